"""The observer of a run: it diagnoses the rounds that are due, and changes no number of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fedkeel import tree
from fedkeel.base.clock import Lap
from fedkeel.base.rng import seed_torch, torch_seed
from fedkeel.engine.base import TrainedCohort, TrainingEngine
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.features.diagnose.clients import ObservedClients
from fedkeel.features.diagnose.kinds import DIAGNOSTICS
from fedkeel.features.diagnose.measured import RoundDiagnostics
from fedkeel.features.diagnose.models import ModelState
from fedkeel.features.diagnose.observed_round import ObservedRound
from fedkeel.features.diagnose.settings import Diagnose
from fedkeel.method.checks import explain_errors
from fedkeel.method.context import Ints, Message
from fedkeel.method.round_values import RoundResult
from fedkeel.method.server_round import raw_weights
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import RunInfo
from fedkeel.runner.feature_hooks import Hooks
from fedkeel.tree import Tree


class Observer(Hooks):
    """Diagnoses the rounds of a run.

    Where the engine has left one sum of the updates in place of a row for each client, the cohort
    is trained again, from the same message and the same states, one client after the other.

    Args:
        prepared: the run.
        settings: what is measured.
    """

    def __init__(self, prepared: Prepared, settings: Diagnose) -> None:
        self._settings, self._rounds = settings, prepared.settings.rounds
        self._setup, self._device = prepared.setup, torch.device("cpu")
        self._measured = RoundDiagnostics()

    def on_run_begin(self, run: RunInfo) -> None:
        """Use models where the engine does."""
        self._device = torch.device(run.record.engine.first_device or "cpu")
        self._setup = self._setup.on(self._device)

    def after_server_step(
        self,
        engine: TrainingEngine,
        message: Message,
        trained: TrainedCohort,
        result: RoundResult,
        rows: Sequence[RoundRecord],
        lap: Lap,
    ) -> None:
        """Diagnose the round where it is due."""
        round = result.server.round
        is_due = round % self._settings.every == 0 or round == self._rounds
        self._measured = RoundDiagnostics()
        if not is_due or not len(result.clients):
            return
        lap("server")
        with (
            torch.no_grad(),
            use_numerics(self._setup.precision),
            torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []),
        ):
            seen = self._seen(engine, message, trained, result, rows)
            for kind in self._settings.kinds:
                seed_torch(torch_seed(self._setup.seed, "diagnose", round))
                with explain_errors(f"The diagnostics {kind!r} of round {round} failed"):
                    self._measured |= DIAGNOSTICS[kind].measure(seen).named(kind)
        lap("diagnostics")

    def recorded(self, row: RoundRecord) -> RoundRecord:
        """Return the record of a round with what was measured in it."""
        measured, self._measured = self._measured, RoundDiagnostics()
        return replace(
            row,
            diagnostics={**row.diagnostics, **measured.numbers},
            breakdowns={**row.breakdowns, **measured.breakdowns},
        )

    def _seen(
        self,
        engine: TrainingEngine,
        message: Message,
        trained: TrainedCohort,
        result: RoundResult,
        rows: Sequence[RoundRecord],
    ) -> ObservedRound:
        replies, clients = trained.replies, result.clients
        place = {int(client): row for row, client in enumerate(replies.clients)}
        order = np.array([place[int(client)] for client in clients])
        weights = raw_weights(
            self._setup.training.plan.weights, replies.examples[order], replies.processed[order]
        )
        message = self._message(message)
        observed = ObservedClients(self._setup, engine, message, self._device)
        if replies.summed:
            updates = self._updates_again(observed, clients)
        else:
            updates = self._rows(replies.update, order)
        server = result.server
        return ObservedRound(
            setup=self._setup,
            settings=self._settings,
            message=message,
            after=ModelState(
                self._there(server.params),
                self._there(server.buffers) or self._setup.training.network.buffers,
            ),
            clients=clients,
            weights=weights / weights.sum(),
            processed=replies.processed[order],
            updates=updates,
            buffers=self._rows(replies.buffers, order),
            rows=rows,
            observed=observed,
        )

    def _updates_again(self, observed: ObservedClients, clients: Ints) -> Tree:
        """Return [K, ...] the updates of clients that are trained again."""
        updates = [dict(observed.train(int(client)).reply.update) for client in clients]
        return tree.tensors(tree.stack(updates))

    def _message(self, message: Message) -> Message:
        """Return the message where models are used."""
        there = partial(tree.map_tensors, lambda t: t.to(self._device))
        return replace(
            message,
            params=self._there(message.params),
            buffers=self._there(message.buffers),
            broadcast=tree.substates(there(dict(message.broadcast))),
        )

    def _there(self, tensors: Mapping[str, torch.Tensor]) -> Tree:
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}

    def _rows(self, rows: Mapping[str, torch.Tensor], order: Ints) -> Tree:
        index = torch.from_numpy(order)
        return {name: tensor[index].to(self._device) for name, tensor in rows.items()}
