"""Rows into which replies are written, one for each client, whoever trains it and wherever.

Where the server only needs a sum over clients, there is one sum for each work item instead of a row
for each client. A work item's sums and seconds lie in the row of its first client.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.base import ClientJob, ReportProgress, TrainingSetup
from fedkeel.engine.buffers import RowBytes, TensorBuffers
from fedkeel.engine.local import PHASES
from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.rehearsal import (
    CLIENT_STATE_PREFIX,
    SURVEY_PREFIX,
    UPDATE_PREFIX,
    check_reply,
    spec_of_client,
    specs_below,
)
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.engine.store import AnyStore
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.survey import survey_client
from fedkeel.engine.trainer import ReadRecord, TrainedClients, Trainer
from fedkeel.method.context import ByPart, Message
from fedkeel.tree import State, Tree, map_tensors, substates, unwalk, walk

COUNTS = {
    "loss": torch.float64,
    "finite": torch.bool,
    "steps": torch.int64,
    "examples": torch.int64,
    "first_row": torch.int64,
}
"""Numbers about each client's round; `first_row` is the first row of its work item."""

PROCESSOR = "processor"
"""Name of the processor seconds of a work item, beside the seconds of its phases."""

PackedRows = dict[str, RowBytes]
"""Bytes of the rows of a work item, by the buffer in which they lie and by path."""


class ReplyRows:
    """Replies, a row for each client, and sums over the clients of a work item.

    What clients keep goes into the store; without a store it is part of the rows.

    Args:
        setup: method, model, data and seed.
        spec: shape and type of each tensor of a reply, by path, from `rehearse`.
        capacity: largest number of clients.
        allocate: provides the memory.
        sums: whether updates and messages are added up as they come, where the method allows it.
        store: holds client state; None on another machine.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        spec: Mapping[str, TensorSpec],
        capacity: int,
        allocate: Allocate,
        sums: bool = False,
        store: AnyStore | None = None,
    ) -> None:
        self._setup, self._store = setup, store
        self._survey_spec = specs_below(spec, SURVEY_PREFIX)
        self._spec = {k: v for k, v in spec.items() if not k.startswith(SURVEY_PREFIX)}
        self._client_state_spec = specs_below(spec, CLIENT_STATE_PREFIX)
        can_add_up = setup.training.plan.needs_only_update_sum and not setup.keeps_updates
        self.summed = sums and can_add_up
        self._sums_device: torch.device | None = None  # where sums stay, None for the rows
        self._kept_sums: Tree = {}  # what stays there, of the only work item
        uploads = (f"uploads/{part}/" for part in setup.training.plan.sum_only_uploads)
        prefixes = (UPDATE_PREFIX, *uploads) if self.summed else ()
        summed = {k: v for k, v in self._spec.items() if k.startswith(prefixes)}
        replies = {
            k: v
            for k, v in self._spec.items()
            if k not in summed and not k.startswith(CLIENT_STATE_PREFIX)
        }
        client_state = self._client_state_spec if store is None else {}
        counts = {name: TensorSpec((), dtype) for name, dtype in COUNTS.items()}
        seconds = {name: TensorSpec((), torch.float64) for name in (*PHASES, PROCESSOR)}
        self._sums = TensorBuffers(summed, capacity, allocate)  # in the first row of a work item
        self._replies = TensorBuffers(replies, capacity, allocate)
        self._client_state = TensorBuffers(client_state, capacity, allocate)
        self._counts = TensorBuffers(counts, capacity, allocate)
        self._seconds = TensorBuffers(
            seconds, capacity, allocate
        )  # in the first row of a work item
        self._answers = TensorBuffers(self._survey_spec, capacity, allocate)
        survey_seconds = {"survey": TensorSpec((), torch.float64)} if self._survey_spec else {}
        self._survey_seconds = TensorBuffers(survey_seconds, capacity, allocate)

    # ---- writing ----------------------------------------------------------------------------

    def train(
        self,
        trainer: Trainer,
        message: Message,
        jobs: Sequence[ClientJob],
        read_record: ReadRecord,
        report_progress: ReportProgress,
    ) -> None:
        """Train the clients of a work item and write their rows.

        Raises:
            TrainingError: the model, the loss or a part raised an error, or the reply has another
                form than the rehearsed one.
        """
        if not jobs:
            return
        first_row = jobs[0].row
        if self._sums_device is None:
            for tensor in self._sums.tensors.values():
                tensor[first_row].zero_()
        phases, sums = dict.fromkeys(PHASES, 0.0), dict[str, Tensor]()
        elsewhere = 0.0
        # while the thread waits for a GPU, its processor time stands still
        clock = time.perf_counter if trainer.queue_length else time.thread_time
        started = clock()
        for trained in started_ahead(trainer, trainer(message, jobs, read_record, self.summed)):
            began = time.perf_counter()
            trained.wait()
            phases["steps"] += time.perf_counter() - began
            began = time.perf_counter()
            self._write_reply(trained, first_row, sums)
            phases["upload"] += time.perf_counter() - began
            for phase, seconds in trained.seconds.items():
                phases[phase] += seconds
            elsewhere += trained.processor_seconds
            report_progress(len(trained.jobs))
        self._put_sums(sums, first_row)
        phases[PROCESSOR] = clock() - started + elsewhere
        for phase, seconds in phases.items():
            self._seconds.tensors[phase][first_row] = seconds

    def keep_sums_on(self, device: torch.device) -> None:
        """Leave sums on the device where clients are trained, for a server that is there too.

        All clients of a round are then one work item.
        """
        self._sums_device = device

    def _put_sums(self, sums: Tree, first_row: int) -> None:
        """Put the sums of a work item into its row, or keep them where they are."""
        if self._sums_device is not None:
            for path, tensor in self._sums.tensors.items():
                if path not in sums:  # no client has sent anything finite
                    sums[path] = torch.zeros_like(tensor[0], device=self._sums_device)
            self._kept_sums = {path: sums[path][None] for path in self._sums.tensors}
            return
        for path, total in sums.items():
            if total.device.type != "cpu":
                self._sums.tensors[path][first_row].copy_(total)

    def _write_reply(
        self, trained: TrainedClients, first_row: int, sums: dict[str, Tensor]
    ) -> None:
        state = dict(walk(trained.state))
        keeps = {CLIENT_STATE_PREFIX + k: v for k, v in trained.client_state.values.items()}
        values = {**state, **keeps}.items()
        spec = {path: TensorSpec(tuple(v.shape[1:]), v.dtype) for path, v in values}
        client = trained.jobs[0].client
        check_reply(spec, client, spec_of_client(self._setup, self._spec, client))
        rows = [job.row for job in trained.jobs]
        summed = {path: state.pop(path) for path in self._sums.tensors}
        self._add(summed, trained, first_row, sums)
        self._write_client_state(trained.client_state, trained.jobs)
        self._replies.write(state, rows)
        counts = {
            "loss": trained.loss,
            "finite": trained.finite,
            "steps": torch.tensor(trained.steps),
            "examples": torch.tensor(trained.examples),
            "first_row": torch.tensor([first_row] * len(rows)),
        }
        self._counts.write(counts, rows)

    def _write_client_state(self, record: ClientRecord, jobs: Sequence[ClientJob]) -> None:
        if self._store is None:
            self._client_state.write(dict(record.state), [job.row for job in jobs])
        elif record.values:
            self._store.write(np.array([job.client for job in jobs]), record)

    def _add(
        self, state: Tree, trained: TrainedClients, first_row: int, sums: dict[str, Tensor]
    ) -> None:
        """Add what clients send, where it is finite, to the sums of their work item.

        Updates are added with the clients' weights, messages without weights, both only of clients
        that have a weight. On a GPU the sums stay there until the work item is trained.
        """
        by_scale: dict[float, tuple[list[Tensor], list[Tensor]]] = {}

        def add(path: str, tensor: Tensor, scale: float = 1) -> None:
            if path not in sums:
                row = self._sums.tensors[path][first_row]
                is_in_row = tensor.device == row.device and self._sums_device is None
                sums[path] = row if is_in_row else tensor.new_zeros(row.shape)
            totals, tensors = by_scale.setdefault(scale, ([], []))
            totals.append(sums[path])
            tensors.append(tensor.view(sums[path].shape).to(sums[path].device))

        def add_up() -> None:
            for scale, (totals, tensors) in by_scale.items():
                torch._foreach_add_(totals, tensors, alpha=scale)

        if trained.added:
            for path, rows in state.items():
                add(path, rows[0])
            add_up()
            return
        weights = self._setup.raw_weights(trained.jobs, trained.examples)
        counted = np.flatnonzero(trained.finite.numpy() & (weights > 0.0))
        if not len(counted):
            return
        for path, rows in state.items():
            scales = weights if path.startswith(UPDATE_PREFIX) else np.ones_like(weights)
            if len(rows) == 1:
                add(path, rows[0], scales[0])
            else:
                if len(counted) < len(rows):
                    rows = rows[torch.from_numpy(counted).to(rows.device)]
                factors = torch.from_numpy(scales[counted]).to(rows.device, rows.dtype)
                add(path, torch.mv(rows.reshape(len(rows), -1).T, factors))
        add_up()

    def answer_survey(self, message: Message, job: ClientJob, client_state: ByPart | None) -> None:
        """Compute one client's answers to the surveys and write them into its row."""
        began = time.thread_time()
        self.write_answers(job, survey_client(self._setup, message, job, client_state))
        self._survey_seconds.tensors["survey"][job.row] = time.thread_time() - began

    def write_answers(self, job: ClientJob, answers: ByPart) -> None:
        """Write one client's answers to the surveys into its row."""
        check_reply(specs_of(dict(answers)), job.client, self._survey_spec)
        self._answers.write(map_tensors(lambda t: t[None], dict(answers)), [job.row])

    # ---- reading ----------------------------------------------------------------------------

    def answers(self, count: int) -> ByPart:
        """Return the answers of the first clients, tensors [count, ...] by part, as views."""
        return substates(self._answers.state(count))

    def replies(self, count: int) -> State:
        """Return what the first clients sent, [count, ...], as views.

        What is added up comes as G sums, [G, ...], one for each work item: as a view where there is
        one work item, otherwise as a copy.
        """
        items = self._work_items(count)
        sums = self._kept_sums
        if self._sums_device is None:
            sums = {path: _select(tensor, items) for path, tensor in self._sums.tensors.items()}
        return unwalk({**sums, **{path: t[:count] for path, t in self._replies.tensors.items()}})

    def counts(self, count: int) -> dict[str, Tensor]:
        """Return numbers about the first clients' rounds, [count] by the names of `COUNTS`."""
        return {name: tensor[:count] for name, tensor in self._counts.tensors.items()}

    def seconds(self, count: int) -> dict[str, float]:
        """Return the seconds of the first clients by phase, summed over them."""
        items = self._work_items(count)
        return {k: float(_select(self._seconds.tensors[k], items).sum()) for k in PHASES}

    def processor_seconds(self, count: int) -> float:
        """Return the processor seconds of the first clients' training and surveys."""
        training = _select(self._seconds.tensors[PROCESSOR], self._work_items(count))
        surveys = [t[:count].sum() for t in self._survey_seconds.tensors.values()]
        return float(training.sum() + sum(surveys))

    def _work_items(self, count: int) -> Tensor | slice:
        """Return the first rows of the first clients' work items; of one item as a slice."""
        rows = np.unique(self._counts.tensors["first_row"][:count].numpy())
        return slice(rows[0], rows[0] + 1) if len(rows) == 1 else torch.from_numpy(rows)

    # ---- sending to another process ---------------------------------------------------------

    def pack(self, count: int, is_survey: bool) -> PackedRows:
        """Return the rows of a work item of the first `count` clients, as views of their bytes."""
        if is_survey:
            return {
                "answers": self._answers.read_bytes(count),
                "survey_seconds": self._survey_seconds.read_bytes(count),
            }
        return {
            "sums": self._sums.read_bytes(1),
            "replies": self._replies.read_bytes(count),
            "client_state": self._client_state.read_bytes(count),
            "counts": self._counts.read_bytes(count),
            "seconds": self._seconds.read_bytes(1),
        }

    def unpack(self, packed: PackedRows, jobs: Sequence[ClientJob]) -> None:
        """Write the rows of a work item that was done elsewhere.

        Args:
            packed: from `pack`.
            jobs: the clients of the work item, with their rows here.
        """
        rows = [job.row for job in jobs]
        self._answers.write_bytes(packed.get("answers", {}), rows)
        self._survey_seconds.write_bytes(packed.get("survey_seconds", {}), rows)
        if "replies" not in packed:
            return
        for buffers, name in ((self._sums, "sums"), (self._seconds, "seconds")):
            buffers.write_bytes(packed[name], rows[:1])
        for buffers, name in ((self._replies, "replies"), (self._counts, "counts")):
            buffers.write_bytes(packed[name], rows)
        self._counts.tensors["first_row"][rows] = rows[0]
        tensors = {
            path: _from_bytes(array, self._client_state_spec[path])
            for path, array in packed["client_state"].items()
        }
        self._write_client_state(ClientRecord(tensors), jobs)


def started_ahead(trainer: Trainer, groups: Iterator[TrainedClients]) -> Iterator[TrainedClients]:
    """Yield groups of clients, each after as many more have been started as may wait."""
    waiting: deque[TrainedClients] = deque()
    for group in groups:
        waiting.append(group)
        while len(waiting) > trainer.queue_length:
            yield waiting.popleft()
    yield from waiting


def _select(rows: Tensor, index: Tensor | slice) -> Tensor:
    """Return some rows.

    `index_select` starts no other threads of torch. Indexing with a tensor would, and these threads
    then keep a core busy for milliseconds, which a worker needs.
    """
    return rows[index] if isinstance(index, slice) else rows.index_select(0, index)


def _from_bytes(array: NDArray[np.uint8], spec: TensorSpec) -> Tensor:
    """Return the tensor [n, ...] of bytes [n, bytes of a row], a copy."""
    return torch.from_numpy(array.copy()).view(spec.dtype).view(len(array), *spec.shape)
