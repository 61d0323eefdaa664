"""Seconds by phase: none is lost, none is counted twice."""

from __future__ import annotations

import time

import pytest

from fedkeel.base.clock import Clock, shares


def test_laps_add_up_to_the_time_that_passed() -> None:
    began, clock = time.perf_counter(), Clock()
    for phase in ("data", "steps", "data"):
        time.sleep(0.01)
        clock.lap(phase)
    took = time.perf_counter() - began
    assert sum(clock.seconds.values()) == pytest.approx(took, abs=1e-3)
    assert clock.seconds["data"] >= 0.02


def test_restarting_loses_no_time() -> None:
    began, clock = time.perf_counter(), Clock()
    time.sleep(0.01)
    clock.lap("a")
    first = clock.restart()
    time.sleep(0.01)
    clock.lap("b")
    took = time.perf_counter() - began
    assert sum(first.values()) + sum(clock.seconds.values()) == pytest.approx(took, abs=1e-3)
    assert list(clock.seconds) == ["b"]


def test_shares_keep_the_sum_and_the_proportions() -> None:
    found = shares("train", 3.0, {"data": 4.0, "steps": 8.0})
    assert found == {"train.data": 1.0, "train.steps": 2.0}
    assert shares("train", 3.0, {"data": 0.0}) == {"train": 3.0}
