"""How a process computes: in one thread, and how exactly it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedkeel.config import Precision


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Compute as a worker does, so that sums are added in the same order: see `settle`."""
    threads, before = torch.get_num_threads(), [get() for get, _ in _SWITCHES]
    settle(precision)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for (_, put), value in zip(_SWITCHES, before, strict=True):
            put(value)


def settle(precision: Precision) -> None:
    """Compute in one thread from now on, and multiply with this precision.

    Torch by itself lets a GPU round the factors of float32 convolutions to tf32; with ``float32``
    it may not, whatever a program has set.
    """
    torch.set_num_threads(1)
    on_gpu = "ieee" if precision == "float32" else "tf32"
    on_processor = "bf16" if precision == "bf16" else "ieee"
    for (_, put), value in zip(_SWITCHES, [on_gpu] * 3 + [on_processor] * 3, strict=True):
        put(value)


def _switch(owner: Any) -> tuple[Callable[[], str], Callable[[str], None]]:  # noqa: ANN401
    """Return how a switch of torch is read and set."""
    if hasattr(owner, "fp32_precision"):
        return lambda: owner.fp32_precision, lambda value: setattr(owner, "fp32_precision", value)
    if hasattr(owner, "allow_tf32"):  # torch before 2.9
        return (
            lambda: "tf32" if owner.allow_tf32 else "ieee",
            lambda value: setattr(owner, "allow_tf32", value == "tf32"),
        )
    return lambda: "ieee", lambda value: None


def _switches() -> list[tuple[Callable[[], str], Callable[[str], None]]]:
    """Return those of a GPU's products, convolutions and recurrent layers, and a processor's."""
    gpu, processor = torch.backends.cudnn, torch.backends.mkldnn
    conv, rnn = (getattr(gpu, name, gpu) for name in ("conv", "rnn"))
    owners = [torch.backends.cuda.matmul, conv, rnn]
    owners += [getattr(processor, name, processor) for name in ("matmul", "conv", "rnn")]
    return [_switch(owner) for owner in owners]


_SWITCHES = _switches()
