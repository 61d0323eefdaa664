"""The round record, a line of rounds.jsonl, and the scores in it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
)

from fedkeel.base.feature import entries, figures
from fedkeel.records.files import finite_values

OLD_NAMES = {"notes": "diagnostics"}
"""Key in a rounds.jsonl that was written before version 0.2 -> its name now."""

OLD_METRICS = {"top1": "accuracy"}
"""Name of a metric in a rounds.jsonl that was written before version 0.3 -> its name now."""

NOT_NEEDED = "not needed: enough had replied"
"""What is said under `faults` of who was over-selected: nothing went wrong there."""


Count = Annotated[int, Field(ge=0, le=2**53)]
"""A number of things."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is never NaN or infinite."""

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that is null in JSON where it is NaN or infinite."""


@dataclass(frozen=True)
class Scores:
    """The metrics of some examples.

    Args:
        examples: how many were evaluated.
        values: each metric by its name, NaN where it is not defined. In rounds.jsonl they stand
            beside ``examples``.
    """

    examples: Count
    values: dict[str, Number] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> float:
        """Return a metric by its name; NaN where it was not measured."""
        return self.values.get(metric, math.nan)


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
        processor_seconds: seconds of processor time that local training and surveys took, summed
            over clients and processes. Unlike ``seconds`` they leave out waiting and other
            programs. On a GPU they are the seconds until its work was done. None where it is not
            known: in round 0, in a federation of nodes, and in runs of earlier versions.
        test: scores on the test set; None where the round was not evaluated.
        sources: scores on the test examples of each source, where there are several.
        per_client: scores on each client's own examples, as columns: ``examples`` and each metric,
            with one entry for each client: on those that it holds out
            (``partition.holdout``), else on those that it is trained on. One without examples to
            measure on, such as a client too small to hold any out, has 0 examples and None for the
            others.
        personal: the same as `per_client`, each client measured with its personal model; None
            where the method has none.
        diagnostics: numbers by ``part.name``, such as ``fedgc.sgc.infeasible``, and those of
            ``[diagnose]`` by ``kind.name``, such as ``conflict.share``.
        breakdowns: what ``[diagnose]`` measures by layer, class, client or position, by
            ``kind.name.axis``, such as ``conflict.share.layer``: a number for each label.
        faults: what went wrong in a federation of nodes, in words, and the clients it happened to.
        features: what features of the run have added, by key, such as ``epsilon``; in rounds.jsonl
            each stands beside the other keys. It can be read as an attribute, too. What is of its
            default is not here.
    """

    round: Count
    lr: Finite = 0.0
    clients: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    excluded: list[int] = field(default_factory=list)
    examples: Count = 0
    steps: Count = 0
    train_loss: float | None = None
    bytes_down: dict[str, Count] = field(default_factory=dict)
    bytes_up: dict[str, Count] = field(default_factory=dict)
    seconds: dict[str, Finite] = field(default_factory=dict)
    processor_seconds: float | None = None
    test: Scores | None = None
    sources: dict[str, Scores] = field(default_factory=dict)
    per_client: dict[str, list[float | None]] | None = None
    personal: dict[str, list[float | None]] | None = None
    diagnostics: dict[str, Number] = field(default_factory=dict)
    breakdowns: dict[str, dict[str, Number]] = field(default_factory=dict)
    faults: dict[str, list[int]] = field(default_factory=dict)
    features: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RoundRecord:
        """Return the row that `values` were written from; keys of later versions are ignored.

        Raises:
            ValueError: a value is missing, or has another type.
        """
        if not isinstance(values, Mapping):
            raise ValueError("no JSON object")
        names = {f.name for f in fields(cls)} - {"features"}
        row = {OLD_NAMES.get(name, name): value for name, value in values.items()}
        if isinstance(row.get("test"), Mapping):
            row["test"] = _scores(row["test"])
        if isinstance(row.get("sources"), Mapping):
            row["sources"] = {name: _scores(item) for name, item in row["sources"].items()}
        for name in ("per_client", "personal"):
            if isinstance(row.get(name), Mapping):
                row[name] = _with_new_metrics(row[name])
        features = {f.key: row[f.key] for f in figures() if row.get(f.key) is not None}
        for key, value in features.items():
            if not _is_finite(value):
                raise ValueError(f"{key}: not a finite number")
        known = {k: v for k, v in row.items() if k in names}
        try:
            added = _entries_class().model_validate(row)
            for entry in entries():
                if getattr(added, entry.key) != entry.default:
                    features[entry.key] = getattr(added, entry.key)
            return _reader().validate_python({**known, "features": features})
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def measured(self) -> Iterator[tuple[str, str | None, str | None, float]]:
        """Yield the name, the axis, the label and the value of each number that was diagnosed.

        Axis and label are None for a number of the whole round.
        """
        for name, value in self.diagnostics.items():
            yield name, None, None, value
        for key, values in self.breakdowns.items():
            name, _, axis = key.rpartition(".")
            for label, value in values.items():
                yield name, axis, label, value

    def line(self) -> str:
        """Return it as a line of rounds.jsonl."""
        row = asdict(self)
        row["test"] = _flat(row["test"])
        row["sources"] = {name: _flat(scores) for name, scores in row["sources"].items()}
        features = {entry.key: entry.default for entry in entries() if entry.is_always_written}
        features |= {k: v for k, v in row.pop("features").items() if v is not None}
        return json.dumps(finite_values({**row, **features})) + "\n"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Return what a feature has added, its default where this run has not."""
            features = self.__dict__.get("features", {})
            if name in features or name in {figure.key for figure in figures()}:
                return features.get(name)
            for entry in entries():
                if entry.key == name:
                    return copy(entry.default)
            raise AttributeError(f"a round record has no {name!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _flat(scores: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return scores as they are written: the examples, and each metric beside them."""
    return None if scores is None else {"examples": scores["examples"], **scores["values"]}


def _scores(values: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return scores as `Scores` has them, where they are an object."""
    if not isinstance(values, Mapping):
        return values
    flat = values["values"] if isinstance(values.get("values"), Mapping) else values
    metrics = _with_new_metrics({k: v for k, v in flat.items() if k != "examples"})
    return {"examples": values.get("examples"), "values": metrics}


def _with_new_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    return {OLD_METRICS.get(name, name): value for name, value in values.items()}


@cache
def _entries_class() -> type[BaseModel]:
    values: dict[str, Any] = {entry.key: (entry.form, entry.default) for entry in entries()}
    return create_model("Entries", **values)


@cache
def _reader() -> TypeAdapter[RoundRecord]:
    return TypeAdapter(RoundRecord)
