"""Methods of one's own: found by import path or entry point, and every way to get it wrong."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import fedkeel as fk
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import CompositionError
from fedkeel.method.docs.cite import keys
from fedkeel.method.grammar import parse, read_terms
from fedkeel.method.part import Part
from fedkeel.method.part_digests import user_part_digests
from fedkeel.method.parts import index
from fedkeel.runner.prepare import prepare
from toys import deadline, forget

PARTS = '''
from dataclasses import dataclass
from typing import ClassVar

from fedkeel.method.roles import (
    LossTerm, Part, Penalty, Preparation, Stage, UpdateTransform, param
)
from fedkeel.tree import scale


@dataclass(frozen=True)
class Slow(UpdateTransform):
    """Makes updates smaller."""

    rate: float = param(0.5, gt=0.0, le=1.0)
    name: ClassVar[str] = "slow"
    paper: ClassVar[str] = ""
    update_stage: ClassVar[Stage] = Stage.LIMIT

    def transform_update(self, delta, round):
        return scale(delta, self.rate)


@dataclass(frozen=True)
class Slower(Slow):
    """Makes updates smaller once more."""

    name: ClassVar[str] = "pair.slower"
    paper: ClassVar[str] = "li2020fedprox"


class Thawed(Slow):
    pass


@dataclass(frozen=True)
class Vague(UpdateTransform):
    def transform_update(self, delta, round):
        return delta


@dataclass(frozen=True)
class Half(Penalty):
    name: ClassVar[str] = "half"
    paper: ClassVar[str] = ""


@dataclass(frozen=True)
class Idle(Part):
    name: ClassVar[str] = "idle"
    paper: ClassVar[str] = ""


@dataclass(frozen=True)
class Bare(UpdateTransform):
    extra: float
    name: ClassVar[str] = "bare"
    paper: ClassVar[str] = ""
    update_stage: ClassVar[Stage] = Stage.LIMIT

    def transform_update(self, delta, round):
        return delta


@dataclass(frozen=True)
class FedProx(Slow):
    name: ClassVar[str] = "fedprox"


@dataclass(frozen=True)
class Local(Slow):
    name: ClassVar[str] = "gcfed.local"


@dataclass(frozen=True)
class Survey(Slow):
    name: ClassVar[str] = "survey"


@dataclass(frozen=True)
class Cites(Slow):
    name: ClassVar[str] = "cites"
    paper: ClassVar[str] = "nobody2030"


@dataclass(frozen=True)
class Shaped(Slow):
    shape: tuple[float, ...] = (1.0,)
    name: ClassVar[str] = "shaped"


@dataclass(frozen=True)
class Unread(Slow):
    other: "NoSuchType" = None
    name: ClassVar[str] = "unread"


@dataclass(frozen=True)
class Short(Slow):
    name: ClassVar[str] = "short"

    def transform_update(self, delta):
        return delta


@dataclass(frozen=True)
class Defaults(Slow):
    """Takes more than it is given, by defaults."""

    name: ClassVar[str] = "defaults"

    def transform_update(self, delta, round, *more, factor=0.5):
        return delta


@dataclass(frozen=True)
class Choosy(Slow):
    mode: str | None = None
    name: ClassVar[str] = "choosy"

    def __post_init__(self):
        if self.mode == "fast":
            raise ValueError("no such mode")


@dataclass(frozen=True)
class Ready(Preparation, LossTerm):
    name: ClassVar[str] = "ready"
    paper: ClassVar[str] = ""
    pairing: ClassVar[str] = "example"

    def prepare(self, examples, step):
        return {"n": examples.y}

    def loss_term(self, output, params, step):
        return step.prepared["n"] * output.logits.mean(dim=1)


pair = (Slow, Slower)
twins = (Slow, Slow)
empty = ()
made = Slow()
'''


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with deadline(60):
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder with `mine.py`; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "mine.py").write_text(PARTS)
    yield tmp_path
    forget(tmp_path)


# --- reading ---------------------------------------------------------------------------------


def test_an_import_path_is_a_term() -> None:
    terms = read_terms("fedprox + my.lab.parts:Slow (rate=0.3)+mine:pair.slow")
    assert [(t.name, t.part, t.values, t.at) for t in terms] == [
        ("fedprox", "", {}, 0),
        ("my.lab.parts:Slow", "", {"rate": 0.3}, 10),
        ("mine:pair", "slow", {}, 39),
    ]


@pytest.mark.parametrize(
    ("text", "at", "got", "expected"),
    [
        ("mine:", 6, "the end", "the name of a part in mine"),
        ("a.b:+c", 5, "'+'", "the name of a part in a.b"),
        (":Slow", 1, "':'", "the name of a method"),
        ("folder/mine:Slow", 7, "'/'", "'+' or the end"),
    ],
)
def test_where_a_path_cannot_be_read(text: str, at: int, got: str, expected: str) -> None:
    with pytest.raises(CompositionError) as caught:
        parse(text)
    assert caught.value.what == f"'{text}' cannot be read at character {at}."
    assert (caught.value.got, caught.value.expected) == (got, expected)


def test_found_from_the_current_folder(here: Path) -> None:
    plan = parse("fedprox + mine:Slow(rate=0.25)")
    assert [part.name for part in plan.parts] == ["fedprox", "slow"]
    assert plan.parts[1].rate == 0.25
    assert plan.expression == "fedprox+mine:Slow(rate=0.25)"
    assert parse(plan.expression).parts == plan.parts


def test_found_in_a_package(here: Path) -> None:
    (here / "lab").mkdir()
    (here / "lab" / "__init__.py").write_text("from lab.parts import Slow\n")
    (here / "lab" / "parts.py").write_text(PARTS)
    plan = parse("lab:Slow")
    assert plan.expression == "lab.parts:Slow"
    assert parse(plan.expression).parts == plan.parts


def test_several_parts_are_one_method(here: Path) -> None:
    plan = parse("mine:pair(rate=0.25)")
    assert plan.expression == "mine:Slow(rate=0.25)+mine:Slower(rate=0.25)"
    assert parse("mine:pair.slower").expression == "mine:Slower"
    assert keys(plan) == ["li2020fedprox"]
    assert keys(parse("mine:Slow")) == []
    assert fk.cite("mine:Slow+fedprox").count("@") == 1


def test_a_part_of_fedkeel_by_its_path_is_that_part() -> None:
    plan = parse("fedkeel.method.parts.fedprox:FedProx(mu=0.5)")
    assert plan.expression == "fedprox(mu=0.5)"
    assert user_part_digests(plan.parts) == {}


# --- entry points ----------------------------------------------------------------------------


def declare(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Let installed packages declare methods; several paths of a name are told apart by a space."""
    found = [
        metadata.EntryPoint(name, path, index.ENTRY_POINTS)
        for name, paths in points.items()
        for path in paths.split()
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: found if "fedkeel" in group else [])
    index.installed_methods.cache_clear()


@pytest.fixture
def _undeclared() -> Iterator[None]:
    yield
    index.installed_methods.cache_clear()


@pytest.mark.usefixtures("_undeclared")
def test_found_by_entry_point(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, snail="mine:Slow", both="mine:pair")
    plan = parse("fedprox+snail(rate=0.25)")
    assert plan.expression == "fedprox+mine:Slow(rate=0.25)"
    assert parse("both.slower").expression == "mine:Slower"
    with pytest.raises(CompositionError, match="did you mean 'snail'"):
        parse("snaill")
    with pytest.raises(CompositionError, match="snail has no hyper-parameter 'rat'"):
        parse("snail(rat=1)")


@pytest.mark.usefixtures("_undeclared")
def test_names_that_clash(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, fedprox="mine:Slow", fedavgm="mine:Slow", two="a:B c:D", same="a:B a:B")
    for name, got in {
        "fedprox": "fedkeel's own and mine:Slow",
        "fedavgm": "fedkeel's own and mine:Slow",
        "two": "a:B and c:D",
    }.items():
        with pytest.raises(
            CompositionError, match=f"Several methods are called '{name}'"
        ) as caught:
            parse(name)
        assert caught.value.got == got
        assert len(str(caught.value).splitlines()) <= 4
    assert parse("momentum").expression == "momentum"
    with pytest.raises(CompositionError, match="no module 'a'"):
        parse("same")


def test_the_real_entry_points_can_be_read() -> None:
    index.installed_methods.cache_clear()
    assert isinstance(index.installed_methods(), dict)


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "said"),
    [
        ("mine.py:Slow", "write 'my_method:Slow'"),
        ("no_such:Slow", "no module 'no_such'"),
        ("mine:Slwo", "did you mean 'Slow'?"),
        ("blank:Slow", "write a part there"),
        ("failing:Slow", "RuntimeError: on purpose"),
        ("mine:Stage", "another class"),
        ("mine:made", "an object of Slow"),
        ("mine:dataclass", "got a function"),
        ("mine:empty", "no part"),
        ("mine:twins", "each with a name of its own"),
        ("mine:Thawed", "is not a frozen dataclass"),
        ("mine:Vague", "does not set name"),
        ("mine:Half", "lacks penalty_gradient, pull"),
        ("mine:Penalty", "'mine' only imports 'Penalty'"),
        ("mine:Idle", "plays no role"),
        ("mine:Bare", "has no default for extra"),
        ("mine:FedProx", "calls itself 'fedprox'"),
        ("mine:Local", "calls itself 'gcfed.local'"),
        ("mine:Survey", "not a name for a part"),
        ("mine:Cites", "cites 'nobody2030'"),
        ("mine:Shaped", "declares 'shape' as tuple[float, ...], which no expression can give"),
        ("mine:Unread", "cannot be read: NameError: name 'NoSuchType' is not defined"),
        ("mine:Short", "transform_update(self, delta), which is called with (update, round)"),
        ("mine:Choosy(mode=fast)", "choosy (Choosy) cannot be made with mode='fast'."),
        ("mine:Ready+mime", "mime needs SURVEYS, which ready breaks"),
        ("mine:Ready+dpsgd", "dpsgd needs EXAMPLE_LOSSES, which ready breaks"),
        ("mine:Slow.w", "has no part 'w'"),
        ("mine:pair.w", "expected slow or slower"),
        ("mine:Slow(rat=1)", "did you mean 'rate'?"),
        ("mine:Slow(rate=2.0)", "`rate` of slow must be a float > 0 and <= 1. Got 2.0."),
        ("mine:Slow(rate=big)", "`rate` of slow must be a float > 0 and <= 1. Got 'big'."),
        ("mine:Slow+mine:Slow(rate=0.1)", "has slow twice"),
    ],
)
def test_refused_in_four_lines(here: Path, term: str, said: str) -> None:
    (here / "blank.py").write_text("x = 1\n")
    (here / "failing.py").write_text("raise RuntimeError('on purpose')\n")
    with pytest.raises(CompositionError) as caught:
        parse(f"fedavg+{term}")
    assert said in str(caught.value)
    assert 1 <= len(str(caught.value).splitlines()) <= 4


@pytest.mark.parametrize("term", ["mine:Defaults", "mine:Choosy", "mine:Choosy(mode=slow)"])
def test_what_can_be_made_and_called_is_taken(here: Path, term: str) -> None:
    assert parse(term).parts


def test_a_part_without_a_file_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a session at the prompt: nobody could tell whether its code has changed."""
    parse("mine:Slow")
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules["mine"], "__file__")
        with pytest.raises(CompositionError, match="are in no file"):
            parse("mine:Slow")


# --- runs ------------------------------------------------------------------------------------


def key(method: str) -> str:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(40, 3)), random.integers(0, 2, 40)
    clients = fk.iid(x, y, clients=4)
    task = fk.Task(lambda: nn.Linear(3, 2))
    settings = fk.config.Run(
        method=method, rounds=1, local=fk.Local(lr=0.1, epochs=1, batch_size=5)
    )
    return prepare(settings, Ingredients(task, lambda _: clients, fk.dataset(x, y), "linear")).key


def test_a_run_is_another_when_the_file_changes(here: Path) -> None:
    first = key("mine:Slow")
    assert key("fedavg + mine:Slow(rate=0.5)") == first
    assert key("mine:Slow(rate=0.25)") != first
    (here / "mine.py").write_text(PARTS + "\n# another thought\n")
    assert key("mine:Slow") == first  # what runs is still what was imported
    forget(here)
    assert key("mine:Slow") != first
    (here / "mine.py").write_text(PARTS)
    forget(here)
    assert key("mine:Slow") == first


def test_the_files_of_all_classes_count(here: Path) -> None:
    text = PARTS.split("@dataclass")[0] + "from mine import Slow\n\n"
    text += "@dataclass(frozen=True)\nclass Child(Slow):\n    name: ClassVar[str] = 'child'\n"
    (here / "child.py").write_text(text)
    assert set(user_part_digests(parse("fedprox+child:Child").parts)) == {"mine", "child"}


def _name_of(part: Part) -> str:
    return part.name


def test_spawned_processes_find_it_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder stays on the path, which a process that is spawned is told of."""
    (part,) = parse("mine:Slow").parts
    assert str(here.resolve()) in sys.path
    monkeypatch.chdir(os.sep)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_name_of, (part,)) == "slow"
