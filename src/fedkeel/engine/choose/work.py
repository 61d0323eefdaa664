"""The work of a run in multiply-adds, counted once on a few examples; no clock is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import flop_registry

from fedkeel.base.dispatch import OperationMode
from fedkeel.data import batches
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.choose.nominal_seconds import Work
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.vectorized.facts import few_examples, has_short_rounds
from fedkeel.tree import numel

UNEVEN_STEPS = 6
"""How many steps are compiled, about, where clients do not end at the same time: for fewer clients,
for masked ones and for short batches, and what ends a round."""


def run_work(prepared: Prepared) -> Work:
    """Return the work of a run; clients count as if they had equally many examples."""
    setup, settings = prepared.setup, prepared.settings
    clients = len(prepared.clients)
    size = max(len(setup.federation.data) // clients, 1)
    batch = max(batches.batch_sizes(settings.local, size))
    gradient = gradient_work(setup)
    steps, whole_rounds = batches.count_steps(settings.local, size), has_short_rounds(setup)
    is_even = len(np.unique(setup.federation.sizes[setup.federation.sizes > 0])) == 1
    return Work(
        steps=steps,
        batch=batch,
        multiply_adds=batch * gradient.multiply_adds,
        entries=batch * gradient.entries,
        operations=gradient.operations,
        fused_attention=gradient.fused_attention,
        parameters=numel(setup.training.network.params),
        cohort=max(settings.cohort.size(clients), 1),
        rounds=settings.rounds,
        whole_rounds=whole_rounds,
        compiled_steps=steps if whole_rounds else 1 if is_even else UNEVEN_STEPS,
    )


@dataclass(frozen=True)
class GradientWork:
    """What the gradient of a loss takes.

    Args:
        multiply_adds: for one example.
        entries: numbers that its operations compute for one example, beside gradients.
        operations: tensor operations, however many examples there are; 0 where the model does not
            bear being watched.
        fused_attention: whether an attention among them is a single operation.
    """

    multiply_adds: float
    entries: float = 0.0
    operations: int = 0
    fused_attention: bool = False


def gradient_work(setup: TrainingSetup) -> GradientWork:
    """Return what the gradient of a loss takes.

    Of a model that does not bear being watched, multiply-adds are those of dense layers with as
    many parameters.
    """
    network, examples = setup.training.network, few_examples(setup)
    counter, parameters = OperationCounter(), numel(network.params)
    with use_numerics(setup.precision), torch.random.fork_rng(devices=[]):
        try:
            with counter:
                buffers = network.copy_buffers(network.buffers)
                network.value_and_grad(network.params, buffers, examples, "eager")
        except Exception:  # a model of the user's, which the rehearsal has trained without a watch
            return GradientWork(3.0 * parameters)
    return GradientWork(
        counter.multiply_adds / len(examples),
        max(counter.entries - parameters, 0) / len(examples),
        counter.operations,
        counter.fused_attention,
    )


def gradient_multiply_adds(setup: TrainingSetup) -> float:
    """Return the multiply-adds of the gradient of one example's loss, see `gradient_work`."""
    return gradient_work(setup).multiply_adds


class OperationCounter(OperationMode):
    """Counts operations, entries of their results, and multiply-adds of products and convolutions.

    It also notes whether an attention is made as a single operation of the processor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0.0
        self.operations = self.entries = 0
        self.fused_attention = False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        """Count a call, and make it."""
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.fused_attention = True
        if not func.is_view:
            results = out if isinstance(out, tuple | list) else (out,)
            self.entries += sum(t.numel() for t in results if isinstance(t, torch.Tensor))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:  # which counts multiplications and additions apart
            self.multiply_adds += int(count(*args, **(kwargs or {}), out_val=out)) / 2
        return out
