"""Work in several threads of which one goes on at a time, until all of them wait for an answer.

Each piece of work is written as if it were the only one. Where it asks for something, it waits.
Once all wait, the thread that has started them answers all requests together, and they go on in
turn. Everything happens in the same order each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from fedkeel.engine.process.lane import Answer, Lane
from fedkeel.engine.process.numerics import Numerics

T = TypeVar("T")


def in_lockstep(
    tasks: Sequence[Callable[[], T]], answer: Callable[[Sequence[Any]], Sequence[Answer]]
) -> list[T]:
    """Do several pieces of work in lockstep, and return what each of them returns.

    Args:
        tasks: the pieces of work; they may call `Lane.ask` of their `current_lane`.
        answer: answers the requests of all that have not ended.

    Raises:
        BaseException: the first error that one of the tasks raises, or `answer`. The others are
            interrupted where they next ask.
    """
    shared: dict[str, Any] = {}
    lanes = [Lane(task, shared) for task in tasks]
    numerics = dict.fromkeys(lanes, Numerics.now())
    answers = dict.fromkeys(lanes, Answer(None))
    error: BaseException | None = None
    try:
        while answers and error is None:
            for lane, value in answers.items():
                with _numerics_of(lane, numerics):
                    lane.go_on(value)
            asking = [lane for lane in answers if not lane.has_ended]
            error = next((lane.error for lane in lanes if lane.error is not None), None)
            if asking and error is None:
                values = answer([lane.request for lane in asking])
                answers = dict(zip(asking, values, strict=True))
            else:
                answers = {}
    finally:
        for lane in lanes:
            if not lane.has_ended:
                with _numerics_of(lane, numerics):
                    lane.interrupt()
    if error is not None:
        raise error
    return [cast(T, lane.result) for lane in lanes]


@contextmanager
def _numerics_of(lane: Lane, numerics: dict[Lane, Numerics]) -> Iterator[None]:
    """Compute in this context as a lane did when it last went on."""
    before = Numerics.now()
    numerics[lane].use()
    try:
        yield
    finally:
        numerics[lane] = Numerics.now()
        before.use()
