"""What a call does beside returning: parameters that it makes, generators that it sets."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedkeel.base.dispatch import OperationMode


@contextmanager
def new_parameters() -> Iterator[list[str]]:
    """Yield a list of the parameters that modules are given in this context, and had not before.

    Each is named by its module's class, its own name and its shape, such as "Linear.weight [3, 8]".
    """
    names: list[str] = []
    thread = threading.get_ident()

    def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        is_new = parameter is not None and module._parameters.get(name) is None
        if is_new and threading.get_ident() == thread:
            shape = list(getattr(parameter, "shape", []))
            names.append(f"{type(module).__name__}.{name} {shape}")

    handle = register_module_parameter_registration_hook(note)
    try:
        yield names
    finally:
        handle.remove()


class GlobalGenerators:
    """The states of the random numbers of Python and of NumPy, as they were when this was made."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> str:
        """Restore them, and return the name of the library that has drawn since, or ""."""
        python, numpy = random.getstate(), _numpy_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if python != self._python:
            return "Python"
        return "" if numpy == _numpy_state() else "NumPy"


def find_reset(call: Callable[[], object]) -> str:
    """Return the library whose global random numbers a call sets: "torch", "Python" or "NumPy".

    It is "" where a call sets none. The call is made from two states of the generators, which never
    meet unless it sets them; and within a call a generator never comes back to a state that it had
    unless the call puts it back, as `torch.random.fork_rng` does.
    """
    generators = GlobalGenerators()
    passes: list[tuple[list[bytes], object, object]] = []
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for seed in (1, 2):
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
                with _Draws() as draws:
                    call()
                states = [*draws.states, _torch_state()]
                passes.append((states, random.getstate(), _numpy_state()))
    finally:
        generators.restore()
    (first, *first_others), (second, *second_others) = passes
    if set(first) & set(second) or len(set(first)) < len(first):
        return "torch"
    same = [a == b for a, b in zip(first_others, second_others, strict=True)]
    return next((n for n, is_same in zip(("Python", "NumPy"), same, strict=True) if is_same), "")


class _Draws(OperationMode):
    """Keeps the state of torch's global generator before each operation that draws from it."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[bytes] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        before = _torch_state() if is_random else b""
        result: object = func(*args, **(kwargs or {}))
        if is_random and _torch_state() != before:
            self.states.append(before)
        return result


def _torch_state() -> bytes:
    return bytes(torch.default_generator.get_state().numpy())


def _numpy_state() -> object:
    name, keys, *others = np.random.get_state()
    return (name, np.asarray(keys).tobytes(), *others)
