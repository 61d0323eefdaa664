"""A fixed sample of all pairs of methods; docs/check_pairs.py checks every one of them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from each import each
from fedkeel.method.legality import all_pairs, verdict
from fedkeel.study.conformance import CHECKS, check_method

SCRIPT = Path(__file__).parents[3] / "docs" / "check_pairs.py"
COUNT = 12


def by_hash(pair: tuple[str, str]) -> str:
    """A key whose order is independent of the methods, and stays as the registry grows."""
    return hashlib.blake2b("+".join(pair).encode(), digest_size=8).hexdigest()


@cache
def sample() -> list[tuple[str, str]]:
    return sorted((pair for pair in all_pairs() if verdict(*pair).legal), key=by_hash)[:COUNT]


@pytest.mark.slow
@each("pair", sample)
def test_a_pair_passes_all_checks(pair: tuple[str, str]) -> None:
    assert [check.name for check in check_method("+".join(pair))] == list(CHECKS)


def test_the_sample_has_many_methods() -> None:
    assert len(sample()) == COUNT
    assert len({name for pair in sample() for name in pair}) > COUNT // 2


# --- the script ------------------------------------------------------------------------------


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_pairs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_this_process(monkeypatch: pytest.MonkeyPatch, script: ModuleType, fails: str = "") -> list:
    """Take the script's processes and checks away; what it would have checked."""
    asked = []

    class Pool:
        def __init__(self, workers: int, mp_context: object) -> None:
            assert workers > 0

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None: ...

        def submit(self, function: object, job: tuple) -> object:
            future = script.Future()
            future.set_result(function(job))
            return future

    def check(method: str, weights: str | None) -> None:
        asked.append((method, weights))
        if fails and fails in method:
            raise ValueError("on purpose")

    monkeypatch.setattr(script, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(script, "check_method", check)
    return asked


def test_it_asks_for_every_pair_that_is_legal(script: ModuleType) -> None:
    asked = dict(script.jobs(["fedavg", "scaffold", "fedgc", "momentum", "addition"]))
    assert asked == {
        "fedavg+scaffold": None,
        "fedavg+fedgc": None,
        "fedavg+momentum": None,
        "fedavg+addition": None,
        "scaffold+fedgc": "examples",
        "scaffold+momentum": None,
        "scaffold+addition": None,
        "fedgc+momentum": None,
        "fedgc+addition": None,
    }


def test_it_goes_on_where_it_was_stopped(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = in_this_process(monkeypatch, script)
    out = tmp_path / "pairs.jsonl"
    words = ("fedprox", "gcfed", "fedgh", "--out", str(out))
    assert script.main(words) == 0
    assert {method for method, _ in asked} == {"fedprox+fedgh", "fedprox+gcfed", "gcfed+fedgh"}
    lines = out.read_text().splitlines(keepends=True)
    asked.clear()
    assert script.main(words) == 0
    assert asked == []
    out.write_text(lines[0] + lines[1] + lines[2][:20])  # killed while it wrote a line
    assert script.main(words) == 0
    assert len(asked) == 1
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 3
    asked.clear()
    monkeypatch.setattr(script, "code", lambda: "other")
    assert script.main(words) == 0
    assert len(asked) == 3


def test_it_says_what_fails_each_time(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_this_process(monkeypatch, script, fails="fedgh")
    out = tmp_path / "pairs.jsonl"
    for _ in range(2):
        assert script.main(("fedprox", "gcfed", "fedgh", "--out", str(out))) == 1
        said = capsys.readouterr().out
        assert "fedprox+fedgh\non purpose" in said
        assert "1 of 3 pairs pass every check" in said
    assert sum(bool(json.loads(line)["failure"]) for line in out.read_text().splitlines()) == 2


@pytest.mark.slow
def test_it_checks_in_processes(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    words = [sys.executable, str(SCRIPT), "fedavg", "fedprox", "--workers", "1", "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (row["method"], row["weights"], row["failure"]) == ("fedavg+fedprox", None, "")
