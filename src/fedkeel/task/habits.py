"""What a module does in a forward pass beside returning scores: found out by two of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.task.functional import Functional
from fedkeel.tree import Tree, clone


@dataclass(frozen=True)
class Habits:
    """What a module does to itself in a forward pass in training.

    Args:
        writes: whether it writes to its parameters, as one that bounds their norm does.
        remembers: where it keeps what is neither parameter nor buffer and changes; "" nowhere.
    """

    writes: bool = False
    remembers: str = ""

    @property
    def reason(self) -> str:
        """Why its steps cannot be recorded; "" where they can."""
        if self.remembers:
            changes = f"the model changes {self.remembers} in its forward pass"
            return (
                f"{changes}, which is no buffer: what one client leaves there, the next one finds"
            )
        return "the model writes to its parameters in its forward pass" if self.writes else ""


def observe(module: nn.Module, params: Tree, buffers: Tree, x: Tensor) -> Habits:
    """Call a copy of a module twice, alike.

    Args:
        module: in training mode; it is left as it is.
        params: its parameters.
        buffers: its buffers.
        x: [B, ...] a few inputs.
    """
    own = copy.deepcopy(module)
    call, before = Functional(own), _attributes(own)
    found: list[Tensor] = []
    given = clone(params)
    places = {name: t.data_ptr() for name, t in given.items()}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for one in (given, clone(params)):
                torch.default_generator.manual_seed(0)
                found.append(call(one, clone(buffers), x))
    except Exception:  # it says so where it is trained
        return Habits()
    writes = any(t._version or t.data_ptr() != places[name] for name, t in given.items())
    after = _attributes(own)
    changed = next((k[0] for k, value in after.items() if before.get(k, value) != value), "")
    if not changed and not torch.allclose(found[0], found[1], equal_nan=True):
        changed = "something of its own"
    return Habits(writes, changed)


def _attributes(module: nn.Module) -> Mapping[tuple[str, int], Any]:
    """Return numbers, texts and how often tensors were written to, of all modules.

    They go by their names. A tensor that is put in another one's place, and which may never be
    looked at, is told apart by a number.
    """
    found: dict[tuple[str, int], Any] = {}
    for path, sub in module.named_modules():
        for key, value in vars(sub).items():
            name = f"{path}.{key}" if path else key
            if isinstance(value, (bool, int, float, str)):
                found[name, 0] = value
            elif isinstance(value, Tensor):
                found[name, id(value)] = value._version
    return found
