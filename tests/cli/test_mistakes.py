"""A user's mistake: exit code 2, at most four lines that say what to do, and nothing is written."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commands import Done, call, shell
from each import each
from fedkeel.records.folder import RunFolder

MEMORY = ("-s", "engine.state=memory")
MODELS = """\
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 2)

    def forward(self, x):
        return self.fc(x)

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(self.norm(x))

class Raises(Two):
    def forward(self, x):
        raise RuntimeError("no\\nand no again")

class NotANetwork:
    pass

def nothing():
    return None
"""

OWN = ("-s", "model.args={}", "-s")

MISTAKES = {
    # the file
    "no file": (("run",), "ConfigError", "neither"),
    "missing file": (("run", "missing.toml"), "ConfigError", "no such experiment"),
    "folder without a run": (("run", "."), "ConfigError", "no such experiment"),
    "data in place of an experiment": (
        ("run", "patients.CSV"),
        "ConfigError",
        "fedkeel new NAME --data patients.CSV --label COLUMN",
    ),
    "a module in place of an experiment": (("run", "net.py"), "ConfigError", "is a TOML file"),
    "broken toml": (("run", "broken.toml"), "ConfigError", "not valid TOML"),
    "no text": (("run", "bytes.toml"), "ConfigError", "cannot be read"),
    "file and preset": (("run", "toy.toml", "--preset", "digits"), "ConfigError", "both"),
    "unknown preset": (("run", "--preset", "digit"), "ConfigError", "digits"),
    # settings
    "unknown key": (("run", "toy.toml", "-s", "local.lrr=1"), "ConfigError", "'lr'"),
    "unknown table": (("run", "toy.toml", "-s", "locale.lr=1"), "ConfigError", "local"),
    "synonym": (("run", "toy.toml", "-s", "local.learning_rate=1"), "ConfigError", "'lr'"),
    "wrong type": (("run", "toy.toml", "-s", "local.lr='fast'"), "ConfigError", "'local.lr'"),
    "wrong number": (("run", "toy.toml", "-s", "rounds=2.5"), "ConfigError", "'rounds'"),
    "out of range": (("run", "toy.toml", "-s", "local.lr=-1"), "ConfigError", "greater than 0"),
    "unknown word": (("run", "toy.toml", "-s", "engine.kind=gpu"), "ConfigError", "sequential"),
    "both of two": (("run", "toy.toml", "-s", "local.steps=3"), "ConfigError", "either"),
    "no value": (("run", "toy.toml", "-s", "local.lr"), "ConfigError", "key=value"),
    "missing key": (("run", "empty.toml"), "ConfigError", "is missing"),
    "name that leaves": (("run", "toy.toml", "-s", "name=../x"), "ConfigError", "'name'"),
    # data
    "unknown set": (("run", "toy.toml", "-s", "data.source=minst"), "DataError", "mnist"),
    "missing data": (("run", "toy.toml", "-s", "data.source=x.npz"), "DataError", "x.npz"),
    "no arrays": (("run", "toy.toml", "-s", "data.source=text.npz"), "DataError", "text.npz"),
    "nan": (("run", "toy.toml", "-s", "data.source=nan.npz"), "DataError", "row 5"),
    "label out of range": (("run", "toy.toml", "-s", "data.test=nine.npz"), "DataError", "9"),
    "label of no class": (("run", "toy.toml", "-s", "data.source=half.npz"), "DataError", "whole"),
    "no labels": (("run", "toy.toml", "-s", "data.label=target"), "DataError", "target"),
    "empty client": (("run", "empty_client.toml"), "DataError", "sizes"),
    "too many clients": (("run", "toy.toml", "-s", "partition.clients=999"), "DataError", "999"),
    "size too large": (("run", "toy.toml", "-s", "partition.min_size=99"), "DataError", "min_size"),
    # model
    "output too small": (
        ("run", "toy.toml", *OWN, "model.name=mistakes:Two"),
        "ModelError",
        "2 outputs for 4 classes",
    ),
    "forward fails": (("run", "toy.toml", *OWN, "model.name=mistakes:Raises"), "ModelError", "no"),
    "no class": (("run", "toy.toml", *OWN, "model.name=mistakes:Too"), "ModelError", "'Two'"),
    "no network": (("run", "toy.toml", *OWN, "model.name=mistakes:NotANetwork"), "ModelError", ""),
    "nothing made": (("run", "toy.toml", *OWN, "model.name=mistakes:nothing"), "ModelError", ""),
    "no module": (("run", "toy.toml", *OWN, "model.name=not_there:Net"), "ModelError", "not_there"),
    "broken module": (("run", "toy.toml", *OWN, "model.name=syntax:Net"), "ModelError", "Syntax"),
    "unknown model": (("run", "toy.toml", "-s", "model.name=lenet"), "ModelError", "lenet5"),
    "unknown argument": (("run", "toy.toml", "-s", "model.args.hiden=[3]"), "ModelError", "hidden"),
    "no such head": (("run", "toy.toml", "-s", "model.head=fc9"), "ModelError", "fc2"),
    "buffers": (("run", "toy.toml", *OWN, "model.name=mistakes:Norm"), "ModelError", "average"),
    # who takes part
    "nobody": (
        ("run", "toy.toml", "-s", "cohort={participation=0.01}"),
        "ConfigError",
        "selects nobody",
    ),
    "more than there are": (("run", "toy.toml", "-s", "cohort.clients=99"), "ConfigError", "1..12"),
    "no memory": (
        ("run", "toy.toml", *MEMORY, "-s", "engine.memory_gb=1e-7", "-s", "method=scaffold"),
        "RunError",
        "368 bytes x 12 clients",
    ),
    # method
    "unknown method": (("run", "toy.toml", "-s", "method=fedpox"), "CompositionError", "fedprox"),
    "illegal": (("run", "toy.toml", "-s", "method=momentum+gradma.s"), "CompositionError", "drop"),
    "breaks": (("run", "toy.toml", "-s", "method=fednova+fedreg"), "CompositionError", "breaks"),
    "unreadable": (("run", "toy.toml", "-s", "method=fedprox(mu"), "CompositionError", "character"),
    "no own method": (
        ("run", "toy.toml", "-s", "method=nowhere:Slow"),
        "CompositionError",
        "run where",
    ),
    "no part": (
        ("run", "toy.toml", "-s", "method=mistakes:Two"),
        "CompositionError",
        "another class",
    ),
    "no part there": (("methods", "mistakes:Slow"), "CompositionError", "write a part there"),
    "no hyper-parameter": (
        ("run", "toy.toml", "-s", "method=fedprox(nu=1)"),
        "CompositionError",
        "'mu'",
    ),
    "hyper-parameter": (
        ("run", "toy.toml", "-s", "method=fedprox(mu=-1)"),
        "CompositionError",
        ">=",
    ),
    # other commands
    "nothing to compare": (("compare", "toy.toml"), "ConfigError", "--methods"),
    "illegal among others": (
        ("compare", "toy.toml", "--methods", "fedavg, momentum+gradma.s"),
        "CompositionError",
        "drop",
    ),
    "unknown expression": (("methods", "fedpox"), "CompositionError", "fedprox"),
    "check": (("check", "toy.toml", "-s", "local.lrr=1"), "ConfigError", "'lr'"),
    "inspect": (("data", "inspect", "missing.toml"), "ConfigError", "missing.toml"),
    "get": (("data", "get", "minst"), "DataError", "mnist"),
    "report of nothing": (("report", "missing"), "RunError", "There is no folder missing"),
    # places to write
    "a file in the way": (("run", "toy.toml", "--out", "text.npz"), "RunError", "text.npz"),
    "a file in the path": (("run", "toy.toml", "--out", "text.npz/x"), "RunError", "text.npz"),
    "others' files": (("run", "toy.toml", "--out", "others"), "RunError", "report.html"),
    "a file for a folder": (
        ("compare", "toy.toml", "--methods", "fedavg", "--out", "text.npz"),
        "RunError",
        "text.npz",
    ),
}


@pytest.fixture
def full(folder: Path) -> Path:
    """The folder, with all that the mistakes need."""
    ones, two = np.ones((20, 6), np.float32), np.arange(20) % 2
    np.savez(
        folder / "nan.npz", x=np.where(np.arange(120).reshape(20, 6) == 33, np.nan, 1.0), y=two
    )
    np.savez(folder / "nine.npz", x=ones, y=two * 9)
    np.savez(folder / "half.npz", x=ones, y=two / 2)
    (folder / "text.npz").write_text("no arrays")
    (folder / "broken.toml").write_text("rounds = [1,\n[data]\n")
    (folder / "bytes.toml").write_bytes(b'name = "\xff\xfe"')
    (folder / "empty.toml").write_text("")
    text = (folder / "toy.toml").read_text()
    given = 'kind = "iid"\nclients = 3\nsizes = [100, 0, 100]\n\n[model]'
    start, end = text.index('kind = "dirichlet"'), text.index("[model]")
    (folder / "empty_client.toml").write_text(text[:start] + given + text[end + len("[model]") :])
    (folder / "mistakes.py").write_text(MODELS)
    (folder / "syntax.py").write_text("def f(:\n")
    (folder / "others").mkdir()
    (folder / "others" / "report.html").write_text("mine")
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
        if "__pycache__" not in p.parts
    }


def is_a_mistake(done: Done, kind: str, words: str) -> None:
    """Exit code 2; one to four lines, the first of them with the kind; no traceback."""
    lines = done.message.splitlines()
    assert done.code == 2, done.message
    assert done.out == ""
    assert 1 <= len(lines) <= 4, done.message
    assert lines[0].startswith(f"{kind}: ")
    assert words in done.message
    assert "Traceback" not in done.message


@each("case", MISTAKES)
def test_a_mistake(full: Path, case: str) -> None:
    words, kind, expected = MISTAKES[case]
    before = contents(full)
    is_a_mistake(call(*words), kind, expected)
    assert contents(full) == before


@pytest.mark.parametrize("case", ["unknown key", "output too small", "label out of range"])
def test_as_json_there_is_no_document(full: Path, case: str) -> None:
    words, kind, expected = MISTAKES[case]
    is_a_mistake(call(*words, "--json"), kind, expected)


def test_a_mistake_in_a_shell(full: Path) -> None:
    before = contents(full)
    is_a_mistake(shell("run", "toy.toml", "-s", "local.lrr=1", folder=full), "ConfigError", "'lr'")
    assert contents(full) == before


# --- folders of other runs ------------------------------------------------------------------------


def test_the_folder_of_another_run(folder: Path) -> None:
    assert call("run", "toy.toml", "--out", "out", "--quiet").code == 0
    before = contents(folder)
    for change in ("local.lr=0.2", "seed=1", "method=fedgh", "data.test_fraction=0.5"):
        for more in ((), ("--resume",)):
            done = call("run", "toy.toml", "--out", "out", "-s", change, *more)
            is_a_mistake(done, "RunError", "holds another run")
    is_a_mistake(
        call("compare", "toy.toml", "--methods", "fedavg", "--out", "out"),
        "RunError",
        "holds a run, not a comparison",
    )
    assert contents(folder) == before


def test_the_folder_of_an_unfinished_run(folder: Path) -> None:
    assert call("run", "toy.toml", "--out", "out", "--quiet").code == 0
    run = RunFolder(folder / "out")
    run.write_run(replace(run.read_run(), status="running"))
    before = contents(folder)
    is_a_mistake(call("run", "toy.toml", "--out", "out"), "RunError", "--resume")
    is_a_mistake(call("run", "out"), "RunError", "--resume")
    assert contents(folder) == before
    assert call("run", "out", "--resume", "--quiet").code == 0


@pytest.mark.parametrize("name", ["run.json", "rounds.jsonl", "checkpoint"])
def test_a_damaged_run(folder: Path, name: str) -> None:
    assert call("run", "toy.toml", "--out", "out", "--quiet").code == 0
    for file in [folder / "out" / name, *(folder / "out" / name).rglob("*")]:
        if file.is_file():
            lines = file.read_bytes().splitlines(keepends=True)
            file.write_bytes(b"{{\n" + b"".join(lines[1:]))
    before = contents(folder)
    is_a_mistake(call("run", "out", "--resume"), "RunError", "")
    assert contents(folder) == before


def test_a_report_of_a_damaged_run(folder: Path) -> None:
    assert call("run", "toy.toml", "--out", "out", "--quiet").code == 0
    (folder / "out" / "run.json").write_text('{"format": 99}')
    is_a_mistake(call("report", "out"), "RunError", "another version")


# --- words that the command does not have ---------------------------------------------------------


@each(
    "words",
    [
        ("nope",),
        ("run", "--nope"),
        ("data", "nope"),
        ("report",),
        ("data", "get"),
        ("compare", "toy.toml", "--seeds", "0"),
        ("compare", "toy.toml", "--seeds", "x"),
        ("report", ".", "--target", "x"),
    ],
)
def test_a_word_that_there_is_not(folder: Path, words: tuple[str, ...]) -> None:
    done = call(*words)
    assert done.code == 2
    assert done.out == ""
    assert 1 <= len(done.message.splitlines()) <= 4
    assert "Usage: fedkeel" in done.message


@pytest.mark.parametrize("words", [("rum",), ("data", "lst")])
def test_the_nearest_command_is_named_once(words: tuple[str, ...]) -> None:
    done = call(*words)
    assert done.code == 2
    assert done.message.count("did you mean") == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [("fedavgg", "fedavg"), ("Fedpox", "fedprox"), ("scafold", "scaffold"), ("prox", "fedprox")],
)
def test_a_misspelt_method_is_named(name: str, meant: str) -> None:
    done = call("methods", name)
    assert done.code == 2
    assert f"did you mean '{meant}'?" in done.message


@pytest.mark.parametrize("name", ["hermes", "zeno", "auror"])
def test_a_method_that_is_not_there_brings_up_no_other(name: str) -> None:
    done = call("methods", name)
    assert done.code == 2
    assert "did you mean" not in done.message
    assert "known: addition, afl, " in done.message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "--seeds", "1", "--seeds=2"), "--seeds is given twice"),
        (("run", "--out", "a", "--out", "b"), "--out is given twice"),
        (("run", "-q", "--quiet"), "--quiet is given twice"),
        (
            ("compare", "a.toml", "b.toml"),
            "a.toml is another one. Give each by itself; `f",
        ),
        (("check", "a.toml"), "a.toml is another one. Give each by itself."),
        (("flower", "node", "--policy", "a", "--policy", "b"), "--policy is given twice"),
        (("run", "-s", "rounds=1", "--set", "rounds=2"), "'rounds' is given twice"),
        (
            ("run", "-s", "diagnose.kinds=cka", "--diagnose", "conflict"),
            "'diagnose.kinds' is given twice",
        ),
        (("check", "-s", 'task.metrics=["auroc(bins=5, bins=6)"]'), "bins is given twice"),
    ],
)
def test_what_is_given_twice_is_refused(folder: Path, words: tuple[str, ...], said: str) -> None:
    file = () if words[0] == "flower" else ("toy.toml",)
    done = call(words[0], *file, *words[1:])
    assert done.code == 2
    assert said in " ".join(done.message.split())


def test_an_empty_list_is_no_list(folder: Path) -> None:
    done = call("run", "toy.toml", "--diagnose", "", "-s", "rounds=1", "--out", "run")
    assert done.code == 0, done.message


@pytest.mark.parametrize(
    "words", [("--diagnose", "conflict", "--diagnose=drift"), ("--diagnose", "conflict,drift")]
)
def test_lists_are_repeated_or_have_commas(folder: Path, words: tuple[str, ...]) -> None:
    done = call("run", "toy.toml", *words, "-s", "rounds=1", "--out", "run")
    assert done.code == 0, done.message
    written = tomllib.loads((folder / "run" / "config.toml").read_text(encoding="utf-8"))
    assert written["diagnose"]["kinds"] == ["conflict", "drift"]
