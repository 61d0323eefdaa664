"""A piece of work in a thread of its own that takes turns with the thread that has started it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fedkeel.base.clock import leave_out


@dataclass(frozen=True)
class Answer:
    """What comes of a request.

    Args:
        value: the answer, or the error that is raised where the request was made.
        seconds: the share of this request in the time that answering all of them took.
    """

    value: Any
    seconds: float = 0.0


class Lane:
    """One piece of work among several, in a thread of its own.

    Args:
        task: the work.
        shared: what the pieces of work share, by name.

    Attributes:
        request: what it waits for an answer to; None while it goes on.
        has_ended: whether it goes on no more.
        result: what it has returned.
        error: what it has raised; None for nothing.
    """

    def __init__(self, task: Callable[[], object], shared: dict[str, Any]) -> None:
        self.shared = shared
        self.request: Any = None
        self.has_ended = False
        self.result: object = None
        self.error: BaseException | None = None
        self._task, self._answer = task, Answer(None)
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self._is_interrupted = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def ask(self, request: object) -> Any:  # noqa: ANN401 - whatever the request is for
        """Wait until all others ask too or have ended; return the answer or raise its error."""
        began = time.perf_counter()
        self.request = request
        self._pause.release()
        self._turn.acquire()
        self.request = None
        if self._is_interrupted:
            raise KeyboardInterrupt
        leave_out(time.perf_counter() - began - self._answer.seconds)
        if isinstance(self._answer.value, BaseException):
            raise self._answer.value
        return self._answer.value

    def go_on(self, answer: Answer) -> None:
        """Let the work go on with an answer until it asks again or ends; called by the starter."""
        self._answer = answer
        self._turn.release()
        self._pause.acquire()

    def interrupt(self) -> None:
        """Raise a KeyboardInterrupt where the work waits or next asks, and wait for its end.

        It may be going on meanwhile, where this process was interrupted in `go_on`.
        """
        self._is_interrupted = True
        self._turn.release()
        self._thread.join()

    def _work(self) -> None:
        _lane.set(self)
        self._turn.acquire()
        try:
            if self._is_interrupted:
                raise KeyboardInterrupt
            self.result = self._task()
        except BaseException as error:
            self.error = error
        self.has_ended = True
        self._pause.release()


_lane: ContextVar[Lane | None] = ContextVar("lane", default=None)


def current_lane() -> Lane | None:
    """Return the lane of this thread, None where its work is not made in lockstep."""
    return _lane.get()
