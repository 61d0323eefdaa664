"""Checks that every method must pass: those of the registry and those of users.

`check_method` runs a method on a small federation in float64, with every engine, and names each
check that fails. Every method of the registry passes all checks.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.base.user_code import one_line
from fedkeel.base.values import as_state
from fedkeel.config import Weights
from fedkeel.engine.base import ClientJob
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.engine.message_state import message_state
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.engine.trainer import TrainedClients
from fedkeel.engine.vectorized.facts import PUBLIC_FIRST
from fedkeel.errors import CompositionError, FedkeelError, counted
from fedkeel.method.context import ByPart, part_state
from fedkeel.method.docs.docstring import is_own, read
from fedkeel.method.legality import task_kinds
from fedkeel.method.local_loop import LocalState
from fedkeel.method.local_training import PERSONAL
from fedkeel.method.part import Capability, Part
from fedkeel.method.round_values import Reply, Server, reply_state, uploaded_state
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study.conformance.small_federation import (
    ADAMW,
    PER_ROUND,
    ROUNDS,
    Linear,
    RandomLinear,
    SmallFederation,
)
from fedkeel.study.conformance.tasks import TASKS
from fedkeel.tree import State, Tree, walk

GROUP_TOLERANCE, ADAMW_TOLERANCE = 1e-9, 1e-7
"""Largest difference in float64 after a round of clients that the vectorized engine trains side by
side. Most methods stay within 1e-12; FedReg divides by squared slopes that may be small, and AdamW
by the root of a moment that may be tiny."""

RUN_TOLERANCE = 1e-7
"""The same after several rounds: a constraint near its bound, as in FedGC, turns the last digit of
one round into more in the next."""


class ConformanceError(FedkeelError):
    """A method fails at least one check."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: what must hold.
        failure: what does not hold; "" where the check passes.
        note: what could be better, though the check passes; "" for nothing.
    """

    name: str
    failure: str = ""
    note: str = ""


def check_method(expression: str, weights: Weights | None = None) -> list[Check]:
    """Run all checks on a method.

    Args:
        expression: e.g. ``"fedprox(mu=0.1)+gcfed"``.
        weights: how clients count, where the parts state different weights.

    Returns:
        All checks; each one passes.

    Raises:
        ConformanceError: names every check that fails.
        CompositionError: the method cannot be composed.
        TrainingError: its first step fails, or changes the shape of its client state.
    """
    checks = run_checks(expression, weights)
    failed = [check for check in checks if check.failure]
    if failed:
        raise ConformanceError(
            f"'{expression}' fails {len(failed)} of {len(checks)} checks.",
            got="; ".join(f"{check.name}: {check.failure}" for check in failed),
        )
    return checks


def run_checks(
    expression: str, weights: Weights | None = None, names: Iterable[str] | None = None
) -> list[Check]:
    """Run checks on a method, and return their results, also those of failed checks.

    Args:
        expression: as in `check_method`.
        weights: as in `check_method`.
        names: the names of some of `CHECKS`; None runs all.
    """
    # tiny tensors: more threads only wait for each other
    with one_at_a_time(), use_numerics("float32"):
        federation = SmallFederation(expression, weights)
        checks = [Check(name, _failure(CHECKS[name], federation)) for name in names or CHECKS]
        note = _note_on_docstrings(federation)
        return [
            replace(check, note=note) if check.name == DOCSTRINGS else check for check in checks
        ]


def _failure(check: Callable[[SmallFederation], str | None], federation: SmallFederation) -> str:
    try:
        return check(federation) or ""
    except CompositionError:
        raise
    except FedkeelError as error:
        return f"{error.what} Got {error.got}" if error.got else error.what
    except Exception as error:  # a check that raises has failed
        return one_line(error)


def _difference(first: Tree, second: Tree, tolerance: float = 0.0) -> str:
    """Return how far parameters are apart; "" where that is within the tolerance."""
    distances = [float((first[name] - second[name]).abs().max()) for name in first]
    largest = max(distances, default=0.0)
    return "" if largest <= tolerance else f"parameters differ by {largest:.1e}"


def _learned(result: Result) -> Tree:
    """Return what a run has learned: the global model, and the loss that clients end with.

    Where all parameters stay at the clients, there is no global model.
    """
    return {**result.params, "train loss": torch.tensor(result.rows[-1].train_loss)}


def _trained(reply: Reply) -> Tree:
    """Return what a client has trained: its update, and its personal parameters."""
    return {**reply.update, **tree.tensors(part_state(reply.client_state, PERSONAL))}


def _aggregated(server: Server) -> Tree:
    """Return what a server has made of replies: the model; where it has none, its memory."""
    return server.params or dict(walk(dict(server.memory)))


def _check_workers(federation: SmallFederation) -> str:
    result = start(federation.prepare(kind="workers", workers=2))
    return _difference(_learned(federation.reference), _learned(result))


def _check_repetition(federation: SmallFederation) -> str:
    return _difference(_learned(federation.reference), _learned(start(federation.prepare())))


def _check_types(federation: SmallFederation) -> str:
    """Compute a round once more where torch makes float64 numbers by default.

    What comes out differently was made with torch's default type, and not with the run's.
    """

    def values() -> dict[str, Tensor]:
        server = federation.prepared.server
        replies = federation.replies(server, [0, 2, 5])
        sent: State = {"update": dict(replies.update), "uploads": dict(replies.uploads)}
        return dict(walk({**sent, "model": dict(federation.aggregate(server, replies).params)}))

    before, default = values(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        after = values()
    finally:
        torch.set_default_dtype(default)
    for path, tensor in before.items():
        if tensor.dtype != after[path].dtype or not torch.equal(tensor, after[path]):
            return f"{path} is made with torch's default type, float32: give tensors the run's type"
    return ""


def _check_reply_order(federation: SmallFederation) -> str:
    server = federation.prepared.server
    ordered = federation.aggregate(server, federation.replies(server, [0, 2, 5]))
    shuffled = federation.aggregate(server, federation.replies(server, [5, 0, 2]))
    return _difference(_aggregated(ordered), _aggregated(shuffled))


def _check_padding(federation: SmallFederation) -> str:
    server = federation.prepared.server
    for client in (0, 4):
        plain = federation.reply(server, client)
        padded = federation.reply(server, client, padded=3)
        if difference := _difference(_trained(plain), _trained(padded)):
            return f"padded steps: {difference}"
    return ""


def _check_zero_weight(federation: SmallFederation) -> str:
    server = federation.prepared.server
    replies = federation.replies(server, [1, 2, 4])
    mask = np.array([0, 1, 1])
    masked = replace(replies, examples=replies.examples * mask, processed=replies.processed * mask)
    without = federation.aggregate(server, federation.replies(server, [2, 4]))
    return _difference(_aggregated(without), _aggregated(federation.aggregate(server, masked)))


def _check_purity(federation: SmallFederation) -> str:
    server = federation.prepared.server
    data = federation.prepared.setup.federation.data
    client_state = federation.reply(server, 3).client_state
    message = message_state(federation.message(server))
    inputs: list[State] = [
        message,
        {"x": as_state(data.x), "y": as_state(data.y)},
        dict(client_state),
    ]
    copies = [tree.map_tensors(torch.clone, state) for state in inputs]
    federation.reply(server, 3, client_state)
    replies = federation.replies(server, [0, 3, 5])
    replied: State = {"update": dict(replies.update), "uploads": dict(replies.uploads)}
    copy_of_replied = tree.map_tensors(torch.clone, replied)
    federation.aggregate(server, replies)
    changed = _changed([*inputs, replied], [*copies, copy_of_replied])
    return changed or _check_purity_of_steps(federation, client_state)


def _check_purity_of_steps(federation: SmallFederation, client_state: ByPart) -> str:
    """Return what a step, or the end of a round, changes of the values before it."""
    states: list[State] = []
    copies: list[State] = []

    def before(local: LocalState) -> None:
        states.append({"params": dict(local.params), "carry": dict(local.carry)})
        copies.append(tree.map_tensors(torch.clone, states[-1]))

    federation.reply(federation.prepared.server, 3, client_state, before=before)
    return _changed(states, copies)


def _changed(states: list[State], copies: list[State]) -> str:
    """Return the first tensor that differs from its copy; "" where none does."""
    for state, copy in zip(states, copies, strict=True):
        for (path, now), (_, then) in zip(walk(state), walk(copy), strict=True):
            if not torch.equal(now.nan_to_num(), then.nan_to_num()):
                return f"{path} was changed in place"
    return ""


def _check_shapes(federation: SmallFederation) -> str:
    server = federation.prepared.server
    first = federation.reply(server, 3)
    second = federation.reply(server, 3, first.client_state)
    after_one = federation.aggregate(server, federation.replies(server, [0, 3, 5]))
    after_two = federation.aggregate(after_one, federation.replies(after_one, [1, 3, 4]))
    servers = (server, after_one, after_two)
    sequences: list[Sequence[Mapping[str, Tensor | State]]] = [
        (first.client_state, second.client_state),
        (first.uploads, second.uploads),
        [server.memory for server in servers],
        [message_state(federation.message(server)) for server in servers],
    ]
    for states in sequences:
        for one, other in pairwise(states):
            shapes = {path: (t.shape, t.dtype) for path, t in walk(dict(one))}
            others = {path: (t.shape, t.dtype) for path, t in walk(dict(other))}
            if shapes != others:
                changes = sorted(shapes.items() ^ others.items(), key=str)
                return f"state changes its form: {changes[:2]}"
    return ""


class _Stop(BaseException):
    """Ends a run as a kill does, without any cleaning up."""


class _Killer(Callback):
    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        """End the run after its second round, before that round is saved."""
        if row.round == 2:
            raise _Stop


def _check_resuming(federation: SmallFederation) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with suppress(_Stop):
            start(federation.prepared, out, callbacks=[_Killer()])
        result = start(federation.prepared, out, resume=True)
    rows = [row.round for row in result.rows]
    if rows != list(range(ROUNDS + 1)):
        return f"rounds recorded after a kill: {rows}"
    return _difference(_learned(federation.reference), _learned(result))


def _check_bytes(federation: SmallFederation) -> str:
    """Compare the recorded bytes with those of a serialised message and reply."""
    prepared, server = federation.prepared, federation.prepared.server
    message = federation.message(server)
    own = prepared.plan.row_senders  # a client is sent its row in place of the model
    to_all = {part: state for part, state in message.broadcast.items() if part not in own}
    reply = federation.reply(server, 2)
    answers: State = {"answers": dict(federation.survey(message, 2))}
    codec = prepared.plan.codec
    if codec is not None:
        decoded = codec.decode(reply.uploads[codec.name], server.params)
        if _difference(decoded, reply.update):
            return "the update is not what its upload decodes to"
    expected, rows = estimate_run(prepared), federation.reference.rows[1:]
    down = [row.bytes_down for row in rows]
    up = [row.bytes_up for row in rows]
    policy = prepared.plan.policy
    clients = PER_ROUND if policy is None else policy.updates_per_step()
    sent = {**answers, **uploaded_state(prepared.plan, reply)}
    received = message_state(replace(message, broadcast=to_all))
    return _compare_bytes("down", received, expected.down, down, clients) or _compare_bytes(
        "up", sent, expected.up, up, clients
    )


def _compare_bytes(
    direction: str,
    state: State,
    expected: Mapping[str, int],
    recorded: Sequence[Mapping[str, int]],
    clients: int,
) -> str:
    count = _payload_bytes(state)
    wire = f"{direction}: {count} bytes on the wire"
    if count != sum(expected.values()):
        return f"{wire}, {expected} expected"
    for of_round in recorded:
        if sum(of_round.values()) != clients * count:
            return f"{wire}, {of_round} recorded for {counted(clients, 'client')}"
    return ""


def _payload_bytes(state: State) -> int:
    """Return the bytes of a serialised state, without its header."""
    blob = safetensors.torch.save({path: t.contiguous().clone() for path, t in walk(state)})
    header = int.from_bytes(blob[:8], "little")
    entries = json.loads(blob[8 : 8 + header])
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return max(ends, default=0)


def _check_vectorized(federation: SmallFederation) -> str:
    """Train a client group by compiled steps for a round, then run groups of one client."""
    if difference := _check_group(federation):
        return difference
    result = start(federation.prepare(kind="vectorized", workers=1, parallel_clients=1))
    if reasons := _refusals(result.record.engine.reasons):
        return reasons[0]
    return _difference(_learned(federation.reference), _learned(result), RUN_TOLERANCE)


def _refusals(reasons: Iterable[str]) -> list[str]:
    """Return why clients are not side by side, but for parts that say that they cannot be."""
    from fedkeel.engine.vectorized import compiled_loop  # a slow import

    known = [str(compiled_loop.NeedsAllExamples()), str(compiled_loop.HasModelOfItsOwn())]
    known.append(PUBLIC_FIRST)
    return [reason for reason in reasons if not any(text in reason for text in known)]


def _check_group(federation: SmallFederation, tolerance: float = GROUP_TOLERANCE) -> str:
    """Train a client group by compiled steps for a round."""
    from fedkeel.engine.vectorized.engine import VectorizedTrainer  # a slow import

    server, setup = federation.prepared.server, federation.prepared.setup
    message = federation.message(server)
    jobs = [ClientJob(row, client, 0) for row, client in enumerate((1, 3, 5))]
    trainer = VectorizedTrainer(setup, len(jobs))
    for _ in range(2):  # the second pass uses the traces of the first
        for trained in trainer(message, jobs, lambda _: None):
            if difference := _group_difference(federation, server, trained, tolerance):
                return f"{len(jobs)} side by side: {difference}"
    return next(iter(_refusals(trainer.reasons)), "")


def _check_adamw(federation: SmallFederation) -> str:
    """Train with AdamW and with all else that local training has; a refusal needs its reason."""
    try:
        other = SmallFederation(federation.expression, federation.weights, ADAMW)
    except CompositionError as error:
        is_known = Capability.LINEAR_ACCUMULATION in federation.plan.needs
        return "" if is_known else f"{error.what} {error.do}"
    if not other.reply(other.prepared.server, 3).finite:
        return "numbers are not finite: who reads round.path_length needs LINEAR_ACCUMULATION"
    return _check_padding(other) or _check_group(other, ADAMW_TOLERANCE)


def _group_difference(
    federation: SmallFederation, server: Server, trained: TrainedClients, tolerance: float
) -> str:
    """Return how far clients of a group are from their replies when each trains alone."""
    for index, job in enumerate(trained.jobs):
        client = f"client {job.client}"
        alone = dict(walk(reply_state(federation.reply(server, job.client))))
        replies: State = {**trained.state, "client_state": dict(trained.client_state.state)}
        in_group = {path: tensor[index] for path, tensor in walk(replies)}
        if in_group.keys() != alone.keys():
            return f"{client} replies {sorted(in_group.keys() ^ alone.keys())[:2]}"
        for path, tensor in alone.items():
            other = in_group[path]
            if tensor.dtype != other.dtype or tensor.shape != other.shape:
                return f"{client}: {path} has another form"
            distances = (tensor.double() - other.double()).abs()
            largest = float(distances.max()) if distances.numel() else 0.0
            if not largest <= tolerance:
                return f"{client}: {path} differs by {largest:.1e}"
    return ""


def _check_learning(federation: SmallFederation) -> str:
    """Check that the loss of softmax regression, a convex problem, falls.

    It is log 3 at scores of 0. Where clients fine-tune, it is less at the initial model already.
    From zero, features that the model computes are 0 at first. A term of their directions is not
    defined there, and drives them apart in the first step: its loss must fall from random weights,
    in smaller steps.
    """
    for model, lr in ((Linear, 0.02), (RandomLinear, 0.01)):
        result: Result = start(federation.prepare(model, rounds=12, lr=lr))
        scores = [row.test for row in result.rows if row.test is not None]
        first, last = scores[0]["loss"], scores[-1]["loss"]
        if last < (min(first, math.log(3) - 0.05) if model is Linear else first - 0.05):
            return ""
    return f"test loss went from {first:.3f} to {last:.3f}"


def _check_tasks(federation: SmallFederation) -> str:
    """Check that the method trains on every kind of task that it accepts, and on no other."""
    accepted = task_kinds(federation.expression)
    for kind, small in TASKS.items():
        try:
            prepared = federation.prepare_task(small)
        except CompositionError as error:
            if kind in accepted:
                return f"{kind}: {error.what}"
            continue
        if kind not in accepted:
            return f"{kind}: it is accepted, and its needs say otherwise"
        result = start(prepared)
        if not all(bool(t.isfinite().all()) for t in result.params.values()):
            return f"{kind}: the model is not finite"
        # of several models at the server, the first may be nobody's choice
        chosen = result.models.values() if prepared.plan.receiver is not None else ()
        before = prepared.server.params
        if all(torch.equal(m[k], t) for m in (result.params, *chosen) for k, t in before.items()):
            return f"{kind}: the model has not changed"
        grouped = start(
            federation.prepare_task(small, kind="vectorized", parallel_clients=PER_ROUND, workers=1)
        )
        if difference := _difference(result.params, grouped.params, RUN_TOLERANCE):
            return f"{kind}, side by side: {difference}"
    return ""


def _check_docstrings(federation: SmallFederation) -> str:
    return "; ".join(says for kind, says in _wrong_docstrings(federation) if not is_own(kind))


def _note_on_docstrings(federation: SmallFederation) -> str:
    """Return what the docstrings of the user's own parts lack: they train without it."""
    says = [what for kind, what in _wrong_docstrings(federation) if is_own(kind)]
    pages = "It trains all the same; `fedkeel methods` describes a part by its docstring."
    return " ".join([*says, pages]) if says else ""


def _wrong_docstrings(federation: SmallFederation) -> Iterator[tuple[type[Part], str]]:
    for kind in map(type, federation.plan.parts):
        try:
            read(kind)
        except CompositionError as error:
            yield kind, error.what


DOCSTRINGS = "its docstring says what it is"

CHECKS: dict[str, Callable[[SmallFederation], str]] = {
    "a seed repeats bit for bit": _check_repetition,
    "engines agree bit for bit": _check_workers,
    "clients run side by side as one by one": _check_vectorized,
    "it bears AdamW, clipping and accumulation, or says why not": _check_adamw,
    "all numbers are of the run's type": _check_types,
    "the order of replies does not matter": _check_reply_order,
    "padded steps change nothing": _check_padding,
    "clients without weight change nothing": _check_zero_weight,
    "nothing is changed in place": _check_purity,
    "state keeps its form": _check_shapes,
    "a killed run goes on as if it had not been": _check_resuming,
    "recorded bytes are the bytes on the wire": _check_bytes,
    "loss falls on a convex problem": _check_learning,
    "it trains on every kind of task that it accepts": _check_tasks,
    DOCSTRINGS: _check_docstrings,
}
"""Every check by what must hold. A check returns what does not hold, or ""."""
