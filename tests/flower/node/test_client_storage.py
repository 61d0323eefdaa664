"""What a client keeps: whole or not at all, by round, and only what the server believes in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedkeel.engine.spec import specs_of
from fedkeel.errors import RunError
from fedkeel.flower.node.client_storage import ClientStorage, LostStateError
from fedkeel.flower.node.log import log_error


def state(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"scaffold": {"c": torch.full((3,), value, dtype=torch.float64)}}


SPEC = specs_of(state(0.0))


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.rglob("*") if p.is_file())


def test_every_round_is_there_until_nobody_can_ask_for_it(tmp_path: Path) -> None:
    storage = ClientStorage(tmp_path, "run", 4)
    digests = {r: storage.store(r, state(r)) for r in (1, 2, 3, 5)}
    for r, digest in digests.items():
        assert storage.load(r, digest, SPEC)["scaffold"]["c"].tolist() == [float(r)] * 3
    storage.remove_unneeded(
        3, checkpoint_round=2
    )  # round 5 was never taken; the server may go back to 2
    assert names(tmp_path) == ["round-00000002.safetensors", "round-00000003.safetensors"]
    storage.remove_unneeded(
        0, checkpoint_round=2
    )  # the method has begun anew, and that is not saved yet
    assert names(tmp_path) == ["round-00000002.safetensors"]
    storage.remove_unneeded(0, checkpoint_round=0)
    assert names(tmp_path) == []


@pytest.mark.parametrize("how", ["gone", "other round", "other digest", "damaged", "other form"])
def test_what_is_not_what_the_server_believes_in_is_lost(tmp_path: Path, how: str) -> None:
    storage = ClientStorage(tmp_path, "run", 0)
    digest = storage.store(2, state(1.0))
    (file,) = tmp_path.rglob("*.safetensors")
    spec = SPEC
    if how == "gone":
        file.unlink()
    elif how == "other round":
        file.rename(file.with_name("round-00000001.safetensors"))
    elif how == "other digest":
        storage.store(2, state(2.0))
    elif how == "damaged":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        spec = {"scaffold/c": specs_of({"c": torch.zeros(4)})["c"]}
    with pytest.raises(LostStateError):
        storage.load(2, digest, spec)


def test_runs_and_clients_are_apart_and_names_are_no_paths(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for run in ("a", "../../b", "/etc"):
        for client in (0, 1):
            ClientStorage(root, run, client).store(1, state(client))
    assert len(names(tmp_path)) == len(names(root)) == 6
    assert all(".." not in str(p) and "etc" not in str(p) for p in root.rglob("*"))


def test_a_disk_that_fails_leaves_the_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ClientStorage(tmp_path, "run", 0)
    digest = storage.store(1, state(1.0))
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(RunError, match="cannot be written"):
        storage.store(2, state(2.0))
    assert names(tmp_path) == ["round-00000001.safetensors"]
    assert storage.load(1, digest, SPEC)["scaffold"]["c"].tolist() == [1.0] * 3


def test_a_folder_that_is_not_ones_own_is_said_to_the_server_and_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log cannot be written to either: the reason was nowhere."""
    (tmp_path / "taken").write_text("a file, and no folder")
    with pytest.raises(RunError) as error:
        ClientStorage(tmp_path / "taken", "run", 0).store(1, state(1.0))
    assert error.value.what == "The client's state cannot be written: Not a directory."
    log_error(tmp_path / "taken", error.value)
    said = capsys.readouterr().err
    assert f"{tmp_path / 'taken' / 'node.log'} cannot be written to (File exists)" in said
    assert error.value.what in said


def test_a_console_on_the_same_full_disk_keeps_nobody_from_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file, and no folder")
    with pytest.raises(RunError) as error:
        ClientStorage(tmp_path / "taken", "run", 0).store(1, state(1.0))
    monkeypatch.setattr("builtins.print", lambda *_, **__: _full(2))
    log_error(tmp_path / "taken", error.value)


@pytest.mark.parametrize("name", ["iterdir", "read_bytes", "unlink", "mkdir"])
def test_what_a_disk_refuses_is_said_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A state that cannot be read just now is not one that is gone."""
    storage = ClientStorage(tmp_path, "run", 0)
    digests = [storage.store(r, state(r)) for r in (1, 2)]
    with monkeypatch.context() as broken:
        broken.setattr(Path, name, lambda *_, **__: _full(0))
        with pytest.raises(RunError, match=r"of the client cannot|client's state cannot") as error:
            _round(storage, digests[1])
        assert not isinstance(error.value, LostStateError)
        assert len(error.value.lines()) <= 4
    assert storage.load(2, digests[1], SPEC)["scaffold"]["c"].tolist() == [2.0] * 3


def _round(storage: ClientStorage, digest: str) -> None:
    storage.remove_unneeded(2, 2)
    storage.load(2, digest, SPEC)
    storage.store(3, state(3.0))


def _full(handle: int) -> None:
    raise OSError(28, "No space left on device")
