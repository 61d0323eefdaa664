"""Whatever changes in a run's folder, the run goes on to the same bits or says what has changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedkeel.engine.prepared import Prepared
from fedkeel.errors import RunError
from fedkeel.records.checkpoint import (
    Checkpoint,
    checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from fedkeel.records.folder import RunFolder
from fedkeel.report.alerts import problems
from fedkeel.report.runs import load_runs
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from toys import prepared, same


class Kill(BaseException):
    """Ends a run as a kill would."""


class KillAfter(Callback):
    def __init__(self, round: int) -> None:
        self._round = round

    def on_round_end(self, row: object, model: GlobalModel) -> None:
        if row.round == self._round:
            raise Kill


def killed(out: Path, method: str = "scaffold", **more: object) -> Prepared:
    """A run with a checkpoint of round 2, killed after the row of round 3."""
    ready = prepared(method, rounds=4, per_round=6, **more)
    with pytest.raises(Kill):
        start(ready, out, callbacks=[KillAfter(3)])
    return ready


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def cut(data: bytes) -> bytes:
    return b"".join(data.splitlines(keepends=True)[:3])


def refused_or_same(ready: Prepared, out: Path, whole: Result) -> bool:
    """Whether a run is refused in words; one that goes on has to have the right bits."""
    try:
        result = start(ready, out, resume=True)
    except RunError:
        return True
    assert same(whole, result)
    return False


def fields(value: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The paths of all numbers and texts in a JSON value."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from fields(item, (*path, key))
    else:
        yield path


def with_other(text: str, path: tuple[object, ...]) -> str:
    values = json.loads(text)
    holder = values
    for key in path[:-1]:
        holder = holder[key]
    before = holder[path[-1]]
    number = isinstance(before, int | float)
    holder[path[-1]] = before + 1 if number else "finished" if path == ("status",) else "other"
    return json.dumps(values)


def test_a_flipped_byte_in_any_file_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    whole = start(prepared("scaffold", rounds=4, per_round=6))
    ready = killed(tmp_path / "good")
    at = RunFolder(tmp_path / "good").load().round
    names = ["run.json", "rounds.jsonl", f"checkpoint/round-{at:08d}/arrays.safetensors"]
    random, refused = np.random.default_rng(0), 0
    for name in names:
        good = (tmp_path / "good" / name).read_bytes()
        for place in random.integers(0, len(good), 3):
            out = tmp_path / "run"
            shutil.copytree(tmp_path / "good", out)
            (out / name).write_bytes(flipped(good, int(place), int(place) % 8))
            refused += refused_or_same(ready, out, whole)
            shutil.rmtree(out)
    assert refused >= 3  # all those of the checkpoint


ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
PLAIN = st.one_of(
    st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text("aé ")
)


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from(["params/w", "clients/done", "b"]), ARRAYS, min_size=1),
    st.dictionaries(st.sampled_from(["note", "spent"]), PLAIN),
    st.data(),
)
def test_a_checkpoint_is_read_as_it_was_written_or_refused(
    arrays: dict[str, np.ndarray], state: dict[str, object], data: st.DataObject
) -> None:
    """Whichever bit is flipped, and wherever a file is cut or goes on."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_checkpoint(root, Checkpoint(3, arrays, state, "rows"), root / "rounds.jsonl")
        [folder] = checkpoints(root)
        read = read_checkpoint(folder)
        assert (read.round, read.state, read.rows) == (3, state, "rows")
        assert read.arrays.keys() == arrays.keys()
        for key, array in arrays.items():
            assert (read.arrays[key].dtype, read.arrays[key].shape) == (array.dtype, array.shape)
            assert read.arrays[key].tobytes() == array.tobytes()
        file = folder / data.draw(st.sampled_from(["arrays.safetensors", "state.json"]))
        good = file.read_bytes()
        place = data.draw(st.integers(0, len(good) - 1))
        more = data.draw(st.binary(min_size=1, max_size=9))
        for other in (flipped(good, place, place % 8), good[:place], good + more):
            file.write_bytes(other)
            try:
                again = read_checkpoint(folder)
            except ValueError:
                continue
            # the seal has another name: the file is taken for one of a version that had none
            assert file.name == "state.json"
            assert (again.round, again.rows) == (3, "rows")
            assert {key: again.state[key] for key in state} == state


def test_each_field_of_a_checkpoint_and_a_record_is_protected(tmp_path: Path) -> None:
    ready = killed(tmp_path / "good")
    at = RunFolder(tmp_path / "good").load().round
    for name in (f"checkpoint/round-{at:08d}/state.json", "run.json"):
        good = (tmp_path / "good" / name).read_text()
        for path in fields(json.loads(good)):
            (tmp_path / "good" / name).write_text(with_other(good, path))
            with pytest.raises(RunError):
                start(ready, tmp_path / "good", resume=True)
        (tmp_path / "good" / name).write_text(good)
    whole = start(prepared("scaffold", rounds=4, per_round=6))
    assert same(whole, start(ready, tmp_path / "good", resume=True))


def test_a_changed_score_is_refused(tmp_path: Path) -> None:
    """It would be another best model, and another end of a run that stops early."""
    ready = killed(tmp_path / "run")
    file = tmp_path / "run" / "rounds.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], with_other(lines[1], ("test", "loss")), *lines[2:], ""]))
    with pytest.raises(RunError, match=r"rounds\.jsonl has changed since it was written"):
        start(ready, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("method", "file", "kind", "damage"),
    [
        ("scaffold", "clients", "sequential", lambda byte: byte ^ 1),
        ("scaffold", "clients", "workers", lambda byte: 0),
        ("fedvarp", "table", "sequential", lambda byte: byte ^ 1),
        ("fedvarp", "table", "sequential", lambda byte: 0),
    ],
)
def test_a_damaged_row_of_state_is_refused_when_it_is_read(
    tmp_path: Path, method: str, file: str, kind: str, damage: Callable[[int], int]
) -> None:
    ready = killed(tmp_path / "run", method, state="disk", kind=kind, workers=2)
    path = tmp_path / "run" / "state" / f"{file}.bin"
    path.write_bytes(bytes(map(damage, path.read_bytes())))
    with pytest.raises(RunError, match="state of the clients is damaged") as found:
        start(ready, tmp_path / "run", resume=True)
    assert f"{file}.bin: the row of slot" in str(found.value.got)


def test_an_older_checkpoint_is_taken_and_that_is_said(tmp_path: Path) -> None:
    """Two are there where a kill came before the older one was removed."""
    out, aside = tmp_path / "run", tmp_path / "aside"

    class Copy(KillAfter):
        def on_round_end(self, row: object, model: GlobalModel) -> None:
            if row.round == 2:
                shutil.copytree(out / "checkpoint", aside)
            super().on_round_end(row, model)

    ready = prepared("scaffold", rounds=4, per_round=6)
    with pytest.raises(Kill):
        start(ready, out, callbacks=[Copy(3)])
    (aside / "round-00000001").rename(out / "checkpoint" / "round-00000001")
    newer = out / "checkpoint" / "round-00000002" / "arrays.safetensors"
    newer.write_bytes(flipped(newer.read_bytes(), -9))
    result = start(ready, out, resume=True)
    assert same(start(prepared("scaffold", rounds=4, per_round=6)), result)
    [warning] = [text for text in result.record.warnings if "cannot be read" in text]
    assert "round-00000002 cannot be read (arrays.safetensors has changed" in warning
    assert warning in RunFolder(out).read_run().warnings
    assert [p.name for p in (out / "checkpoint").iterdir()] == ["round-00000004"]


def without_digests(out: Path) -> None:
    """Make a folder what an earlier version would have left."""
    for file in (out / "run.json", *out.glob("checkpoint/*/state.json")):
        values = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in values.items() if "digest" not in k}))


def test_a_folder_without_digests_is_read(tmp_path: Path) -> None:
    whole = start(prepared("scaffold", rounds=4, per_round=6))
    ready = killed(tmp_path / "run")
    without_digests(tmp_path / "run")
    assert same(whole, start(ready, tmp_path / "run", resume=True))
    without_digests(tmp_path / "run")
    assert same(whole, start(ready, tmp_path / "run"))
    [method] = load_runs([tmp_path / "run"])
    assert method.runs[0].changes == ()


# --- while a run writes ---------------------------------------------------------------------------


class At(Callback):
    """Does something after round 2."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def on_round_end(self, row: object, model: GlobalModel) -> None:
        if row.round == 2:
            self._act()


@pytest.mark.parametrize("rounds", [2, 4])
@pytest.mark.parametrize(
    "damage", [lambda data: None, lambda data: flipped(data, 9), lambda data: data[:-40]]
)
def test_rows_that_are_deleted_or_changed_while_a_run_writes_are_written_again(
    tmp_path: Path, rounds: int, damage: Callable[[bytes], bytes | None]
) -> None:
    file = tmp_path / "run" / "rounds.jsonl"

    def act() -> None:
        data = damage(file.read_bytes())
        file.unlink() if data is None else file.write_bytes(data)

    result = start(prepared(rounds=rounds), tmp_path / "run", callbacks=[At(act)])
    folder = RunFolder(tmp_path / "run")
    assert [row.round for row in folder.rows()] == list(range(rounds + 1))
    assert same(start(prepared(rounds=rounds)), result)
    assert sum("rounds.jsonl was deleted" in text for text in result.record.warnings) == 1
    assert folder.read_run() == result.record
    assert folder.changes(result.record, folder.rows()) == []


def test_rows_that_are_deleted_before_an_interrupt_are_saved_with_the_checkpoint(
    tmp_path: Path,
) -> None:
    def act() -> None:
        (tmp_path / "run" / "rounds.jsonl").unlink()
        os.kill(os.getpid(), signal.SIGTERM)

    ready = prepared(rounds=4)
    assert start(ready, tmp_path / "run", callbacks=[At(act)]).record.status == "interrupted"
    assert same(start(ready), start(ready, tmp_path / "run", resume=True))


def test_a_run_does_not_write_into_a_folder_that_has_taken_the_place_of_its_own(
    tmp_path: Path,
) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    start(prepared(rounds=3), other)
    before = {p: p.read_bytes() for p in other.rglob("*") if p.is_file()}

    def act() -> None:
        out.rename(tmp_path / "moved")
        other.rename(out)

    with pytest.raises(RunError, match="was deleted or replaced while the run wrote into it"):
        start(prepared(rounds=4), out, callbacks=[At(act)])
    after = {other / p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert after == before


# --- a finished run -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("rounds.jsonl", cut, "rounds.jsonl holds 3 of the rounds 0 to 3"),
        ("rounds.jsonl", lambda data: data.replace(b"0.", b"1.", 1), "rounds.jsonl has changed"),
        ("model.safetensors", lambda data: flipped(data, -1), "model.safetensors has changed"),
        ("model-best.safetensors", lambda data: data[:-4], "model-best.safetensors has changed"),
        ("run.json", lambda data: data.replace(b'"seed": 0', b'"seed": 5'), "run.json has changed"),
    ],
)
def test_the_report_says_what_has_changed_since_a_run_ended(
    tmp_path: Path, file: str, damage: Callable[[bytes], bytes], words: str
) -> None:
    result = start(prepared(), tmp_path / "run")
    assert problems(load_runs([tmp_path / "run"])) == []
    path = tmp_path / "run" / file
    if file.startswith("model-best"):
        start(prepared(), tmp_path / "run").best_state_dict()
    path.write_bytes(damage(path.read_bytes()))
    assert any(words in sentence for sentence in problems(load_runs([tmp_path / "run"])))
    if file == "model-best.safetensors":
        again = start(prepared(), tmp_path / "run")
        with pytest.raises(RunError, match=f"{file} has changed"):
            again.best_state_dict()
    elif file != "model.safetensors":
        with pytest.raises(RunError):
            start(prepared(), tmp_path / "run")
    assert result.record.digests.keys() == {
        "config.toml",
        "rounds.jsonl",
        "model.safetensors",
        "model-best.safetensors",
        "pictures.safetensors",
    }


@pytest.mark.parametrize("has_digests", [True, False])
def test_a_run_whose_settings_were_deleted_stays_in_its_row(
    tmp_path: Path, has_digests: bool
) -> None:
    """It was taken for a method with other settings, and nothing said why."""
    folders = [tmp_path / f"seed-{seed}" for seed in range(3)]
    for seed, folder in enumerate(folders):
        start(prepared(seed=seed, rounds=1), folder)
    (folders[0] / "config.toml").unlink()
    (folders[2] / "model.safetensors").unlink()
    (folders[1] / "config.toml").write_text(
        (folders[1] / "config.toml").read_text(encoding="utf-8") + "# seen\n", encoding="utf-8"
    )
    if not has_digests:
        for folder in folders[:2]:
            without_digests(folder)
    (method,) = load_runs(folders)
    assert [run.record.seed for run in method.runs] == [0, 1, 2]
    told = [words.partition(": ")[2] for words in problems([method])]
    assert told[0].startswith("config.toml has been deleted since the run ended. Take")
    assert told[-1].startswith("model.safetensors has been deleted since the run ended. Take")
    changed = [words for words in told if words.startswith("config.toml has changed since")]
    assert len(changed) == has_digests


def test_the_report_says_that_a_run_without_digests_lacks_rounds(tmp_path: Path) -> None:
    start(prepared(), tmp_path / "run")
    without_digests(tmp_path / "run")
    file = tmp_path / "run" / "rounds.jsonl"
    file.write_bytes(cut(file.read_bytes()))
    [sentence] = problems(load_runs([tmp_path / "run"]))
    assert "rounds.jsonl holds 3 of the rounds 0 to 3" in sentence
