"""Ending a run at any moment and going on gives the same bits as never having ended it.

Here the end comes inside the process, before and in the middle of every single thing that is done
to the disk, one after the other. tests/runner/test_kill.py kills real processes.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.sequential import Sequential
from fedkeel.engine.store.base import EncodedRows
from fedkeel.engine.store.disk import DiskStore
from fedkeel.engine.workers import Workers
from fedkeel.errors import RunError, TrainingError
from fedkeel.method import checks
from fedkeel.records import files, row_file
from fedkeel.records import folder as folders
from fedkeel.records.checkpoint import Checkpoint
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner import manifest
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.result import Result
from fedkeel.runner.start import check_settings, start
from toys import MODELS, Kills, Net, federation, plain, prepared, same


class Kill(BaseException):
    """Ends what runs as a kill would: nothing catches it, nothing is tidied up."""


class Budget:
    """Lets so many things be done to the disk, and kills before or in the middle of the next."""

    def __init__(self, allowed: int, half: bool) -> None:
        self.left, self.half = allowed, half

    def spend(self, halfway: Callable[[], object] | None = None) -> None:
        if self.left == 0:
            if self.half and halfway is not None:
                halfway()
            raise Kill
        self.left -= 1


@contextmanager
def dying(budget: Budget) -> Iterator[None]:
    """Put the budget between the records and the disk."""
    patch = pytest.MonkeyPatch()
    rename, sync, remove = os.replace, os.fsync, shutil.rmtree
    save, append = files.save_file, RunFolder.append
    text, rows = folders.write_text, row_file.write_bytes
    place, write = DiskStore.restore, DiskStore._write_slots

    def half_removed(path: Path) -> None:
        for file in list(Path(path).iterdir())[:1]:
            file.unlink()

    def half_saved(arrays: object, path: Path) -> None:
        save(arrays, path)
        path.write_bytes(path.read_bytes()[:100])

    def half_appended(folder: RunFolder, row: RoundRecord) -> None:
        with (folder.path / "rounds.jsonl").open("a") as file:
            file.write(row.line()[:50])

    def half_written(store: DiskStore, slots: np.ndarray, rows: EncodedRows) -> None:
        half = {k: [torch.full_like(t[:1], 7) for t in tensors] for k, tensors in rows.items()}
        write(store, slots[:1], half)

    def spent(real: Callable[..., object], half: Callable[..., object] | None = None) -> object:
        def call(*args: object, **kwargs: object) -> object:
            if real is remove and not Path(str(args[0])).exists():
                return None
            budget.spend(None if half is None else partial(half, *args))
            return real(*args, **kwargs)

        return call

    patch.setattr(os, "replace", spent(rename))
    patch.setattr(os, "fsync", spent(sync))
    patch.setattr(shutil, "rmtree", spent(remove, half_removed))
    patch.setattr(files, "save_file", spent(save, half_saved))
    patch.setattr(folders, "write_text", spent(text))
    patch.setattr(row_file, "write_bytes", spent(rows))
    patch.setattr(RunFolder, "append", spent(append, half_appended))
    patch.setattr(DiskStore, "_write_slots", spent(write, half_written))
    patch.setattr(DiskStore, "restore", spent(place))
    try:
        yield
    finally:
        patch.undo()


def until_it_is_done(ready: Prepared, out: Path, allowed: int, half: bool) -> tuple[Result, int]:
    """Start a run, kill it after so many things done to the disk, and again, until it is done."""
    for kills in range(200):
        try:
            with dying(Budget(allowed, half)):
                return start(ready, out, resume=True), kills
        except Kill:
            continue
    raise AssertionError("it never gets anywhere")


def checkpoint(out: Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, but for where rows lie in a file that is gone by now."""
    saved = RunFolder(out).load()
    assert saved is not None
    return {k: v for k, v in saved.arrays.items() if k != "clients/slot"}


def same_checkpoint(a: Path, b: Path) -> bool:
    one, two = checkpoint(a), checkpoint(b)
    return list(one) == list(two) and all(np.array_equal(one[k], two[k]) for k in one)


@pytest.mark.parametrize(
    ("method", "state", "half"),
    [
        ("scaffold", "memory", True),
        pytest.param("scaffold", "disk", True, marks=pytest.mark.slow),
        pytest.param("gradma", "memory", True, marks=pytest.mark.slow),
        pytest.param("scaffold", "memory", False, marks=pytest.mark.slow),
        pytest.param("scaffold", "disk", False, marks=pytest.mark.slow),
        pytest.param("gradma", "memory", False, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_write_leaves_no_trace(
    tmp_path: Path, method: str, state: str, half: bool
) -> None:
    """One kill, at each of the things done to the disk in turn."""
    ready = prepared(method, rounds=2, per_round=3, state=state)
    whole = start(ready, tmp_path / "whole")
    for allowed in range(200):
        out = tmp_path / str(allowed)
        try:
            with dying(Budget(allowed, half)):
                start(ready, out)
        except Kill:
            result = start(ready, out, resume=True)
            assert same(whole, result), allowed
            assert plain(result) == plain(replace(whole, rows=RunFolder(out).rows())), allowed
            assert same_checkpoint(tmp_path / "whole", out), allowed
            assert [p.name for p in (out / "checkpoint").iterdir()] == ["round-00000002"]
            assert not (out / "state").exists(), allowed
        else:
            break
    assert allowed > 20  # there were many moments to be killed at


@pytest.mark.parametrize(
    ("allowed", "state"),
    [
        (17, "memory"),
        (20, "disk"),
        *(
            pytest.param(allowed, state, marks=pytest.mark.slow)
            for state in ("memory", "disk")
            for allowed in (18, 22, 25)
        ),
    ],
)
def test_killed_again_and_again_it_still_arrives(tmp_path: Path, allowed: int, state: str) -> None:
    ready = prepared("scaffold", rounds=4, state=state)
    allowed += 3  # the counts for pictures are written at the end
    allowed += 6 if state == "disk" else 0  # rows are read, written and synchronised too
    whole = start(ready, tmp_path / "whole")
    result, kills = until_it_is_done(ready, tmp_path / "run", allowed, half=True)
    assert kills >= 2
    assert same(whole, result)
    assert same_checkpoint(tmp_path / "whole", tmp_path / "run")


# --- every kind of state comes back ---------------------------------------------------------------


class StopAfter(Callback):
    """Ends a run after a round, before that round is saved."""

    def __init__(self, round: int) -> None:
        self._round = round

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round == self._round:
            raise Kill


LOCAL = fk.Local(lr=0.05, steps=3, batch_size=4, drop_last="single")


STATES = [
    ("fedavg", "dropout", "refuse"),
    ("scaffold", "norm", "average"),
    ("gradma", "norm", "local"),
    ("fedgc+momentum", "plain", "refuse"),
    ("gradma.s(memory=4)", "plain", "refuse"),
    ("fedreg", "plain", "refuse"),
]


@pytest.mark.parametrize(
    ("method", "model", "buffers", "kind"),
    [
        *((*state, "sequential") for state in STATES),
        (*STATES[2], "workers"),
        *(
            pytest.param(*state, "workers", marks=pytest.mark.slow)
            for state in STATES
            if state is not STATES[2]
        ),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(
    tmp_path: Path, method: str, model: str, buffers: str, kind: str
) -> None:
    """With steps that continue through the data: the client's place in it comes back too."""
    evaluation = fk.Evaluation(every=2, clients_every=3, batch_size=16)
    ready = prepared(
        method,
        MODELS[model],
        buffers=buffers,
        local=LOCAL,
        rounds=5,
        evaluation=evaluation,
        kind=kind,
        workers=2,
    )
    whole = start(ready, tmp_path / "whole")
    for last in (1, 3):
        with pytest.raises(Kill):
            start(ready, tmp_path / "run", resume=True, callbacks=[StopAfter(last)])
    result = start(ready, tmp_path / "run", resume=True)
    assert same(whole, result)
    assert same_checkpoint(tmp_path / "whole", tmp_path / "run")


def test_the_engine_may_change_on_the_way(tmp_path: Path) -> None:
    whole = start(prepared("scaffold", rounds=4), tmp_path / "whole")
    with pytest.raises(Kill):
        start(prepared("scaffold", rounds=4), tmp_path / "run", callbacks=[StopAfter(2)])
    other = prepared("scaffold", rounds=4, kind="workers", workers=3, name="other")
    result = start(other, tmp_path / "run", resume=True)
    assert same(whole, result)
    assert RunFolder(tmp_path / "run").read_run().engine.kind == "workers"


@pytest.mark.parametrize(
    "asked",
    [{"kind": "auto"}, {"kind": "auto", "parallel_clients": 3}, {"kind": "vectorized"}],
    ids=["auto", "auto with a chunk", "vectorized"],
)
def test_a_choice_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object]
) -> None:
    """Another version or machine might choose another engine, which rounds differently."""
    ready = prepared(rounds=4, workers=1, **asked)
    chosen = replace(
        manifest.choose_engine(ready), kind="vectorized", parallel_clients=2, workers=1
    )
    monkeypatch.setattr(manifest, "choose_engine", lambda _: chosen)
    whole = start(ready)
    with pytest.raises(Kill):
        start(ready, tmp_path / "run", callbacks=[StopAfter(2)])
    other = replace(chosen, kind="sequential", parallel_clients=1)
    monkeypatch.setattr(manifest, "choose_engine", lambda _: other)
    result = start(ready, tmp_path / "run", resume=True)
    engine = result.record.engine
    assert (engine.kind, engine.parallel_clients) == ("vectorized", 2)
    assert same(whole, result)


def test_without_a_checkpoint_a_run_begins_again(tmp_path: Path) -> None:
    ready = prepared(rounds=3, checkpoint_seconds=1e6)
    whole = start(ready)
    with pytest.raises(Kill):
        start(ready, tmp_path / "run", callbacks=[StopAfter(2)])
    assert RunFolder(tmp_path / "run").load() is None
    assert same(whole, start(ready, tmp_path / "run", resume=True))


# --- state on disk --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("scaffold", "workers"),
        ("gradma", "sequential"),
        pytest.param("scaffold", "sequential", marks=pytest.mark.slow),
        pytest.param("gradma", "workers", marks=pytest.mark.slow),
        pytest.param("fedavg", "sequential", marks=pytest.mark.slow),
    ],
)
def test_a_file_and_memory_make_the_same_bits(tmp_path: Path, method: str, kind: str) -> None:
    """With buffers of the clients' own, and ended and gone on with on the way."""
    more = {"buffers": "local", "local": LOCAL, "rounds": 5, "per_round": 3}
    whole = start(prepared(method, MODELS["norm"], **more, state="memory"))
    ready = prepared(method, MODELS["norm"], **more, state="disk", kind=kind, workers=2)
    assert ready.state == "disk"
    assert same(whole, start(ready))
    for last in (1, 2, 4):
        with pytest.raises(Kill):
            start(ready, tmp_path / "run", resume=True, callbacks=[StopAfter(last)])
        assert (tmp_path / "run" / "state").exists()
    assert same(whole, start(ready, tmp_path / "run", resume=True))
    assert not (tmp_path / "run" / "state").exists()


@pytest.mark.slow
def test_so_do_they_with_spawned_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers.__init__, "__defaults__", ("spawn",))
    ready = prepared("scaffold", rounds=4, state="disk", kind="workers", workers=2)
    with pytest.raises(Kill):
        start(ready, tmp_path / "run", callbacks=[StopAfter(3)])
    result = start(ready, tmp_path / "run", resume=True)
    assert same(start(prepared("scaffold", rounds=4)), result)


def test_checkpoints_that_are_rounds_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows were written over and over since the last one, and their slots given out again."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("fedkeel.runner.checkpoint.time", clock)

    class EveryThird(StopAfter):
        def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
            now[0] = row.round // 3 * 100.0
            super().on_round_end(row, model)

    out = tmp_path / "run"
    ready = prepared("scaffold", rounds=12, state="disk", checkpoint_seconds=50.0)
    for last, saved in ((5, 3), (8, 6), (12, 9)):
        with pytest.raises(Kill):
            start(ready, out, resume=True, callbacks=[EveryThird(last)])
        assert RunFolder(out).load().round == saved
    assert same(start(prepared("scaffold", rounds=12)), start(ready, out, resume=True))


@pytest.mark.parametrize(("first", "then"), [("memory", "disk"), ("disk", "memory")])
def test_state_may_move_on_the_way(tmp_path: Path, first: str, then: str) -> None:
    """From memory to disk; a run whose state is on disk leaves it there."""
    whole = start(prepared("scaffold", rounds=6))
    out = tmp_path / "run"
    for state, last in ((first, 2), (then, 4)):
        with pytest.raises(Kill):
            start(prepared("scaffold", rounds=6, state=state), out, True, [StopAfter(last)])
    assert "clients/slot" in RunFolder(out).load().arrays
    assert same(whole, start(prepared("scaffold", rounds=6, state=then), out, resume=True))
    assert not (out / "state").exists()


def test_a_checkpoint_on_disk_holds_no_rows(tmp_path: Path) -> None:
    with pytest.raises(Kill):
        start(prepared("scaffold", state="disk"), tmp_path / "run", callbacks=[StopAfter(3)])
    arrays = RunFolder(tmp_path / "run").load().arrays
    found = {name: array.shape for name, array in arrays.items() if name.startswith("clients/")}
    count = len(arrays["clients/index"])
    assert found.pop("clients/bytes") == (1,)  # how long a row is
    assert found == dict.fromkeys(
        (f"clients/{name}" for name in ("index", "slot", "checksum", "done")), (count,)
    )


def test_without_its_file_a_run_on_disk_does_not_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ready = prepared("scaffold", state="disk")
    with pytest.raises(Kill):
        start(ready, out, callbacks=[StopAfter(3)])
    (out / "state").rename(out / "elsewhere")
    for state in ("disk", "memory"):
        with pytest.raises(RunError, match="cannot be read"):
            start(prepared("scaffold", state=state), out, resume=True)
        assert not (out / "state").exists()
    (out / "elsewhere").rename(out / "state")
    assert same(start(ready), start(ready, out, resume=True))


def test_a_run_without_a_folder_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[Path] = []

    class Look(Callback):
        def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
            seen.extend(tmp_path.rglob("clients.bin"))

    ready = prepared("scaffold", state="disk")
    start(ready, callbacks=[Look()])
    assert len(seen) == 3
    with pytest.raises(Kill):
        start(ready, callbacks=[StopAfter(2)])
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_state_is_not_written_over(tmp_path: Path) -> None:
    """In a folder that holds no run, it is somebody else's."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "clients.bin").write_bytes(b"client_state")
    with pytest.raises(RunError, match="would write over"):
        start(prepared("scaffold", state="disk"), tmp_path)
    assert (tmp_path / "state" / "clients.bin").read_bytes() == b"client_state"


# --- what was saved is never lost -----------------------------------------------------------------


def stopped(out: Path, **more: object) -> Prepared:
    ready = prepared("scaffold", rounds=4, **more)
    with pytest.raises(Kill):
        start(ready, out, callbacks=[StopAfter(3)])
    return ready


@pytest.mark.parametrize("file", ["arrays.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_said_and_left_as_it_is(tmp_path: Path, file: str) -> None:
    """Not taken for a run that has to begin anew, which would write over what might be mended."""
    out = tmp_path / "run"
    ready = stopped(out)
    damaged = out / "checkpoint" / "round-00000002" / file
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-3])
    rows = (out / "rounds.jsonl").read_bytes()
    for _ in range(2):
        with pytest.raises(RunError, match="cannot be read"):
            start(ready, out, resume=True)
        assert damaged.read_bytes() == good[:-3]
        assert (out / "rounds.jsonl").read_bytes() == rows
    damaged.write_bytes(good)
    assert same(start(ready), start(ready, out, resume=True))


def test_a_checkpoint_that_does_not_fit_is_said_and_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ready = stopped(out)
    folder = RunFolder(out)
    saved = folder.load()
    for arrays, state, words in (
        ({k: v for k, v in saved.arrays.items() if "fc1.bias" not in k}, saved.state, "not fit"),
        ({**saved.arrays, "server/params/fc1.bias": np.zeros(3)}, saved.state, "not fit"),
        (saved.arrays, {"key": "another"}, "belongs to another run"),
    ):
        shutil.rmtree(out / "checkpoint")
        folder.save(Checkpoint(2, arrays, state))
        before = (out / "checkpoint" / "round-00000002" / "arrays.safetensors").read_bytes()
        with pytest.raises(RunError, match=words):
            start(ready, out, resume=True)
        files = [p.name for p in (out / "checkpoint").iterdir()]
        assert files == ["round-00000002"]
        assert (out / "checkpoint" / files[0] / "arrays.safetensors").read_bytes() == before


@pytest.mark.parametrize("kind", ["sequential", "workers"])
def test_a_failed_evaluation_does_not_leave_a_round_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The round was made and is not recorded: it must not be saved as if it were."""
    whole = start(prepared("scaffold", rounds=4))
    out = tmp_path / "run"
    ready = prepared("scaffold", rounds=4, kind=kind, workers=2)
    engine = Workers if kind == "workers" else Sequential
    evaluate, calls = engine.evaluate, []

    def third_fails(self: object, *args: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise TrainingError("A worker failed on an evaluation.")
        return evaluate(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "evaluate", third_fails)
        with pytest.raises(TrainingError):
            start(ready, out)
    assert RunFolder(out).read_run().status == "failed"
    result = start(ready, out, resume=True)
    assert [row.round for row in result.rows] == [0, 1, 2, 3, 4]
    assert same(whole, result)


def test_a_failed_step_of_the_server_leaves_nothing_in_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts change theirs in place: what a round has begun must not be saved as the last one's."""
    ready = prepared("gradma", rounds=5, checkpoint_seconds=1e6)
    whole = start(ready)
    finite, calls = checks.check_finite_model, []

    def third_fails(*args: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise TrainingError("Something went wrong, once.")
        finite(*args)

    with monkeypatch.context() as patch:
        patch.setattr("fedkeel.method.server_round.check_finite_model", third_fails)
        with pytest.raises(TrainingError, match="once"):
            start(ready, tmp_path / "run")
    assert same(whole, start(ready, tmp_path / "run", resume=True))


@pytest.mark.parametrize(
    "at", [1, 5, 9, *(pytest.param(at, marks=pytest.mark.slow) for at in (3, 7, 11, 13))]
)
def test_a_full_disk_is_said_and_costs_no_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Whatever is written when it is full, and whatever may be written afterwards."""
    ready, out = prepared("scaffold", rounds=3), tmp_path / "run"
    full, calls = OSError(errno.ENOSPC, "No space left on device"), []

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(1)
            if len(calls) == at:
                raise full
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(os.replace))
        patch.setattr(files, "save_file", failing(files.save_file))
        patch.setattr(RoundRecord, "line", failing(RoundRecord.line))
        with pytest.raises(RunError, match="cannot be written to") as found:
            start(ready, out)
        assert "No space left" in str(found.value.got)
    assert same(start(ready), start(ready, out, resume=True))
    assert [row.round for row in RunFolder(out).rows()] == [0, 1, 2, 3]


@pytest.mark.parametrize("lost", [slice(0, 2), slice(2, None), slice(None)])
def test_rows_that_were_lost_are_said(tmp_path: Path, lost: slice) -> None:
    """Without them a run would end early at another round, and report another best."""
    out = tmp_path / "run"
    ready = stopped(out)
    file = out / "rounds.jsonl"
    good = file.read_text().splitlines(keepends=True)
    left = good.copy()
    del left[lost]
    file.write_text("".join(left))
    for _ in range(2):
        with pytest.raises(RunError, match="lacks rounds"):
            start(ready, out, resume=True)
        assert file.read_text() == "".join(left)
    file.write_text("".join(good))
    assert same(start(ready), start(ready, out, resume=True))


def test_a_run_whose_workers_died_goes_on(tmp_path: Path) -> None:
    """As after a machine ran out of memory: with one worker less, say."""
    clients = federation(marked=3)
    more = {"clients": clients, "per_round": 6}
    with pytest.raises(TrainingError, match="died"):
        start(prepared("scaffold", Kills, **more, kind="workers"), tmp_path / "run")
    assert RunFolder(tmp_path / "run").read_run().status == "failed"
    result = start(prepared("scaffold", Kills, **more), tmp_path / "run", resume=True)
    assert same(start(prepared("scaffold", Kills, **more)), result)


# --- what is there already ------------------------------------------------------------------------


def contents(out: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(p.relative_to(out)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in out.rglob("*")
        if p.is_file()
    }


@pytest.mark.parametrize("resume", [False, True])
def test_a_finished_run_is_read_and_not_made_again(tmp_path: Path, resume: bool) -> None:
    out = tmp_path / "run"
    first = start(prepared("scaffold"), out)
    before = contents(out)
    again = start(prepared("scaffold"), out, resume=resume)
    assert contents(out) == before
    assert same(first, again)
    assert again.record == first.record


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_another_run_is_refused_and_nothing_is_written(
    tmp_path: Path, finished: bool, resume: bool
) -> None:
    out = tmp_path / "run"
    if finished:
        start(prepared("scaffold", rounds=4), out)
    else:
        stopped(out)
    before = contents(out)
    for other in (
        prepared("fedavg", rounds=4),
        prepared("scaffold", rounds=3),  # more rounds go on, see `test_more_rounds`
        prepared("scaffold", rounds=4, seed=1),
    ):
        with pytest.raises(RunError, match="holds another run") as found:
            start(other, out, resume=resume)
        assert "scaffold, seed 0, 4 rounds" in found.value.got
    assert contents(out) == before


def test_other_settings_are_refused_before_anything_is_prepared(tmp_path: Path) -> None:
    """A federation waited for its nodes, and refused then."""
    out = tmp_path / "run"
    check_settings(out, prepared("scaffold").settings)  # nothing is there
    stopped(out)
    check_settings(out, prepared("scaffold", rounds=4).settings)
    with pytest.raises(RunError, match="holds another run") as found:
        check_settings(out, prepared("scaffold", rounds=5).settings)
    assert "rounds is 5, there 4" in str(found.value.why)


def test_a_model_with_another_hook_is_another_run(tmp_path: Path) -> None:
    def hooked(factor: float) -> nn.Module:
        net = Net()
        net.register_forward_hook(lambda module, given, found: found * factor)
        return net

    start(prepared(model=partial(hooked, 1.0)), tmp_path / "run")
    with pytest.raises(RunError, match="holds another run"):
        start(prepared(model=partial(hooked, 3.0)), tmp_path / "run")


def test_an_unfinished_run_is_not_taken_up_unasked(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ready = stopped(out)
    before = contents(out)
    with pytest.raises(RunError, match="unfinished") as found:
        start(ready, out)
    assert "3 of 4 rounds" in found.value.got
    assert "--resume" in found.value.do
    assert contents(out) == before


def test_a_finished_run_without_its_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    start(prepared(), out)
    shutil.rmtree(out / "checkpoint")
    with pytest.raises(RunError, match="marked finished, and has no checkpoint"):
        start(prepared(), out)


@pytest.mark.parametrize("left", [0, 2])
def test_a_finished_run_that_lost_rows(tmp_path: Path, left: int) -> None:
    out = tmp_path / "run"
    ready = prepared()
    start(ready, out)
    file = out / "rounds.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:left]))
    with pytest.raises(RunError, match="lacks rounds") as found:
        start(prepared(), out)
    assert found.value.got == f"{left} rows up to round {ready.settings.rounds}"
