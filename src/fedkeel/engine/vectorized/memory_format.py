"""Finds out whether a single client's images may be laid out with channels last.

oneDNN, with which torch convolves on a processor, writes past its memory where it takes the
gradient by the weights of a strided 1 x 1 convolution of few input channels whose input has its
channels last (uxlfoundation/oneDNN issue 6035, open in September 2026). The process then dies, at
once or later. Such a network keeps the usual layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedkeel.base.dispatch import OperationMode

aten = torch.ops.aten


def block_size() -> int:
    """Return the input channels of a convolution that oneDNN takes together on this processor."""
    cpu: Any = torch.backends.cpu
    return 16 if cpu.get_cpu_capability().startswith("AVX512") else 8


class ConvolutionWatch(OperationMode):
    """Notes in `may_be_last` whether all convolutions that are made bear channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.may_be_last = True
        self._block = block_size()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do an operation; look at it where it is a convolution."""
        if func is aten.convolution.default:
            _, weight, _, stride, *_ = args
            is_pointwise, is_strided = set(weight.shape[2:]) == {1}, max(stride) > 1
            if is_pointwise and is_strided and weight.shape[1] < self._block:
                self.may_be_last = False
        return func(*args, **(kwargs or {}))
