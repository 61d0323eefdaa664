"""What an audit found, as plain values: for the page, the terminal, JSON and the next call."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, Self

from fedkeel.base.named_files import read_regular
from fedkeel.errors import RunError
from fedkeel.records.files import finite_values, write_text

AUDIT = "audit.json"
"""File in the folder of an audit with all that was found."""

RECOVERED = 20.0
"""PSNR in dB from which an example counts as recovered; one can then recognise most pictures."""

LABEL_GUESSES = {
    "even": "equal shares of the classes",
    "shares": "the classes' shares in the test set",
    "majority": "the test set's most frequent class for all",
}
"""What one guesses who saw no message, in words: `labels_right_of_NAME` is how good it is."""


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


def auc_interval(
    auc: float, sizes: Sequence[tuple[float, float]], share: float = 0.95
) -> tuple[float, float]:
    """Return the interval of the mean of areas under the curve, each of members and others.

    It has all areas that lie no more than so many of their own standard errors from the one that
    was found. So it leaves 0.5 out exactly where the test of Mann and Whitney does, and it has a
    width also where an area of 1 was found.

    Source: Newcombe, Confidence intervals for an effect size measure based on the Mann-Whitney
    statistic, Part 2, Statistics in Medicine 2006, method 5. The variance is that of Hanley and
    McNeil, Radiology 1982, with the mean of both numbers in its terms.

    Args:
        auc: the mean area.
        sizes: the numbers of members and of others behind each area.
        share: how often such intervals have the true value.

    >>> [round(bound, 3) for bound in auc_interval(0.65, [(73, 73)])]
    [0.557, 0.731]
    """
    width = NormalDist().inv_cdf((1 + share) / 2) / len(sizes)

    def is_within(area: float) -> bool:
        term = (1 - area) / (2 - area) + area / (1 + area)
        variance = sum(
            area * (1 - area) * (1 + ((m + n) / 2 - 1) * term) / (m * n) for m, n in sizes
        )
        return abs(auc - area) <= width * math.sqrt(variance)

    bounds = []
    for outside in (0.0, 1.0):
        inside = auc
        for _ in range(40):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if is_within(middle) else (inside, middle)
        bounds.append(inside)
    return bounds[0], bounds[1]


def largest_auc(epsilon: float, delta: float) -> float:
    """Return the largest area under the curve that differential privacy of an example allows.

    The true positive rate is at most exp(epsilon) times the false positive rate, plus delta, and
    the same holds with both exchanged and taken from 1 (Kairouz et al., The Composition Theorem
    for Differential Privacy, ICML 2015). This is the area below both lines.

    >>> round(largest_auc(0.513, 1e-5), 3)
    0.626
    """
    odds = math.exp(-epsilon)
    return 1.0 - (1.0 - delta) ** 2 * odds / (1.0 + odds)


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
