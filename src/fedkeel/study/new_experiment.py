"""A first experiment for a user's data: an experiment file and a model to change."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeel.base.named_files import expanded, writing
from fedkeel.base.values import only_tensor
from fedkeel.config import Data, build, toml
from fedkeel.config.settings import Experiment
from fedkeel.data.codings import coding_warnings
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.data.read.folders import train_and_test_folders
from fedkeel.data.read.hugging_face import load_any
from fedkeel.data.read.survey import ColumnSurvey, TableSurvey, survey_tables
from fedkeel.data.read.tables import TABLE_SUFFIXES
from fedkeel.errors import ConfigError, counted
from fedkeel.runner.ingredients import ingredients
from fedkeel.runner.prepare import prepare
from fedkeel.study.new_model import IMAGE, LABELS, QUANTITY

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

_SIMULATED_CLIENTS = 10
"""Clients that data without a column of clients is divided among, at most."""

_HOLDOUT, _EXAMPLES_PER_CLIENT = 0.25, 8
"""Share of its examples that a client keeps aside, and how many it has on average for that."""

_TEST_FRACTION = 0.2
"""Share of all examples that are the common test set, where the data have none."""

_SKEWED = 0.75
"""Share of the largest class from which on accuracy says little."""


@dataclass(frozen=True)
class NewExperiment:
    """What was written, and why.

    Args:
        experiment: the experiment file.
        model: the file with the model.
        notes: what was seen and decided, (word, sentence) each.
    """

    experiment: Path
    model: Path
    notes: tuple[tuple[str, str], ...]


def new_experiment(
    name: str,
    sources: Sequence[str],
    label: str = "label",
    client: str | None = None,
    drop: Sequence[str] = (),
) -> NewExperiment:
    """Write an experiment file and a model for a user's data into the current folder.

    The data are read as a run reads them, and everything but the training is checked.

    Args:
        name: name of the experiment: ``NAME.toml`` and ``NAME_model.py`` are written.
        sources: paths of tables, or one path or known name of anything that `data.source` takes.
        label: name of the column or array that is to be predicted.
        client: name of the column or array of clients, None where there is none.
        drop: names of columns that should not be inputs.

    Raises:
        ConfigError: the name cannot be used, or a file of that name is there.
        RunError: the current folder cannot be written to.
        FedkeelError: the data cannot be read or used.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "The name of an experiment is letters, digits, '.', '_' and '-'.",
            got=repr(name),
            do="write such a name; the files go into the current folder",
        )
    module = re.sub(r"\W", "_", f"_{name}" if name[0].isdigit() else name) + "_model"
    files = Path(f"{name}.toml"), Path(f"{module}.py")
    for file in files:
        if os.path.lexists(file):
            raise ConfigError(
                f"There is a file {file} already.", do="give another name, or move the file away"
            )
    is_table = all(source.lower().endswith(TABLE_SUFFIXES) for source in sources)
    survey = None
    if is_table:
        paths = [expanded(source) for source in sources]
        survey = survey_tables(paths, label, client, drop)
    values = _data(sources, label, client, drop, survey)
    train, test = load_any(build(Data, values, "data"))
    plan = _Plan(name, module, values, train, survey)
    texts = plan.experiment(), plan.model()
    try:
        _write(files, texts)
        settings = build(Experiment, toml.parse(texts[0], str(files[0])), str(files[0]))
        prepared = prepare(settings, ingredients(settings, train, test))
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        raise
    return NewExperiment(*files, tuple(plan.notes(prepared.clients, len(test))))


def _write(files: Sequence[Path], texts: Sequence[str]) -> None:
    """Write the files, or say why the current folder cannot be written to (RunError)."""
    with writing(
        "The experiment cannot be written into the current folder.",
        "go to a folder of your own that has room, and give the data by their whole path",
    ):
        for file, text in zip(files, texts, strict=True):
            file.write_text(text, encoding="utf-8")


def _data(
    sources: Sequence[str],
    label: str,
    client: str | None,
    drop: Sequence[str],
    survey: TableSurvey | None,
) -> dict[str, object]:
    """Return the settings of the data."""
    values: dict[str, object] = {"source": sources[0] if len(sources) == 1 else tuple(sources)}
    is_path = any(mark in sources[0] for mark in "./\\") or os.path.exists(sources[0])
    if survey is None:
        if sources[0].endswith(".npz"):
            values["label"] = label
        elif client is not None:
            raise ConfigError(
                "--client names a column of a table, or an array of an .npz file.",
                got=f"{client!r}, and the data are {sources[0]}",
                do="take --client away: the data are then divided at random",
            )
        values |= {} if client is None else {"client": client}
        values |= {"drop": tuple(drop)} if drop else {}  # which is refused when the data are read
        return values | ({"normalize": "standardize"} if is_path else {})
    values["label"] = label
    if survey.target == "quantity":
        values["target"] = "quantity"
    if client is not None:
        values["client"] = client
    if left_out := [column.name for column in survey.of_kind("left out")]:
        values["drop"] = tuple(left_out)
    values["normalize"] = "standardize"
    if any(column.gaps for column in survey.columns if column.kind != "left out"):
        values["missing"] = "indicator"
    categories = {column.name: column.categories for column in survey.of_kind("category")}
    return values | ({"categories": categories} if categories else {})


@dataclass(frozen=True)
class _Plan:
    """The first experiment.

    Args:
        name: its name.
        module: the Python module with the model.
        data: settings of the data.
        train: the training set that they give.
        survey: what the tables look like, None of other data.
    """

    name: str
    module: str
    data: dict[str, object]
    train: Dataset
    survey: TableSurvey | None

    @property
    def is_quantity(self) -> bool:
        """Whether a number is predicted."""
        return not self.train.classes

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images [C, H, W]."""
        return len(self.train.shape) == 3

    @property
    def is_divided(self) -> bool:
        """Whether the data say who the clients are."""
        return self.data.get("client") is not None or not isinstance(self.data["source"], str)

    @property
    def clients(self) -> int:
        """Number of clients."""
        if self.is_divided:
            return len(self.train.clients or self.train.sources)
        return max(2, min(_SIMULATED_CLIENTS, len(self.train) // 20))

    @property
    def largest_share(self) -> float:
        """Share of the largest class."""
        return float(np.bincount(self.train.labels).max() / len(self.train))

    def experiment(self) -> str:
        """Return the text of the experiment file."""
        small = len(self.train) / self.clients < 200
        methods = [
            *("local", "centralised", "fedavg"),
            "fedprox" if self.is_quantity else "scaffold",
            "ditto",
        ]
        tables = [
            f"# A first experiment: fedkeel run {self.name}.toml\n"
            f'# Every key: fedkeel\'s page "The experiment file".\nname = {_toml(self.name)}\n'
            'method = "fedavg"\nrounds = 30',
            self._data_text(),
            self._partition_text() + self._holdout_text(),
            f"[model]\nname = {_toml(self.module + ':Net')}  # in {self.module}.py, to be changed"
            + (f"\nargs = {{ {self._scale_text()} }}" if self.is_quantity else ""),
            self._task_text(),
            (
                '[local]\noptimiser = "adam"\nlr = 0.01\n'
                if self.is_quantity
                else f"[local]\nlr = {0.05 if self.is_image else 0.1}\n"
            )
            + f"epochs = 2\nbatch_size = {16 if small else 32}",
            *self._evaluation_text(),
            "[compare]  # for which client is it better than to train alone?\n"
            f"# fedkeel compare {self.name}.toml\n"
            f"methods = {_toml(methods)}\nseeds = 5  # more of them show smaller gains",
        ]
        return "\n\n".join(tables) + "\n"

    def _data_text(self) -> str:
        """Return the tables of the data."""
        values = dict(self.data)
        categories = values.pop("categories", {})
        lines = [f"{key} = {_toml(value)}{_comment(key)}" for key, value in values.items()]
        if self.draws_test:
            of_all = (
                f"test_fraction = {_TEST_FRACTION}  # of all: the common test set, not trained on"
            )
            lines.append(of_all)
        text = "\n".join(["[data]", *lines])
        if not isinstance(categories, dict) or not categories:
            return text
        lines = [f"{_toml_key(key)} = {_toml(names)}" for key, names in categories.items()]
        return (
            text + "\n\n[data.categories]  # each becomes an input of 0 or 1\n" + "\n".join(lines)
        )

    def _partition_text(self) -> str:
        """Return the table of the partition."""
        if self.is_divided:
            kind = "client" if self.data.get("client") is not None else "source"
            return f'[partition]\nkind = "{kind}"'
        if self.train.has_labels:
            return (
                "[partition]  # simulated: the data do not say who the clients are\n"
                f'kind = "dirichlet"\nclients = {self.clients}\nalpha = 0.5\nmin_size = 2'
            )
        return (
            "[partition]  # simulated: the data do not say who the clients are\n"
            f'kind = "iid"\nclients = {self.clients}'
        )

    @property
    def draws_test(self) -> bool:
        """Whether the test set is drawn from the data, which have none of their own."""
        return any(_is_without_test(text) for text in build(Data, self.data, "data").sources)

    @property
    def holds_out(self) -> bool:
        """Whether clients have enough examples to be judged on their own."""
        return len(self.train) >= _EXAMPLES_PER_CLIENT * self.clients

    def _holdout_text(self) -> str:
        """Return the settings of the partition that keep examples of each client aside."""
        if not self.holds_out:
            return ""
        text = f"\nholdout = {_HOLDOUT}  # of each client: new examples to judge its model on"
        by_class = (
            "\nstratify = true  # the same share of each class" if self.train.has_labels else ""
        )
        return text + by_class

    def _evaluation_text(self) -> list[str]:
        """Return the table of the evaluation: who trains alone is judged on its own examples."""
        if not self.holds_out:
            return []
        return [
            '[evaluation]\nmodel = "personal"  # judge each client\'s model on what it holds out;\n'
            '# "global" judges on the common test set, which has other clients\' examples too'
        ]

    def _task_text(self) -> str:
        """Return the table of the task."""
        return (
            '[task]\nloss = "mse"\nmetrics = ["mae", "r2"]'
            if self.is_quantity
            else f"[task]\nmetrics = {_toml(self.metrics)}  # models are judged by the first one"
        )

    @property
    def metrics(self) -> list[str]:
        """What is measured where labels are predicted."""
        metrics = ["accuracy", "balanced_accuracy"]
        if self.largest_share > _SKEWED:
            metrics.reverse()
        return metrics + (["auroc"] if self.train.classes == 2 else [])

    def _scale_text(self) -> str:
        """Return mean and deviation of the quantity, by which the model's output is scaled."""
        y = only_tensor(self.train.y, "a quantity").double()
        deviation = float(y.std(correction=0)) or 1.0
        return f"mean = {float(y.mean()):.6g}, deviation = {deviation:.6g}"

    def model(self) -> str:
        """Return the text of the model's file."""
        template = QUANTITY if self.is_quantity else IMAGE if self.is_image else LABELS
        return template.replace("EXPERIMENT", self.name)

    def notes(self, clients: Federation, tested: int) -> list[tuple[str, str]]:
        """Return what was seen and decided.

        Args:
            clients: the clients as a run has them.
            tested: examples in the test set.
        """
        train, survey = self.train, self.survey
        of = counted(self.clients, "client")
        sources = self.data["source"]
        where = sources if isinstance(sources, str) else counted(len(train.sources), "source")
        rows = counted(len(train) if survey is None else survey.rows, "example")
        notes = [("data", f"{where}: {rows}, {of}" + ("" if self.is_divided else " (simulated)"))]
        target = "a quantity" if self.is_quantity else counted(train.classes, "class")
        if train.label_names and train.classes <= 8:
            target += f": {', '.join(train.label_names)}"
        if train.has_labels and self.largest_share > _SKEWED:
            target += f"; {self.largest_share:.0%} are one class, so balanced accuracy counts"
        notes.append(("target", target))
        notes += self._shares(clients, tested)
        warnings = [*train.warnings, *coding_warnings(train)]
        of_data = [("warning", text) for text in dict.fromkeys(warnings)]
        if survey is None:
            return notes + of_data
        kinds = [
            counted(len(columns), f"{kind} column")
            for kind in ("number", "category")
            if (columns := survey.of_kind(kind))
        ]
        gaps = [c.name for c in survey.columns if c.gaps and c.kind != "left out"]
        notes.append(("inputs", " and ".join(kinds)))
        if gaps:
            has = "has" if len(gaps) == 1 else "have"
            text = f"{_some(gaps)} {has} gaps: filled by means, and marked by an input of its own"
            notes.append(("gaps", text))
        for column in survey.of_kind("left out"):
            hint = f"; {column.hint}" if column.hint else ""
            notes.append(("left out", f"{column.name}: {column.reason}{hint}"))
        notes += [("codes?", _codes_told(c)) for c in survey.of_kind("number") if c.codes]
        return notes + of_data

    def _shares(self, clients: Federation, tested: int) -> list[tuple[str, str]]:
        """Return how many examples are trained on, held out and in the test set."""
        trained = len(clients.rows)
        held = 0 if clients.holdout_rows is None else len(clients.holdout_rows)

        def of_all(count: int) -> str:
            return f"{counted(count, 'example')} ({count / (trained + held + tested):.0%})"

        notes = [("trained", f"{of_all(trained)} are trained on")]
        if held:
            rest = " that the test set leaves" * self.draws_test
            says = f"{_HOLDOUT:.0%} of each client's examples{rest} (partition.holdout)"
            notes.append(("held out", f"{of_all(held)}, {says}; models are judged on them"))
        key = " (data.test_fraction)" * self.draws_test
        says = "" if held else "; models are judged on them"
        return [*notes, ("test set", f"{of_all(tested)} of all clients together{key}{says}")]


def _is_without_test(source: str) -> bool:
    """Return whether a test set is drawn from a source, as far as its name tells."""
    if source in SOURCES:
        return SOURCES[source].layout == "embedded"
    path = expanded(source)
    return path.is_file() or (path.is_dir() and train_and_test_folders(path)[1] is None)


def _codes_told(column: ColumnSurvey) -> str:
    """Return that the numbers of a column may be codes, and what to do then."""
    return (
        f"{column.name} has only the whole numbers {', '.join(map(str, column.codes))}: if these "
        f"are codes and no quantity, write {_toml_key(column.name)} = [] below [data.categories]"
    )


def _some(names: Sequence[str]) -> str:
    """Return the first of some names."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _toml(value: object) -> str:
    """Return a text, or a list of texts, as TOML has it."""
    return json.dumps(value, ensure_ascii=False)


def _toml_key(name: str) -> str:
    """Return a key as TOML has it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _comment(key: str) -> str:
    """Return what stands behind a setting of the data."""
    comments = {
        "target": "a number is predicted",
        "drop": "no inputs",
        "normalize": "mean 0 and deviation 1 for each input",
        "missing": "gaps are filled by means, and an input says where",
    }
    return f"  # {comments[key]}" if key in comments else ""
