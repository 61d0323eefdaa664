"""Orders out, replies in: on Flower's `Grid`, with short polls and a deadline for everything."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar, cast

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedkeel.config import Flower
from fedkeel.errors import RunError
from fedkeel.user_code import one_line

T = TypeVar("T")

TRAIN, SURVEY, EVALUATE, HELLO = "train", "train.survey", "evaluate", "query.hello"
"""Types of messages, with their actions."""

GRACE = 60.0
"""Seconds beyond its deadline for which a message is kept for a node that comes late."""


@dataclass(frozen=True)
class Reply:
    """What came of an order.

    Args:
        node: the node that it was sent to.
        content: what it sent, None where it failed.
        fault: why it failed, "" where it did not.
    """

    node: int
    content: RecordDict | None
    fault: str = ""


class Exchange:
    """Asks nodes and waits for what they reply.

    Args:
        grid: Flower's grid.
        settings: deadline and polls.
    """

    def __init__(self, grid: Grid, settings: Flower) -> None:
        self._grid = grid
        self._settings = settings
        self._open: dict[str, int] = {}  # orders that were given up on, and their nodes
        self._greeted: dict[str, tuple[int, float]] = {}  # questions still to be answered, until

    def online(self) -> list[int]:
        """Return the ids of the nodes that are connected, ascending."""
        return sorted(self._bounded(lambda: list(self._grid.get_node_ids())))

    def ask(
        self,
        orders: Mapping[int, RecordDict],
        kind: str,
        done: Callable[[], bool] = lambda: False,
        seconds: float | None = None,
    ) -> Iterator[Reply]:
        """Send an order to each node and yield the replies as they come.

        It ends when every node has replied, when `done` says so, or at the deadline; each node is
        yielded once at most. What comes after that, or twice, is thrown away: see `late`.

        Args:
            orders: what each node is sent.
            kind: message type, with its action.
            done: whether what came is enough.
            seconds: until the deadline; None for that of the settings.
        """
        seconds = self._settings.deadline_seconds if seconds is None else seconds
        end = time.monotonic() + seconds
        waiting: dict[str, int] = {}
        now, asked = time.monotonic(), dict[int, str]()
        if kind == HELLO:  # what is too old Flower has thrown away, with its answer
            asked = {node: number for number, (node, ends) in self._greeted.items() if now < ends}
        greeted = dict[str, float]()
        for node, content in orders.items():
            if node in asked:  # it has not answered the last one yet
                waiting[asked[node]] = node
                greeted[asked[node]] = self._greeted[asked[node]][1]
                continue
            lives = max(seconds, self._settings.deadline_seconds) + GRACE
            message = Message(content, node, kind, ttl=lives)
            numbers = self._push(message)
            if not numbers or not numbers[0]:  # Flower says None where it did not take the message
                yield Reply(node, None, "the message could not be handed to Flower")
            else:
                waiting[numbers[0]] = node
                greeted[numbers[0]] = now + lives
        while waiting and not done():
            came = False
            for message in self._pull(waiting):
                number = message.metadata.reply_to_message_id
                if number in waiting:  # and not a second reply to the same order
                    came = True
                    yield _reply(waiting.pop(number), message)
            if time.monotonic() > end:
                break
            if not came:
                time.sleep(self._settings.poll_seconds)
        if kind == TRAIN:
            self._open.update(waiting)
        elif kind == HELLO:
            self._greeted = {one: (node, greeted[one]) for one, node in waiting.items()}

    def late(self) -> list[int]:
        """Return the nodes that replied after they were given up on; the replies are dropped."""
        if not self._open:
            return []
        nodes = []
        for message in self._pull(self._open):
            number = message.metadata.reply_to_message_id
            if number in self._open:
                node = self._open.pop(number)
                nodes += [] if message.has_error() else [node]
        return sorted(nodes)

    def _push(self, message: Message) -> list[str]:
        return self._bounded(lambda: list(self._grid.push_messages([message])))

    def _pull(self, numbers: Iterable[str]) -> list[Message]:
        """Return what has come; Flower waits for a reply of which only a part is there."""
        wanted = list(numbers)
        return self._bounded(lambda: list(self._grid.pull_messages(wanted)), self._answers)

    def _answers(self) -> None:
        self._bounded(lambda: list(self._grid.get_node_ids()), seconds=GRACE)

    def _bounded(
        self,
        call: Callable[[], T],
        answers: Callable[[], None] | None = None,
        seconds: float | None = None,
    ) -> T:
        """Return what a call of the grid returns, which tries for ever where nobody answers.

        Args:
            call: what is called.
            answers: raises where the SuperLink does not answer, for a call that may take longer.
            seconds: that it may take; None for a minute more than a round's deadline.

        Raises:
            RunError: it has not returned by then, or Flower raised an error.
        """
        found: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                found.put((call(), None))
            except BaseException as error:  # whatever it is, it belongs to who asked
                found.put((None, error))

        threading.Thread(target=work, daemon=True).start()
        limit = self._settings.deadline_seconds + GRACE if seconds is None else seconds
        while True:
            with suppress(queue.Empty):
                value, error = found.get(timeout=limit)
                break
            if answers is None:
                raise RunError(
                    "The SuperLink does not answer.",
                    expected=f"an answer within {limit:g} s",
                    do="see that it runs, then go on with resume; everything is saved",
                )
            answers()
        if isinstance(error, Exception):
            raise RunError(
                "The SuperLink cannot be asked any more.",
                got=f"{one_line(error):.200}",
                do="see that it runs and that its certificate is valid, then go on with resume; "
                "everything is saved",
            ) from error
        if error is not None:
            raise error
        return cast(T, value)


def _reply(node: int, message: Message) -> Reply:
    if message.has_error():
        words = f"{message.error.reason or f'error {message.error.code}'}".splitlines()
        return Reply(node, None, f"no reply: {words[0]:.120}")
    if message.metadata.src_node_id != node:
        return Reply(node, None, "the reply came from another node")
    return Reply(node, message.content)
