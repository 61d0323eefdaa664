"""What nodes reply, taken only as it was asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedkeel.data import batches
from fedkeel.engine.prepared import Prepared
from fedkeel.flower.node.node import Forms
from fedkeel.flower.server.arrivals import Took
from fedkeel.flower.wire import TENSORS, Answer, Order, WireError, of_client, unpack, values
from fedkeel.method import local_loop as method
from fedkeel.method.context import ByPart
from fedkeel.tree import State, Tree, substate, substates, tensors, unwalk


@dataclass(frozen=True)
class Reader:
    """Reads the replies of a run.

    Args:
        prepared: the run.
        forms: shapes and types of what is sent.
    """

    prepared: Prepared
    forms: Forms

    def answer(self, content: RecordDict, order: Order) -> Answer:
        """Return what a node says of its clients.

        Args:
            content: its reply.
            order: what it was asked for.

        Raises:
            WireError: it is not an answer to that.
        """
        answer = Answer.read(content)
        if (answer.run, answer.round) != (order.run, order.round):
            raise WireError("A reply belongs to another round or run.", got=f"round {answer.round}")
        if answer.clients != order.clients:
            raise WireError("A reply is for other clients than were asked.")
        columns = (answer.status, answer.steps, answer.seen, answer.digest)
        if any(len(column) != len(order.clients) for column in columns):
            raise WireError("A reply's columns differ in length.")
        return answer

    def state(self, content: RecordDict, client: int) -> State:
        """Return the tensors of one client's reply.

        Raises:
            WireError: they are not of the form that is expected.
        """
        return unpack(content, of_client(TENSORS, client), self.forms.reply)

    def took(
        self, content: RecordDict, state: State, answer: Answer, place: int, done: int
    ) -> Took:
        """Return one client's reply, checked.

        Args:
            content: the node's reply.
            state: the client's tensors.
            answer: what the node says of its clients.
            place: which of them.
            done: local steps that it had made before.

        Raises:
            WireError: it counts other work than was asked for, or cannot be decoded.
        """
        client, forms, setup = answer.clients[place], self.forms, self.prepared.setup
        numbers = values(content, of_client("diagnostics", client), {*forms.diagnostics, "loss"})
        steps, seen = answer.steps[place], answer.seen[place]
        asked = batches.count_examples(
            setup.training.local, int(setup.federation.sizes[client]), done
        )
        if seen != asked or not 0 < steps <= seen:
            raise WireError(
                "A reply counts other work than was asked for.",
                got=f"{steps} steps, {seen} examples",
            )
        digest = answer.digest[place]
        if forms.client_state and not _is_digest(digest):
            raise WireError("A reply's digest is not one.")
        update = self._update(state)
        reply = method.Reply(
            update=update,
            buffers=tensors(substate(state, "buffers")),
            uploads=substates(substate(state, "uploads")),
            client_state={},
            loss=torch.tensor(numbers["loss"], dtype=torch.float64),
            finite=method.finite({**state, "update": dict(update)}),
            diagnostics={
                name: torch.tensor(numbers[name], dtype=one.dtype)
                for name, one in forms.diagnostics.items()
            },
        )
        return Took(reply, steps, seen, digest)

    def _update(self, state: State) -> Tree:
        """Return the update of a reply, decoded where it was encoded."""
        codec = self.prepared.plan.codec
        if codec is None:
            return tensors(substate(state, "update"))
        try:
            sent = substate(substate(state, "uploads"), codec.name)
            return codec.decode(sent, self.prepared.server.params)
        except (RuntimeError, IndexError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise WireError("A reply's update cannot be decoded.", got=f"{first:.80}") from None


def _is_digest(text: str) -> bool:
    return len(text) == 16 and all(sign in "0123456789abcdef" for sign in text)


def scores(content: RecordDict, client: int, count: int) -> Tensor:
    """Return [N, 3] rows of examples that have the means that a client has sent; hits are whole.

    Args:
        content: the reply of its node.
        client: which client.
        count: N, the number of examples that it was measured on.

    Raises:
        WireError: there are none, or they cannot be those of so many examples.
    """
    means = values(content, of_client("scores", client), {"top1", "top3", "loss"})
    if not all(0.0 <= means[name] <= 1.0 for name in ("top1", "top3")):
        raise WireError("A score is no share of hits.", got=f"{means['top1']}, {means['top3']}")
    places = torch.arange(count)
    hits = [(places < round(means[name] * count)).double() for name in ("top1", "top3")]
    return torch.stack([*hits, torch.full((count,), means["loss"]).double()], dim=1)


def nothing(forms: Forms) -> ByPart:
    """Return the answer of a client that has given none: NaN, which counts for nothing."""
    return substates(
        unwalk({p: torch.full(s.shape, math.nan, dtype=s.dtype) for p, s in forms.answer.items()})
    )
