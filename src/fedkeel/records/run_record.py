"""The run record: what ran, as it is written to run.json and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from fedkeel.base.feature import declarations
from fedkeel.errors import RunError
from fedkeel.records.rows import Count
from fedkeel.records.score import MetricInfo, TaskRecord

Status = Literal["running", "interrupted", "finished", "failed"]

FORMAT = 1
"""Version of the run folder's layout. A folder of another version is refused."""

OLD_NAMES = {"hints": "warnings", "chunk": "parallel_clients"}
"""Key in a run.json that was written before version 0.2 -> its name now."""

_OPTIONAL: dict[str, Any] = {"optional": True}
"""Metadata of a field that run.json leaves out where it is empty."""


PARTITION_SETTINGS = (
    "clients",
    "alpha",
    "min_size",
    "classes_per_client",
    "sigma",
    "holdout",
    "holdout_by",
)
"""Settings of a partition; the rest of its record follows from them and the seed."""


@dataclass(frozen=True)
class PartRecord:
    """One part of the method.

    Args:
        name: name of the part.
        paper: citation key of its paper.
        roles: names of the roles that it has.
        code: digest of its files, where it is the user's own part.
    """

    name: str = ""
    paper: str | None = None
    roles: list[str] = field(default_factory=list)
    code: str = field(default="", metadata=_OPTIONAL)


@dataclass(frozen=True)
class ModelRecord:
    """The model.

    Args:
        name: name of the model.
        parameters: number of trained parameters.
        bytes: bytes of these.
        head: name of the layer that makes the scores, or None.
        args: keyword arguments that `fedkeel.task.models.make` was given beyond shape and classes.
    """

    name: str = ""
    parameters: Count = 0
    bytes: Count = 0
    head: str | None = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScaleRecord:
    """How inputs were standardised: (input - mean) / deviation.

    Args:
        mean: mean of each channel, column or single number. They are for the first axis of an input
            where it has as many places, for all its numbers where there are as many, else for its
            last axis. Channels of the last axis (``data.channels``) are written for each number
            where both axes are equally long.
        deviation: standard deviation of each. It is 1e30 for an input that was the same in all
            training examples, which therefore became 0 whatever it is in others.
    """

    mean: list[float] = field(default_factory=list)
    deviation: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class RangeRecord:
    """The lowest and the highest values of the training inputs, as the model takes them.

    Args:
        low: lowest value of each column, of each channel that was standardised by itself, or of all
            numbers; of inputs that were standardised, afterwards.
        high: highest value of each.
    """

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class DataRecord:
    """The data.

    Args:
        sources: names of the data sets.
        train: number of training examples that clients have.
        test: number of test examples.
        classes: number of classes.
        label_names: names of the classes, or empty.
        columns: names of a table's inputs, in their order.
        schema: the columns of a table in their order: ``name``; ``kind``, ``number`` or
            ``category``; its ``categories``, each of which is an input of 0 or 1; ``fill``, what
            the inputs of a missing value are, where such are taken; and whether an ``indicator``
            follows, an input that is 1 where the value is missing.
        scale: how inputs were standardised, None where they were not. A node with data of its own
            has its own scale, in ``scale-CLIENT.json`` in its ``state`` folder.
        client_scales: the scale of each client's inputs by its name, where each has its own.
        ranges: the lowest and the highest values of each input by name, "" for a single one. Tokens
            have none. Empty with a privacy budget, where only nodes have the data, and in runs
            before they were recorded.
        text_column: name of the column whose text became tokens. Empty of anything else, and in
            runs before it was recorded.
        shape: shape of an input; empty where there are several by name.
        inputs: shape of each input by name, where there are several.
        types: type of each input by name, such as ``float32`` or ``int64``; that of a single one by
            ``""``. Empty in runs before it was recorded.
        grouped_by: what is held out in whole groups, such as ``patient``.
        test_groups: number of these in the test set.
        fingerprint: digest of the training set, without what features change in it.
    """

    sources: list[str] = field(default_factory=list)
    train: Count = 0
    test: Count = 0
    classes: Count = 0
    label_names: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    schema: list[dict[str, Any]] = field(default_factory=list, metadata=_OPTIONAL)
    scale: ScaleRecord | None = None
    client_scales: dict[str, ScaleRecord] = field(default_factory=dict, metadata=_OPTIONAL)
    ranges: dict[str, RangeRecord] = field(default_factory=dict, metadata=_OPTIONAL)
    text_column: str = field(default="", metadata=_OPTIONAL)
    shape: list[Count] = field(default_factory=list)
    inputs: dict[str, list[Count]] = field(default_factory=dict, metadata=_OPTIONAL)
    types: dict[str, str] = field(default_factory=dict, metadata=_OPTIONAL)
    grouped_by: str = field(default="", metadata=_OPTIONAL)
    test_groups: Count = field(default=0, metadata=_OPTIONAL)
    fingerprint: str = ""


@dataclass(frozen=True)
class PartitionRecord:
    """How the training set was divided among clients.

    Args:
        kind: kind of the partition.
        clients: number of clients C.
        sizes: [C] training examples of each client.
        histogram: [C, Y] training examples by client and class, empty where nobody knows them, and
            where they are more than 100,000 numbers: these are in ``histogram.safetensors``.
        names: [C] names of the clients, or empty.
        held_out: examples that clients hold out for evaluation.
        says: the partition in one line.
        settings: everything else that describes it, such as ``alpha``, ``seed`` or ``attempts``. In
            run.json these keys stand beside the ones above.
    """

    kind: str = ""
    clients: Count = 0
    sizes: list[Count] = field(default_factory=list)
    histogram: list[list[Count]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    held_out: Count = 0
    says: str = field(default="", metadata=_OPTIONAL)
    settings: dict[str, Any] = field(default_factory=dict, metadata=_OPTIONAL)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> PartitionRecord:
        """Return the record of a partition from one mapping of everything that describes it."""
        return cls(**_settings_apart(values))


@dataclass(frozen=True)
class EngineChoice:
    """The engine that runs the clients.

    Args:
        kind: kind of the engine.
        workers: number of processes, actors or nodes.
        parallel_clients: clients that the vectorized engine trains side by side.
        parallel_runs: runs of one study whose clients it trains side by side, at most; None where
            a run trains by itself.
        parallel_numbers: names of the numbers of the method, such as ``fedprox.mu``, in which these
            runs may differ, beside those that only the server computes with.
        device: ``cpu`` or ``cuda``.
        devices: where each process trains, where several devices are asked for; in a federation
            what the nodes train on, where that is not as in a simulation.
        dtype: type of the parameters.
        precision: precision of products of matrices.
        asked: the kind that the settings ask for.
        address: address of the Ray cluster.
        reasons: why a faster engine could not be used.
    """

    kind: str = ""
    workers: Count = 1
    parallel_clients: Count | None = field(default=None, metadata=_OPTIONAL)
    parallel_runs: Count | None = field(default=None, metadata=_OPTIONAL)
    parallel_numbers: list[str] = field(default_factory=list, metadata=_OPTIONAL)
    device: str = field(default="", metadata=_OPTIONAL)
    devices: list[str] = field(default_factory=list, metadata=_OPTIONAL)
    dtype: str = "float32"
    precision: str = field(default="", metadata=_OPTIONAL)
    asked: str = "auto"
    address: str | None = field(default=None, metadata=_OPTIONAL)
    reasons: list[str] = field(default_factory=list, metadata=_OPTIONAL)

    @property
    def first_device(self) -> str:
        """The device, or the first of several."""
        return self.devices[0] if self.devices else self.device


@dataclass(frozen=True)
class Environment:
    """Where and when a run was made.

    Args:
        fedkeel: version of fedkeel.
        python: version of Python.
        torch: version of torch.
        numpy: version of numpy.
        system: operating system and architecture.
        processor: name of the processor.
        cores: cores that this process may use.
        date: date and time when the run began, in UTC.
    """

    fedkeel: str = ""
    python: str = ""
    torch: str = ""
    numpy: str = ""
    system: str = ""
    processor: str = ""
    cores: Count = 0
    date: str = ""


@dataclass(frozen=True)
class Estimate:
    """What a run will send and store.

    Args:
        down: bytes to a client in a round, by part; ``model`` is the model itself.
        up: bytes from a client in a round, by part.
        client_state: bytes of one client's state.
        clients: how many clients will have state, at most.
        table: bytes that the server remembers of each client.
        server_state: bytes that the server remembers besides, beyond the model.
        state: where the clients' state lives.
        disk: bytes of the file of client state, at most; 0 where it lives in memory.
        evaluation: bytes that the metrics keep in an evaluation; 0 in records of before.
    """

    down: dict[str, Count] = field(default_factory=dict)
    up: dict[str, Count] = field(default_factory=dict)
    client_state: Count = 0
    clients: Count = 0
    table: Count = 0
    server_state: Count = 0
    state: Literal["memory", "disk"] = "memory"
    disk: Count = 0
    evaluation: Count = 0

    @property
    def resident(self) -> int:
        """Bytes of state in this process once every client that will take part has done so."""
        return (self.rows if not self.disk else 0) + self.server_state

    @property
    def rows(self) -> int:
        """Bytes of the state of all clients, their own and the server's."""
        return (self.client_state + self.table) * self.clients


@dataclass(frozen=True)
class BestModel:
    """The round whose model is in model-best.safetensors.

    Args:
        round: rounds completed.
        score: its score.
        chosen_on: the examples that the score was measured on.
    """

    round: Count
    score: float
    chosen_on: Literal["held-out clients", "test set"]


@dataclass(frozen=True)
class RunRecord:
    """What ran, as it is written to run.json.

    Args:
        name: name of the run.
        key: digest of all that decides the numbers: settings, data, initial model, version, and
            the user's own code with the values that it reaches.
        method: canonical expression of the method.
        describe: the method in words, one line each.
        parts: the parts of the method: ``name``, ``paper``, ``roles``; ``code``, a digest of its
            files, for a user's own part.
        citations: citation keys of the parts, in order.
        bibtex: BibTeX of exactly these parts.
        weights: how clients count in the mean.
        seed: seed of the run.
        rounds: T, rounds asked for.
        status: what became of the run.
        model: ``name``, ``args``, ``parameters``, ``bytes``, ``head``. The name, the shape and the
            classes of the data, and ``args`` are what `fedkeel.task.models.make` makes it of.
        data: ``sources``, ``train``, ``test``, ``classes``, ``label_names``; ``columns`` and
            ``schema`` of a table; ``scale`` (``mean``, ``deviation``) where inputs were
            standardised, ``client_scales`` where each client's were apart; ``ranges`` (``low``,
            ``high``) of the inputs as the model takes them; ``text_column``; ``shape``,
            ``fingerprint``. The deviation of an input that was the same in all training examples is
            1e30. A node with data of its own keeps its scale in ``scale-CLIENT.json`` in its
            ``state`` folder.
        partition: ``kind`` and its settings, ``clients``, ``sizes`` [C], ``histogram`` [C][Y]
            or empty, ``names`` [C] or empty; ``unassigned`` and ``held_out`` examples;
            ``attempts`` that a draw took; ``says``, all that in words.
        local: settings of local training in words.
        participation: clients in a round, and of how many.
        target: test score for rounds to target, or None.
        task: ``loss``; ``metrics``, each with ``name``, ``higher_is_better`` and ``unit``; and the
            ``score``, the name of the metric by which models are judged. Of runs of earlier
            versions it is the classification of labels.
        judges: the model whose scores a round's ``test`` has: the ``global`` one, on the test set;
            or the clients' ``personal`` ones, on their own examples, all clients together.
        client_parameters: names of the parameters, and of the statistics of batch normalisation,
            of which each client has its own; the run then has no single model. None in runs of
            earlier versions.
        new_clients: clients that no round selects, ascending.
        earlier_keys: keys of this run when it had fewer rounds.
        engine: ``kind``, ``workers``, ``parallel_clients``, ``device``, ``dtype`` and
            ``precision`` that ran, and the kind that was ``asked`` for; ``reasons`` why a faster
            one could not be used.
        environment: versions, processor, date.
        estimate: bytes by part and direction for each client and round, and bytes of state.
        warnings: what a user should know about the run, such as that rounding may decide it.
        best_model: ``round`` and ``score`` of the model in model-best.safetensors, and what it was
            ``chosen_on``; None before a model was scored.
        message: why a run failed, was interrupted, or ended before its last round, else "".
        digests: SHA-256 of the files that a finished run has left, such as its rows and models, by
            name.
        features: what features of the run have written, by their table, such as ``privacy``; in
            run.json each stands beside the other keys. It can be read as an attribute, too.
        format: version of this layout.
    """

    name: str
    key: str
    method: str
    describe: str
    parts: list[PartRecord]
    citations: list[str]
    bibtex: str
    weights: str
    seed: Count
    rounds: Count
    status: Status
    model: ModelRecord
    data: DataRecord
    partition: PartitionRecord
    local: str
    participation: str
    target: float | None
    engine: EngineChoice
    environment: Environment
    estimate: Estimate
    task: TaskRecord = field(default_factory=TaskRecord)
    judges: Literal["global", "personal"] = "global"
    client_parameters: list[str] | None = None
    new_clients: list[Count] = field(default_factory=list)
    earlier_keys: list[str] = field(default_factory=list, metadata=_OPTIONAL)
    warnings: list[str] = field(default_factory=list)
    best_model: BestModel | None = None
    message: str = ""
    digests: dict[str, str] = field(default_factory=dict, metadata=_OPTIONAL)
    features: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def __repr__(self) -> str:
        """Return in a few lines what runs; each field has more."""
        model = f"{self.model.name}, {self.model.parameters:,} parameters"
        run = f"{self.method}, seed {self.seed}, {self.rounds:,} rounds: {self.status}"
        return "\n".join(
            [
                f"RunRecord of {run}",
                f"  model      {model}",
                f"  clients    {self.participation}",
                f"  training   {self.local}",
                f"  score      {self.score.label}",
                *(f"  warning    {warning}" for warning in self.warnings),
            ]
        )

    @property
    def ending(self) -> str:
        """How the run has ended, as a verb: a killed one leaves the status of one at work."""
        verbs = {
            "interrupted": "was interrupted",
            "failed": "has failed",
            "finished": "is finished",
        }
        return verbs.get(self.status, "has not ended")

    @property
    def score(self) -> MetricInfo:
        """The metric by which models are judged."""
        return self.task.metric(self.task.score)

    def content(self) -> dict[str, Any]:
        """Return what the runs of one comparison have in common beside their settings.

        These are the version, the model and the data, without what a seed may decide: how many
        examples the partition hands out, and what nodes with their own data hold out; and without
        what only predictions need, which some runs do not record. The model's arguments are among
        the settings.
        """
        left_out = {"train", "ranges", "text_column"}
        if self.partition.kind == "nodes":
            left_out |= {"test", "fingerprint"}
        return {
            "version": self.environment.fedkeel,
            "model": {k: v for k, v in to_json(self.model).items() if k != "args"},
            "data": {k: v for k, v in to_json(self.data).items() if k not in left_out},
        }

    def likeness(self) -> str:
        """Return a text that two runs share which differ in method and seed only.

        The record has no settings but the main ones: this is for runs whose config.toml is gone.
        """
        partition = to_json(self.partition)
        task = self.task
        main = {
            "partition": [self.partition.kind, *map(partition.get, PARTITION_SETTINGS)],
            "training": [self.rounds, self.participation, self.local, self.weights],
            "task": [task.loss, task.score, [metric.name for metric in task.metrics]],
            "features": self.feature_texts(),
        }
        return json.dumps([self.content(), main], sort_keys=True, default=str)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Return what a feature has written, None where this run has none."""
            if name in declarations():
                return self.__dict__.get("features", {}).get(name)
            raise AttributeError(f"a run record has no {name!r}")

    def feature_texts(self) -> dict[str, str]:
        """Return what features have written in a few words, by their label."""
        kinds = declarations()
        return {
            kinds[table].label or table: kinds[table].text(value)
            for table, value in self.features.items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunRecord:
        """Return the record that `values` were written from; keys of later versions are ignored.

        Raises:
            RunError: a value is missing or has another type.
        """
        values = _with_new_names(values)
        values["features"] = {
            table: values[table]
            for table, kind in declarations().items()
            if kind.record_class is not None and values.get(table)
        }
        engine, partition = values.get("engine"), values.get("partition")
        if isinstance(engine, Mapping):
            american = {k: "vectorized" for k in ("kind", "asked") if engine.get(k) == "vectorised"}
            values["engine"] = {**_with_new_names(engine), **american}
        if isinstance(partition, Mapping):
            values["partition"] = _settings_apart(partition)
            if not _is_shallow(values["partition"]["settings"]):
                raise RunError("A run record cannot be read.", got="partition: nested too deeply")
        try:
            record = _reader().validate_python(values)
            for table, value in record.features.items():
                record.features[table] = _feature_reader(table).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise RunError("A run record cannot be read.", got=f"{key}: {first['msg']}") from None
        if len({len(row) for row in record.partition.histogram}) > 1:
            got = "partition.histogram: rows of different lengths"
            raise RunError("A run record cannot be read.", got=got)
        return record


def to_json(record: Any) -> dict[str, Any]:  # noqa: ANN401 - any of the dataclasses above
    """Return a run record, or a section of it, as run.json has it."""
    values: dict[str, Any] = {}
    for f in fields(record):
        value = getattr(record, f.name)
        if f.metadata.get("optional") and not value:
            continue
        if isinstance(value, list) and value and is_dataclass(value[0]):
            value = [to_json(item) for item in value]
        if isinstance(value, dict):
            value = {k: to_json(v) if is_dataclass(v) else v for k, v in value.items()}
        values[f.name] = to_json(value) if is_dataclass(value) else value
    settings, features = values.pop("settings", {}), values.pop("features", {})
    return {**settings, **values, **features}


def _settings_apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a partition as its record has it: with a field for each known key and `settings`."""
    known = {f.name for f in fields(PartitionRecord)} - {"settings"}
    settings = {k: v for k, v in values.items() if k not in known}
    return {**{k: v for k, v in values.items() if k in known}, "settings": settings}


def _is_shallow(value: Any, levels: int = 8) -> bool:  # noqa: ANN401 - any JSON value
    """Return whether a JSON value is nested no deeper than so many levels."""
    if not isinstance(value, dict | list):
        return True
    items = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in items)


def _with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    return {OLD_NAMES.get(name, name): value for name, value in values.items()}


@cache
def _feature_reader(table: str) -> TypeAdapter[Any]:
    kind: Any = declarations()[table].record_class
    return TypeAdapter(kind)


@cache
def _reader() -> TypeAdapter[RunRecord]:
    return TypeAdapter(RunRecord)
