"""A folder that somebody else made: no door imports what it names before the user trusts it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedkeel as fk
from commands import EXPERIMENT, call, experiment
from fedkeel.config import Local, Run, load
from fedkeel.config.code_names import code_names
from fedkeel.errors import RunError
from fedkeel.records.trust import MARK, check_trusted, mark_as_made_here, state_folder

MINE = """\
from pathlib import Path
from torch import nn
Path("marker").touch()

class Net(nn.Module):
    def __init__(self, classes, width=6):
        super().__init__()
        self.layer = nn.Linear(width, classes)

    def forward(self, x):
        return self.layer(x)

def loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none")
"""

TEXT = EXPERIMENT.replace('"mlp"', '"mine:Net"').replace("hidden = [8]", "width = 6")


def forget() -> None:
    """As in a process that has just begun, beside which no marker is."""
    sys.modules.pop("mine", None)
    Path("marker").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a user who has made a run with a network of their own."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "mine.py").write_text(MINE)
        file = experiment(folder, TEXT)
        done = call(
            "run", file, "--out", "run", "-q", "-s", "rounds=1", "-s", "task.loss=mine:loss"
        )
        assert done.code == 0, done.err
        forget()
    return folder


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, where a test may change it and its key: the run was made there."""
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    folder = Path(shutil.copytree(made, tmp_path / "home"))
    monkeypatch.chdir(folder)
    mark_as_made_here(folder / "run", load("run/config.toml"))
    forget()
    return folder


@pytest.fixture
def stranger(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What that user has sent: the folder with the run, its data and code, at another place."""
    folder = Path(shutil.copytree(made, tmp_path / "received"))
    monkeypatch.chdir(folder)
    forget()
    return folder


DOORS = [
    *(("predict", "run", "toy.npz"), ("export", "run", "model.pt2")),
    *(("run", "run", "--resume"), ("run", "run"), ("run", "run/config.toml", "--out", "again")),
    *(("check", "run"), ("audit", "run"), ("compare", "run"), ("tune", "run"), ("doctor", "run")),
    *(
        ("data", "inspect", "run"),
        ("flower", "up", "run"),
        ("flower", "export", "run", "--out", "a"),
    ),
]


MORE = ("run", "run", "--resume", "--rounds", "3")


@pytest.mark.parametrize("words", DOORS, ids=" ".join)
def test_no_command_imports_what_a_strangers_folder_names(
    words: tuple[str, ...], stranger: Path
) -> None:
    done = call(*words)
    assert done.code == 2, done.out
    assert "run names code, and was not made here by you" in done.err
    assert f"model.name = 'mine:Net' in {stranger / 'mine.py'}" in done.err
    assert "add --trust" in done.err
    assert not Path("marker").exists()
    assert "mine" not in sys.modules


def test_no_command_connects_to_a_cluster_that_a_strangers_folder_names(tmp_path: Path) -> None:
    """What a cluster sends is unpickled."""
    text = EXPERIMENT.replace('kind = "sequential"', 'kind = "ray"\naddress = "10.255.255.1:6379"')
    experiment(tmp_path, text).rename(tmp_path / "config.toml")
    done = call("run", tmp_path)
    assert done.code == 2
    assert "engine.address = '10.255.255.1:6379' in a cluster" in done.err
    assert "add --trust" in done.err


def test_a_user_may_trust_it(stranger: Path) -> None:
    for words in (
        ("predict", "run", "toy.npz"),
        ("check", "run"),
        ("run", "run", "--resume"),
        MORE,
    ):
        done = call(*words, "--trust")
        assert done.code == 0, done.err
        assert Path("marker").exists()
        forget()
    assert "was not made here by you" in call("predict", "run", "toy.npz").err


def test_every_name_that_is_imported_needs_trust(stranger: Path) -> None:
    """A module may be named as a library of networks is, or with signs that only Python takes."""
    for module in ("hf", "timm", "ne\u0301t", "ne\u00b7t"):
        (stranger / f"{module}.py").write_text(MINE)
        file = stranger / "run" / "config.toml"
        text = file.read_text()
        file.write_text(text.replace("mine:loss", f"{module}:loss"))
        done = call("check", "run", "-s", "model={name='mlp', args={}}")
        assert done.code == 2, module
        assert f"task.loss = '{module}:loss' in {stranger / module}.py" in done.err
        assert not Path("marker").exists()
        file.write_text(text)
    local = Local(lr=0.1, epochs=1)
    hidden = "fedgh(x='\\\n')+mine:Slow(y='')"  # the first quotes hold a line break
    assert code_names(Run(rounds=1, local=local, method=hidden)) == {("method", "mine:Slow")}
    assert code_names(load("toy.toml", ["model.name='hf:mine'"])) == set()


def test_a_report_imports_nothing(stranger: Path) -> None:
    assert call("report", "run").code == 0
    assert not Path("marker").exists()


def test_what_the_user_names_needs_no_trust(stranger: Path) -> None:
    """The user writes the names on the command line, or the folder names code of fedkeel only."""
    words = ["-s", "model.name=mine:Net", "-s", "task.loss=mine:loss"]
    assert call("check", "run", *words).code == 0
    forget()
    part = call("check", "run", "-s", "model.name=mine:Net", "-s", "data.test=mine:loss_of_mine")
    assert part.code == 2
    assert "task.loss = 'mine:loss'" in part.err  # the loss is the folder's, as part of a word too
    words = ["-s", "model={name='mlp', args={}}", "-s", "task.loss=cross_entropy"]
    assert call("check", "run", *words).code == 0
    longer = ["-s", "task.loss=mine:loss_2", "-s", "data.augment=mine:Net_2"]  # other names
    assert "model.name = 'mine:Net'" in call("check", "run", *longer).err
    assert not Path("marker").exists()


def test_the_maker_is_not_asked(home: Path) -> None:
    for words in (
        ("predict", "run", "toy.npz"),
        ("check", "run"),
        ("run", "run", "--resume"),
        MORE,
    ):
        done = call(*words)
        assert done.code == 0, done.err
    assert call("predict", "run", "toy.npz").code == 0
    assert (state_folder() / "folder-key").stat().st_mode & 0o777 == 0o600


def _change_settings(home: Path) -> None:
    file = home / "run" / "config.toml"
    file.write_text(file.read_text().replace("width = 6", "width = 7"))


def _put_code_elsewhere(home: Path) -> None:
    (home / "mine.py").unlink()
    (home / "mine").mkdir()
    (home / "mine" / "__init__.py").write_text(MINE)


CHANGES: dict[str, Callable[[Path], object]] = {
    "other settings": _change_settings,
    "code elsewhere": _put_code_elsewhere,
    "no mark": lambda home: (home / "run" / MARK).unlink(),
    "no marks in it": lambda home: (home / "run" / MARK).write_text('["mine:Net"]'),
    "another mark": lambda home: (home / "run" / MARK).write_text('{"mine:Net": "\u00e9"}'),
    "no key": lambda home: (state_folder() / "folder-key").unlink(),
    "another key": lambda home: (state_folder() / "folder-key").write_bytes(bytes(32)),
    "a short key": lambda home: (state_folder() / "folder-key").write_bytes(b""),
    "a key that others read": lambda home: (state_folder() / "folder-key").chmod(0o644),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_mark_that_does_not_fit_is_none(change: str, home: Path) -> None:
    CHANGES[change](home)
    with pytest.raises(RunError, match="was not made here by you"):
        fk.load("run")
    assert not Path("marker").exists()


def test_in_python(stranger: Path) -> None:
    with pytest.raises(RunError, match="names code"):
        fk.load("run")
    assert not Path("marker").exists()
    loaded = fk.load("run", trust=True).module
    Path("marker").unlink()
    assert fk.load("run", model=loaded).module.state_dict().keys() == loaded.state_dict().keys()
    assert not Path("marker").exists()


def test_the_record_of_a_run_names_no_code(home: Path) -> None:
    """The network is that of the settings, on which the mark is."""
    file = home / "run" / "run.json"
    values = json.loads(file.read_text())
    values["model"] |= {"name": "os:system", "args": {"command": "touch marker"}}
    file.write_text(json.dumps(values))
    assert type(fk.load("run").module).__name__ == "Net"


def test_a_run_needs_no_home(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on without a mark."""
    monkeypatch.setenv("XDG_STATE_HOME", str(stranger / "mine.py"))
    mark_as_made_here(stranger / "run", load("run/config.toml"))
    with pytest.raises(RunError, match="not made here"):
        check_trusted(stranger / "run", [("model.name", "mine:Net")], trust=False)


def test_no_run_without_names_of_code_is_marked(tmp_path: Path) -> None:
    mark_as_made_here(tmp_path, load(experiment(tmp_path)))
    assert not (tmp_path / MARK).exists()
