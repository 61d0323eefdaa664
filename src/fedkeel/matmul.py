"""Products of matrices on a processor, by whichever of torch's two libraries is the faster one.

By itself torch multiplies float32 matrices with MKL, which uses vectors of 512 bits on Intel's
processors alone; oneDNN, with which torch convolves, uses them wherever they are. On an AMD EPYC of
2024 (Zen 5) its products of middling and large matrices take half the time. Both work in float32
throughout, and differ by rounding. Recorded steps and evaluations take the faster one; which that
is follows from the processor and the shapes alone, so a run repeats bit for bit.

A thin product that is added to a large matrix stays with MKL, which adds while it multiplies.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

LEAST = 1e6
"""Multiply-adds of a product from which oneDNN's takes less time than MKL's. A call has a cost of
its own of about ten microseconds, and both are equal at a million on that EPYC."""

LEAST_OF_LANES = 3e6
"""The same of each lane's, which are taken one after the other, where MKL takes all in one call."""

THICK = 16
"""Least inner dimension of a product that is added to a matrix, so that making it first pays; of
lanes' twice as many."""


@functools.cache
def faster() -> bool:
    """Return whether oneDNN's products are faster than MKL's on this processor."""
    torchs: Any = torch.backends
    capable = torchs.cpu.get_cpu_capability().startswith("AVX512")
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torchs.mkldnn, "matmul")
    return capable and known and torchs.mkl.is_available() and not _by_intel()


def _by_intel() -> bool:
    """Return whether Intel has made the processor."""
    told = Path("/proc/cpuinfo")
    words = told.read_text() if told.is_file() else platform.processor()
    return "GenuineIntel" in words


@contextmanager
def by_torch() -> Iterator[None]:
    """Leave all products to torch for a while: for comparing one with another, bit by bit."""
    _left.append(True)
    try:
        yield
    finally:
        _left.pop()


_left: list[bool] = []


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the product of [M, K] and [K, N], in `out` where there is one."""
    if a.shape[0] * b.numel() >= LEAST and _here(a):
        found = _product(a, b)
        return found if out is None else out.copy_(found)
    return torch.mm(a, b, out=out)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return a bias, [N] or [M, N], and the product of [M, K] and [K, N]."""
    plain = bias.ndim == 1 and len(bias) == b.shape[1] and beta == alpha == 1
    if plain and a.shape[0] * b.numel() >= LEAST and _here(a):
        return _product(a, b, bias)
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of [n, M, K] and [n, K, N]."""
    lanes, rows, _ = a.shape
    if lanes and rows * b[0].numel() >= LEAST_OF_LANES and _here(a):
        return torch.stack([_product(a[lane], b[lane]) for lane in range(lanes)])
    return torch.bmm(a, b)


def add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Add a multiple of a product, or of those of all lanes, to a matrix or to each lane's.

    Args:
        out: [..., M, N]; it is written over.
        a: [..., M, K].
        b: [..., K, N].
        alpha: by which the product is multiplied.

    Returns:
        The same `out`.
    """
    inner, work = a.shape[-1], a.shape[-2] * a.shape[-1] * b.shape[-1]
    if a.ndim == 2:
        if inner >= THICK and work >= LEAST and _here(a):
            return out.add_(_product(a, b), alpha=alpha)
        return out.addmm_(a, b, alpha=alpha)
    if inner >= 2 * THICK and work >= LEAST_OF_LANES and _here(a):
        for lane in range(len(a)):
            out[lane].add_(_product(a[lane], b[lane]), alpha=alpha)
        return out
    return out.baddbmm_(a, b, alpha=alpha)


def linear_layers() -> AbstractContextManager[Any]:
    """Let modules that are called meanwhile, without gradients, choose their products too."""
    return _LinearLayers() if faster() else nullcontext()


class _LinearLayers(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        function = _linear if func is F.linear else func
        return function(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what a linear layer makes of [..., K] inputs by [N, K] weights, [..., N]."""
    work = input.numel() * len(weight)
    if weight.ndim == 2 and work >= LEAST and _here(input) and not torch.is_grad_enabled():
        return _product(input, weight.t(), bias)
    return F.linear(input, weight, bias)


def _here(a: Tensor) -> bool:
    """Return whether oneDNN is to multiply: not where factors may be rounded, which MKL heeds."""
    if a.dtype is not torch.float32 or not a.is_cpu or _left or not faster():
        return False
    torchs: Any = torch.backends
    return bool(torchs.mkldnn.matmul.fp32_precision != "bf16")


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of [..., K] and [K, N], and a bias of [N]; in float32, on a processor."""
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()  # or it takes a thousand times as long
    if bias is not None:
        bias = bias.contiguous()  # or its strides are not looked at
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    return found
