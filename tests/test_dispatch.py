"""Watching operations and taking gradients do not load torch's compiler."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import torch

from fedkeel.base.dispatch import OperationMode, grad


class Names(OperationMode):
    """Notes the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_operations_are_seen_without_a_wrapper_that_loads_the_compiler() -> None:
    assert not hasattr(Names.__torch_dispatch__, "__wrapped__")
    with Names() as mode:
        torch.ones(2) + 1
    assert mode.seen == ["ones", "add"]


def test_gradients_are_those_of_torch() -> None:
    x = torch.linspace(-1, 1, 6).reshape(3, 2)

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad(lambda y: y.tanh().square().sum())(x).sum(), x + 1

    ours, theirs = (
        torch.func.vmap(take(loss, has_aux=True))(x) for take in (grad, torch.func.grad)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def in_a_new_process(code: str) -> None:
    """Run Python in a process that has not loaded torch's compiler."""
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_gradients_do_not_load_the_compiler() -> None:
    in_a_new_process(
        """
        import sys, torch
        from fedkeel.base.dispatch import grad
        assert grad(lambda x: (x * x).sum())(torch.ones(2)).tolist() == [2, 2]
        assert "torch._dynamo" not in sys.modules
        assert "_dynamo" not in vars(torch)
        """
    )


def test_steps_are_compiled_without_torchs_compiler() -> None:
    """What says which form these operations' results have would load it; later it is left alone."""
    in_a_new_process(
        """
        import sys, torch
        from fedkeel.engine.compiler.compiled_function import CompiledFunction

        def function(x, y):
            z = (x * 2.0).clamp_(min=0.5)
            return [z.neg_().div_(3.0), torch.sigmoid(y).mul_(2.0).sum()]

        inputs = [torch.randn(3, 4), torch.randn(3, 4)]
        results = CompiledFunction(function, inputs)(*inputs)
        for a, b in zip(results, function(*inputs), strict=True):
            assert torch.allclose(a, b)
        assert "torch._dynamo" not in sys.modules
        assert "_dynamo" not in vars(torch)
        compiled = torch.compile(function, backend="eager")
        for a, b in zip(compiled(*inputs), function(*inputs), strict=True):
            assert torch.allclose(a, b)
        assert vars(torch)["_dynamo"] is sys.modules["torch._dynamo"]
        again = CompiledFunction(function, inputs)(*inputs)
        assert all(map(torch.equal, again, results))
        """
    )


def test_a_function_that_needs_the_compiler_loads_it() -> None:
    in_a_new_process(
        """
        import sys, torch
        from fedkeel.base.dispatch import grad

        def loss(x):
            assert not torch._dynamo.is_compiling()
            assert not torch._dynamo.compiled_autograd.in_compiled_autograd_region
            return (x * x).sum()

        assert grad(loss)(torch.ones(2)).tolist() == [2, 2]
        assert vars(torch)["_dynamo"] is sys.modules["torch._dynamo"]
        """
    )


def test_an_error_leaves_torch_as_it_was() -> None:
    in_a_new_process(
        """
        import torch
        from fedkeel.base.dispatch import grad

        def loss(x):
            raise ValueError("mine")

        try:
            grad(loss)(torch.ones(2))
        except ValueError as error:
            assert str(error) == "mine"
        assert "_dynamo" not in vars(torch)
        """
    )
