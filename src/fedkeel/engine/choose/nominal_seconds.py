"""How long a run takes by each engine, in nominal seconds: counts times constants, without a clock.

The constants are those of one core of a server of 2024. They were set by hand on runs of
``benchmarks/engines.py``, made beside other work. Only their ratios matter: the engine with the
fewest nominal seconds is taken. What all engines do alike, such as evaluations, is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

OPERATION_SECONDS = 6e-6
"""Of a tensor operation, beside its arithmetic."""

MULTIPLY_ADD_SECONDS = 3.3e-11
"""Of a multiply-add in a product or a convolution of float32."""

ENTRY_SECONDS = 1e-9
"""Of each number that an operation computes: activations and their gradients go through memory."""

ROUND_SECONDS = 1.7e-3
"""Of a round, beside its clients: drawing them, the server's step, records."""

CLIENT_SECONDS, STEP_SECONDS, STEP_PARAMETER_SECONDS = 4e-4, 6e-5, 1.8e-9
"""Of what an exact engine does once for each client, for each of its steps, and for each parameter
in each step: Python, automatic differentiation and copies."""

GROUP_CLIENT_SECONDS, GROUP_PARAMETER_SECONDS = 5e-5, 1e-9
"""The same of compiled steps: for each client, and for each parameter in each step."""

WHOLE_ROUND_PARAMETER_SECONDS = 3e-10
"""For each parameter in each step where whole rounds are compiled for several clients: none of them
has a model of its own."""

SINGLE_SHARE = 0.93
"""Of the time of multiply-adds, where clients train one by one in compiled steps: images are laid
out with channels last."""

COMPILE_SECONDS, COMPILED_OPERATION_SECONDS = 0.1, 1.5e-3
"""Of what is loaded to compile, and for each operation that is compiled."""

COMPARED_RUNS = 4
"""How often what is compiled is run before it is used, to compare its results."""

PROCESSES_SECONDS, DISPATCH_SECONDS = 0.15, 1.5e-3
"""Of starting worker processes, and of giving them the clients of a round."""


@dataclass(frozen=True)
class Work:
    """The work of a run, by what all methods and seeds of a comparison share.

    The method counts as FedAvg.

    Args:
        steps: local steps of a client in a round.
        batch: examples in a local step.
        multiply_adds: of the gradient of one batch.
        entries: numbers that the operations of that gradient compute, beside the gradient itself.
        operations: tensor operations of that gradient; 0 where they could not be counted.
        fused_attention: whether an attention among them is a single operation.
        parameters: of the network.
        cohort: clients in a round.
        rounds: rounds of the run.
        whole_rounds: whether rounds of several clients are compiled as a whole.
        compiled_steps: how many steps are compiled, as one function or as several.
    """

    steps: int
    batch: int
    multiply_adds: float
    entries: float
    operations: int
    fused_attention: bool
    parameters: int
    cohort: int
    rounds: int
    whole_rounds: bool
    compiled_steps: int

    @property
    def round_seconds(self) -> float:
        """Of the clients of a round on one core, one client after the other."""
        step = STEP_SECONDS + STEP_PARAMETER_SECONDS * self.parameters + self._gradient_seconds
        return self.cohort * (CLIENT_SECONDS + self.steps * step)

    @property
    def _gradient_seconds(self) -> float:
        arithmetic = MULTIPLY_ADD_SECONDS * self.multiply_adds
        return OPERATION_SECONDS * self.operations + ENTRY_SECONDS * self.entries + arithmetic

    def exact_seconds(self, workers: int) -> float:
        """Of the run by an exact engine: `sequential`, or `workers` where there are several."""
        return self._run_seconds(self.round_seconds / workers, workers)

    def compiled_seconds(
        self, workers: int, group: int, compilations: float = 1.0, is_tried: bool = False
    ) -> float:
        """Of the run by `vectorized`.

        Args:
            workers: processes; each compiles for itself.
            group: clients side by side.
            compilations: how often the run compiles; less than once where its clients train beside
                those of other runs, with which it shares operations and compiled functions.
            is_tried: whether a step is compiled before, to see whether it can be.
        """
        is_whole = self.whole_rounds and group > 1
        of_parameters = WHOLE_ROUND_PARAMETER_SECONDS if is_whole else GROUP_PARAMETER_SECONDS
        arithmetic = MULTIPLY_ADD_SECONDS * self.multiply_adds * (SINGLE_SHARE if group == 1 else 1)
        step = arithmetic + ENTRY_SECONDS * self.entries + of_parameters * self.parameters
        client = GROUP_CLIENT_SECONDS + self.steps * step
        groups = math.ceil(math.ceil(self.cohort / group) / workers)  # one after the other
        of_run = compilations if groups == workers == 1 else 1.0
        group_seconds = group * client + of_run * self.steps * OPERATION_SECONDS * self.operations
        share = min(groups * group, self.cohort) / group
        compiled = self.operations * (compilations * self.compiled_steps + is_tried)
        compiling = compilations * COMPILE_SECONDS + COMPILED_OPERATION_SECONDS * compiled
        compared = min(self.compiled_steps / max(self.steps, 1), 1) * group_seconds
        compiling += compilations * COMPARED_RUNS * compared
        return compiling + self._run_seconds(share * group_seconds, workers)

    def _run_seconds(self, training: float, workers: int) -> float:
        """Of all rounds, of which training takes so many seconds each."""
        if workers == 1:
            return self.rounds * (ROUND_SECONDS + training)
        return PROCESSES_SECONDS + self.rounds * (ROUND_SECONDS + DISPATCH_SECONDS + training)
