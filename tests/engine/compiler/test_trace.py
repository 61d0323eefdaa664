"""Tracing a function: which operations are written down, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from each import each
from fedkeel.engine.compiler.errors import CannotCompile
from fedkeel.engine.compiler.trace import module_of, trace

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])
Y = torch.tensor([[2.0, 1.0, -3.0], [0.0, 1.0, 2.0]])


def outside(x: Tensor) -> Tensor:
    """A copy that torch's modes do not see."""
    with _disable_current_modes():
        return x.clone()


@each(
    "function",
    [
        lambda x: x * float(x.max()),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.from_numpy(np.abs(x.numpy())),
        lambda x: torch.from_numpy(np.abs(x)),
        lambda x: torch.tensor(x.tolist()),
        lambda x: F.one_hot(x.argmax(1)),
        lambda x: torch.zeros(2).index_add(0, torch.tensor([0]), x[0, :1]) * x.equal(x),
    ],
)
def test_what_depends_on_numbers_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CannotCompile, match=r"numbers in a tensor|leaves torch"):
        trace(lambda x: [function(x)], [X])


@each(
    "function",
    [
        lambda x: x[:, torch.tensor([2, 0])],
        lambda x: x[torch.tensor([True, False])],
        lambda x: x.masked_fill(x > 0, 7.0),
        lambda x: x * torch.tensor(3.0).item(),
        lambda x: F.one_hot(x.argmax(1), 4) + 0.0,
        lambda x: torch.zeros(3).scatter_(0, x.argmax(1), 5.0),
        lambda x: torch.cat([*x.split(1), x.unbind(1)[0][None].expand(3, 2).T]),
        lambda x: torch.hstack([x, x]).sort(1, descending=True).values,
        lambda x: x.clone().t_().add_(1.0).unsqueeze_(0),
        lambda x: F.layer_norm(x, (3,)) @ torch.linalg.qr(x.T).Q,
        lambda x: torch.func.vmap(torch.func.grad(lambda r: r.square().sum().exp()))(x / 9),
    ],
)
def test_what_does_not_is_done_again_with_other_numbers(
    function: Callable[[Tensor], Tensor],
) -> None:
    again = module_of(trace(lambda x: [function(x)], [X]))
    for _ in range(2):
        torch.testing.assert_close(again(Y.clone())[0], function(Y.clone()), rtol=0, atol=1e-6)


def test_a_tensor_of_numbers_is_made_anew_in_each_call() -> None:
    def count(x: Tensor) -> list[Tensor]:
        found = torch.tensor([1.0, 2.0])
        found[0] += x.sum()
        return [found]

    again = module_of(trace(count, [X]))
    for _ in range(2):
        assert again(Y)[0].tolist() == [4.0, 2.0]


def test_a_tensor_that_is_no_argument_may_be_read_and_not_written_to() -> None:
    own = torch.ones(3)
    again = module_of(trace(lambda x: [x + own], [X]))
    assert torch.equal(again(Y)[0], Y + 1)
    with pytest.raises(CannotCompile, match="not an argument is written to"):
        trace(lambda x: [own.add_(x[0])], [X])
    assert own.tolist() == [1.0, 1.0, 1.0]


def test_arguments_are_left_as_they_are() -> None:
    given = X.clone()
    again = module_of(trace(lambda x: [x.add_(1.0)], [given]))
    assert torch.equal(given, X)
    assert torch.equal(again(given)[0], X + 1)


def test_a_tensor_given_twice_is_two_arguments() -> None:
    again = module_of(trace(lambda a, b: [a - b], [X, X]))
    assert torch.equal(again(X, Y)[0], X - Y)


def test_numbers_that_come_by_another_way_are_other_ones() -> None:
    """So what was traced gives another result than the function, and is not used."""
    again = module_of(trace(lambda x: [x + outside(x)], [X]))
    assert not torch.allclose(again(X)[0], X + X)
