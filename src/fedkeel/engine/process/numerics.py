"""How a process computes: in one thread, and with which precision it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fedkeel.config import Precision

_Switch = tuple[Callable[[], str], Callable[[str], None]]
"""Reads and sets one of torch's precision switches."""

SEARCH, MIXED_SEARCH = 10, 3
"""Algorithms of each convolution that a GPU times, at most: 10 is torch's own number. With
``bf16-mixed`` they took 8 of the 10 s before the first round of a ResNet-18. How fast the best of
three is beside the best of ten has not been measured."""


@contextmanager
def use_numerics(precision: Precision, searches: bool = True) -> Iterator[None]:
    """Compute as a worker does in this context, so that sums are added in the same order.

    Args:
        precision: see `set_numerics`.
        searches: whether a GPU searches for the fastest algorithm of each convolution: that takes
            seconds, and does not help where each is called once.
    """
    before = Numerics.now()
    set_numerics(precision)
    torch.backends.cudnn.benchmark &= searches
    try:
        yield
    finally:
        before.use()


@dataclass(frozen=True)
class Numerics:
    """How this process computes.

    Args:
        threads: threads of an operation.
        searches: whether a GPU searches for the fastest algorithm of each convolution.
        limit: algorithms that it times, at most.
        switches: values of torch's precision switches.
    """

    threads: int
    searches: bool
    limit: int
    switches: tuple[str, ...]

    @classmethod
    def now(cls) -> Numerics:
        """Return how it computes now."""
        cudnn = torch.backends.cudnn
        switches = tuple(read() for read, _ in _SWITCHES)
        limit = cudnn.benchmark_limit or SEARCH
        return cls(torch.get_num_threads(), cudnn.benchmark, limit, switches)

    def use(self) -> None:
        """Compute so from now on."""
        torch.set_num_threads(self.threads)
        torch.backends.cudnn.benchmark = self.searches
        torch.backends.cudnn.benchmark_limit = self.limit
        for (_, write), value in zip(_SWITCHES, self.switches, strict=True):
            write(value)


def set_numerics(precision: Precision) -> None:
    """Compute in one thread from now on, and multiply with this precision.

    By default torch lets a GPU round the factors of float32 convolutions to tf32. With ``float32``
    it may not, whatever the program has set. A GPU times its convolutions' algorithms at the first
    call of each shape, and takes the fastest.
    """
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = MIXED_SEARCH if precision == "bf16-mixed" else SEARCH
    on_gpu = "tf32" if precision in ("tf32", "bf16") else "ieee"
    on_cpu = "bf16" if precision == "bf16" else "ieee"
    for (_, write), value in zip(_SWITCHES, [on_gpu] * 3 + [on_cpu] * 3, strict=True):
        write(value)


def use_device(device: torch.device) -> None:
    """Let this process start its work on a GPU, where it is one that is named by its number."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def _switch(owner: Any) -> _Switch:  # noqa: ANN401
    if hasattr(owner, "fp32_precision"):
        return lambda: owner.fp32_precision, lambda value: setattr(owner, "fp32_precision", value)
    if hasattr(owner, "allow_tf32"):  # torch before 2.9
        return (
            lambda: "tf32" if owner.allow_tf32 else "ieee",
            lambda value: setattr(owner, "allow_tf32", value == "tf32"),
        )
    return lambda: "ieee", lambda value: None


def _switches() -> list[_Switch]:
    """Return the switches of a GPU, then of the CPU: products, convolutions, recurrent layers."""
    gpu, cpu = torch.backends.cudnn, torch.backends.mkldnn
    owners = [torch.backends.cuda.matmul, *(getattr(gpu, name, gpu) for name in ("conv", "rnn"))]
    owners += [getattr(cpu, name, cpu) for name in ("matmul", "conv", "rnn")]
    return [_switch(owner) for owner in owners]


_SWITCHES = _switches()
