"""Arrays that stay in their files, so that they may be larger than memory."""

from __future__ import annotations

import mmap
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NO_RESERVE = 0x4000
"""The flag MAP_NORESERVE of Linux, which `mmap` of Python 3.11 does not name."""


def private_map(values: NDArray[Any]) -> NDArray[Any] | None:
    """Return an array in a file that can be written to without changing the file.

    What a model writes into its inputs would otherwise end the process, or reach the user's file.

    Args:
        values: a `numpy.memmap`, or a view of a part of one.

    Returns:
        The same numbers in the same file, None where the array is none in a file.
    """
    file, name = getattr(values, "_mmap", None), getattr(values, "filename", None)
    if file is None or name is None:
        return None
    offset = getattr(values, "offset", 0)
    offset -= offset % mmap.ALLOCATIONGRANULARITY
    with open(name, "rb") as stream:
        if sys.platform == "linux":  # no memory is reserved, of which there may be too little
            flags, prot = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            private = mmap.mmap(stream.fileno(), len(file), flags, prot, offset=offset)
        else:
            private = mmap.mmap(stream.fileno(), len(file), access=mmap.ACCESS_COPY, offset=offset)
    start = values.ctypes.data - np.frombuffer(file, dtype=np.uint8).ctypes.data
    return np.ndarray(values.shape, values.dtype, private, start, values.strides)


def joined_in_file(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other in a temporary file, which takes no memory.

    The file is deleted with the tensor, or where the system does not allow that, when the process
    ends.

    Args:
        parts: at least one, of one type and of one shape but for the first axis.
    """
    length = sum(len(part) for part in parts)
    with tempfile.TemporaryFile(prefix="fedkeel-") as file:
        out = np.memmap(
            file, parts[0].numpy().dtype, mode="w+", shape=(length, *parts[0].shape[1:])
        )
        tensor = torch.from_numpy(out)
        rest = tensor
        for part in parts:
            rest[: len(part)].copy_(part)
            rest = rest[len(part) :]
    return tensor
