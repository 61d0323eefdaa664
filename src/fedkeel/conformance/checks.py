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
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.config import Weights
from fedkeel.conformance.stand import PER_ROUND, ROUNDS, Linear, Stand
from fedkeel.engine.rounds import flat
from fedkeel.engine.sequential import one_thread
from fedkeel.errors import CompositionError, FedkeelError
from fedkeel.experiment.execute import Result, start
from fedkeel.experiment.prepare import estimate
from fedkeel.experiment.progress import Silent
from fedkeel.method.client import client_finish, client_start, client_step, wired
from fedkeel.method.context import ByPart, Facts
from fedkeel.method.docstring import read
from fedkeel.records import RoundRecord
from fedkeel.task.network import Batch
from fedkeel.tree import State, Tree, walk

TOLERANCE = 1e-11
"""Largest difference where two ways of computing may round differently, in float64."""


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
    """
    with one_thread():  # tiny tensors: more threads only wait for each other
        stand = Stand(expression, weights)
        checks = [Check(name, _failure(check, stand)) for name, check in CHECKS.items()]
    failed = [check for check in checks if check.failure]
    if failed:
        raise ConformanceError(
            f"'{expression}' fails {len(failed)} of {len(checks)} checks.",
            got="; ".join(f"{check.name}: {check.failure}" for check in failed),
        )
    return checks


def _failure(check: Callable[[Stand], str | None], stand: Stand) -> str:
    try:
        return check(stand) or ""
    except CompositionError:
        raise
    except Exception as error:  # a check that raises has failed, whatever it raises
        return f"{type(error).__name__}: {error}"


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
        found = _differ(plain.delta, padded.delta)
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
    data = stand.prepared.world.federation.data
    message = stand.message(server)
    mine = stand.reply(server, 3)[0].mine
    watched: list[State] = [flat(message), {"x": data.x, "y": data.y}, dict(mine)]
    before = [tree.map_tensors(torch.clone, state) for state in watched]
    stand.reply(server, 3, mine)
    replies = stand.replies(server, [0, 3, 5])
    sent: State = {"delta": dict(replies.delta), "uploads": dict(replies.uploads)}
    copies = tree.map_tensors(torch.clone, sent)
    stand.aggregate(server, replies)
    for state, copy in zip([*watched, sent], [*before, copies], strict=True):
        for (path, now), (_, then) in zip(walk(state), walk(copy), strict=True):
            if not torch.equal(now, then):
                return f"{path} was changed in place"
    return ""


def _shapes(stand: Stand) -> str:
    server = stand.prepared.server
    first = stand.reply(server, 3)[0]
    second = stand.reply(server, 3, first.mine)[0]
    pairs: list[tuple[Mapping[str, Tensor | State], Mapping[str, Tensor | State]]]
    pairs = [(first.mine, second.mine), (first.uploads, second.uploads)]
    after = stand.aggregate(server, stand.replies(server, [0, 3, 5]))
    again = stand.aggregate(after, stand.replies(after, [1, 3, 4]))
    pairs += [(server.memory, after.memory), (after.memory, again.memory)]
    sent = [flat(stand.message(one)) for one in (server, after, again)]
    pairs += [(sent[0], sent[1]), (sent[1], sent[2])]
    for one, other in pairs:
        a = {path: (t.shape, t.dtype) for path, t in walk(dict(one))}
        b = {path: (t.shape, t.dtype) for path, t in walk(dict(other))}
        if a != b:
            return f"state changes its form: {sorted(a.items() ^ b.items(), key=str)[:2]}"
    return ""


class _Stop(Exception):  # noqa: N818 - never leaves this module
    """Ends a run as a kill would: nothing is tidied up."""


class _Killer(Silent):
    def row(self, row: RoundRecord) -> None:
        """End the run after its second round, before that round is saved."""
        if row.round == 2:
            raise _Stop


def _resumes(stand: Stand) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with suppress(_Stop):
            start(stand.prepared, out, watcher=_Killer())
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
        **wired(prepared.plan, reply),
    }
    codec = prepared.plan.codec
    if codec is not None:
        decoded = codec.decode(reply.uploads[codec.name], server.params)
        if _differ(decoded, reply.delta):
            return "the update is not what its upload decodes to"
    needs, rows = estimate(prepared), stand.reference.rows[1:]
    for name, state, recorded, expected in (
        ("down", flat(message), [row.bytes_down for row in rows], needs.down),
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
    """Run the client functions under vmap, for three clients at once, and one by one."""
    clients, server = [1, 3, 5], stand.prepared.server
    single = [stand.reply(server, k)[0] for k in clients]
    bench = replace(stand.bench, autograd="functional")
    message = stand.message(server)
    planned = [stand.planned(k, 0) for k in clients]
    passes = torch.tensor([stand.per_pass(k) for k in clients])
    steps, width = max(map(len, planned)), max(len(b) for p in planned for b in p)
    x, y, weight, active = _stacked(stand, clients, planned, steps, width)
    counts = torch.tensor([len(p) for p in planned])
    labels = torch.stack([torch.bincount(stand.everything(k).y, minlength=3) for k in clients])
    sources = [stand.noise(message, k) for k in clients]
    noise = _noise([[draw() for _ in range(steps)] for draw in sources])

    def client(
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        active: Tensor,
        passes: Tensor,
        labels: Tensor,
        noise: Tree,
    ) -> tuple[Tree, ByPart]:
        whole = Batch(x.flatten(0, 1), y.flatten(), weight.flatten())
        held, progress = client_start(bench, message, None, Facts(0, 1, labels), lambda: whole)
        rows = torch.arange(steps * width).reshape(steps, width)
        for s in range(steps):
            batch = Batch(x[s], y[s], weight[s])
            first = rows[0] + s % passes * width
            normal = {k: t[s] for k, t in noise.items()} or None
            progress = client_step(held, progress, batch, rows[s], first, active[s], normal)
        return progress.params, {}

    with torch.no_grad():
        given = (x, y, weight, active, passes, labels, noise)
        ends, _ = torch.func.vmap(client, randomness="error")(*given)
    for i, (k, reply) in enumerate(zip(clients, single, strict=True)):
        end = {name: t[i] for name, t in ends.items()}
        held, progress = client_start(
            stand.bench, message, None, stand.facts(k), partial(stand.everything, k)
        )
        done = client_finish(held, replace(progress, params=end), int(counts[i]))
        found = _differ(reply.delta, done.delta, TOLERANCE)
        if found:
            return f"client {k}: {found}"
    return ""


def _noise(drawn: list[list[Tree | None]]) -> Tree:
    """Return [K, S, ...] random numbers by parameter, none where the method takes none."""
    rows = [[tree_ for tree_ in steps if tree_ is not None] for steps in drawn]
    if not rows[0]:
        return {}
    return {
        k: torch.stack([torch.stack([step[k] for step in steps]) for steps in rows])
        for k in rows[0][0]
    }


def _stacked(
    stand: Stand, clients: list[int], planned: list[list[np.ndarray]], steps: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return [K, S, B, ...] inputs, [K, S, B] labels and weights, and [K, S] real steps."""
    shape = (len(clients), steps, width)
    x = torch.zeros(*shape, 5, dtype=torch.float64)
    y = torch.zeros(shape, dtype=torch.int64)
    weight = torch.zeros(shape, dtype=torch.float64)
    weight[:, :, 0] = 1.0  # a padded step still needs something to take a mean of
    active = torch.zeros(shape[:2], dtype=torch.bool)
    for i, k in enumerate(clients):
        for s, positions in enumerate(planned[i]):
            batch = stand.batch(k, positions)
            x[i, s, : len(positions)], y[i, s, : len(positions)] = batch.x, batch.y
            weight[i, s, : len(positions)], active[i, s] = 1.0, True
    return x, y, weight, active


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
