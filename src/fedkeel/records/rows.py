"""Row types: a round, a run, scores."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

Status = Literal["running", "interrupted", "finished", "failed"]

FORMAT = 1
"""Version of the run folder's layout; a folder of another version is refused, not guessed at."""

NOT_NEEDED = "not needed: enough had replied"
"""What is said under `faults` of who was over-selected: nothing went wrong there."""


@dataclass(frozen=True)
class Scores:
    """Sums over evaluated examples, as means.

    Args:
        examples: how many were evaluated.
        top1: share with the true class ranked first, in [0, 1].
        top3: share with the true class among the first three, in [0, 1].
        loss: mean of the task's loss.
    """

    examples: int
    top1: float
    top3: float
    loss: float


@dataclass(frozen=True)
class RoundRecord:
    """One round, as it is written to rounds.jsonl.

    Args:
        round: rounds completed; 0 is the initial model, which no training precedes.
        lr: local learning rate of the round.
        clients: clients whose updates were aggregated, ascending.
        dropped: clients that were selected and did not report.
        excluded: clients whose update was not finite and was left out.
        examples: examples processed in local training, over all clients and epochs.
        steps: local steps over all clients.
        train_loss: mean over clients, each counting the same, of a client's mean task loss over
            its own local steps; None where nobody trained.
        bytes_down: bytes sent to clients, by part; ``model`` is the model itself.
        bytes_up: bytes sent to the server, by part.
        seconds: seconds by phase; they add up to the round's wall time. ``sampling``: choosing the
            cohort and making the message. ``train.survey``, ``train.data`` (which examples, and
            the examples themselves), ``train.steps``, ``train.upload`` (what is done after the last
            step, and writing the reply): local training; clients that are trained at the same time
            count one by one, and the sums are scaled to the wall time of training, waiting
            included. ``projection``: transforms of the cohort and the aggregate. ``server``: all
            else of the server's step. ``evaluation``. ``records``: making this row, and writing
            the one before and its checkpoint.
        test: scores on the test set; None where the round was not evaluated.
        sources: scores on the test examples of each source, where there are several.
        per_client: scores on each client's own examples, as columns: ``examples``, ``top1``,
            ``top3`` and ``loss``, each with one entry for each client: on those that it holds out
            (``partition.holdout``), else on those that it is trained on. One without examples to
            measure on, such as a client too small to hold any out, has 0 examples and None for the
            others.
        diagnostics: numbers by ``part.name``, such as ``fedgc.sgc.infeasible``.
        faults: what went wrong in a federation of nodes, in words, and the clients it happened to.
    """

    round: int
    lr: float = 0.0
    clients: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    excluded: list[int] = field(default_factory=list)
    examples: int = 0
    steps: int = 0
    train_loss: float | None = None
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    test: Scores | None = None
    sources: dict[str, Scores] = field(default_factory=dict)
    per_client: dict[str, list[float | None]] | None = None
    diagnostics: dict[str, float] = field(default_factory=dict)
    faults: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RoundRecord:
        """Return the row that `values` were written from; keys of later versions are ignored."""
        row = _known(cls, values)
        if row.get("test") is not None:
            row["test"] = Scores(**row["test"])
        row["sources"] = {k: Scores(**v) for k, v in row.get("sources", {}).items()}
        return cls(**row)

    def line(self) -> str:
        """Return it as a line of rounds.jsonl."""
        return json.dumps(_finite(asdict(self))) + "\n"


@dataclass(frozen=True)
class RunRecord:
    """What ran, as it is written to run.json.

    Args:
        name: name of the run.
        key: digest of all that decides the numbers: settings, data, initial model, version, and
            files of one's own with those that they import.
        method: canonical expression of the method.
        describe: the method in words, one line each.
        parts: one object for each part: ``name``, ``paper``, ``roles``; ``code``, a digest of its
            files, where it is one's own.
        citations: citation keys of the parts, in order.
        bibtex: BibTeX of exactly these parts.
        weights: how clients count in the mean.
        seed: seed of the run.
        rounds: T, rounds asked for.
        status: what became of the run.
        model: ``name``, ``parameters``, ``bytes``, ``head``.
        data: ``sources``, ``train``, ``test``, ``classes``, ``label_names``, ``shape``,
            ``fingerprint``; ``columns`` of a table in the order of the inputs; ``scale``, the
            ``mean`` that was taken off each channel, column or pixel and the ``deviation`` that it
            was divided by, none where nothing was (a node with data of its own has its own, in
            ``scale-CLIENT.json`` in its ``state`` folder). What was the same in all training
            examples became 0, whatever it is in others: its deviation is written as 1e30.
        partition: ``kind`` and its settings, ``clients``, ``sizes`` [C], ``histogram`` [C][Y],
            ``names`` [C] or empty; ``unassigned`` and ``held_out`` examples; ``attempts`` that a
            draw took; ``says``, all that in words.
        local: settings of local training in words.
        participation: clients in a round, and of how many.
        target: test accuracy for rounds to target, or None.
        engine: ``kind``, ``workers``, ``parallel_clients``, ``device``, ``dtype`` and ``precision``
            that ran, and the kind that was ``asked`` for; where it was measured,
            ``seconds_per_client`` by engine in one process; ``reasons`` why a faster one could not
            be had.
        environment: versions, processor, date.
        estimate: bytes by part and direction for each client and round, and bytes of state.
        warnings: what was to be known before the run, such as that rounding may decide it.
        message: why a run failed, was interrupted, or ended before its last round, else "".
        format: version of this layout.
    """

    name: str
    key: str
    method: str
    describe: str
    parts: list[dict[str, Any]]
    citations: list[str]
    bibtex: str
    weights: str
    seed: int
    rounds: int
    status: Status
    model: dict[str, Any]
    data: dict[str, Any]
    partition: dict[str, Any]
    local: str
    participation: str
    target: float | None
    engine: dict[str, Any]
    environment: dict[str, Any]
    estimate: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    message: str = ""
    format: int = FORMAT

    def content(self) -> dict[str, Any]:
        """Return what the runs of one comparison have in common beside their settings.

        These are the version, the model and the data, without what a seed may decide: how many
        examples the partition hands out, and what nodes hold out where they have data of their own.
        """
        nodes = self.partition.get("kind") == "nodes"
        apart = ("train", "test", "fingerprint") if nodes else ("train",)
        return {
            "version": self.environment.get("fedkeel"),
            "model": self.model,
            "data": {name: value for name, value in self.data.items() if name not in apart},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunRecord:
        """Return the record that `values` were written from; keys of later versions are ignored."""
        row = _known(cls, values)
        if "engine" in row:
            row["engine"] = {OLD_ENGINE.get(k, k): v for k, v in row["engine"].items()}
            if row["engine"].get("kind") == "vectorised":
                row["engine"]["kind"] = "vectorized"
        return cls(**row)


OLD_ENGINE = {"chunk": "parallel_clients"}
"""Key of `RunRecord.engine` before version 0.2 -> its name."""

OLD_NAMES = {"diagnostics": "notes", "warnings": "hints"}
"""Key -> the name that it had before version 0.2."""


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row type, those under their old names too."""
    out = {}
    for f in fields(kind):
        old = OLD_NAMES.get(f.name, f.name)
        if f.name in values or old in values:
            out[f.name] = values.get(f.name, values.get(old))
    return out


def _finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value with NaN and infinities, which JSON has no word for, as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(v) for v in value]
    if isinstance(value, np.generic):
        return _finite(value.item())
    return value
