"""What a task, its data and the simulation provide to a method."""

from __future__ import annotations

from torch import Tensor

from fedkeel.data.dataset import Dataset
from fedkeel.method.compose import SIMULATION
from fedkeel.method.part import Capability
from fedkeel.task.losses import (
    is_plain_cross_entropy,
)
from fedkeel.task.network import Network
from fedkeel.task.parameter_names import blocks


def provided_capabilities(network: Network, data: Dataset) -> frozenset[Capability]:
    """Return what a method may use: what the model and its loss, the data and one machine have."""
    capabilities = set(SIMULATION)
    if data.has_labels and network.scores_classes:
        capabilities.add(Capability.CLASSES)
    if network.soft_target is not None:
        capabilities.add(Capability.SOFT_TARGETS)
    if network.head:
        capabilities |= {Capability.HEAD, Capability.FEATURES}
    if len(blocks(network.names)) > 1:
        capabilities.add(Capability.BLOCKS)
    if is_plain_cross_entropy(network.task_loss):
        capabilities.add(Capability.PLAIN_LOSS)
    if not network.weighs_examples:
        capabilities.add(Capability.LOSS_BY_EXAMPLE)
        if not network.mixes_examples:
            capabilities.add(Capability.EXAMPLE_LOSSES)
    if isinstance(data.x, Tensor) and data.x.is_floating_point():
        capabilities.add(Capability.INPUT_GRADIENT)
    return frozenset(capabilities)
