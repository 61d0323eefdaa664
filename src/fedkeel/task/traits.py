"""What a module does in a forward pass beside returning scores: found out by two of them."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeel.errors import ModelError
from fedkeel.task.functional import Functional
from fedkeel.tree import Tree, clone


@dataclass(frozen=True)
class Traits:
    """What a module does in a forward pass in training, beside returning scores.

    Args:
        writes: whether it writes to its parameters, as one that bounds their norm does.
        remembers: where it keeps what is neither parameter nor buffer and changes; "" nowhere.
        draws: whose random numbers it draws beside torch's, "Python" or "NumPy"; "" nobody's.
        overwrites: whether it writes to its inputs, which are copied for it.
        bypasses: whether it reaches its parameters otherwise than by its modules during a call:
            again in the backward pass (activation checkpointing), or by a list of its own.
        unreached: parameters that no gradient reaches, of those that are trained.
    """

    writes: bool = False
    remembers: str = ""
    draws: str = ""
    overwrites: bool = False
    bypasses: bool = False
    unreached: frozenset[str] = frozenset()

    @property
    def varies(self) -> str:
        """Why one call differs from the next, whatever engine makes it; "" where it does not."""
        if self.draws:
            return (
                f"the model draws random numbers from {self.draws}, which the run's seed does not "
                "set: no other run has the same numbers. Draw them with torch"
            )
        if self.remembers:
            return (
                f"the model changes {self.remembers} in its forward pass, which is no buffer: what "
                "one client leaves there, the next one finds, and the server, which evaluates, "
                "does not get it. Make it a buffer of the model"
            )
        return ""

    @property
    def reason(self) -> str:
        """Why its steps cannot be recorded; "" where they can."""
        writes = "the model writes to its parameters in its forward pass" if self.writes else ""
        ways = "the model reaches its parameters in ways of its own (checkpointing, a list of them)"
        return self.varies or writes or (ways if self.bypasses else "")


TRIES, SEEN = 8, 8
"""Further batches, and inputs of each, by which a parameter may be reached that the first was not:
of layers that are left out at random, or that only some inputs go through."""


def observe(module: nn.Module, params: Tree, buffers: Tree, x: Tensor) -> Traits:
    """Call a copy of a module twice, alike, and see whether it evaluates as one that was not.

    Args:
        module: in training mode; it is left as it is.
        params: its parameters.
        buffers: its buffers.
        x: [B, ...] a few inputs: the first two are looked at, the others where these leave open
            which parameters are trained.

    Raises:
        ModelError: gradients by given parameters are not those by the module's own.
    """
    own = copy.deepcopy(module)
    call, states = Functional(own), [_attributes(own)]
    every, x = x, x[:2]
    found: list[Tensor] = []
    given, mine = clone(params), x.clone()
    places = {name: t.data_ptr() for name, t in given.items()}
    drawn = _Drawn()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for one, inputs in ((given, mine), (clone(params), x.clone())):
                torch.default_generator.manual_seed(0)
                found.append(call(one, clone(buffers), inputs))
                states.append(_attributes(own))
            scores = [
                Functional(one.eval())(clone(params), clone(buffers), x.clone())
                for one in (copy.deepcopy(module), own)
            ]
    except Exception:  # it says so where it is trained
        return Traits()
    finally:
        draws = drawn.by()
    writes = any(t._version or t.data_ptr() != places[name] for name, t in given.items())
    traits = Traits(writes, draws=draws, overwrites=mine._version > 0)
    changed = _changed(*states)
    alike = all(torch.allclose(a, b, equal_nan=True) for a, b in (found, scores))
    if not changed and not alike and not draws:
        changed = next((k[0] for k in states[2] if k not in states[0]), "something of its own")
    traits = replace(traits, remembers=changed)
    return _with_gradients(traits, module, params, buffers, every)


def _with_gradients(
    traits: Traits, module: nn.Module, params: Tree, buffers: Tree, every: Tensor
) -> Traits:
    """Compare the gradient by given parameters with what `backward` finds for the module's own.

    They are alike there, and the module that is given parameters has other numbers of its own.
    """
    x, shared = every[:2], not traits.writes  # a large model is not copied in vain

    def same(own: Tensor) -> Tensor:
        return own.detach() if shared and isinstance(own, nn.Parameter) else own.detach().clone()

    def other(own: Tensor) -> Tensor:
        given = own.is_floating_point() and (own.requires_grad or not isinstance(own, nn.Parameter))
        return own.new_full((), 0.1).expand(own.shape) if given else same(own)

    first, second = _with_tensors(module, same), _with_tensors(module, other)
    drawn = _Drawn()

    def chosen(copied: bool) -> Sequence[Tensor | None]:
        given = {k: same(nn.Parameter(v)).requires_grad_() for k, v in params.items()}
        drawn.by()
        call = Functional(second, copied)
        value = _weighted(lambda: call(given, clone(buffers), x.clone()))
        return torch.autograd.grad(value, list(given.values()), allow_unused=True)

    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            places = dict(first.named_parameters())
            torch.autograd.backward(_weighted(lambda: first(x.clone())))
            expected = [places[name].grad for name in params]
            bypasses = not _alike(chosen(False), expected)
            served = not bypasses or _alike(chosen(True), expected)
            unreached = frozenset(k for k, g in zip(params, expected, strict=True) if g is None)
            unreached = _never_reached(first, unreached, every)
    except Exception:  # whatever is wrong, it says so where it is trained
        return traits
    finally:
        drawn.by()
    if not served and not traits.varies:
        raise ModelError(
            "The model's gradient by parameters that it is given is not what backward() finds.",
            why="some of it is made in the backward pass, by torch.utils.checkpoint or an "
            "autograd.Function of one's own",
            do="give checkpoint use_reentrant=False",
        )
    return replace(traits, bypasses=bypasses, unreached=unreached)


def _never_reached(module: nn.Module, names: frozenset[str], x: Tensor) -> frozenset[str]:
    """Return those of some parameters that further inputs, and other random numbers, leave too."""
    places = dict(module.named_parameters())
    for number in range(TRIES if names else 0):
        given = x[torch.arange(2 + number * SEEN, 2 + (number + 1) * SEEN) % len(x)]
        torch.autograd.backward(_weighted(partial(module, given), number + 1))
        names = frozenset(name for name in names if places[name].grad is None)
        if not names:
            break
    return names


def _with_tensors(module: nn.Module, made: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module with other tensors in the place of its parameters and buffers."""
    memo: dict[int, Tensor] = {id(t): made(t) for t in module.buffers()}
    for own in module.parameters():
        memo[id(own)] = nn.Parameter(made(own), own.requires_grad)
    return copy.deepcopy(module, memo)


def _weighted(call: Callable[[], Tensor], seed: int = 0) -> Tensor:
    """Return a sum of scores, each with a weight of its own."""
    torch.default_generator.manual_seed(seed)
    scores = call()
    weights = torch.linspace(1.0, 2.0, scores.numel(), dtype=scores.dtype).view_as(scores)
    return (scores * weights).sum()


def _alike(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
        elif not torch.equal(one, other):
            small = 1e-3 * float(other.abs().amax())
            if not torch.allclose(one, other, rtol=1e-3, atol=small, equal_nan=True):
                return False
    return True


class _Drawn:
    """Whether Python's or NumPy's random numbers are drawn from now on; they are put back then."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def by(self) -> str:
        """Return whose were drawn, "" where none were."""
        python, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if python != self._python:
            return "Python"
        same = all(np.array_equal(a, b) for a, b in zip(numpy, self._numpy, strict=True))
        return "" if same else "NumPy"


def changed_by(call: Callable[[], object], thing: object) -> str:
    """Return what of an object, or of its modules, two calls change; "" nothing."""
    states = [_attributes(thing)]
    for _ in range(2):
        call()
        states.append(_attributes(thing))
    return _changed(*states)


HELD = 1
"""Marks what an attribute that is a list, a dictionary or an array holds."""

State = Mapping[tuple[str, int], Any]
"""What can be compared of attributes, by their names, and tensors by numbers of their own too."""


def _changed(before: State, between: State, after: State) -> str:
    """Return the name of what has changed after two calls, "" where nothing has.

    In a list or a dictionary the first one may leave what the next only looks up.
    """
    for key, value in after.items():
        if (between if key[1] == HELD else before).get(key, value) != value:
            return key[0]
    return ""


def _attributes(thing: object) -> State:
    """Return numbers, texts and how often tensors were written to, of an object or all its modules.

    A tensor that is put in another one's place, and which may never be looked at, is told apart.
    """
    found: dict[tuple[str, int], Any] = {}
    modules = thing.named_modules() if isinstance(thing, nn.Module) else [("", thing)]
    for path, sub in modules:
        for key, value in getattr(sub, "__dict__", {}).items():
            name = f"{path}.{key}" if path else key
            if isinstance(value, _PLAIN):
                found[name, 0] = value
            elif isinstance(value, Tensor):
                found[name, id(value)] = value._version
            elif key not in _TORCHS:
                found[name, HELD] = _content(value)
    return found


_PLAIN = (bool, int, float, str)
_TORCHS = frozenset(vars(nn.Module()))


def _content(value: object, depth: int = 4) -> object:
    """Return numbers and texts in a container; of tensors there, only that there are some."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.ndarray) and value.nbytes <= LARGEST:
        return value.shape, value.tobytes()
    if isinstance(value, Mapping) and depth:
        return [(repr(k), _content(one, depth - 1)) for k, one in value.items()]
    if isinstance(value, (list, tuple, deque)) and depth:
        return [_content(one, depth - 1) for one in value]
    return None


LARGEST = 1 << 20
"""Bytes of an array that is looked at."""
