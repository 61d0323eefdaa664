"""Commands are called in a folder of their own, and every test fails where it would hang."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import experiment
from toys import deadline


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with deadline(90):
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a small experiment toy.toml and its data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    experiment(tmp_path)
    return tmp_path
