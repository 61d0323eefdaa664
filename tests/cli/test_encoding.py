"""What is printed: in an encoding that lacks characters, and in a narrow terminal."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from commands import EXECUTABLE, Done, call, experiment
from fedkeel.cli.common import say


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a comparison that is finished."""
    folder = tmp_path_factory.mktemp("encoding")
    before = Path.cwd()
    os.chdir(folder)
    try:
        experiment(folder)
        settings = ("-s", "rounds=2", "-s", "name=both", "--seeds", "2")
        call("compare", "toy.toml", *settings, "--methods", "fedavg, fedprox")
    finally:
        os.chdir(before)
    return folder


COMPARE = ("compare", "toy.toml", "-s", "rounds=2", "-s", "name=both", "--seeds", "2", "--methods")
INSPECT, REPORT = ("data", "inspect", "toy.toml"), ("report", "runs/both-compare")
MISTAKE = ("run", "toy.toml", "-s", "model.name=réseau×")


@pytest.mark.parametrize(
    ("encoding", "words", "text"),
    [
        ("cp1252", INSPECT, ". up to a quarter"),
        ("cp437", INSPECT, "░ up to a quarter"),
        ("ascii", INSPECT, "===="),
        ("utf-8", INSPECT, "━━━━"),
        ("cp1252", REPORT, "× model"),
        ("cp437", REPORT, "x model"),
        ("ascii", REPORT, " +- "),
        ("utf-8", REPORT, " ± "),
        ("cp1252", MISTAKE, "'réseau×'"),
        ("cp437", MISTAKE, "'réseaux'"),
        ("ascii", MISTAKE, "'reseaux'"),
        ("cp437", ("run", "toy.toml", "-s", "rounds=2"), "x model"),
        ("cp437", (*COMPARE, "fedavg, fedprox"), "x model"),
        ("cp437", ("check", "toy.toml"), "everything fits together"),
        ("cp437", ("data", "list"), "digits"),
        ("cp437", ("methods",), "fedprox"),
        ("cp437", ("methods", "scaffold", "--bibtex"), "Karimireddy"),
    ],
)
def test_every_command_writes_in_every_encoding(
    done: Path,
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    words: tuple[str, ...],
    text: str,
) -> None:
    monkeypatch.chdir(done)
    monkeypatch.setenv("COLUMNS", "120")
    ended = call(*words, encoding=encoding)
    assert ended.code == (2 if words == MISTAKE else 0), ended.err
    assert text in ended.out + ended.err


def test_the_names_of_files_are_written_in_any_encoding(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(done)
    for name in ("łódź-データ.toml", os.fsdecode(b"caf\xe9.toml")):
        ended = call("check", name)
        assert ended.code == 2
        assert ".toml" in ended.err


def python(folder: Path, encoding: str, *words: str) -> Done:
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    ended = subprocess.run(
        [str(EXECUTABLE), *words], cwd=folder, capture_output=True, env=environment, check=False
    )
    codec = encoding.partition(":")[0]
    return Done(ended.returncode, ended.stdout.decode(codec), ended.stderr.decode(codec))


@pytest.mark.parametrize(
    ("encoding", "shade"), [("cp1252", ". "), ("cp437", "░"), ("cp1252:replace", "?")]
)
@pytest.mark.slow
def test_the_installed_command_does_so_too(done: Path, encoding: str, shade: str) -> None:
    """A handler that the user chose stays."""
    ended = python(done, encoding, "data", "inspect", "toy.toml")
    assert (ended.code, ended.err) == (0, "")
    assert shade in ended.out


def test_a_terminal_breaks_a_sentence_between_words_and_no_path() -> None:
    path = "runs/" + "x" * 90
    for is_terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, width=80, force_terminal=is_terminal, color_system=None)
        say(console, "Nothing can be said against `fedavg` yet: " + "there are few runs. " * 5)
        say(console, f"report  {path}")
        text = stream.getvalue()
        lines = text.splitlines()
        assert path in lines[-1].split()
        if is_terminal:
            assert max(map(len, lines[:-2])) <= 80
            assert " ".join(lines[:-2]).split().count("there") == 5
        else:
            assert len(lines) == 2
