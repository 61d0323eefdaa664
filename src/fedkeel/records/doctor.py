"""What the doctor says of a federation, as plain values: for the page, the terminal and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fedkeel.records.files import finite_values
from fedkeel.records.score import ACCURACY, MetricInfo

Level = Literal["fine", "notable", "problem", "unknown"]
"""How much a finding matters; ``unknown`` is what could not be measured."""


@dataclass(frozen=True)
class Finding:
    """One question and its answer.

    Args:
        key: a short name, such as ``labels`` or ``rate``.
        title: what is asked, in a few words.
        level: how much it matters.
        says: the answer, in one or two sentences with the numbers.
        numbers: the numbers by name.
    """

    key: str
    title: str
    level: Level
    says: str
    numbers: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class BestTrial:
    """The best trial of a method.

    Args:
        method: its expression as it was offered.
        tuned: its expression with the hyper-parameters of this trial.
        lr: local learning rate.
        score: mean score over the second half of the rounds; None where every trial diverged.
        rounds: rounds of the trial; more in the second stage, which fewer methods reach.
        points: settings of the method that were tried for as many rounds.
    """

    method: str
    tuned: str
    lr: float
    score: float | None
    rounds: int
    points: int


@dataclass(frozen=True)
class Advice:
    """A method, and why it is worth tuning here or not.

    Args:
        method: its expression.
        reason: what it is for, with the measurement behind it; or why it was not tried.
        trial: its best trial; None where it was not tried.
    """

    method: str
    reason: str
    trial: BestTrial | None = None


@dataclass(frozen=True)
class PilotRun:
    """One run of the pilot.

    Args:
        name: what it tries, in a few words.
        method: its expression.
        lr: local learning rate.
        score: its score at the end; None where training diverged.
        curve: score after each round.
    """

    name: str
    method: str
    lr: float
    score: float | None
    curve: tuple[float, ...] = ()


@dataclass(frozen=True)
class DoctorRecord:
    """What the doctor found and advises.

    Args:
        name: name of the experiment.
        clients: number of clients.
        per_round: clients in a round.
        rounds: rounds of each pilot run.
        trial_rounds: rounds of a trial of the second stage.
        validation_examples: examples that runs are scored on, which they do not train on.
        judges_personal: whether the clients' personal models are judged.
        held_out_by: what these are whole groups of, such as ``patient``; "" where there are none.
        score: the metric by which models are judged.
        findings: answers, in the order of the page.
        advised: the three methods with the best trials, the best first.
        not_advised: the other methods that were tried, the best first.
        excluded: methods that were not tried.
        reference: FedAvg's trial, as long as those of the advised methods.
        pilot: the runs.
        client_names: C names; empty where clients are numbers.
        label_names: Y names; empty where labels are numbers or there are none.
        sizes: [C] training examples.
        histogram: [C, Y] training examples by client and label; empty where there are none.
        input_distances: [C] distance of each client's mean input from that of all.
        experiment: an experiment file that searches the three; "" where the data were given in
            Python.
        notes: what the findings do not rest on, and other things that a reader has to know.
    """

    name: str
    clients: int
    per_round: int
    rounds: int
    trial_rounds: int
    validation_examples: int
    judges_personal: bool = False
    held_out_by: str = ""
    score: MetricInfo = ACCURACY
    findings: tuple[Finding, ...] = ()
    advised: tuple[Advice, ...] = ()
    not_advised: tuple[Advice, ...] = ()
    excluded: tuple[Advice, ...] = ()
    reference: BestTrial | None = None
    pilot: tuple[PilotRun, ...] = ()
    client_names: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    histogram: tuple[tuple[int, ...], ...] = ()
    input_distances: tuple[float, ...] = ()
    experiment: str = ""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the findings and the methods that are worth tuning, a line each."""
        lines = [f"DoctorRecord of {self.name}, {self.clients:,} clients"]
        lines += [f"  {item.title} ({item.level}): {item.says}" for item in self.findings]
        lines += [f"  worth tuning: {method}" for method in self.methods]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def finding(self, key: str) -> Finding | None:
        """Return the finding of this name, None where there is none."""
        return next((finding for finding in self.findings if finding.key == key), None)

    @property
    def methods(self) -> tuple[str, ...]:
        """The expressions of the three methods that are worth tuning."""
        return tuple(advice.method for advice in self.advised)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with None for what is not a finite number."""
        values: dict[str, Any] = finite_values(asdict(self))
        return values
