"""Clients of a round by their losses: what is asked of them, what is remembered, who is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.base.rng import generator
from fedkeel.data.cohort import Selection, select, selectable, with_dropouts
from fedkeel.data.federation import Federation, concatenate_rows
from fedkeel.data.partition.common import Floats
from fedkeel.engine.base import TrainedCohort, TrainingSetup
from fedkeel.engine.evaluation import evaluate, scores_by_group
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.features.selection.rules import (
    SLOWNESS_EXPONENT,
    draw_by_utility,
    explored_share,
    largest_losses,
    oort_utility,
)
from fedkeel.method.context import Ints, Message
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import LOSS
from fedkeel.runner.feature_hooks import Selector

UTILITY, LAST_ROUND = "selection/utility", "selection/last_round"
"""Names in a checkpoint of what each client's last training says, NaN without one, and of the round
in which that was, counted from 1."""


class SelectorByLosses(Selector):
    """Selects the clients of each round of a run.

    ``power_of_choice``: d candidates are drawn without replacement in proportion to their examples,
    are sent the model, answer with its mean loss on all their examples, and the K with the largest
    ones train.

    ``oort``: a share of the round are clients that have never trained, drawn by their speed, or
    uniformly where no time is counted; the others are drawn by utility, from what their last
    training said. So nobody is asked for more.

    Args:
        prepared: the run.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._setup, self._cohort = prepared.setup, prepared.cohort
        self._sizes, self._seed = prepared.setup.federation.sizes, prepared.server_seed
        self._utility = np.full(len(self._sizes), np.nan)  # [C] examples times loss
        self._last_round = np.zeros(len(self._sizes), dtype=np.int64)  # [C] counted from 1

    def __call__(self, round: int, among: Ints | None = None) -> Selection:
        """Return the clients of a round; see `data.cohort.select`."""
        if among is None:
            among = selectable(self._cohort, self._sizes, self._seed)
        among = among[self._sizes[among] > 0]
        count = min(self._cohort.size(len(self._sizes)), len(among))
        candidates = None
        if self._cohort.sampling == "power_of_choice":
            chosen, candidates = self._by_choice(round, among, count)
        else:
            chosen = self._by_utility(round, among, count)
        return with_dropouts(self._cohort, chosen, self._seed, round, candidates=candidates)

    # --- power of choice -------------------------------------------------------------------------

    def _by_choice(self, round: int, among: Ints, count: int) -> tuple[Ints, Ints]:
        wanted = min(self._cohort.candidates or 2 * count, len(among))
        by_examples = self._cohort.model_copy(update={"sampling": "examples", "dropout": 0.0})
        drawn = select(by_examples, self._sizes, self._seed, round, among=among, count=wanted)
        candidates = drawn.clients
        if not len(candidates):
            return candidates, candidates
        if self.message is None:
            raise ValueError("clients are chosen before there is a model to ask them about")
        losses = local_losses(self._setup, self.message, candidates)
        return largest_losses(candidates, losses, count), candidates

    # --- Oort ------------------------------------------------------------------------------------

    def _by_utility(self, round: int, among: Ints, count: int) -> Ints:
        is_known = ~np.isnan(self._utility[among])
        known, new = among[is_known], among[~is_known]
        random = generator(self._seed, "cohort", round)
        wanted = explored_share(self._cohort, round + 1) * count
        explored = min(int(wanted + random.random()), len(new))  # rounded at random
        exploited = min(count - explored, len(known))
        explored = min(count - exploited, len(new))
        chosen = known[:0]
        if exploited:
            utility = self._utility_of(known, round + 1)
            chosen = draw_by_utility(known, utility, exploited, random)
        if explored:
            speed = np.ones(len(new)) if self.seconds is None else 1.0 / self.seconds[new]
            p = speed / speed.sum()
            chosen = np.union1d(chosen, random.choice(new, explored, replace=False, p=p))
        return np.sort(chosen).astype(np.int64, copy=False)

    def _utility_of(self, clients: Ints, round: int) -> Floats:
        seconds, preferred = self.seconds, self._cohort.preferred_seconds
        exponent = self._cohort.slowness_exponent
        if seconds is not None:
            preferred = preferred or float(np.median(seconds))
            seconds = seconds[clients]
        return oort_utility(
            self._utility[clients],
            self._last_round[clients],
            round,
            seconds,
            preferred or 1.0,
            SLOWNESS_EXPONENT if exponent is None else exponent,
        )

    # --- what is remembered ----------------------------------------------------------------------

    def observe(self, trained: TrainedCohort, keep: Ints, round: int) -> None:
        """Remember the losses of clients that have trained in a round, counted from 1."""
        rows = np.isin(trained.replies.clients, keep) & np.isfinite(trained.loss)
        clients = trained.replies.clients[rows]
        self._utility[clients] = self._sizes[clients] * trained.loss[rows]
        self._last_round[clients] = round

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what is remembered, for a checkpoint."""
        return {UTILITY: self._utility.copy(), LAST_ROUND: self._last_round.copy()}

    def restore(self, arrays: Mapping[str, NDArray[Any]], rows: Sequence[RoundRecord]) -> None:
        """Take what a checkpoint holds."""
        self._utility[:] = arrays[UTILITY]
        self._last_round[:] = arrays[LAST_ROUND]


def local_losses(setup: TrainingSetup, message: Message, clients: Ints) -> Floats:
    """Return [n] the mean loss of a model on all training examples of each of some clients.

    It is measured in this process, one client after the other, whatever the engine.
    """
    federation = setup.federation
    rows, offsets = concatenate_rows([federation.client(k) for k in clients.tolist()])
    setup = replace(setup, federation=Federation(federation.data, rows, offsets, federation.how))
    buffers = message.buffers or setup.training.network.buffers
    with use_numerics(setup.precision):
        measured = evaluate(setup, message.params, buffers, "clients")
    return np.array([scores[LOSS] for scores in scores_by_group(setup, "clients", measured)])
