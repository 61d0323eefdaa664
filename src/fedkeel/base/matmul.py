"""Matrix products on a processor, by the faster one of torch's two libraries.

By itself torch multiplies float32 matrices with MKL, which uses vectors of 512 bits only on
Intel's processors. oneDNN, with which torch convolves, uses them wherever they exist: on an AMD
EPYC of 2024 (Zen 5) its products of medium and large matrices take half the time. Both compute in
float32 throughout and differ by rounding. Compiled steps and evaluations take the faster library.
The choice follows only from the processor and the shapes, so a run repeats bit for bit.

A product with a small inner dimension that is added to a large matrix stays with MKL, which adds
while it multiplies.
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

MIN_WORK = 1e6
"""Multiply-adds of a product from which oneDNN takes less time than MKL. One call costs about ten
microseconds by itself, and both libraries are equal at a million on that EPYC."""

MIN_WORK_BATCHED = 3e6
"""The same for each of several products: oneDNN needs a call for each, MKL one call for all."""

MIN_INNER = 16
"""Inner dimension from which a product that is added to a matrix is computed first, by oneDNN;
twice as much for several products."""


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN's products are faster than MKL's on this processor."""
    backends: Any = torch.backends
    has_avx512 = backends.cpu.get_cpu_capability().startswith("AVX512")
    has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(
        backends.mkldnn, "matmul"
    )
    return has_avx512 and has_onednn and backends.mkl.is_available() and not _is_intel()


def _is_intel() -> bool:
    """Return whether Intel made the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else platform.processor()
    return "GenuineIntel" in text


@contextmanager
def without_onednn() -> Iterator[None]:
    """Leave all products to torch for a while, so that results can be compared."""
    _disabled.append(True)
    try:
        yield
    finally:
        _disabled.pop()


_disabled: list[bool] = []


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the product of [M, K] and [K, N], in `out` where one is given."""
    if a.shape[0] * b.numel() >= MIN_WORK and _suits_onednn(a):
        product = _onednn_product(a, b)
        return product if out is None else out.copy_(product)
    return torch.mm(a, b, out=out)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return the sum of a bias, [N] or [M, N], and the product of [M, K] and [K, N]."""
    is_plain = bias.ndim == 1 and len(bias) == b.shape[1] and beta == alpha == 1
    if is_plain and a.shape[0] * b.numel() >= MIN_WORK and _suits_onednn(a):
        return _onednn_product(a, b, bias)
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of [n, M, K] and [n, K, N]."""
    count, rows, _ = a.shape
    if count and rows * b[0].numel() >= MIN_WORK_BATCHED and _suits_onednn(a):
        return torch.stack([_onednn_product(a[i], b[i]) for i in range(count)])
    return torch.bmm(a, b)


def add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Add a multiple of a matrix product to a matrix, or of n products to n matrices.

    Args:
        out: [..., M, N]; it is written over.
        a: [..., M, K].
        b: [..., K, N].
        alpha: the factor of the product.

    Returns:
        The same `out`.
    """
    inner, work = a.shape[-1], a.shape[-2] * a.shape[-1] * b.shape[-1]
    if a.ndim == 2:
        if inner >= MIN_INNER and work >= MIN_WORK and _suits_onednn(a):
            return out.add_(_onednn_product(a, b), alpha=alpha)
        return out.addmm_(a, b, alpha=alpha)
    if inner >= 2 * MIN_INNER and work >= MIN_WORK_BATCHED and _suits_onednn(a):
        for i in range(len(a)):
            out[i].add_(_onednn_product(a[i], b[i]), alpha=alpha)
        return out
    return out.baddbmm_(a, b, alpha=alpha)


def linear_layers() -> AbstractContextManager[Any]:
    """Let linear layers choose their library too, where they are called without gradients."""
    return _LinearLayers() if onednn_is_faster() else nullcontext()


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
    """Return [..., N], what a linear layer of [N, K] weights makes of [..., K] inputs."""
    is_large = weight.ndim == 2 and input.numel() * len(weight) >= MIN_WORK
    if is_large and _suits_onednn(input) and not torch.is_grad_enabled():
        return _onednn_product(input, weight.t(), bias)
    return F.linear(input, weight, bias)


def _suits_onednn(a: Tensor) -> bool:
    """Return whether oneDNN computes products of a tensor; MKL does where factors are rounded."""
    if a.dtype is not torch.float32 or not a.is_cpu or _disabled or not onednn_is_faster():
        return False
    backends: Any = torch.backends
    return bool(backends.mkldnn.matmul.fp32_precision != "bf16")


def _onednn_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the float32 product of [..., K] and [K, N], plus a bias of [N]."""
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()  # otherwise the call takes a thousand times as long
    if bias is not None:
        bias = bias.contiguous()  # the call does not look at a bias's strides
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    return product
