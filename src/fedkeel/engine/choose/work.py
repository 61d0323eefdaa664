"""The work of a run in multiply-adds, counted once on a few examples; no clock is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fedkeel.base.dispatch import OperationMode
from fedkeel.data import batches
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.vectorized.facts import few_examples
from fedkeel.tree import numel

STEP_SECONDS = 4e-4
"""Seconds of a local step of any network, beside its arithmetic: Python and automatic
differentiation, on one core of a server of 2024."""

OPERATION_SECONDS = 1e-5
"""Seconds of a tensor operation on one core, beside its arithmetic."""

COMPILE_SECONDS = 4e-3
"""Seconds that it takes to compile a step for each of its operations: in a trial, and in a worker.
Measured on a network of 6,500 operations, see ``docs/benchmarks/log.md``."""

MULTIPLY_ADDS_PER_SECOND = 2e10
"""Multiply-adds of one such core in a second, in products and convolutions of float32."""


@dataclass(frozen=True)
class Work:
    """The work of a run, by what all methods and seeds of a comparison share.

    The method counts as FedAvg.

    Args:
        steps: local steps of a client in a round.
        batch: examples in a local step.
        multiply_adds: of the gradient of one batch.
        operations: tensor operations of that gradient; 0 where they could not be counted.
        fused_attention: whether an attention among them is a single operation.
        cohort: clients in a round.
        rounds: rounds of the run.
    """

    steps: int
    batch: int
    multiply_adds: float
    operations: int
    fused_attention: bool
    cohort: int
    rounds: int

    @property
    def round_seconds(self) -> float:
        """Nominal seconds of a round on one core, one client after the other."""
        step = STEP_SECONDS + self.multiply_adds / MULTIPLY_ADDS_PER_SECOND
        return self.cohort * self.steps * step

    @property
    def seconds(self) -> float:
        """Nominal seconds of the run on one core, one client after the other."""
        return self.rounds * self.round_seconds

    @property
    def compile_share(self) -> float:
        """Seconds that it takes to compile a step, as a share of the seconds of the run."""
        step = self.operations * OPERATION_SECONDS + self.multiply_adds / MULTIPLY_ADDS_PER_SECOND
        run = self.rounds * self.cohort * self.steps * step
        return self.operations * COMPILE_SECONDS / run if run else 0.0


def run_work(prepared: Prepared) -> Work:
    """Return the work of a run; clients count as if they had equally many examples."""
    setup, settings = prepared.setup, prepared.settings
    clients = len(prepared.clients)
    size = max(len(setup.federation.data) // clients, 1)
    batch = max(batches.batch_sizes(settings.local, size))
    multiply_adds, operations, fused_attention = gradient_work(setup)
    return Work(
        steps=batches.count_steps(settings.local, size),
        batch=batch,
        multiply_adds=batch * multiply_adds,
        operations=operations,
        fused_attention=fused_attention,
        cohort=max(settings.cohort.size(clients), 1),
        rounds=settings.rounds,
    )


def gradient_work(setup: TrainingSetup) -> tuple[float, int, bool]:
    """Return what the gradient of a loss takes: multiply-adds for one example, and operations.

    The number of operations does not depend on how many examples there are. The third value is
    whether an attention among them is a single operation. Of a model that does not bear being
    watched, multiply-adds are those of dense layers with as many parameters, and the number of
    operations is 0.
    """
    network, examples = setup.training.network, few_examples(setup)
    counter = MultiplyAdds()
    with use_numerics(setup.precision), torch.random.fork_rng(devices=[]):
        try:
            with counter:
                buffers = network.copy_buffers(network.buffers)
                network.value_and_grad(network.params, buffers, examples, "eager")
        except Exception:  # a model of the user's, which the rehearsal has trained without a watch
            return 3.0 * numel(network.params), 0, False
    return counter.total / len(examples), counter.operations, counter.fused_attention


def gradient_multiply_adds(setup: TrainingSetup) -> float:
    """Return the multiply-adds of the gradient of one example's loss, see `gradient_work`."""
    return gradient_work(setup)[0]


class MultiplyAdds(OperationMode):
    """Counts operations, and the multiply-adds of matrix products and convolutions.

    It also notes whether an attention is made as a single operation of the processor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total: float = 0.0
        self.operations = 0
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
        count = flop_registry.get(func.overloadpacket)
        if count is not None:  # which counts multiplications and additions apart
            self.total += int(count(*args, **(kwargs or {}), out_val=out)) / 2
        return out
