"""Who replies when: against times worked out by hand, and against a simulation of its own."""

from __future__ import annotations

import heapq
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import fedkeel as fk
from fedkeel.base.rng import generator
from fedkeel.config import Cohort
from fedkeel.data.cohort import selectable
from fedkeel.errors import ConfigError, DataError, RunError
from fedkeel.features.time import asynchronous as asynchronous_module
from fedkeel.features.time import trainings
from fedkeel.features.time.asynchronous import Asynchronous
from fedkeel.features.time.availability import Diurnal, Sessions, Trace, make_availability
from fedkeel.features.time.devices import Devices, make_devices
from fedkeel.features.time.schedule import Synchronous, Timing
from fedkeel.features.time.settings import System
from fedkeel.features.time.trainings import VirtualTrainings
from fedkeel.features.time.work import ClientWork
from fedkeel.runner.start import start
from toys import deadline, prepared

INF = np.inf


def timing(speeds: list[float], settings: System | None = None, **work: float) -> Timing:
    """Clients with 12 seconds of work at speed 1, and connections of 10 bytes a second."""
    count, settings = len(speeds), settings or System()
    seconds, answers = np.full(count, 12.0), np.full(count, work.get("answer", 0.0))
    need = ClientWork(seconds, answers, work.get("down", 0.0), work.get("up", 0.0))
    ten = np.full(count, 10.0)
    devices = Devices(np.array(speeds), ten, ten)
    return Timing(settings, need, devices, make_availability(settings, count, 0), seed=0)


def sizes(count: int) -> np.ndarray:
    return np.full(count, 5)


def asynchronous(timing: Timing, cohort: Cohort, sizes: np.ndarray, buffer: int) -> Asynchronous:
    return Asynchronous(VirtualTrainings(timing), cohort, sizes, timing.seed, buffer)


# --- devices ---------------------------------------------------------------------------------


def test_speeds_are_log_normal_and_classes_are_drawn() -> None:
    settings = System(
        speed="lognormal",
        sigma=0.5,
        mbit_up=8.0,
        classes={"phone": {"share": 0.75, "speed": 0.1}, "laptop": {"share": 0.25, "mbit_up": 80}},
    )
    found = make_devices(settings, 20000, seed=3)
    z = generator(3, "speed").standard_normal(20000)
    base = np.round(found.speed / np.exp(0.5 * z), 12)
    assert set(base) == {0.1, 1.0}
    assert abs((base == 0.1).mean() - 0.75) < 0.01
    np.testing.assert_allclose(found.up, np.where(base == 0.1, 1e6, 1e7))
    assert np.isinf(found.down).all()


def test_a_file_says_what_single_devices_are(tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    file.write_text("client,speed,mbit_down\n2,3.5,\n0,,8\n")
    found = make_devices(System(devices=str(file)), 3, seed=0)
    assert found.speed.tolist() == [1.0, 1.0, 3.5]
    assert found.down.tolist() == [1e6, INF, INF]
    for line in ("3,1,1", "0.5,1,1", "0,-1,1", "0,fast,1", "x,1,1"):
        file.write_text(f"client,speed,mbit_down\n{line}\n")
        with pytest.raises(DataError, match="line 2"):
            make_devices(System(devices=str(file)), 3, seed=0)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_devices(System(devices=str(tmp_path / "none.csv")), 3, seed=0)


# --- availability ----------------------------------------------------------------------------


def test_a_day_and_sessions_have_the_share_that_is_asked_for() -> None:
    times = np.linspace(0.0, 200 * 86400.0, 4001)
    for there in (Diurnal(5, 6 * 3600.0, seed=1), Sessions(3600.0, 3 * 3600.0, seed=1)):
        shares = [len(there.present(np.arange(5), t)) / 5 for t in times]
        assert abs(float(np.mean(shares)) - 0.25) < 0.02
        for t in times[:50]:
            start, end = there.interval(2, t)
            assert start < end
            assert end > t
            assert there.interval(2, start)[0] == start  # asked again, also for earlier times
    day = Diurnal(5, 6 * 3600.0, seed=1)
    assert day.interval(3, 1e5)[0] - day.interval(3, 1e5 - 86400.0)[0] == pytest.approx(86400.0)


def test_a_trace_is_repeated(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("client,start,end\n1,60,100\n0,10,20\n1,0,30\n")
    there = make_availability(System(availability="trace", trace=str(file)), 3, seed=0)
    assert there.interval(1, 30.0) == (60.0, 100.0)
    assert there.interval(0, 25.0) == (110.0, 120.0)
    assert there.interval(2, 0.0)[0] == INF
    everybody = np.arange(3)
    assert there.present(everybody, 215.0).tolist() == [0, 1]
    assert there.next_start(np.array([0]), 21.0) == 110.0
    for text in ("1,60,100\n1,90,110", "1,5,5", "7,0,1", ""):
        file.write_text(f"client,start,end\n{text}\n")
        with pytest.raises(DataError):
            make_availability(System(availability="trace", trace=str(file)), 3, seed=0)


def test_a_client_that_leaves_is_away_at_that_moment_in_every_turn() -> None:
    """Sums of such numbers are rounded, and 0.3 seconds into the second turn is before 100.3 s."""
    there = Trace({0: [(0.1, 0.3), (0.7, 0.9)], 1: [(0.2, 100.1)]}, period=100.1)
    for client in (0, 1):
        time = 0.0
        for _ in range(300):
            start, end = there.interval(client, time)
            assert time < end
            assert len(there.present(np.array([client]), start)) == 1
            time = end


@pytest.mark.parametrize("sampling", ["fixed", "examples", "uniform"])
def test_the_server_waits_for_a_client_that_may_be_selected(tmp_path: Path, sampling: str) -> None:
    """Client 3 comes after 50 seconds; nobody else is ever selected."""
    file, counts, cohort = tmp_path / "trace.csv", sizes(4), Cohort(clients=1, sampling=sampling)
    if sampling == "examples":
        counts = np.array([0, 0, 0, 5])
    if sampling == "uniform":
        cohort = Cohort(clients=1, new_clients=3)
    (last,) = selectable(cohort, counts, 0)
    rows = (f"{k},{50 if k == last else 0},100\n" for k in range(4))
    file.write_text("client,start,end\n" + "".join(rows))
    when = timing([1.0] * 4, System(availability="trace", trace=str(file)))
    for server in (Synchronous(when, cohort, counts), asynchronous(when, cohort, counts, 1)):
        due = server.due(0)
        assert (due.cohort.clients.tolist(), due.seconds) == ([last], 62.0)


# --- a server that waits ---------------------------------------------------------------------


def test_a_round_takes_as_long_as_its_slowest_client() -> None:
    rounds = Synchronous(timing([1.0, 2.0, 4.0], down=20.0, up=50.0), Cohort(), sizes(3))
    assert rounds.due(0).seconds == 2.0 + 12.0 + 5.0
    assert rounds.due(1).seconds == 2 * 19.0


def test_each_direction_has_its_own_bandwidth() -> None:
    need = ClientWork(np.array([12.0]), np.zeros(1), down=30.0, up=40.0)
    devices = Devices(np.array([2.0]), down=np.array([10.0]), up=np.array([5.0]))
    made = Timing(System(), need, devices, make_availability(System(), 1, 0), seed=0)
    assert made.replies(0, np.array([0])).tolist() == [3.0 + 6.0 + 8.0]
    assert Synchronous(made, Cohort(), sizes(1)).seconds.tolist() == [17.0]


def test_the_server_waits_for_all_answers_to_a_survey() -> None:
    rounds = Synchronous(timing([1.0, 2.0], answer=3.0), Cohort(), sizes(2))
    assert rounds.due(0).seconds == 3.0 + 12.0


def test_the_first_to_reply_end_a_round_and_the_others_are_left_out() -> None:
    speeds = [1.0, 2.0, 3.0, 4.0, 6.0]
    rounds = Synchronous(timing(speeds, System(enough=0.6)), Cohort(), sizes(5))
    due = rounds.due(0)
    assert (due.cohort.clients.tolist(), due.cohort.dropped.tolist()) == ([2, 3, 4], [0, 1])
    assert due.seconds == 4.0


def test_a_round_ends_at_its_deadline() -> None:
    speeds = [1.0, 2.0, 3.0]
    rounds = Synchronous(timing(speeds, System(deadline_seconds=5.0)), Cohort(), sizes(3))
    due = rounds.due(0)
    assert (due.cohort.clients.tolist(), due.seconds) == ([2], 5.0)
    in_time = Synchronous(timing(speeds, System(deadline_seconds=50.0)), Cohort(), sizes(3))
    assert in_time.due(0).seconds == 12.0


def test_who_leaves_or_drops_out_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("client,start,end\n0,5,11\n1,5,100\n")
    settings = System(availability="trace", trace=str(file))
    rounds = Synchronous(timing([1.0, 2.0], settings), Cohort(), sizes(2))
    due = rounds.due(0)  # both come at 5; 0 needs 12 seconds and leaves at 11, as 1 is ready
    assert (due.cohort.clients.tolist(), due.cohort.dropped.tolist()) == ([1], [0])
    assert due.seconds == 11.0
    drops = Synchronous(timing([1.0] * 40), Cohort(dropout=0.5), sizes(40))
    due = drops.due(0)
    assert 10 < len(due.cohort.dropped) < 30
    assert due.seconds == 12.0  # the others reply, and who is lost is lost before


def test_a_resumed_schedule_goes_on() -> None:
    settings = System(availability="sessions", hours_on=0.1, hours_off=0.1, enough=0.5)
    made = Synchronous(timing([1.0, 2.0, 3.0, 4.0], settings), Cohort(), sizes(4))
    first = [made.due(t) for t in range(8)]
    again = Synchronous(timing([1.0, 2.0, 3.0, 4.0], settings), Cohort(), sizes(4))
    again.now = first[4].seconds or 0.0
    assert str(again.due(5)) == str(first[5])


# --- a server that does not wait -------------------------------------------------------------


def simulated(speeds: list[float], buffer: int, steps: int) -> list[tuple[float, list, list]]:
    """All clients train; one whose update is in the buffer waits for the step."""
    events = [(12.0 / s, k, 0) for k, s in enumerate(speeds)]
    heapq.heapify(events)
    out: list[tuple[float, list, list]] = []
    held: list[tuple[int, int]] = []
    while len(out) < steps:
        now, client, version = heapq.heappop(events)
        held.append((client, version))
        if len(held) == buffer:
            held.sort()
            out.append((now, [k for k, _ in held], [v for _, v in held]))
            for k, _ in held:
                heapq.heappush(events, (now + 12.0 / speeds[k], k, len(out)))
            held.clear()
    return out


@pytest.mark.parametrize("buffer", [1, 2, 4])
def test_events_come_in_the_order_of_their_time(buffer: int) -> None:
    speeds = [1.0, 1.7, 2.3, 7.1, 0.4]
    server = asynchronous(timing(speeds), Cohort(), sizes(5), buffer)
    for step, (now, clients, versions) in enumerate(simulated(speeds, buffer, 40)):
        due = server.due(step)
        assert due.seconds == pytest.approx(now)
        assert (due.cohort.clients.tolist(), due.versions.tolist()) == (clients, versions)


def test_other_clients_take_the_place_of_those_that_are_done_or_lost() -> None:
    settings = System(jitter=0.5)
    speeds = np.exp(generator(0, "test").standard_normal(30)).tolist()
    cohort = Cohort(clients=8, dropout=0.3)
    server = asynchronous(timing(speeds, settings), cohort, sizes(30), 3)
    seen, lost, last = set(), 0, 0.0
    for step in range(60):
        due = server.due(step)
        assert len(set(due.cohort.clients.tolist())) == 3
        assert (due.versions <= step).all()
        assert due.seconds is not None
        assert due.seconds >= last
        assert len(server.trainings._events) <= 8
        assert server.trainings.versions <= set(range(step + 1))
        seen |= set(due.cohort.clients.tolist())
        lost += len(due.cohort.dropped)
        last = due.seconds
    assert len(seen) == 30
    assert lost > 30
    again = asynchronous(timing(speeds, settings), cohort, sizes(30), 3)
    again.resume(59)
    assert str(again.due(59)) == str(due)


def test_a_buffer_that_never_gets_full_is_refused() -> None:
    with pytest.raises(ConfigError, match="more updates than there are clients"):
        asynchronous(timing([1.0] * 4), Cohort(), sizes(4), 5)
    with pytest.raises(ConfigError, match="poisson"):
        asynchronous(timing([1.0] * 4), Cohort(sampling="poisson"), sizes(4), 1)
    settings = System(availability="sessions", hours_on=1e-5, hours_off=1e-3)
    server = asynchronous(timing([1.0] * 2, settings), Cohort(), sizes(2), 1)
    with pytest.raises(RunError, match="No client finishes"):
        server.due(0)


@pytest.mark.parametrize("method", ["fedasync", "fedbuff(buffer=2)"])
def test_clients_that_are_hardly_ever_there_are_soon_given_up(method: str) -> None:
    """At such times a session had the same start and end, and virtual time went on for ever."""
    rare = fk.System(step_seconds=1.0, availability="sessions", hours_on=1e-6, hours_off=1e9)
    with deadline(60.0), pytest.raises(RunError, match="No client finishes the work of a step"):
        start(prepared(method, rounds=5, per_round=3, system=rare))
    often = rare.model_copy(update={"hours_on": 1e-9, "hours_off": 1e-9, "deadline_seconds": 1e9})
    with deadline(60.0), pytest.raises(RunError, match="come and go too often"):
        start(prepared("fedavg", rounds=5, per_round=3, system=often))


def test_an_interrupt_ends_a_step_that_takes_too_long_to_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was waited for until the step was made, which may be never."""
    monkeypatch.setattr(asynchronous_module, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(trainings, "MOST_LOST", 10**9)
    rare = fk.System(step_seconds=1.0, availability="sessions", hours_on=1e-6, hours_off=1e9)
    timer = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGTERM])
    timer.start()
    with deadline(60.0), pytest.raises(KeyboardInterrupt):
        start(prepared("fedasync", rounds=5, per_round=3, system=rare))
    timer.join()
