"""The local loop over lanes: starts, steps and ends of several clients at once, by recordings.

A lane is one client; n of them lie on a leading axis. One lane alone has no axis. Where rounds are
short and alike, a round is recorded as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedkeel.config import Precision
from fedkeel.engine.compiler.cache import Flat, Recordings
from fedkeel.engine.compiler.dropout_masks import Masks, Sources
from fedkeel.engine.local import sent
from fedkeel.method.context import ClientInfo, Ints, Message
from fedkeel.method.local_loop import (
    Client,
    LocalTraining,
    Progress,
    Reply,
    client_finish,
    client_start,
    client_step,
)
from fedkeel.task.network import Batch
from fedkeel.tree import State, leaf, map_tensors, substate, substates, tensors


class WantsAll(Exception):  # noqa: N818 - a way that is not open
    """A part asks for all examples of a client, which are not laid out in lanes."""


@dataclass(frozen=True)
class Common:
    """What all lanes of a group have in common.

    Args:
        message: what the server sent.
        shared: the same, as recorded functions take it.
        rate: [] learning rate, on the CPU, of the parameters' type: beside numbers a wider one
            would decide theirs.
        sources: what the lanes' masks are drawn from; None where there is one client alone.
    """

    message: Message
    shared: Flat
    rate: Tensor
    sources: Sources

    @classmethod
    def of(cls, message: Message, sources: Sources) -> Common:
        """Return it for a message; without sources for lanes there is one client alone."""
        shared: State = {
            "start": dict(message.params),
            "received": dict(message.buffers),
            "broadcast": dict(message.broadcast),
        }
        rate = torch.tensor(message.lr, dtype=next(iter(message.params.values())).dtype)
        return cls(message, Flat.of(shared), rate, sources)

    @property
    def single(self) -> bool:
        """Whether there is one client alone, without an axis."""
        return self.sources is None

    def lift(self, function: Callable[..., State], *axes: int | None) -> Callable[..., State]:
        """Return a function of one client as one of all lanes."""
        if self.single:
            return function
        return torch.func.vmap(function, in_dims=axes, randomness="different")


class Lanes:
    """The local loop, recorded.

    Args:
        training: method, model and local training.
        precision: of the factors of products.
        masks: what the network draws in training; None where that is nothing.
    """

    def __init__(
        self, training: LocalTraining, precision: Precision = "float32", masks: Masks | None = None
    ) -> None:
        self._training = training
        self.recordings = Recordings(precision, masks.orders if masks else ())
        self._ends = "recorded"  # how lanes end their round: else "mapped", or "apart"

    def start(self, common: Common, held: Flat, prepared: State) -> tuple[Flat, Flat]:
        """Begin the round of each lane.

        Args:
            common: what all have in common.
            held: what stays the same in each.
            prepared: the distinct examples of each lane's round, empty where no part prepares.

        Returns:
            What stays the same, what parts have prepared among it, and what steps move.
        """
        training = self._training

        def start(shared: State, held: State, prepared: State) -> State:
            client, progress = _started(training, shared, held, prepared)
            return {"moving": _moving(progress), "prepared": dict(client.prepared)}

        given = (common.shared, held, Flat.of(prepared))
        lift = common.lift(start, None, 0, 0)
        found = self.recordings.run(
            "start", lift, given, varies=(2 if prepared else 1,), sources=common.sources
        ).state
        if substate(found, "prepared"):
            held = Flat.of({**held.state, "prepared": substate(found, "prepared")})
        return held, Flat.of(substate(found, "moving")).map(torch.clone)  # steps write over it

    def step(
        self, common: Common, held: Flat, moving: Flat, batch: State, real: Ints | None = None
    ) -> Flat:
        """Make one step in every lane; what was moving before is lost.

        Masks are drawn for the `real` examples alone: see `Recordings.run`.
        """
        training = self._training

        def step(shared: State, held: State, moving: State, batch: State, lr: Tensor) -> State:
            client = _client(training, _message(shared), held, _refuse)
            return _moving(_stepped(client, _progress(moving), batch, lr))

        given = (common.shared, held, moving, Flat.of(batch))
        lift = common.lift(step, None, 0, 0, 0, None)
        return self.recordings.run(
            "step",
            lift,
            given,
            varies=(3,),
            sources=common.sources,
            real=real,
            owned=2,
            rate=common.rate,
        )

    def end(self, common: Common, held: Flat, moving: Flat, about: State) -> State | None:
        """End the round of every lane; None where each has to end by itself.

        Args:
            common: what all have in common.
            held: what stays the same in each.
            moving: what the last step left; it is lost.
            about: ``steps`` and ``unit`` [n] as `client_finish` means them.
        """
        training = self._training

        def end(shared: State, held: State, moving: State, about: State, lr: Tensor) -> State:
            client = _client(training, _message(shared), held, _refuse)
            return _finished(client, _progress(moving), about, lr)

        given = (common.shared, held, moving, Flat.of(about))
        lift = common.lift(end, None, 0, 0, 0, None)
        if self._ends == "recorded":
            try:
                found = self.recordings.run(
                    "end",
                    lift,
                    given,
                    varies=(3,),
                    sources=common.sources,
                    owned=2,
                    rate=common.rate,
                    again=False,
                ).state
                return map_tensors(lambda t: t[None], found) if common.single else found
            except WantsAll:
                self._ends = "apart"
            except torch.OutOfMemoryError:
                raise
            except Exception:  # whatever a part may do that cannot be recorded
                self._ends = "mapped"
        if self._ends == "mapped" and not common.single:
            try:
                return lift(*(flat.state for flat in given), common.rate)
            except WantsAll:
                self._ends = "apart"
        return None

    def alone(
        self,
        message: Message,
        held: State,
        moving: State,
        client_info: ClientInfo,
        steps: int,
        everything: Callable[[], State],
    ) -> State:
        """End the round of one lane that has left the others, with no recording.

        Args:
            message: what the server sent.
            held: what stayed the same in it.
            moving: what the last step left.
            client_info: about the client.
            steps: how many it has made.
            everything: gives all examples of the client.
        """
        training = replace(
            self._training, autograd="eager"
        )  # as alone: masks lie in the same order
        client = _client(training, message, held, lambda: _batch(everything()))
        return _ended(
            client_finish(replace(client, client_info=client_info), _progress(moving), steps)
        )

    def whole(
        self,
        common: Common,
        held: Flat,
        prepared: State,
        batches: State,
        about: State,
        weights: Tensor | None,
    ) -> Flat:
        """Train every lane for its whole round at once: start, all steps, end.

        Args:
            common: what all have in common.
            held: what stays the same in each.
            prepared: as in `start`.
            batches: of each step by its number, the same number in each lane.
            about: as in `end`.
            weights: [n] with which updates are added up; None where they are not.

        Returns:
            What each sends, keeps and logs; where updates are added up, ``update`` and messages
            that the server only adds up are [1, ...]. Matrices of what is kept may be low-rank, as
            they may be in `held`.
        """
        training = self._training

        def one(
            shared: State, held: State, prepared: State, batches: State, about: State, lr: Tensor
        ) -> State:
            client, progress = _started(training, shared, held, prepared)
            for number in range(len(batches)):
                progress = _stepped(client, progress, substate(batches, str(number)), lr)
            return _finished(client, progress, about, lr)

        every = common.lift(one, None, 0, 0, 0, 0, None)

        def all_lanes(*given: State | Tensor) -> State:
            *states, scales, lr = given
            found = every(*states, lr)
            if common.single:
                found = map_tensors(lambda t: t[None], found)
            own = tensors(scales)  # type: ignore[arg-type]
            return _added(found, own["weights"], training.plan.summed) if own else found

        scales: State = {} if weights is None else {"weights": weights}
        states = (prepared, batches, about, scales)
        given = (common.shared, held, *map(Flat.of, states))
        return self.recordings.run(
            "round" if weights is None else "round, added up",
            all_lanes,
            given,
            varies=(2, 3),
            sources=common.sources,
            rate=common.rate,
            thin=tuple(f"client_state/{part}/" for part in training.plan.renewed),
        )


# ---- the local loop of one client, on states ----------------------------------------------------


def _started(
    training: LocalTraining, shared: State, held: State, prepared: State
) -> tuple[Client, Progress]:
    return client_start(
        training,
        _message(shared),
        substates(substate(held, "client_state")),
        _client_info(held),
        _refuse,
        (lambda: _batch(prepared)) if prepared else None,
    )


def _stepped(client: Client, progress: Progress, batch: State, lr: Tensor) -> Progress:
    own = tensors(batch)
    return client_step(
        client,
        progress,
        _batch(batch),
        own.get("rows"),
        own.get("first"),
        own.get("active"),
        tensors(substate(batch, "noise")) or None,
        lr,
    )


def _finished(client: Client, progress: Progress, about: State, lr: Tensor) -> State:
    steps, path_length = leaf(about, "steps"), leaf(about, "path_length")
    return _ended(client_finish(client, progress, steps, path_length, lr))


def _added(found: State, weights: Tensor, summed: frozenset[str]) -> State:
    """Return what lanes send with the sum of their updates, by weights [n], in place of these.

    The messages of the parts `summed` are added up as they are, of lanes that have a weight.
    """

    def total(factors: Tensor, state: State) -> State:
        return map_tensors(
            lambda t: torch.mm(factors.to(t.dtype), t.reshape(len(t), -1)).view(1, *t.shape[1:]),
            state,
        )

    one = weights[None]
    count = (one > 0.0).to(one.dtype)
    uploads = substates(substate(found, "uploads"))
    messages = {part: total(count, uploads[part]) for part in summed & uploads.keys()}
    update = total(one, substate(found, "update"))
    return {**found, "update": update, "uploads": {**uploads, **messages}}


# ---- values of the client loop as states --------------------------------------------------------


def _refuse() -> Batch:
    raise WantsAll


def _message(shared: State) -> Message:
    """Return the message as a recorded function sees it: round and rate are not known to it."""
    return Message(
        params=tensors(substate(shared, "start")),
        buffers=tensors(substate(shared, "received")),
        broadcast=substates(substate(shared, "broadcast")),
        round=0,
        lr=math.nan,
    )


def _client_info(held: State) -> ClientInfo:
    told = tensors(substate(held, "facts"))
    return ClientInfo(told["client"], told["examples"], told.get("counts"))


def _client(
    training: LocalTraining, message: Message, held: State, everything: Callable[[], Batch]
) -> Client:
    return Client(
        training=training,
        message=message,
        client_info=_client_info(held),
        client_state=substates(substate(held, "client_state")),
        prepared=substates(substate(held, "prepared")),
        everything=everything,
    )


def _batch(state: State) -> Batch:
    own = tensors(state)
    return Batch(own["x"], own["y"], own.get("weight"))


def _ended(reply: Reply) -> State:
    return {**sent(reply), "loss": reply.loss, "finite": reply.finite}


def _moving(progress: Progress) -> State:
    return {
        "params": dict(progress.params),
        "buffers": dict(progress.buffers),
        "optimiser": dict(progress.optimiser),
        "carry": dict(progress.carry),
        "loss": progress.loss,
    }


def _progress(moving: State) -> Progress:
    return Progress(
        params=tensors(substate(moving, "params")),
        buffers=tensors(substate(moving, "buffers")),
        optimiser=substate(moving, "optimiser"),
        carry=substates(substate(moving, "carry")),
        loss=leaf(moving, "loss"),
    )
