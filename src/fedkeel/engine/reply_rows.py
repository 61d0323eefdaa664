"""Where replies are written: one row for each client, whoever trains it and wherever.

Of what the server only adds up there is one sum for each piece of work in their place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.base import ClientJob, ReportProgress, TrainingSetup
from fedkeel.engine.buffers import Buffers, RowBytes
from fedkeel.engine.local import PHASES
from fedkeel.engine.process.shared_memory import Allocate
from fedkeel.engine.rehearsal import (
    CLIENT_STATE_PREFIX,
    SURVEY_PREFIX,
    UPDATE_PREFIX,
    check_reply,
)
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.engine.store.base import ClientStore
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.survey import survey_client
from fedkeel.engine.trainer import ReadRecord, TrainedClients, Trainer
from fedkeel.method.context import ByPart, Message
from fedkeel.tree import State, Tree, map_tensors, substates, unwalk, walk

COUNTS = {
    "loss": torch.float64,
    "finite": torch.bool,
    "steps": torch.int64,
    "seen": torch.int64,
    "head": torch.int64,
}
"""Numbers about each client's round; `head` is the row of the piece that it was trained in."""


class Rows:
    """Replies, a row for each client; of what is added up, one sum for each piece of work.

    What clients keep goes into the store; where there is none it is a row like the others.

    Args:
        setup: method, model, data and seed.
        spec: shape and type of each tensor of a reply, by path, from `rounds.rehearse`.
        capacity: the most clients.
        allocate: where the memory comes from.
        sums: whether updates and messages are added up as they come, where the method allows it.
        store: where client state lies; None on another machine.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        spec: Mapping[str, TensorSpec],
        capacity: int,
        allocate: Allocate,
        sums: bool = False,
        store: ClientStore | None = None,
    ) -> None:
        self._setup, self._store = setup, store
        self._asked = {
            k.removeprefix(SURVEY_PREFIX): v for k, v in spec.items() if k.startswith(SURVEY_PREFIX)
        }
        self._spec = {k: v for k, v in spec.items() if not k.startswith(SURVEY_PREFIX)}
        self.summed = sums and setup.training.plan.needs_only_update_sum
        messages = (f"uploads/{part}/" for part in setup.training.plan.sum_only_uploads)
        added = (UPDATE_PREFIX, *messages) if self.summed else ()
        summed = {k: v for k, v in self._spec.items() if k.startswith(added)}
        self._kept = {k: v for k, v in self._spec.items() if k.startswith(CLIENT_STATE_PREFIX)}
        rest = {k: v for k, v in self._spec.items() if k not in summed and k not in self._kept}
        counts = {k: TensorSpec((), dtype) for k, dtype in COUNTS.items()}
        seconds = {k: TensorSpec((), torch.float64) for k in PHASES}
        self._sums = Buffers(summed, capacity, allocate)  # by piece
        self._replies = Buffers(rest, capacity, allocate)
        self._client_state = Buffers(self._kept if store is None else {}, capacity, allocate)
        self._counts = Buffers(counts, capacity, allocate)
        self._seconds = Buffers(seconds, capacity, allocate)  # by piece
        self._answers = Buffers(self._asked, capacity, allocate)

    # ---- written ----------------------------------------------------------------------------

    def run(
        self,
        train: Trainer,
        message: Message,
        jobs: Sequence[ClientJob],
        kept: ReadRecord,
        tick: ReportProgress,
    ) -> None:
        """Train the clients of a piece of work and write their rows.

        The seconds of all of them, and their sum where updates are added up, are written into row
        `jobs[0].row`.

        Raises:
            TrainingError: what the model, the loss or a part raised, or a part that sends or keeps
                something else than in the rehearsal.
        """
        head = jobs[0].row if jobs else 0
        for tensor in self._sums.tensors.values():
            tensor[head].zero_()
        spent, sums = dict.fromkeys(PHASES, 0.0), dict[str, Tensor]()
        for done in train(message, jobs, kept, self.summed):
            began = time.perf_counter()
            self._take(done, head, sums)
            spent["upload"] += time.perf_counter() - began
            for phase, seconds in done.seconds.items():
                spent[phase] += seconds
            tick(len(done.jobs))
        for path, total in sums.items():
            if total.device.type != "cpu":
                self._sums.tensors[path][head].copy_(total)
        if jobs:
            for phase, seconds in spent.items():
                self._seconds.tensors[phase][head] = seconds

    def _take(self, done: TrainedClients, head: int, sums: dict[str, Tensor]) -> None:
        state = dict(walk(done.state))
        values = {
            **state,
            **{CLIENT_STATE_PREFIX + path: v for path, v in done.client_state.values.items()},
        }
        found = {path: TensorSpec(tuple(v.shape[1:]), v.dtype) for path, v in values.items()}
        check_reply(found, done.jobs[0].client, self._spec)
        rows = [job.row for job in done.jobs]
        self._add({path: state.pop(path) for path in self._sums.tensors}, done, head, sums)
        self._keep(done.client_state, done.jobs, rows)
        self._replies.write(state, rows)
        heads = [head] * len(rows)
        counts = (done.loss, done.finite, *map(torch.tensor, (done.steps, done.examples, heads)))
        self._counts.write(dict(zip(COUNTS, counts, strict=True)), rows)

    def _keep(self, record: ClientRecord, jobs: Sequence[ClientJob], rows: Sequence[int]) -> None:
        """Write what clients keep."""
        if self._store is None:
            self._client_state.write({CLIENT_STATE_PREFIX.rstrip("/"): dict(record.state)}, rows)
        elif record.values:
            self._store.write(np.array([job.client for job in jobs]), record)

    def _add(self, state: Tree, done: TrainedClients, head: int, sums: dict[str, Tensor]) -> None:
        """Add what clients send, those that are finite, to the sums of their piece.

        Updates are added with the clients' weights; messages as they are, of clients that count.
        On a GPU the sums lie there until the piece is done.
        """

        def add(path: str, one: Tensor, scale: float = 1) -> None:
            if path not in sums:
                own = self._sums.tensors[path][head]
                sums[path] = own if one.device == own.device else one.new_zeros(own.shape)
            sums[path].add_(one.view(sums[path].shape).to(sums[path].device), alpha=scale)

        if done.added:
            for path, rows in state.items():
                add(path, rows[0])
            return
        raw = self._setup.raw_weights(done.jobs, done.examples)
        good = np.flatnonzero(done.finite.cpu().numpy() & (raw > 0.0))
        if not len(good):
            return
        for path, rows in state.items():
            scales = raw if path.startswith(UPDATE_PREFIX) else np.ones_like(raw)
            if len(rows) == 1:
                add(path, rows[0], scales[0])
            else:
                if len(good) < len(rows):
                    rows = rows[torch.from_numpy(good).to(rows.device)]
                weights = torch.from_numpy(scales[good]).to(rows.device, rows.dtype)
                add(path, torch.mv(rows.reshape(len(rows), -1).T, weights))

    def ask(self, message: Message, job: ClientJob, client_state: ByPart | None) -> None:
        """Write one client's answers to the surveys into its row."""
        self.put_answers(job, survey_client(self._setup, message, job, client_state))

    def put_answers(self, job: ClientJob, answers: ByPart) -> None:
        """Write one client's answers to the surveys, whoever asked it, into its row."""
        check_reply(specs_of(dict(answers)), job.client, self._asked)
        self._answers.write(map_tensors(lambda t: t[None], dict(answers)), [job.row])

    # ---- read -------------------------------------------------------------------------------

    def answers(self, count: int) -> ByPart:
        """Return the answers of the first clients, tensors [count, ...] by part, as views."""
        return substates(self._answers.state(count))

    def replies(self, count: int) -> State:
        """Return what the first clients sent, [count, ...], as views.

        What is added up comes as G sums, [G, ...]: of one piece as a view, else as copies.
        """
        heads = self._heads(count)
        sums = {path: _chosen(t, heads) for path, t in self._sums.tensors.items()}
        return unwalk({**sums, **{path: t[:count] for path, t in self._replies.tensors.items()}})

    def counts(self, count: int) -> dict[str, Tensor]:
        """Return numbers about the first clients' rounds, [count] by the names of `COUNTS`."""
        return {name: t[:count] for name, t in self._counts.tensors.items()}

    def seconds(self, count: int) -> dict[str, float]:
        """Return the seconds of the first clients by phase, summed over them."""
        heads = self._heads(count)
        return {phase: float(_chosen(t, heads).sum()) for phase, t in self._seconds.tensors.items()}

    def _heads(self, count: int) -> Tensor | slice:
        """Return where the pieces of the first clients begin; as a slice, where it is one."""
        heads = np.unique(self._counts.tensors["head"][:count].numpy())
        return slice(heads[0], heads[0] + 1) if len(heads) == 1 else torch.from_numpy(heads)

    # ---- carried from one process to another --------------------------------------------------

    def packed(self, count: int, survey: bool) -> Packed:
        """Return the rows of a piece, which are the first `count`, as bytes that are views."""
        if survey:
            return {"answers": self._answers.read_bytes(count)}
        return {
            "sums": self._sums.read_bytes(1),
            "replies": self._replies.read_bytes(count),
            "client_state": self._client_state.read_bytes(count),
            "counts": self._counts.read_bytes(count),
            "seconds": self._seconds.read_bytes(1),
        }

    def unpack(self, packed: Packed, jobs: Sequence[ClientJob]) -> None:
        """Write the rows of a piece that was trained elsewhere.

        Args:
            packed: from `packed`.
            jobs: its clients, with the rows where they stand here.
        """
        rows = [job.row for job in jobs]
        into = {
            "answers": self._answers,
            "sums": self._sums,
            "replies": self._replies,
            "counts": self._counts,
            "seconds": self._seconds,
        }
        for name, buffers in into.items():
            one = name in ("seconds", "sums")
            buffers.write_bytes(packed.get(name, {}), rows[:1] if one else rows)
        if "client_state" in packed:
            tensors = {
                path.removeprefix(CLIENT_STATE_PREFIX): _typed(array, self._kept[path])
                for path, array in packed["client_state"].items()
            }
            self._keep(ClientRecord(tensors), jobs, rows)
        if "counts" in packed:
            self._counts.tensors["head"][rows] = rows[0]


Packed = dict[str, RowBytes]
"""Bytes of tensors by what they are and by path, uint8 [n, bytes of a row]."""


def _chosen(rows: Tensor, heads: Tensor | slice) -> Tensor:
    """Return some rows.

    Indexing with a tensor would wake torch's other threads, however little there is to copy, and
    they then keep a core busy for milliseconds, which a worker wants.
    """
    return rows[heads] if isinstance(heads, slice) else rows.index_select(0, heads)


def _typed(raw: NDArray[np.uint8], spec: TensorSpec) -> Tensor:
    """Return the tensor [n, ...] of bytes [n, bytes of a row], a copy."""
    return torch.from_numpy(raw.copy()).view(spec.dtype).view(len(raw), *spec.shape)
