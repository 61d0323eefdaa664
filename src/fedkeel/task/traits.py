"""What a module does in a forward pass beside returning scores, found out by calling it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeel.base.values import Values, copy_of, count_of, rows_of, tensors_of
from fedkeel.errors import ModelError
from fedkeel.task.first_pass import GlobalGenerators, find_reset
from fedkeel.task.functional import Functional
from fedkeel.task.outputs import Outputs, tensors_in
from fedkeel.tree import Tree, clone


@dataclass(frozen=True)
class ModuleTraits:
    """What a module does in a forward pass in training, beside returning scores.

    Args:
        writes_parameters: whether it writes to its parameters, as one that bounds their norm does.
        hidden_state: name of an attribute that changes and is neither parameter nor buffer; ""
            where there is none.
        random_library: library beside torch from which it draws random numbers, "Python" or
            "NumPy"; "" where there is none.
        sets_generator: library whose global random numbers it sets, "torch", "Python" or "NumPy";
            "" where there is none.
        writes_inputs: whether it writes to its inputs, which are then copied for it.
        bypasses_modules: whether it reaches its parameters otherwise than by its modules: again in
            the backward pass (activation checkpointing), or by a list of its own.
        without_gradient: names of trained parameters that no gradient reaches.
    """

    writes_parameters: bool = False
    hidden_state: str = ""
    random_library: str = ""
    sets_generator: str = ""
    writes_inputs: bool = False
    bypasses_modules: bool = False
    without_gradient: frozenset[str] = frozenset()

    @property
    def why_calls_differ(self) -> str:
        """Why one call differs from the next with every engine; "" where it does not."""
        if self.random_library:
            return (
                f"the model draws random numbers from {self.random_library}, which the run's seed "
                "does not set: no other run has the same numbers. Draw them with torch"
            )
        if self.hidden_state:
            return (
                f"the model changes {self.hidden_state} in its forward pass, which is not a "
                "buffer: the next client starts with what the last one left there, and the "
                "server, which evaluates, does not get it. Make it a buffer of the model"
            )
        return ""

    @property
    def why_not_traceable(self) -> str:
        """Why its steps cannot be traced; "" where they can."""
        if self.why_calls_differ:
            return self.why_calls_differ
        if self.sets_generator:
            return f"the model or its loss sets the random numbers of {self.sets_generator} itself"
        if self.writes_parameters:
            return "the model writes to its parameters in its forward pass"
        if self.bypasses_modules:
            return (
                "the model does not reach its parameters through its modules (activation "
                "checkpointing, or a list of parameters)"
            )
        return ""


FIRST_INPUTS = 2
"""Number of inputs of the first batch, from which all but `without_gradient` is found out."""

FURTHER_BATCHES, FURTHER_INPUTS = 8, 8
"""Number of further batches, and of inputs in each. A layer that is left out at random, or that
only some inputs go through, may get its gradient from one of these."""


def detect_traits(module: nn.Module, params: Tree, buffers: Tree, x: Values) -> ModuleTraits:
    """Call a copy of a module twice with the same arguments, and compare.

    Args:
        module: in training mode; it is not changed.
        params: its parameters.
        buffers: its buffers.
        x: [B, ...] inputs: the first two, then those of the further batches.

    Raises:
        ModelError: gradients by given parameters are not those by the module's own.
    """
    twin = copy.deepcopy(module)
    call, states = Functional(twin), [_snapshot(twin)]
    first_x = rows_of(x, slice(FIRST_INPUTS))
    given_params, given_x = clone(params), copy_of(first_x)
    addresses = {name: t.data_ptr() for name, t in given_params.items()}
    outputs: list[Any] = []
    generators = GlobalGenerators()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for tree, inputs in ((given_params, given_x), (clone(params), copy_of(first_x))):
                torch.default_generator.manual_seed(0)
                outputs.append(call(tree, clone(buffers), inputs))
                states.append(_snapshot(twin))
            evaluated = [
                Functional(one.eval())(clone(params), clone(buffers), copy_of(first_x))
                for one in (copy.deepcopy(module), twin)
            ]
        twin.train()
        sets_generator = find_reset(lambda: call(clone(params), clone(buffers), copy_of(first_x)))
    except Exception:  # of the user's module; training raises it again, where the user sees it
        return ModuleTraits()
    finally:
        random_library = generators.restore()
    if random_library == sets_generator:  # what it draws then is the same each time
        random_library = ""
    changed = _changed_name(*states)
    same = all(_same_output(a, b) for a, b in (outputs, evaluated))
    if not changed and not same and not random_library:
        changed = next((k[0] for k in states[2] if k not in states[0]), "something of its own")
    traits = ModuleTraits(
        writes_parameters=any(
            t._version or t.data_ptr() != addresses[name] for name, t in given_params.items()
        ),
        hidden_state=changed,
        random_library=random_library,
        sets_generator=sets_generator,
        writes_inputs=any(tensor._version > 0 for tensor in tensors_of(given_x)),
    )
    return _with_gradients(traits, module, params, buffers, x)


def _with_gradients(
    traits: ModuleTraits, module: nn.Module, params: Tree, buffers: Tree, x: Values
) -> ModuleTraits:
    """Compare the gradient by given parameters with what `backward` finds for the module's own.

    One copy of the module has its own parameters. Another one is given these parameters, and its
    own ones are other numbers, so that a gradient by them would differ.
    """
    first_x = rows_of(x, slice(FIRST_INPUTS))
    given = {id(buffer) for name, buffer in module.named_buffers() if name in buffers}
    shares_memory = not traits.writes_parameters  # so that a large model is not copied needlessly

    def same(tensor: Tensor) -> Tensor:
        shared = shares_memory and isinstance(tensor, nn.Parameter)
        return tensor.detach() if shared else tensor.detach().clone()

    def other(tensor: Tensor) -> Tensor:
        is_given = tensor.requires_grad or id(tensor) in given
        if tensor.is_floating_point() and is_given:
            return tensor.new_full((), 0.1).expand(tensor.shape)
        return same(tensor)

    own_copy, other_copy = _with_tensors(module, same), _with_tensors(module, other)
    generators = GlobalGenerators()

    def gradient(copied: bool) -> Sequence[Tensor | None]:
        tensors = {k: same(nn.Parameter(v)).requires_grad_() for k, v in params.items()}
        generators.restore()
        call = Functional(other_copy, copied)
        value = _weighted_sum(lambda: call(tensors, clone(buffers), copy_of(first_x)))
        return torch.autograd.grad(value, list(tensors.values()), allow_unused=True)

    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            copied = dict(own_copy.named_parameters())
            torch.autograd.backward(_weighted_sum(lambda: _call(own_copy, copy_of(first_x))))
            expected = [copied[name].grad for name in params]
            bypasses_modules = not _close(gradient(False), expected)
            correct = not bypasses_modules or _close(gradient(True), expected)
            missing = frozenset(k for k, g in zip(params, expected, strict=True) if g is None)
            missing = _still_without_gradient(own_copy, missing, x)
    except Exception:  # of the user's module; training raises it again, where the user sees it
        return traits
    finally:
        generators.restore()
    if not correct and not traits.why_calls_differ:
        raise ModelError(
            "The model's gradient differs from that of backward() when parameters are passed in.",
            why="part of it is computed in the backward pass, by torch.utils.checkpoint or an "
            "autograd.Function of the model",
            do="give checkpoint use_reentrant=False",
        )
    return replace(traits, bypasses_modules=bypasses_modules, without_gradient=missing)


def _still_without_gradient(module: nn.Module, names: frozenset[str], x: Values) -> frozenset[str]:
    """Return those of some parameters that get no gradient from the further batches either."""
    params = dict(module.named_parameters())
    for number in range(FURTHER_BATCHES):
        if not names:
            break
        start = FIRST_INPUTS + number * FURTHER_INPUTS
        inputs = rows_of(x, torch.arange(start, start + FURTHER_INPUTS) % count_of(x))
        torch.autograd.backward(_weighted_sum(partial(_call, module, inputs), number + 1))
        names = frozenset(name for name in names if params[name].grad is None)
    return names


def _with_tensors(module: nn.Module, replacement: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module with other tensors in place of its parameters and buffers."""
    memo: dict[int, Tensor] = {id(t): replacement(t) for t in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(replacement(parameter), parameter.requires_grad)
    return copy.deepcopy(module, memo)


def _call(module: nn.Module, x: Values) -> Any:  # noqa: ANN401 - whatever a module returns
    return module(x) if isinstance(x, Tensor) else module(**x)


def _same_output(first: Outputs, second: Outputs) -> bool:
    pairs = zip(tensors_in(first), tensors_in(second), strict=True)
    return all(torch.allclose(a, b, equal_nan=True) for a, b in pairs)


def _weighted_sum(call: Callable[[], Outputs], seed: int = 0) -> Tensor:
    """Return the sum of all that a module returns, each number with a weight of its own."""
    torch.default_generator.manual_seed(seed)
    total: Tensor | None = None
    for scores in tensors_in(call()):
        if scores.is_floating_point() and scores.requires_grad:
            weights = torch.linspace(1.0, 2.0, scores.numel(), dtype=scores.dtype).view_as(scores)
            part = (scores * weights).sum()
            total = part if total is None else total + part
    if total is None:
        raise TypeError("the output depends on no parameter")
    return total


def _close(gradients: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    for gradient, reference in zip(gradients, expected, strict=True):
        if gradient is None or reference is None:
            if gradient is not reference:
                return False
        elif not torch.equal(gradient, reference):
            small = 1e-3 * float(reference.abs().amax())
            if not torch.allclose(gradient, reference, rtol=1e-3, atol=small, equal_nan=True):
                return False
    return True


def find_changed_attribute(call: Callable[[], object], thing: object) -> str:
    """Return the name of an attribute of an object, or of its modules, that two calls change.

    It is "" where they change none.
    """
    states = [_snapshot(thing)]
    for _ in range(2):
        call()
        states.append(_snapshot(thing))
    return _changed_name(*states)


_CONTENT = 1
"""In a key of a snapshot: the value is the content of a list, a dictionary or an array."""

_Snapshot = Mapping[tuple[str, int], Any]
"""(attribute's name, 0 or `_CONTENT` or a tensor's id) -> what can be compared."""

_SCALARS = (bool, int, float, str)
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))

LARGEST_ARRAY = 1 << 20
"""Bytes of an array, at most, that is compared."""


def _changed_name(before: _Snapshot, between: _Snapshot, after: _Snapshot) -> str:
    """Return the name of an attribute that two calls change, "" where they change none.

    Of a list or a dictionary only the second call counts: the first one may fill a cache.
    """
    for key, value in after.items():
        if (between if key[1] == _CONTENT else before).get(key, value) != value:
            return key[0]
    return ""


def _snapshot(thing: object) -> _Snapshot:
    """Return numbers and texts among the attributes of an object or of all its modules.

    Of a tensor it is the number of times that it was written to. The key of a tensor holds its id:
    another tensor in its place, which the module may never look at, is not a change.
    """
    snapshot: dict[tuple[str, int], Any] = {}
    modules = thing.named_modules() if isinstance(thing, nn.Module) else [("", thing)]
    for path, module in modules:
        for key, value in getattr(module, "__dict__", {}).items():
            name = f"{path}.{key}" if path else key
            if isinstance(value, _SCALARS):
                snapshot[name, 0] = value
            elif isinstance(value, Tensor):
                snapshot[name, id(value)] = value._version
            elif key not in _TORCH_ATTRIBUTES:
                snapshot[name, _CONTENT] = _content(value)
    return snapshot


def _content(value: object, depth: int = 4) -> object:
    """Return numbers and texts in a container, and None for everything else in it."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, np.ndarray) and value.nbytes <= LARGEST_ARRAY:
        return value.shape, value.tobytes()
    if isinstance(value, Mapping) and depth:
        return [(repr(k), _content(item, depth - 1)) for k, item in value.items()]
    if isinstance(value, (list, tuple, deque)) and depth:
        return [_content(item, depth - 1) for item in value]
    return None
