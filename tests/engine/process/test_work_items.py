"""Work items cover a round, whatever it costs, and those that kill their worker are counted."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from fedkeel.engine.base import ClientJob
from fedkeel.engine.process.work_items import (
    EvaluateItem,
    TrainItem,
    WorkQueue,
    decreasing_cuts,
    equal_cuts,
    work_error,
)
from fedkeel.errors import DataError, TrainingError

ITEM = TrainItem(3, 0.1, (ClientJob(0, 7, 0), ClientJob(1, 9, 0)))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_pieces_cover_all_jobs_exactly_once(workers: int) -> None:
    rng = np.random.default_rng(workers)
    for count in range(60):
        for costs in ([1] * count, sorted(rng.integers(1, 100, count).tolist(), reverse=True)):
            pieces = decreasing_cuts(costs, workers)
            assert [i for a, b in pieces for i in range(a, b)] == list(range(count))
            assert all(a < b for a, b in pieces)
            total = sum(costs)
            for a, b in pieces:  # nobody gets more than half a share, but for one large client
                assert b - a == 1 or sum(costs[a:b]) * 2 * workers <= sum(costs[a:]) <= total
            if count >= workers:
                assert len(pieces) >= workers  # everybody has something to do
                assert pieces[-1] == (count - 1, count)  # and nobody waits long for the last


@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
def test_even_pieces_cover_all_jobs_exactly_once(pieces: int) -> None:
    rng = np.random.default_rng(pieces)
    for count in range(60):
        costs = sorted(rng.integers(1, 100, count).tolist(), reverse=True)
        cuts = equal_cuts(costs, pieces)
        assert [i for a, b in cuts for i in range(a, b)] == list(range(count))
        assert len(cuts) <= pieces
        most = max(costs, default=0)
        assert all(sum(costs[a:b]) <= sum(costs) / pieces + 2 * most for a, b in cuts)


def test_work_is_done_again_together_then_apart_and_then_given_up() -> None:
    other = EvaluateItem("test", (0,))
    queue = WorkQueue([other])
    queue.retry(ITEM, "exit code 1", None)
    assert queue.next() == ITEM
    queue.retry(ITEM, "exit code 1", None)
    alone = TrainItem(3, 0.1, (ClientJob(0, 7, 0),))
    assert queue.items == [alone, TrainItem(3, 0.1, (ClientJob(1, 9, 0),)), other]
    with pytest.raises(TrainingError, match="died 3 times") as found:
        queue.retry(alone, "exit code 1", "no memory")
    assert found.value.got == "exit code 1 on client 7"
    assert found.value.why == "no memory"


def test_clients_that_are_rounded_together_stay_together() -> None:
    group = replace(ITEM, is_divisible=False)
    queue = WorkQueue([])
    for _ in range(2):
        queue.retry(group, "exit code 1", None)
        assert queue.next() == group
    with pytest.raises(TrainingError, match="died 3 times") as found:
        queue.retry(group, "exit code 1", None)
    assert found.value.got == "exit code 1 on client 7, 9"


def test_an_error_of_ours_comes_through_whole_and_another_is_named() -> None:
    error = DataError("what", got=3, expected="four", why="because", do="this")
    again = pickle.loads(pickle.dumps(work_error(error, ITEM)))
    assert type(again) is DataError
    assert again.lines() == error.lines()
    other = pickle.loads(pickle.dumps(work_error(LookupError("nothing"), ITEM)))
    assert type(other) is TrainingError
    assert other.what == "A worker failed on client 7, 9."
    assert other.got == "nothing"
