"""Real processes, killed and interrupted at real moments, go on as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from commands import EXECUTABLE, Process, experiment, rows, run, wait_for_rows
from fedkeel.records.files import Arrays
from fedkeel.records.folder import RunFolder
from toys import alive, children, eventually

WORKERS = ("-s", "engine.kind=workers", "-s", "engine.workers=2")
SLOW = """\
import time
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        time.sleep(0.1)
        return self.fc(x)
"""


def state(out: Path) -> tuple[Arrays, list[str]]:
    """The arrays of a run's last checkpoint, and its rows without seconds."""
    folder = RunFolder(out)
    saved = folder.load()
    assert saved is not None
    assert saved.state == {"key": folder.read_run().key}
    arrays = {k: v for k, v in saved.arrays.items() if k != "clients/slot"}  # where rows lay
    return arrays, [
        repr({**vars(row), "seconds": None, "processor_seconds": None}) for row in folder.rows()
    ]


def same(a: Path, b: Path) -> bool:
    (one, rows), (two, others) = state(a), state(b)
    return (
        rows == others
        and list(one) == list(two)
        and all(np.array_equal(one[name], two[name]) for name in one)
    )


@pytest.mark.parametrize(
    ("method", "state", "count"),
    [
        ("scaffold", "auto", 2),
        pytest.param("scaffold", "auto", 4, marks=pytest.mark.slow),
        pytest.param("gradma", "disk", 4, marks=pytest.mark.slow),
        pytest.param("fedavg", "auto", 4, marks=pytest.mark.slow),
        pytest.param("gradma", "auto", 4, marks=pytest.mark.slow),
        pytest.param("fedgc", "auto", 4, marks=pytest.mark.slow),
        pytest.param("scaffold", "disk", 4, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments(tmp_path: Path, method: str, state: str, count: int) -> None:
    """With a checkpoint after every round, most of these moments are in the middle of a write."""
    file, moment = experiment(tmp_path), random.Random(method + state)
    words = ("run", file, *WORKERS, "-s", f"method={method}", "-s", "rounds=20")
    words = (*words, "-s", f"engine.state={state}")
    done = run(*words, "--out", "whole", folder=tmp_path)
    assert done.code == 0, done.err
    kills, reached = 0, []
    for _ in range(60):
        began = len(RunFolder(tmp_path / "run").rows())
        process = Process(*words, "--out", "run", "--resume", "--quiet", folder=tmp_path)
        if kills < count:
            workers = _until(process, tmp_path / "run", began + moment.randint(1, 4))
            time.sleep(moment.random() * 0.03)
            process.send(signal.SIGKILL)
        killed = process.wait()
        if killed.code == 0:
            break
        assert killed.code == -signal.SIGKILL, killed.err
        kills += 1
        reached.append(rows(tmp_path / "run"))
        assert eventually(lambda w=workers: not any(alive(pid) for pid in w))
    assert kills == count
    assert reached == sorted(reached), "work was lost"
    assert same(tmp_path / "whole", tmp_path / "run")
    record = RunFolder(tmp_path / "run").read_run()
    assert (record.status, len(RunFolder(tmp_path / "run").rows())) == ("finished", 21)
    left = [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()]
    assert left == ["round-00000020"]


def _until(process: Process, out: Path, count: int) -> list[int]:
    """Wait until a run has so many rows, or has ended; return its workers."""
    eventually(lambda: rows(out) >= count or not process.running)
    return children(process.pid) if process.running else []


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGINT, "workers"),
        pytest.param(signal.SIGTERM, "sequential", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_ends_after_the_round(tmp_path: Path, number: int, kind: str) -> None:
    file = experiment(tmp_path)
    words = ("run", file, "-s", f"engine.kind={kind}", "-s", "method=scaffold", "-s", "rounds=24")
    words = (*words, "-s", "engine.checkpoint_seconds=1000")  # the interrupt itself has to save
    process = Process(*words, "--out", "run", "--json", folder=tmp_path)
    wait_for_rows(tmp_path / "run", 4)
    process.send(number)
    done = process.wait()
    assert done.code == 130, done.err
    folder = RunFolder(tmp_path / "run")
    record, found, saved = folder.read_run(), folder.rows(), folder.load()
    assert record.status == "interrupted"
    assert 4 <= len(found) < 25
    assert saved.round == found[-1].round
    assert done.json["status"] == "interrupted"
    assert done.json["rounds"] == found[-1].round
    last = done.err.strip().splitlines()[-1]
    assert last == (
        f"interrupted after {found[-1].round} of 24 rounds; to go on: fedkeel run run --resume"
    )
    again = run(*last.split("fedkeel ")[1].split(), folder=tmp_path)
    assert again.code == 0, again.err
    assert run(*words, "--out", "whole", folder=tmp_path).code == 0
    assert same(tmp_path / "whole", tmp_path / "run")


def slow(folder: Path, *words: str, out: str = "run") -> Process:
    file = experiment(folder)
    (folder / "slow.py").write_text(SLOW)
    model = ("-s", "model.name=slow:Net", "-s", "model.args={}")
    return Process("run", file, *model, *words, "--out", out, folder=folder)


@pytest.mark.parametrize("kind", [pytest.param("sequential", marks=pytest.mark.slow), "workers"])
def test_a_second_interrupt_ends_at_once(tmp_path: Path, kind: str) -> None:
    """A round takes many seconds here; it is lost, and nothing else."""
    process = slow(tmp_path, "-s", f"engine.kind={kind}", "-s", "engine.workers=2")
    wait_for_rows(tmp_path / "run", 1)
    assert kind == "sequential" or len(children(process.pid)) == 2
    workers = children(process.pid)
    time.sleep(0.3)  # in the middle of the first round
    process.send(signal.SIGINT)
    time.sleep(0.3)
    assert process.running
    process.send(signal.SIGINT)
    began = time.monotonic()
    done = process.wait(20)
    assert time.monotonic() - began < 5
    assert done.code == 130
    assert "Traceback" not in done.err
    assert done.err.count("stopping after this round") == 1
    assert done.err.endswith("stopped; to go on from what was saved: fedkeel run run --resume\n")
    folder = RunFolder(tmp_path / "run")
    assert folder.read_run().status == "interrupted"
    assert len(folder.rows()) == 1
    assert eventually(lambda: not any(alive(pid) for pid in workers))


def test_two_processes_do_not_write_into_one_folder(tmp_path: Path) -> None:
    first = slow(tmp_path, *WORKERS)
    wait_for_rows(tmp_path / "run", 1)
    second = slow(tmp_path, "--resume").wait()
    assert second.code == 2
    assert second.message.startswith("RunError: run is being written by another process.")
    assert first.running
    first.send(signal.SIGKILL)
    first.wait()
    third = slow(tmp_path, "-s", "engine.workers=1", "--resume")  # at once, workers may still live
    time.sleep(1.0)
    assert third.running
    third.send(signal.SIGKILL)
    third.wait()


def test_no_file_in_the_folder_can_be_deleted_to_let_a_second_process_in(tmp_path: Path) -> None:
    first = slow(tmp_path, *WORKERS)
    wait_for_rows(tmp_path / "run", 1)
    for file in (tmp_path / "run").glob(".*"):
        file.unlink()
    (tmp_path / "run" / ".lock").touch()  # as an earlier version has left it
    second = slow(tmp_path, "--resume").wait()
    assert second.message.startswith("RunError: run is being written by another process.")
    assert first.running
    first.send(signal.SIGKILL)
    first.wait()


def test_workers_end_when_a_run_is_killed_in_mid_round(tmp_path: Path) -> None:
    process = slow(tmp_path, *WORKERS)
    wait_for_rows(tmp_path / "run", 1)
    workers = children(process.pid)
    assert len(workers) == 2
    time.sleep(0.3)
    process.send(signal.SIGKILL)
    process.wait()
    assert eventually(lambda: not any(alive(pid) for pid in workers), 30)


# --- in a shell -----------------------------------------------------------------------------------


def shell(folder: Path, out: str, *more: str) -> subprocess.Popen[str]:
    """The installed command in a process group of its own, as a terminal starts it."""
    words = ("run", "toy.toml", *WORKERS, "-s", "rounds=40", "--out", out, *more)
    return subprocess.Popen(
        [EXECUTABLE, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_ctrl_c_in_a_shell_reaches_every_process_and_loses_nothing(tmp_path: Path) -> None:
    """And after it, a kill of the whole group; then the run is finished all the same."""
    experiment(tmp_path)
    first = shell(tmp_path, "run")
    wait_for_rows(tmp_path / "run", 3)
    os.killpg(first.pid, signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert "to go on: fedkeel run run --resume" in err
    assert err.count("stopping after this round") == 1
    assert "Traceback" not in err
    before = len(RunFolder(tmp_path / "run").rows())
    second = shell(tmp_path, "run", "--resume")
    wait_for_rows(tmp_path / "run", before + 2)
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate(timeout=60)
    third = run("run", "run", "--resume", folder=tmp_path)
    assert third.code == 0, third.err
    done = run("run", "toy.toml", "-s", "rounds=40", "--out", "whole", folder=tmp_path)
    assert done.code == 0, done.err
    assert same(tmp_path / "whole", tmp_path / "run")
