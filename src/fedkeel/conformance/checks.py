"""What every method has to do, checked: for entries of the registry and for one's own.

`check_method` runs a method on a small federation, in float64, in every way that it can be run, and
says by name what does not hold. It is the suite that every registry entry passes in our own tests.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.config import Weights
from fedkeel.conformance.small_federation import PER_ROUND, ROUNDS, Linear, Stand
from fedkeel.cost.memory import estimate
from fedkeel.engine.base import ClientJob
from fedkeel.engine.message_state import message_state
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.trainer import TrainedClients
from fedkeel.errors import CompositionError, FedkeelError
from fedkeel.method.context import ByPart
from fedkeel.method.docs.docstring import read
from fedkeel.method.local_loop import LocalState
from fedkeel.method.round_values import Server, reply_state, uploaded_state
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.tree import State, Tree, walk
from fedkeel.user_code import one_line

BESIDE = 1e-9
"""Largest difference, in float64, after a round of clients that train side by side by recorded
steps: their rounding is within 1e-12 for most methods, and FedReg divides by squared slopes that
may be small."""

GROWN = 1e-7
"""The same after several rounds: constraints that just hold or just do not, as FedGC's, turn the
last digit of one round into more in the next."""


class ConformanceError(FedkeelError):
    """A method does not do what every method has to do."""


@dataclass(frozen=True)
class Check:
    """One thing that was checked.

    Args:
        name: what has to hold.
        failure: what does not hold, "" where it does.
    """

    name: str
    failure: str = ""


def check_method(expression: str, weights: Weights | None = None) -> list[Check]:
    """Check that a method does what every method has to do.

    Args:
        expression: e.g. ``"fedprox(mu=0.1)+gcfed"``.
        weights: how clients count, where the parts state different ones.

    Returns:
        What was checked; all of it holds.

    Raises:
        ConformanceError: names every check that failed.
        CompositionError: the method cannot be composed.
        TrainingError: it cannot take a first step, or what it keeps for a client has another form
            after it.
    """
    checks = run_checks(expression, weights)
    failed = [check for check in checks if check.failure]
    if failed:
        raise ConformanceError(
            f"'{expression}' fails {len(failed)} of {len(checks)} checks.",
            got="; ".join(f"{check.name}: {check.failure}" for check in failed),
        )
    return checks


def run_checks(expression: str, weights: Weights | None = None) -> list[Check]:
    """Return what `check_method` checks, also where something does not hold."""
    with use_numerics("float32"):  # tiny tensors: more threads only wait for each other
        stand = Stand(expression, weights)
        return [Check(name, _failure(check, stand)) for name, check in CHECKS.items()]


def _failure(check: Callable[[Stand], str | None], stand: Stand) -> str:
    try:
        return check(stand) or ""
    except CompositionError:
        raise
    except FedkeelError as error:
        return f"{error.what} Got {error.got}" if error.got else error.what
    except Exception as error:  # a check that raises has failed, whatever it raises
        return one_line(error)


def _differ(a: Tree, b: Tree, tolerance: float = 0.0) -> str:
    """Return how far two trees are apart, "" where that is within the tolerance."""
    worst = max(float((a[k] - b[k]).abs().max()) for k in a)
    return "" if worst <= tolerance else f"parameters differ by {worst:.1e}"


def _engines(stand: Stand) -> str:
    result = start(stand.prepare(kind="workers", workers=2))
    return _differ(stand.reference.params, result.params)


def _repeats(stand: Stand) -> str:
    return _differ(stand.reference.params, start(stand.prepare()).params)


def _order(stand: Stand) -> str:
    server = stand.prepared.server
    one = stand.aggregate(server, stand.replies(server, [0, 2, 5]))
    other = stand.aggregate(server, stand.replies(server, [5, 0, 2]))
    return _differ(one.params, other.params)


def _padding(stand: Stand) -> str:
    server = stand.prepared.server
    for k in (0, 4):
        plain, _, _ = stand.reply(server, k)
        padded, _, _ = stand.reply(server, k, padded=3)
        found = _differ(plain.update, padded.update)
        if found:
            return f"padded steps: {found}"
    return ""


def _weightless(stand: Stand) -> str:
    server = stand.prepared.server
    replies = stand.replies(server, [1, 2, 4])
    zero = np.array([0, 1, 1])
    light = replace(replies, examples=replies.examples * zero, processed=replies.processed * zero)
    alone = stand.aggregate(server, stand.replies(server, [2, 4]))
    return _differ(alone.params, stand.aggregate(server, light).params)


def _pure(stand: Stand) -> str:
    server = stand.prepared.server
    data = stand.prepared.setup.federation.data
    message = stand.message(server)
    client_state = stand.reply(server, 3)[0].client_state
    watched: list[State] = [message_state(message), {"x": data.x, "y": data.y}, dict(client_state)]
    before = [tree.map_tensors(torch.clone, state) for state in watched]
    stand.reply(server, 3, client_state)
    replies = stand.replies(server, [0, 3, 5])
    uploaded: State = {"update": dict(replies.update), "uploads": dict(replies.uploads)}
    copies = tree.map_tensors(torch.clone, uploaded)
    stand.aggregate(server, replies)
    return _changed([*watched, uploaded], [*before, copies]) or _in_steps(stand, client_state)


def _in_steps(stand: Stand, client_state: ByPart) -> str:
    """Return what a step, or the end of a round, changes of what came before; "" if nothing."""
    seen: list[State] = []
    copies: list[State] = []

    def before(progress: LocalState) -> None:
        seen.append({"params": dict(progress.params), "carry": dict(progress.carry)})
        copies.append(tree.map_tensors(torch.clone, seen[-1]))

    stand.reply(stand.prepared.server, 3, client_state, before=before)
    return _changed(seen, copies)


def _changed(states: list[State], copies: list[State]) -> str:
    """Return the first tensor that differs from its copy, in words; "" if none does."""
    for state, copy in zip(states, copies, strict=True):
        for (path, now), (_, then) in zip(walk(state), walk(copy), strict=True):
            if not torch.equal(now.nan_to_num(), then.nan_to_num()):
                return f"{path} was changed in place"
    return ""


def _shapes(stand: Stand) -> str:
    server = stand.prepared.server
    first = stand.reply(server, 3)[0]
    second = stand.reply(server, 3, first.client_state)[0]
    pairs: list[tuple[Mapping[str, Tensor | State], Mapping[str, Tensor | State]]]
    pairs = [(first.client_state, second.client_state), (first.uploads, second.uploads)]
    after = stand.aggregate(server, stand.replies(server, [0, 3, 5]))
    again = stand.aggregate(after, stand.replies(after, [1, 3, 4]))
    pairs += [(server.memory, after.memory), (after.memory, again.memory)]
    states = [message_state(stand.message(one)) for one in (server, after, again)]
    pairs += [(states[0], states[1]), (states[1], states[2])]
    for one, other in pairs:
        a = {path: (t.shape, t.dtype) for path, t in walk(dict(one))}
        b = {path: (t.shape, t.dtype) for path, t in walk(dict(other))}
        if a != b:
            return f"state changes its form: {sorted(a.items() ^ b.items(), key=str)[:2]}"
    return ""


class _Stop(BaseException):
    """Ends a run as a kill would: nothing is tidied up."""


class _Killer(Callback):
    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        """End the run after its second round, before that round is saved."""
        if row.round == 2:
            raise _Stop


def _resumes(stand: Stand) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with suppress(_Stop):
            start(stand.prepared, out, callbacks=[_Killer()])
        result = start(stand.prepared, out, resume=True)
    rows = [row.round for row in result.rows]
    if rows != list(range(ROUNDS + 1)):
        return f"rounds recorded after a kill: {rows}"
    return _differ(stand.reference.params, result.params)


def _wire(stand: Stand) -> str:
    """Compare what is recorded with what a serialised message and reply carry."""
    prepared, server = stand.prepared, stand.prepared.server
    message = stand.message(server)
    reply = stand.reply(server, 2)[0]
    sent: State = {
        "answers": dict(stand.survey(message, 2)),
        **uploaded_state(prepared.plan, reply),
    }
    codec = prepared.plan.codec
    if codec is not None:
        decoded = codec.decode(reply.uploads[codec.name], server.params)
        if _differ(decoded, reply.update):
            return "the update is not what its upload decodes to"
    needs, rows = estimate(prepared), stand.reference.rows[1:]
    for name, state, recorded, expected in (
        ("down", message_state(message), [row.bytes_down for row in rows], needs.down),
        ("up", sent, [row.bytes_up for row in rows], needs.up),
    ):
        wire = _payload(state)
        if wire != sum(expected.values()):
            return f"{name}: {wire} bytes on the wire, {expected} expected"
        for one in recorded:
            if sum(one.values()) != PER_ROUND * wire:
                return f"{name}: {wire} bytes on the wire, {one} recorded for {PER_ROUND} clients"
    return ""


def _payload(state: State) -> int:
    """Return the bytes of a serialised state, without its header."""
    blob = safetensors.torch.save({path: t.contiguous().clone() for path, t in walk(state)})
    header = int.from_bytes(blob[:8], "little")
    entries = json.loads(blob[8 : 8 + header])
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return max(ends, default=0)


def _vectorises(stand: Stand) -> str:
    """Train clients side by side by recorded steps, for a round; then a run of one at a time."""
    from fedkeel.engine.vectorized.engine import VectorizedTrainer  # a slow import

    server, setup = stand.prepared.server, stand.prepared.setup
    message = stand.message(server)
    jobs = [ClientJob(row, k, 0) for row, k in enumerate((1, 3, 5))]
    chunks = VectorizedTrainer(setup, len(jobs))
    for _ in range(2):  # the second time by the recordings of the first
        for done in chunks(message, jobs, lambda _: None):
            found = _apart(stand, server, done)
            if found:
                return f"{len(jobs)} side by side: {found}"
    if chunks.reasons:
        return chunks.reasons[0]
    result = start(stand.prepare(kind="vectorized", workers=1, parallel_clients=1))
    if reasons := result.record.engine.reasons:
        return str(reasons[0])
    return _differ(stand.reference.params, result.params, GROWN)


def _apart(stand: Stand, server: Server, done: TrainedClients) -> str:
    """Return how far clients are from what they reply when each trains by itself."""
    for lane, job in enumerate(done.jobs):
        expected = dict(walk(reply_state(stand.reply(server, job.client)[0])))
        replies: State = {**done.state, "client_state": dict(done.client_state.state)}
        found = {path: t[lane] for path, t in walk(replies)}
        if found.keys() != expected.keys():
            return f"client {job.client} replies {sorted(found.keys() ^ expected.keys())[:2]}"
        for path, one in expected.items():
            if one.dtype != found[path].dtype or one.shape != found[path].shape:
                return f"client {job.client}: {path} has another form"
            worst = float((one.double() - found[path].double()).abs().max()) if one.numel() else 0.0
            if not worst <= BESIDE:
                return f"client {job.client}: {path} differs by {worst:.1e}"
    return ""


def _learns(stand: Stand) -> str:
    """The loss of softmax regression, a convex problem, has to fall."""
    result: Result = start(stand.prepare(Linear, rounds=12, lr=0.02))
    scores = [row.test for row in result.rows if row.test is not None]
    if not scores[-1].loss < scores[0].loss - 0.05:
        return f"test loss went from {scores[0].loss:.3f} to {scores[-1].loss:.3f}"
    return ""


def _documented(stand: Stand) -> str:
    for part in stand.plan.parts:
        try:
            read(type(part))
        except CompositionError as error:
            return error.what
    return ""


CHECKS: dict[str, Callable[[Stand], str]] = {
    "a seed repeats bit for bit": _repeats,
    "engines agree bit for bit": _engines,
    "clients run side by side as one by one": _vectorises,
    "the order of replies does not matter": _order,
    "padded steps change nothing": _padding,
    "clients without weight change nothing": _weightless,
    "nothing is changed in place": _pure,
    "state keeps its form": _shapes,
    "a killed run goes on as if it had not been": _resumes,
    "recorded bytes are the bytes on the wire": _wire,
    "loss falls on a convex problem": _learns,
    "its docstring says what it is": _documented,
}
"""Every check by what has to hold. A check returns what does not hold, or ""."""
