"""What a run leaves behind survives a kill at any moment, and damage is said in one sentence."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
from dataclasses import asdict, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from fedkeel.errors import RunError
from fedkeel.records.checkpoint import Checkpoint
from fedkeel.records.comparison import runs_of
from fedkeel.records.files import write_text
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.run_record import (
    FORMAT,
    DataRecord,
    EngineChoice,
    Environment,
    Estimate,
    ModelRecord,
    PartitionRecord,
    PartRecord,
    RangeRecord,
    RunRecord,
    ScaleRecord,
    to_json,
)


class Kill(BaseException):
    """Ends what runs as a kill would: nothing catches it."""


def record(**more: object) -> RunRecord:
    words = {f.name: "" for f in fields(RunRecord) if f.type == "str"}
    values = {
        **words,
        "name": "try",
        "key": "k",
        "method": "fedavg",
        "parts": [PartRecord("fedavg", None, ["Reduction"])],
        "citations": [],
        "seed": 0,
        "rounds": 3,
        "status": "running",
        "target": None,
        "format": FORMAT,
        "model": ModelRecord("mlp", 10, 40, "fc2"),
        "data": DataRecord(
            ["digits"], train=9, classes=3, scale=ScaleRecord([0.5], [2.0]), shape=[4]
        ),
        "partition": PartitionRecord("iid", 2, [4, 5], settings={"seed": 3, "alpha": 0.5}),
        "engine": EngineChoice("vectorized", 2, 4, reasons=["it is small"]),
        "environment": Environment("0.1.0", cores=2),
        "estimate": Estimate({"model": 40}, {"model": 40}, clients=2),
    }
    return RunRecord(**{**values, **more})


def row(round: int, **more: object) -> RoundRecord:
    scores = Scores(10, {"accuracy": 0.5, "top3": 1.0, "loss": 0.25})
    values = {
        "clients": [1, 2],
        "test": scores,
        "sources": {"a": scores},
        "diagnostics": {"p.x": 1.5},
    }
    return RoundRecord(round, **{**values, **more})


def checkpoint(round: int, value: float = 0.0) -> Checkpoint:
    arrays = {"a/w": np.full((2, 3), value, np.float32), "n": np.array(7, np.int64)}
    return Checkpoint(round, arrays, {"key": "k"})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.start(record(), "rounds = 3\n")
    return made


# --- the record and the rows ---------------------------------------------------------------------


def test_what_is_written_is_read_back(folder: RunFolder) -> None:
    assert folder.exists()
    assert folder.read_run() == record()
    rows = [row(0), row(1, per_client={"accuracy": [0.5, None]}, train_loss=0.1, dropped=[3])]
    for one in rows:
        folder.append(one)
    assert folder.rows() == rows
    assert (folder.path / "config.toml").read_text() == "rounds = 3\n"


def test_keys_of_a_later_version_are_ignored(folder: RunFolder) -> None:
    later = {**to_json(record()), "invented_later": 1}
    later["model"]["invented_later"] = {"a": 1}
    write_text(folder.path / "run.json", json.dumps(later))
    assert folder.read_run() == record()
    assert RoundRecord.from_json({**asdict(row(2)), "invented_later": 1}) == row(2)
    earlier = {k: v for k, v in asdict(row(2)).items() if k != "processor_seconds"}
    assert RoundRecord.from_json(earlier) == row(2, processor_seconds=None)


def test_what_only_predictions_need_tells_no_two_runs_apart(folder: RunFolder) -> None:
    """A private run records no ranges, and is compared with one that does."""
    data = replace(record().data, ranges={"": RangeRecord([0.0], [1.0])}, text_column="note")
    more = replace(record(), data=data)
    assert RunRecord.from_json(to_json(more)) == more
    assert more.likeness() == record().likeness()


def test_what_describes_a_partition_stands_together(folder: RunFolder) -> None:
    partition = json.loads((folder.path / "run.json").read_text())["partition"]
    assert partition["alpha"] == 0.5
    assert "settings" not in partition


def test_a_ragged_histogram_is_refused(folder: RunFolder) -> None:
    values = json.loads((folder.path / "run.json").read_text())
    for histogram, is_ragged in (([[1, 2], [3, 4]], False), ([[1, 2], [3]], True)):
        values["partition"]["histogram"] = histogram
        (folder.path / "run.json").write_text(json.dumps(values))
        if not is_ragged:
            assert folder.read_run().partition.histogram == histogram
            continue
        with pytest.raises(RunError, match="cannot be read") as caught:
            folder.read_run()
        assert caught.value.got == "partition.histogram: rows of different lengths"


def test_a_run_of_an_earlier_version_is_read(folder: RunFolder) -> None:
    """Keys have other names, values too, and some are missing."""
    values = to_json(record())
    values["hints"] = ["heed this"]
    values["engine"] = {"kind": "vectorised", "workers": 2, "chunk": 4, "asked": "auto"}
    for section, key in (("estimate", "table"), ("data", "scale"), ("model", "head")):
        values[section].pop(key)
    for key in ("warnings", "best_model"):
        values.pop(key)
    write_text(folder.path / "run.json", json.dumps(values))
    found = folder.read_run()
    assert found.warnings == ["heed this"]
    assert found.engine == EngineChoice("vectorized", 2, 4)
    assert (found.estimate.table, found.data.scale, found.model.head) == (0, None, None)


def test_a_last_line_that_a_kill_cut_short_is_left_out(folder: RunFolder) -> None:
    folder.append(row(0))
    folder.append(row(1))
    whole = (folder.path / "rounds.jsonl").read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole) - 1, 7):
        (folder.path / "rounds.jsonl").write_bytes(whole[:end])
        assert folder.rows() == [row(0)]


def test_a_damaged_line_before_the_last_is_refused(folder: RunFolder) -> None:
    for number in range(3):
        folder.append(row(number))
    file = folder.path / "rounds.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for damage in (b'{"round": 1, "cl\n', b"[1, 2]\n", b'{"clients": []}\n', b"\xff\xfe\n", b"\n"):
        file.write_bytes(lines[0] + damage + lines[2])
        with pytest.raises(RunError, match=r"rounds\.jsonl is damaged\.\n  got line 2"):
            folder.rows()


def test_rows_after_a_checkpoint_are_dropped(folder: RunFolder) -> None:
    for number in range(4):
        folder.append(row(number))
    with (folder.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "cli')
    assert [one.round for one in folder.keep_rows(2)] == [0, 1, 2]
    folder.append(row(3, train_loss=0.5))
    assert folder.rows() == [row(0), row(1), row(2), row(3, train_loss=0.5)]
    folder.keep_rows(-1)
    assert folder.rows() == []


def test_rows_of_a_run_that_wrote_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).rows() == []


def test_nan_and_infinity_become_null_which_json_has(folder: RunFolder) -> None:
    scores = Scores(1, {"accuracy": 0.0, "top3": 0.0, "loss": math.nan})
    folder.append(row(1, train_loss=math.inf, test=scores, diagnostics={"p.x": np.float64("nan")}))

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    text = (folder.path / "rounds.jsonl").read_text()
    values = json.loads(text, parse_constant=refuse)
    assert values["train_loss"] is None
    assert values["test"]["loss"] is None
    assert values["diagnostics"] == {"p.x": None}
    assert folder.rows()[0].train_loss is None


def test_numpy_numbers_are_written_as_numbers(folder: RunFolder) -> None:
    folder.append(row(1, clients=[np.int64(4)], diagnostics={"p.x": np.float32(0.5)}))
    found = folder.rows()[0]
    assert (found.clients, found.diagnostics) == ([4], {"p.x": 0.5})


# --- run.json ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "run.json cannot be read"),
        ("[1]", "run.json cannot be read"),
        (json.dumps({"format": FORMAT}), "run.json cannot be read"),
        (json.dumps({"format": FORMAT + 1}), "was written by another version of fedkeel"),
        (json.dumps({**to_json(record()), "model": "mlp"}), "run.json cannot be read"),
        (json.dumps({"name": "no format"}), "was written by another version of fedkeel"),
        ("\udcff", "run.json cannot be read"),
    ],
)
def test_a_damaged_run_is_said_in_one_sentence(folder: RunFolder, text: str, words: str) -> None:
    (folder.path / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(RunError, match=words) as found:
        folder.read_run()
    assert len(found.value.lines()) <= 4


def test_no_run_there(tmp_path: Path) -> None:
    (tmp_path / "try.toml").touch()
    (tmp_path / "both" / "fedavg-s0").mkdir(parents=True)
    (tmp_path / "both" / "fedavg-s0" / "run.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for path, do in {
        "empty": "do   give a folder that `fedkeel run` wrote",
        "missing/deeper": "There is no folder .*\n  do   check the path",
        "both/fedavg-s1": f"There is no folder .*\n  do   did you mean {tmp_path}/both/fedavg-s0",
        "both/xyz": f"do   runs in {tmp_path}/both: fedavg-s0",
        "try.toml": "got a file; expected .*\n  do   run it first",
        "both": f"got a folder of a run\n  do   give one: {tmp_path}/both/fedavg-s0",
    }.items():
        assert not RunFolder(tmp_path / path).exists()
        with pytest.raises(RunError) as caught:
            RunFolder(tmp_path / path).read_run()
        assert re.search(do, str(caught.value)), (path, str(caught.value))


def test_a_comparison_that_may_be_meant(tmp_path: Path) -> None:
    (tmp_path / "digits-compare").mkdir()
    (tmp_path / "digits-compare" / "comparison.json").write_text("{}")
    with pytest.raises(RunError, match=f"did you mean {tmp_path}/digits-compare?"):
        runs_of(tmp_path / "digits-compar")
    with pytest.raises(RunError, match="check the path"):
        RunFolder(tmp_path / "digits-compar").read_run()


# --- starting ------------------------------------------------------------------------------------


def test_a_start_that_was_killed_can_be_made_again(tmp_path: Path) -> None:
    made = RunFolder(tmp_path / "run")
    made.path.mkdir()
    write_text(made.path / "config.toml", "rounds = 3\n")
    made.check_free("rounds = 3\n")
    made.start(record(), "rounds = 3\n")
    assert made.read_run() == record()


@pytest.mark.parametrize("name", ["config.toml", "rounds.jsonl", "checkpoint", "report.html"])
def test_files_that_are_not_of_a_run_are_not_written_over(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine\n")
    with pytest.raises(RunError, match=name):
        RunFolder(tmp_path).check_free("rounds = 3\n")
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine\n"


def test_other_files_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    RunFolder(tmp_path).check_free("")
    RunFolder(tmp_path).start(record(), "")
    assert RunFolder(tmp_path).exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / "file" / "run")
    with pytest.raises(RunError, match="cannot be written to") as found:
        folder.start(record(), "")
    assert len(found.value.lines()) <= 4
    with pytest.raises(RunError, match="cannot be written to"), folder.alone():
        pass


def held(path: Path, pipe: Connection) -> None:
    with RunFolder(path).alone():
        pipe.send("held")
        pipe.recv()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Also before there is a run, and however often its files are replaced."""
    folder = RunFolder(tmp_path / "run")
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=held, args=(folder.path, theirs))
    other.start()
    assert ours.recv() == "held"
    for _ in range(2):
        with pytest.raises(RunError, match="another process"), folder.alone():
            pass
        folder.start(record(), "rounds = 3\n")
    ours.send("over")
    other.join()
    with folder.alone():
        assert folder.read_run() == record()


# --- writing aside and renaming ------------------------------------------------------------------


def test_a_kill_leaves_the_old_text_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text"
    write_text(file, "old")

    def kill(*_: object) -> None:
        raise Kill

    for moment in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, moment, kill)
            with pytest.raises(Kill):
                write_text(file, "new")
        assert file.read_text() == "old"
    write_text(file, "new")
    assert file.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


def test_a_text_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("replace"), rename(*names))[1])
    write_text(tmp_path / "text", "new")
    assert order == ["fsync", "replace"]


# --- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_is_read_back_and_older_ones_go(folder: RunFolder) -> None:
    assert folder.load() is None
    for number in (1, 2, 12):
        folder.save(checkpoint(number, float(number)))
    found = folder.load()
    assert found is not None
    assert (found.round, found.state) == (12, {"key": "k"})
    for name, array in checkpoint(12, 12.0).arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype
    assert [p.name for p in (folder.path / "checkpoint").iterdir()] == ["round-00000012"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_every_file_has_the_usual_mode(folder: RunFolder, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder.save(checkpoint(1))
        folder.save_model(checkpoint(1).arrays)
    finally:
        os.umask(before)
    for file in folder.path.rglob("*.safetensors"):
        assert file.stat().st_mode & 0o777 == 0o666 & ~umask, file


def test_nothing_is_pickled(folder: RunFolder) -> None:
    folder.save(checkpoint(1))
    files = [p for p in folder.path.rglob("*") if p.is_file()]
    names = ["arrays.safetensors", "config.toml", "run.json", "state.json"]
    assert sorted(p.name for p in files) == names
    assert all(b"\x80\x04" not in p.read_bytes()[:64] for p in files)


def test_a_checkpoint_of_the_same_round_is_never_taken_away(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a kill between taking it away and putting the new one there would lose the run."""
    folder.save(checkpoint(3, 3.0))

    def kill(*_: object, **__: object) -> None:
        raise Kill

    for module, name in (("shutil", "rmtree"), ("os", "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(f"fedkeel.records.checkpoint.{module}.{name}", kill)
            with contextlib.suppress(Kill):
                folder.save(checkpoint(3, 3.0))
        found = folder.load()
        assert found is not None
        assert found.round == 3


def test_what_a_kill_left_aside_is_not_taken_for_a_checkpoint(folder: RunFolder) -> None:
    folder.save(checkpoint(1, 1.0))
    aside = folder.path / "checkpoint" / f".round-00000002.{os.getpid()}"
    aside.mkdir()
    (aside / "arrays.safetensors").write_bytes(b"half")
    found = folder.load()
    assert found is not None
    assert found.round == 1
    folder.save(checkpoint(2, 2.0))
    assert [p.name for p in (folder.path / "checkpoint").iterdir()] == ["round-00000002"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("arrays.safetensors", b""),
        ("arrays.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      xxxx"),
        ("arrays.safetensors", None),
        ("state.json", b""),
        ("state.json", b"{}"),
        ("state.json", b"[]"),
        ("state.json", None),
    ],
)
def test_a_damaged_checkpoint(folder: RunFolder, file: str, content: bytes | None) -> None:
    folder.save(checkpoint(4))
    path = folder.path / "checkpoint" / "round-00000004" / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(RunError, match="round-00000004 cannot be read") as found:
        folder.load()
    assert len(found.value.lines()) <= 4


def test_a_cut_checkpoint(folder: RunFolder) -> None:
    folder.save(checkpoint(4))
    path = folder.path / "checkpoint" / "round-00000004" / "arrays.safetensors"
    whole = path.read_bytes()
    for size in range(0, len(whole), 11):
        path.write_bytes(whole[:size])
        with pytest.raises(RunError, match="cannot be read"):
            folder.load()


# --- a leaf --------------------------------------------------------------------------------------


def test_records_and_report_come_without_torch() -> None:
    """A report of a thousand runs needs the files, not the framework."""
    code = (
        "import sys, types\n"
        "package = types.ModuleType('fedkeel')\n"  # the package itself names everything
        f"package.__path__ = [{str(Path(__file__).parents[1] / 'src' / 'fedkeel')!r}]\n"
        "sys.modules['fedkeel'] = package\n"
        "import fedkeel.records.folder, fedkeel.report.page, fedkeel.report.tables\n"
        "import fedkeel.report.partition_table\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'torch')[:3])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"


def test_a_status_is_replaced_whole(folder: RunFolder) -> None:
    folder.write_run(replace(record(), status="finished"))
    assert folder.read_run().status == "finished"
    assert sorted(p.name for p in folder.path.iterdir()) == ["config.toml", "run.json"]


def test_two_threads_do_not_write_into_one_folder(tmp_path: Path) -> None:
    """The lock is that of the process, and to open the file once more and close it frees it."""
    with RunFolder(tmp_path).alone():
        for same in (tmp_path, tmp_path / "sub" / ".."):
            with (
                pytest.raises(RunError, match="is being written by another thread"),
                RunFolder(same).alone(),
            ):
                pass
        code = (
            "import sys; from pathlib import Path; from fedkeel.records.folder import RunFolder\n"
        )
        code += "with RunFolder(Path(sys.argv[1])).alone(): pass"
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True
        )
        assert "is being written by another process" in done.stderr
    with RunFolder(tmp_path).alone():
        pass
