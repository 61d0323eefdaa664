"""The page on scale: what it calls arithmetic is what its formulas give."""

from __future__ import annotations

import re
from pathlib import Path

from fedkeel.engine.process.work_items import DEVICE_SUMS
from fedkeel.task.models import make

PAGE = (Path(__file__).parents[1] / "docs" / "concepts" / "scale.md").read_text("utf-8")
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
CLIENTS, COHORT, ROUNDS = (10**3, 10**6, 10**9), 100, 1000


def parameters() -> int:
    return sum(p.numel() for p in make("2nn", (784,), 10).parameters())


def size(text: str) -> float:
    """The bytes that a text says."""
    number, _, unit = text.strip().partition(" ")
    return float(number) * UNITS.get(unit.split()[0] if unit else "", 1.0)


def is_near(said: str, bytes: float) -> bool:
    return abs(size(said) - bytes) <= 0.03 * bytes  # two digits


def row(label: str) -> list[str]:
    (found,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", PAGE, re.MULTILINE)
    return found.split("|")[1:]


def test_bytes_of_clients() -> None:
    model = 4 * parameters()
    assert f"P = {parameters():,}" in PAGE
    expected = {
        "messages of a round, both ways": [2 * model * COHORT for _ in CLIENTS],
        "the same where a thousandth of the clients takes part": [
            2 * model * c / 1000 for c in CLIENTS
        ],
        "what clients keep: FedAvg, FedProx, FedAdam": [0.0 for _ in CLIENTS],
        "what clients keep: SCAFFOLD, FedDyn, MOON, at most": [
            model * min(c, COHORT * ROUNDS) for c in CLIENTS
        ],
        "the same once every client was seen": [model * c for c in CLIENTS],
    }
    for label, values in expected.items():
        cells = row(label)
        assert len(cells) == len(values)
        assert all(is_near(cell, value) for cell, value in zip(cells, values, strict=True)), label


def test_bytes_of_eight_gpus() -> None:
    assert f"at most {DEVICE_SUMS} sums" in PAGE
    (small, large) = re.findall(r"· 4 P = ([\d.]+ MB).*parameters ([\d.]+ GB)", PAGE)[0]
    assert is_near(small, (8 + DEVICE_SUMS) * 4 * parameters())
    assert is_near(large, (8 + DEVICE_SUMS) * 4 * 1e8)


def test_seconds_of_a_connection() -> None:
    (seconds, minutes) = re.findall(r"that is ([\d.]+) s for K = 100,\s+and (\d+) minutes", PAGE)[0]
    of_reply = 4 * parameters() / 1.25e9
    assert abs(float(seconds) - 100 * of_reply) < 0.005
    assert abs(float(minutes) - 1e6 * of_reply / 60) < 1.0
