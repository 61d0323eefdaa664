"""What an audit found, as plain values: for the page, the terminal, JSON and the next call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from fedkeel.base.named_files import read_regular
from fedkeel.errors import RunError
from fedkeel.records.files import finite_values, write_text

AUDIT = "audit.json"
"""File in the folder of an audit with all that was found."""

RECOVERED = 20.0
"""PSNR in dB from which an example counts as recovered; one can then recognise most pictures."""


@dataclass(frozen=True)
class Picture:
    """An original and what an attacker made of it.

    Args:
        original: a PNG as a data URI.
        found: the reconstruction in the same form.
        psnr: how alike they are, in dB.
    """

    original: str
    found: str
    psnr: float


@dataclass(frozen=True)
class AttackResult:
    """One attack on one message.

    Args:
        attack: its name, such as ``dlg``.
        title: what it looks for, in a few words.
        target: whose message it was, in words: a client, or the sum of some.
        knows: what the attacker is assumed to know beside the message.
        budget: how much was tried, in words.
        says: the outcome in a sentence with the numbers.
        numbers: the numbers by name; None for what is not defined.
        pictures: originals and reconstructions, the best first.
    """

    attack: str
    title: str
    target: str
    knows: str
    budget: str
    says: str
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the result of plain values, as `to_json` makes them."""
        pictures = tuple(Picture(**picture) for picture in values["pictures"])
        return cls(**{**values, "pictures": pictures})

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with None for what is not a finite number."""
        values: dict[str, Any] = finite_values(asdict(self))
        return values


@dataclass(frozen=True)
class Skipped:
    """An attack that was not made.

    Args:
        attack: its name.
        reason: why it does not apply.
    """

    attack: str
    reason: str


@dataclass(frozen=True)
class AuditRecord:
    """What an audit found.

    Args:
        name: name of the experiment.
        method: expression of the method.
        seed: seed of the run.
        view: what the attacker sees: ``client``, ``sum`` or ``release``.
        round: the round that was attacked.
        rounds: rounds of the run.
        clients: clients in that round.
        score: test score of the model after that round; None where it was not measured.
        score_name: the metric of `score`, as a reader knows it.
        epsilon: epsilon of differential privacy spent by then; None without a budget.
        delta: its delta.
        unit: whom the budget protects, ``client`` or ``example``.
        results: what the attacks found.
        skipped: attacks that do not apply.
    """

    name: str
    method: str
    seed: int
    view: str
    round: int
    rounds: int
    clients: int
    score: float | None = None
    score_name: str = ""
    epsilon: float | None = None
    delta: float | None = None
    unit: str | None = None
    results: tuple[AttackResult, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def __repr__(self) -> str:
        """Return what was attacked, and what each attack found, a line each."""
        lines = [f"AuditRecord of {self.method}, round {self.round:,} of {self.rounds:,}"]
        lines += [f"  {item.attack} on {item.target}: {item.says}" for item in self.results]
        return "\n".join(lines)

    def of(self, attack: str) -> tuple[AttackResult, ...]:
        """Return the results of an attack by its name, one for each message that was attacked."""
        return tuple(result for result in self.results if result.attack == attack)

    def mean(self, attack: str, number: str) -> float | None:
        """Return the mean of a number over an attack's results; None where none has it."""
        values = [result.numbers.get(number) for result in self.of(attack)]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with None for what is not a finite number."""
        values: dict[str, Any] = finite_values(asdict(self))
        return values


def write_audit(record: AuditRecord, folder: Path) -> None:
    """Write what an audit found into a folder, which is made where it is not there.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record.to_json(), indent=1, allow_nan=False) + "\n"
    write_text(folder / AUDIT, text)


def read_audit(folder: Path) -> AuditRecord:
    """Return what an audit wrote into a folder.

    Raises:
        RunError: it cannot be read.
    """
    try:
        values = json.loads(read_regular(folder / AUDIT))
        results = tuple(map(AttackResult.from_json, values.pop("results")))
        skipped = tuple(Skipped(**item) for item in values.pop("skipped"))
        return AuditRecord(**values, results=results, skipped=skipped)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder / AUDIT} cannot be read.",
            got=error,
            do="delete its folder, and of a reproduced table the run's folder beside it; then run "
            "the same command again",
        ) from None
