"""Requests to nodes and their replies, on Flower's `Grid`, with a deadline for every call."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar, cast

from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.serverapp import Grid

from fedkeel.base.user_code import one_line
from fedkeel.config import Flower
from fedkeel.errors import RunError
from fedkeel.flower.protocol import DESCRIPTIONS, TRAIN
from fedkeel.flower.wire import WireError

T = TypeVar("T")

NOT_TAKEN = "the message could not be handed to Flower"
"""Fault of a request that Flower does not take."""

GRACE = 60.0
"""Seconds beyond its deadline for which a message is kept for a node that comes late."""


@dataclass(frozen=True)
class NodeReply:
    """The outcome of a request.

    Args:
        node: the node that it was sent to.
        content: the node's reply, None where it failed.
        fault: why it failed, "" where it did not.
    """

    node: int
    content: RecordDict | None
    fault: str = ""

    def checked(self) -> RecordDict:
        """Return the content.

        Raises:
            WireError: the request failed.
        """
        if self.content is None:
            raise WireError(self.fault)
        return self.content


@dataclass(frozen=True)
class _Pending:
    """A request without a reply: its node and kind, and until when Flower keeps it."""

    node: int
    kind: str
    expires: float


class NodeConnection:
    """Sends requests to nodes and waits for their replies.

    Args:
        grid: Flower's grid.
        settings: deadline and time between polls.
    """

    def __init__(self, grid: Grid, settings: Flower) -> None:
        self._grid = grid
        self._settings = settings
        self._expired: dict[str, _Pending] = {}  # requests past their deadline
        self._late: list[int] = []  # nodes whose training replies have come late
        self._describing: dict[str, _Pending] = {}  # nodes that have not described themselves yet

    def connected_nodes(self) -> list[int]:
        """Return the ids of the nodes that are connected, ascending."""
        return sorted(self._bounded(lambda: list(self._grid.get_node_ids())))

    def ask(
        self,
        requests: Mapping[int, RecordDict],
        kind: str,
        is_enough: Callable[[], bool] = lambda: False,
        seconds: float | None = None,
    ) -> Iterator[NodeReply]:
        """Send a request to each node and yield the replies as they come.

        It ends when every node has replied, when `is_enough` says so, or at the deadline. Each node
        is yielded at most once. What comes later, or twice, is dropped: see `late_nodes`.

        Args:
            requests: what each node is sent.
            kind: message type, with its action.
            is_enough: whether the replies so far are enough.
            seconds: until the deadline; None for that of the settings.
        """
        seconds = self._settings.deadline_seconds if seconds is None else seconds
        now = time.monotonic()
        waiting: dict[str, _Pending] = {}
        asked: dict[int, str] = {}  # nodes whose last description is still to come
        if kind in DESCRIPTIONS:  # Flower drops an expired request together with its reply
            asked = {p.node: number for number, p in self._describing.items() if now < p.expires}
        lifetime = max(seconds, self._settings.deadline_seconds) + GRACE
        for node, content in requests.items():
            if node in asked:
                waiting[asked[node]] = self._describing[asked[node]]
                continue
            number = self._push(Message(content, node, kind, ttl=lifetime))
            if number:
                waiting[number] = _Pending(node, kind, now + lifetime)
            else:
                yield NodeReply(node, None, NOT_TAKEN)
        while waiting and not is_enough():
            is_idle = True
            for message in self._pull([*waiting, *self._expired]):
                number = message.metadata.reply_to_message_id
                self._drop_late(message)
                if number in waiting:  # else it is a second reply to the same request
                    is_idle = False
                    yield _reply(waiting.pop(number).node, message)
            if time.monotonic() > now + seconds:
                break
            if is_idle:
                time.sleep(self._settings.poll_seconds)
        if kind in DESCRIPTIONS:
            self._describing = waiting
        else:
            self._expired.update(waiting)

    def send(self, node: int, content: RecordDict, kind: str) -> str:
        """Send a request to a node without waiting for its reply.

        Returns:
            The message's number, by which `replies` knows it; "" where Flower does not take it.
        """
        lifetime = self._settings.deadline_seconds + GRACE
        return self._push(Message(content, node, kind, ttl=lifetime))

    def replies(self, nodes: Mapping[str, int]) -> Iterator[tuple[str, NodeReply]]:
        """Yield the replies to sent requests that have come since the last call.

        Args:
            nodes: the node that each request without a reply was sent to, by its number.
        """
        seen = set()
        for message in self._pull([*nodes, *self._expired]):
            number = message.metadata.reply_to_message_id
            self._drop_late(message)
            if number in nodes and number not in seen:  # else it is a second reply
                seen.add(number)
                yield number, _reply(nodes[number], message)

    def late_nodes(self) -> list[int]:
        """Return the nodes that have trained after their deadline, since the last call.

        All late replies are dropped.
        """
        for message in self._pull(self._expired) if self._expired else ():
            self._drop_late(message)
        nodes, self._late = sorted(self._late), []
        return nodes

    def _drop_late(self, reply: Message) -> None:
        """Drop a reply where it comes late, and the request where it will not be fetched any more.

        Flower would keep the request's tensors in the SuperLink's database until the run ends, and
        `Grid` has no call to remove them. This is the one by which a receiver says that it has a
        message. A reply is removed when it is pulled; one that has expired before never is, so late
        ones are pulled as often as others.
        """
        pending = self._expired.pop(reply.metadata.reply_to_message_id, None)
        if pending is not None and pending.kind == TRAIN and not reply.has_error():
            self._late.append(pending.node)
        client = getattr(self._grid, "_runtime_client", None)  # not every version has it
        if client is None or not reply.has_error():
            return
        request = ConfirmMessageReceivedRequest(
            node=Node(node_id=reply.metadata.dst_node_id),
            run_id=reply.metadata.run_id,
            message_object_id=reply.metadata.reply_to_message_id,
        )
        with suppress(RunError):  # the call only frees memory at the other end
            self._bounded(lambda: client.ConfirmMessageReceived(request))

    def _push(self, message: Message) -> str:
        """Return the number of a message, "" where Flower does not take it."""
        numbers = self._bounded(lambda: list(self._grid.push_messages([message])))
        return (numbers[0] or "") if numbers else ""

    def _pull(self, numbers: Iterable[str]) -> list[Message]:
        """Return the replies so far. Flower waits for the rest of one that has come in part."""
        wanted = list(numbers)
        return self._bounded(lambda: list(self._grid.pull_messages(wanted)), self._check_alive)

    def _check_alive(self) -> None:
        self._bounded(lambda: list(self._grid.get_node_ids()), seconds=GRACE)

    def _bounded(
        self,
        call: Callable[[], T],
        check_alive: Callable[[], None] | None = None,
        seconds: float | None = None,
    ) -> T:
        """Return the result of a call of the grid, which by itself retries for ever.

        The call may take `seconds`, None for a minute more than a round's deadline; or longer, as
        long as `check_alive` finds that the SuperLink answers.

        Raises:
            RunError: it has not returned by then, or Flower raised an error.
        """
        results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                results.put((call(), None))
            except BaseException as error:  # it is raised in the thread that called
                results.put((None, error))

        threading.Thread(target=work, daemon=True).start()
        limit = self._settings.deadline_seconds + GRACE if seconds is None else seconds
        while True:
            with suppress(queue.Empty):
                value, error = results.get(timeout=limit)
                break
            if check_alive is None:
                raise RunError(
                    "The SuperLink does not answer.",
                    expected=f"an answer within {limit:g} s",
                    do="see that it runs, then go on with resume; everything is saved",
                )
            check_alive()
        if isinstance(error, Exception):
            raise RunError(
                "The SuperLink cannot be reached any more.",
                got=f"{one_line(error):.200}",
                do="see that it runs and that its certificate is valid, then go on with resume; "
                "everything is saved",
            ) from error
        if error is not None:
            raise error
        return cast(T, value)


def _reply(node: int, message: Message) -> NodeReply:
    if message.has_error():
        reason = f"{message.error.reason or f'error {message.error.code}'}".splitlines()[0]
        return NodeReply(node, None, f"no reply: {reason:.200}")
    if message.metadata.src_node_id != node:
        return NodeReply(node, None, "the reply came from another node")
    return NodeReply(node, message.content)
