"""Copies between a processor and its GPU for which neither waits, and copies on a GPU.

A copy from ordinary memory makes the processor wait for all that the GPU still has to do. From and
to pinned memory it takes its turn among the GPU's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedkeel.engine.compiler.cuda_graphs import copy_all
from fedkeel.engine.trainer import TrainedClients


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the processor on a device; itself where it is there already."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors of one device; a GPU makes all of a type at once."""
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.clone() for tensor in tensors]
    new = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(zip(new, tensors, strict=True))
    return new


def with_counts_on_host(trained: TrainedClients) -> TrainedClients:
    """Return clients whose losses, and whether they are finite, are on their way to the processor.

    They may be read after `TrainedClients.wait`.
    """
    if not trained.loss.is_cuda:
        return trained
    loss, finite = _to_host(trained.loss), _to_host(trained.finite)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return replace(trained, loss=loss, finite=finite, wait=arrived.synchronize)


def _to_host(tensor: Tensor) -> Tensor:
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)
