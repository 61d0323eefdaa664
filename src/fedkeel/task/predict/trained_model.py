"""A trained model of a run, with the preparation of its inputs: `load`."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedkeel.base.named_files import expanded, read_regular
from fedkeel.base.user_code import one_line, where_raised
from fedkeel.base.values import count_of, rows_of
from fedkeel.config import Experiment, Model, OtherModel, toml
from fedkeel.config.code_names import code_names
from fedkeel.data.read.new_texts import TextReader
from fedkeel.errors import DataError, ModelError, RunError
from fedkeel.records.client_models import (
    client_file,
    client_names,
    has_single_model,
    no_single_model,
)
from fedkeel.records.files import is_as_written
from fedkeel.records.folder import BEST_MODEL, MODEL, RunFolder
from fedkeel.records.run_record import RunRecord
from fedkeel.records.trust import check_trusted
from fedkeel.task.losses import LOSSES, OF_QUANTITIES
from fedkeel.task.models import make
from fedkeel.task.models.hub import is_hub_name
from fedkeel.task.models.lora import AdaptedBuilder
from fedkeel.task.outputs import scores_of
from fedkeel.task.predict.answers import Predictions, answer
from fedkeel.task.predict.preparation import InputPreparation

ModelLike = nn.Module | Callable[[], nn.Module]

_BATCH = 1000
"""Examples that the module sees at a time."""


@dataclass(frozen=True, repr=False)
class TrainedModel:
    """The trained model of a run, ready for new examples.

    Args:
        module: the module with the trained parameters, in evaluation mode.
        preparation: what is done to inputs before the module sees them.
        record: what the run says of itself.
        which: ``last`` or ``best``.
        folder: the run folder.
        client: whose own model it is, None for the model of all clients.
    """

    module: nn.Module
    preparation: InputPreparation
    record: RunRecord
    which: str
    folder: Path
    client: str | None = None

    def __repr__(self) -> str:
        whose = "" if self.client is None else f" of client {self.client!r}"
        return f"<TrainedModel: {self.which} model{whose} of {self.folder}, {self.record.method}>"

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels in their order, empty where they are just numbers."""
        return tuple(self.record.data.label_names)

    def predict(
        self, examples: object, *, client: str | None = None, name: str = "the examples"
    ) -> Predictions:
        """Return what the model says of new examples, which need no labels.

        Inputs are made ready as in training: categories, missing values, and the mean and the
        deviation of the training examples.

        Args:
            examples: path of a CSV, Parquet or ``.npz`` file, of an image or of a folder of images;
                a frame of pandas or another table; or inputs [N, ...] as they were before they were
                standardised, for several inputs a mapping. A table may have further columns.
                For a model of text: a list of texts, a table with a column of text, a data set of
                `datasets` or its folder.
            client: whose examples these are, where each client's inputs were standardised apart
                and no column says so.
            name: what to call the examples in messages.

        Returns:
            The answers. Where the model or `client` is one client's and the column of clients names
            others, their ``warnings`` say so.

        Raises:
            DataError: examples cannot be read, or do not fit what the model was trained on: a
                column is missing, a category is not known, a value is of another kind.
            ModelError: the module fails on them.
        """
        if isinstance(examples, (str, Path)):
            name = str(examples)
        inputs = self.preparation.apply(examples, name, client)
        parts: list[Tensor] = []
        with torch.inference_mode():
            for start in range(0, count_of(inputs.x), _BATCH):
                x = rows_of(inputs.x, slice(start, start + _BATCH))
                try:
                    output = self.module(**x) if isinstance(x, dict) else self.module(x)
                except Exception as error:  # a user's module may raise anything
                    raise ModelError(
                        "The model fails on the new examples.",
                        got=one_line(error),
                        why=f"raised in {where_raised(error)}",
                    ) from error
                parts.append(scores_of(output))
        scores = torch.cat(parts).clone()
        task = self.record.task
        values, shares = answer(scores, task.like or task.loss, self.record.data.classes)
        if inputs.resized and values.ndim > 2:
            size = " x ".join(map(str, values.shape[-2:]))
            raise DataError(
                f"{name}: the masks would not fit the images.",
                got=inputs.resized,
                expected=f"images of {size} pixels, as in training",
                do="cut them into pieces of that size; or resize them, and resize the masks back",
            )
        others = inputs.others
        warnings = (*inputs.warnings, *self._warnings(others, name, client or self.client))
        return Predictions(values, shares, scores, self.label_names, others, warnings)

    def _warnings(
        self, others: Mapping[str, list[str]], name: str, client: str | None
    ) -> Iterator[str]:
        """Yield a warning where the column of clients names others than the one that is taken."""
        column = self.preparation.client_column
        if client is None or column is None or self.record.partition.kind != "client":
            return
        own = client, client.rpartition("/")[2]  # of joined sources it is SOURCE/CLIENT
        named = Counter(value for value in others.get(column, ()) if value and value not in own)
        if not named:
            return
        yield (
            f"{name}: {named.total():,} of {len(others[column]):,} rows are of another client than "
            f"{client!r}, as the column {column!r} says: {_counts(named)}"
        )

    def export(self, path: str | Path) -> Path:
        """Write the model for programs without fedkeel; see `fedkeel.task.predict.export`.

        Args:
            path: a file that ends in ``.onnx``, or in ``.pt2`` for `torch.export.load`.

        Raises:
            ModelError: the model cannot be traced, the suffix is another one, or ONNX is not
                installed.
        """
        from fedkeel.task.predict.export import export  # torch.export takes seconds to import

        return export(self, expanded(path))


def load(
    run: str | Path,
    *,
    which: str = "last",
    model: ModelLike | None = None,
    client: str | None = None,
    trust: bool = False,
) -> TrainedModel:
    """Load the trained model of a finished run, with the preparation of its inputs.

    Args:
        run: the run folder.
        which: the model after the ``last`` round, or of the ``best`` one. `record.best_model` says
            which round that is, and on which examples it was chosen.
        model: the module, or what makes it, where the run was made in Python: the run does not say
            where the class is. The module is copied.
        client: whose own model, where each client has one; its inputs are then made ready as that
            client's. None takes the model of all clients.
        trust: whether the module of a class that the run names may be imported where the run was
            not made by this user on this machine.

    Raises:
        RunError: it is not a finished run, a file of it has changed, it has no single model, or
            none of the client, or its parameters do not fit the module; or it names code, and is
            not trusted.
        ModelError: the module cannot be made.
    """
    folder = RunFolder(Path(run))
    record = folder.read_run()
    if client is None:
        _check_single(record)
        state = _read_state(folder.path, record, which)
    else:
        state = _read_client(folder.path, record, which, client)
    settings = _experiment(folder.path)
    keeps_buffers = settings is not None and settings.model.buffers == "local"
    if client is None and keeps_buffers and _has_statistics(state):
        raise RunError(
            f"{folder} has no single model.",
            why='each client keeps its own statistics of batch normalisation (buffers = "local")',
            do='take a client\'s (client=), or train with model.buffers = "average", or without '
            "batch normalisation",
        )
    if model is None and settings is not None:
        names = code_names(settings)
        check_trusted(folder.path, {item for item in names if item[0] == "model.name"}, trust)
    dtype = torch.float64 if record.engine.dtype == "float64" else torch.float32
    module = _module(record, settings, state, model, client).to(dtype)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise RunError(
            f"The model of {folder} does not fit {type(module).__name__}.",
            got=" ".join(str(error).split())[:300],
            do=_other_code(settings, model),
        ) from None
    module.eval().requires_grad_(False)
    data = None if settings is None else settings.data
    preparation = InputPreparation.of(record.data, data, dtype)
    if settings is not None:
        preparation = replace(preparation, texts=TextReader.of(settings, record.data.text_column))
    if client is not None:
        preparation = preparation.of_client(client)
    return TrainedModel(module, preparation, record, which, folder.path, client)


def _check_single(record: RunRecord) -> None:
    """Refuse a run without one model for all clients."""
    if not has_single_model(record):
        raise no_single_model(record)


def _read_client(folder: Path, record: RunRecord, which: str, client: str) -> dict[str, Tensor]:
    """Read a client's own model, and check that it is as it was written."""
    if which != "last":
        raise RunError(
            "A client's own model is that after the last round.", got=which, expected="'last'"
        )
    name = client_file(record, client)
    path = folder / name
    if not is_as_written(path, record.digests[name]):
        raise RunError(f"{path} is gone, or has changed since the run ended.")
    return dict(load_file(path))


def _read_state(folder: Path, record: RunRecord, which: str) -> dict[str, Tensor]:
    """Read a model, and check that it is as it was written."""
    if which not in ("best", "last"):
        raise RunError("There are two models.", got=repr(which), expected="'best' or 'last'")
    name = MODEL if which == "last" else BEST_MODEL
    path = folder / name
    if not path.exists():
        raise RunError(
            f"{folder} has no {which} model.",
            got=f"no {name}; the run {record.ending}",
            do=f"fedkeel run {folder} --resume"
            if record.status in ("running", "interrupted")
            else "take a run that kept its models: one of a search or a comparison may not",
        )
    digest = record.digests.get(name)
    if digest is not None and not is_as_written(path, digest):
        raise RunError(f"{path} has changed since the run ended.")
    return dict(load_file(path))


def _experiment(folder: Path) -> Experiment | None:
    """Return the experiment of a run, None of a run from Python, whose file has no data."""
    path = folder / "config.toml"
    try:
        values = toml.parse(read_regular(path).decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read.", got=error) from None
    return toml.load(path) if {"data", "model"} <= values.keys() else None


def _has_statistics(state: dict[str, Tensor]) -> bool:
    return any(name.endswith("running_mean") for name in state)


def _module(
    record: RunRecord,
    settings: Experiment | None,
    state: dict[str, Tensor],
    model: ModelLike | None,
    client: str | None,
) -> nn.Module:
    """Return the module, with whatever parameters."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if model is not None:
        module = model()
        if not isinstance(module, nn.Module):
            raise ModelError(
                "'model' makes no module.", got=type(module).__name__, expected="a torch.nn.Module"
            )
        return module
    if settings is None:
        raise RunError(
            f"The run was made in Python, with a model {record.model.name!r}.",
            why="it does not say where its class is",
            do=f"give it: fedkeel.load(RUN, model={record.model.name})",
        )
    with torch.random.fork_rng(devices=[]):
        # settings, whose mark was looked at; the record has none
        wanted, head = _network_of(settings.model, record, client)
        outputs = _outputs(record, state, head)
        build = partial(make, wanted.name, record.data.shape, outputs, wanted.args)
        lora = wanted.lora if isinstance(wanted, Model) else None
        return build() if lora is None else AdaptedBuilder(build, lora)()


def _network_of(
    model: Model, record: RunRecord, client: str | None
) -> tuple[Model | OtherModel, str | None]:
    """Return the settings of the network that a client has, and the name of its head."""
    names = client_names(record)
    for other in getattr(record.features.get("networks"), "others", ()):
        if client in [names[k] for k in other.clients]:
            return model.others[other.name], other.head
    return model, record.model.head


def _outputs(record: RunRecord, state: dict[str, Tensor], head: str | None) -> int:
    """Return the number of outputs with which the module was made."""
    is_quantity = LOSSES.get(record.task.loss) in OF_QUANTITIES or not record.data.classes
    if not is_quantity:
        return record.data.classes
    weight = state.get(f"{head}.weight")
    return 1 if weight is None else len(weight)


def _other_code(settings: Experiment | None, model: ModelLike | None) -> str:
    """Return what to do about parameters that do not fit the module."""
    if model is None and settings is not None and is_hub_name(settings.model.name):
        return "install the versions of transformers, timm and peft that it was trained with"
    return "load it with the code of the model that it was trained with"


def _counts(named: Counter[str]) -> str:
    """Return the three most frequent values with their numbers."""
    more = ", ..." if len(named) > 3 else ""
    return ", ".join(f"{value} ({count:,})" for value, count in named.most_common(3)) + more


def metadata(model: TrainedModel) -> dict[str, str]:
    """Return what a program without fedkeel has to know of a model, as texts."""
    data, scale = model.record.data, model.record.data.scale
    schema = model.preparation.schema
    return {
        "method": model.record.method,
        "which": model.which,
        "loss": model.record.task.loss,
        "columns": json.dumps(data.columns),
        "schema": json.dumps([] if schema is None else schema.record()),
        "label_names": json.dumps(data.label_names),
        "scale": json.dumps(None if scale is None else asdict(scale)),
        "fedkeel": model.record.environment.fedkeel,
    }
