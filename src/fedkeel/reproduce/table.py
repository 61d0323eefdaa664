"""The settings of a paper's table or figure: experiments, published numbers, deviations.

Each table is a TOML file in `tables/`. A cell is one row (a method) in one column (a setting). Its
experiment is the base, overridden by the settings of the column, then of the row, then of the row
in that column. Cells with the same settings share their runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedkeel import config
from fedkeel.config import UNSET, Settings
from fedkeel.config.audit import InversionName
from fedkeel.features.diagnose.settings import diagnose_of

ID = r"^[a-z0-9][a-z0-9.-]*$"

Number = float | Literal["never", "failed"]
"""A published number; ``never``: the target was not reached; ``failed``: training failed."""


class CellMetric(Settings):
    """What the number of a cell is, computed from the rounds of one run.

    Args:
        kind: ``best``: the highest over rounds. ``last``. ``last_mean``: mean of the last `window`
            evaluations. ``at``: after `round` rounds. ``rounds_to``: completed rounds until the
            score reaches `target`. ``rounds_to_share``: the same for `share` of the highest score
            of the row `reference` with the same seed, which is FedReg's R_a. ``bytes_to_share``:
            bytes sent both ways until then, over all clients, in 10^6. ``models_to_share``: what a
            client of each round sends and receives until then, in models each way, which is FedGC's
            communication cost. ``fluctuation_mean``,
            ``_std``, ``_min``: of the differences between consecutive evaluations, in points.
            ``diagnosed``: the mean of a `diagnostic` over the rounds that have it. ``audited``: the
            mean PSNR of what `attack` brings back from the messages of a round.
        score: a metric of the test set that is a share, in percent: ``accuracy``, or one of those
            that the run measures.
        window: evaluations in the mean, for ``last_mean``.
        round: for ``at``.
        target: share in (0, 1], for ``rounds_to``.
        share: a in (0, 1], for ``rounds_to_share``, ``bytes_to_share`` and ``models_to_share``.
        reference: name of the row that sets the scale there.
        diagnostic: for ``diagnosed``: a number of ``[diagnose]``, such as ``forgetting.increase``;
            of those by layer or class, with the label behind a slash: ``cka.cka.layer/conv2``.
        attack: for ``audited``: ``linear``, ``dlg`` or ``cosine``.
    """

    kind: Literal[
        "best",
        "last",
        "last_mean",
        "at",
        "rounds_to",
        "rounds_to_share",
        "bytes_to_share",
        "models_to_share",
        "fluctuation_mean",
        "fluctuation_std",
        "fluctuation_min",
        "diagnosed",
        "audited",
    ] = "best"
    score: str = "accuracy"
    window: int = Field(10, ge=1)
    round: int | None = Field(None, ge=1)
    target: float | None = Field(None, gt=0.0, le=1.0)
    share: float | None = Field(None, gt=0.0, le=1.0)
    reference: str | None = None
    diagnostic: str | None = None
    attack: InversionName | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed: dict[str, tuple[str, ...]] = {
            "at": ("round",),
            "rounds_to": ("target",),
            "rounds_to_share": ("share", "reference"),
            "bytes_to_share": ("share", "reference"),
            "models_to_share": ("share", "reference"),
            "diagnosed": ("diagnostic",),
            "audited": ("attack",),
        }
        for name in ("round", "target", "share", "reference", "diagnostic", "attack"):
            if (getattr(self, name) is not None) != (name in needed.get(self.kind, ())):
                needs = " and ".join(needed.get(self.kind, ())) or "none of these"
                raise ValueError(f"kind {self.kind!r} needs {needs}: {name!r} is wrong")
        return self

    @property
    def unit(self) -> str:
        """What the number counts; "" where it depends on what is diagnosed."""
        if self.kind.startswith("fluctuation"):
            return "points"
        return {
            "rounds_to": "rounds",
            "rounds_to_share": "rounds",
            "bytes_to_share": "MB",
            "models_to_share": "models",
            "diagnosed": "",
            "audited": "dB",
        }.get(self.kind, "%")

    @property
    def counts_until_target(self) -> bool:
        """Whether it counts until a target is reached, so that a missing number means never."""
        return self.unit in ("rounds", "MB", "models")


class Published(Settings):
    """A number of the paper; in TOML ``87.5``, ``[87.5, 0.3]`` with its spread, or ``"never"``."""

    value: Number
    spread: float | None = Field(None, ge=0.0)


class PaperColumn(Settings):
    """A setting in which all methods are compared.

    Args:
        id: name for ``--columns`` and for the published numbers of the rows.
        name: header, as the paper has it.
        settings: override those of the base experiment.
        audit: overrides the table's.
        metric: replaces the table's.
        baseline: name of the row that gains are over in this column; replaces the table's.
        ours: whether it is not in the paper.
        missing: why it cannot be run; only its published numbers are shown.
        note: a remark for readers.
    """

    id: str = Field(pattern=ID)
    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    audit: dict[str, Any] = Field(default_factory=dict)
    metric: CellMetric | None = None
    baseline: str | None = None
    ours: bool = False
    missing: str = ""
    note: str = ""


class Row(Settings):
    """A method.

    Args:
        name: as the paper calls it.
        method: our expression.
        settings: the paper's settings of this method; override those of base and column.
        settings_in: the same for single columns by id; ``method`` may be among them.
        audit: overrides the table's and the column's.
        published: the paper's number by column id.
        columns: ids of the columns in which it is run; empty for all.
        baseline: name of the row that its gains are over; replaces the column's or the table's.
        ours: whether it is not in the paper.
        missing: why it cannot be run.
        note: a remark for readers.
    """

    name: str
    method: str = "fedavg"
    settings: dict[str, Any] = Field(default_factory=dict)
    settings_in: dict[str, dict[str, Any]] = Field(default_factory=dict)
    audit: dict[str, Any] = Field(default_factory=dict)
    published: dict[str, Published] = Field(default_factory=dict)
    columns: tuple[str, ...] = ()
    baseline: str | None = None
    ours: bool = False
    missing: str = ""
    note: str = ""

    @field_validator("published", mode="before")
    @classmethod
    def _numbers(cls, values: object) -> object:
        """Take a bare number, and a pair of number and spread."""
        if not isinstance(values, Mapping):
            return values
        return {name: _published(value) for name, value in values.items()}


def _published(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) == 2:
        return {"value": value[0], "spread": value[1]}
    return value if isinstance(value, Mapping) else {"value": value}


class Quick(Settings):
    """A smaller version of a table, for a first look.

    Args:
        name: what is smaller, as text; the pages of a quick result show it.
        settings: override all others.
        audit: overrides all others.
        seeds: number of seeds.
        columns: ids of the columns that are run; empty for all.
        rows: names of the rows that are run; empty for all.
    """

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    audit: dict[str, Any] = Field(default_factory=dict)
    seeds: int = Field(1, ge=1)
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


class PaperTable(Settings):
    """A table or figure.

    Args:
        id: such as ``fedgh-table1``.
        paper: citation key; empty for a user's table.
        title: paper, number and content, in one line.
        shows: what the paper concludes from it; of a table of our own "Not in ..." and a question.
        source: where the published numbers and the settings are printed.
        data: the data sets that are needed, with their names in ``fedkeel data list``, or as text
            where fedkeel has no reader.
        base: the experiment; the keys of an experiment file.
        columns: settings.
        rows: methods.
        baseline: name of the row that gains are over; None where there is none.
        metric: what the numbers are.
        audit: the attack on the messages of a round, for ``audited``; see `config.Audit`.
        seeds: number of seeds that are run; the first is the base's.
        published_seeds: number of seeds behind the published numbers; None where that is unstated.
        tune: the search for hyper-parameters that ``--tune`` makes.
        quick: the smaller version.
        deviations: assumptions, and where paper and code disagree.
        missing: why it cannot be run at all.
    """

    id: str = Field(pattern=ID)
    paper: str = ""
    title: str
    shows: str
    source: str
    data: tuple[str, ...]
    base: dict[str, Any] = Field(default_factory=dict)
    columns: tuple[PaperColumn, ...] = ()
    rows: tuple[Row, ...] = ()
    baseline: str | None = None
    metric: CellMetric = CellMetric()
    audit: dict[str, Any] = Field(default_factory=dict)
    seeds: int = Field(3, ge=1)
    published_seeds: int | None = Field(None, ge=1)
    tune: config.Space | None = None
    quick: Quick | None = None
    deviations: tuple[str, ...] = ()
    missing: str = ""

    @property
    def conclusion(self) -> str:
        """What the paper concludes, in its name: what was measured may differ."""
        is_ours = not self.paper or self.shows.startswith("Not in ")
        return self.shows if is_ours else f"The paper shows: {self.shows}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.is_runnable and not (self.base and self.columns and self.rows):
            raise ValueError("give base, columns and rows, or say what is 'missing'")
        columns, rows = [c.id for c in self.columns], [r.name for r in self.rows]
        for what, names in (("column", columns), ("row", rows)):
            repeated = [name for name, count in Counter(names).items() if count > 1]
            if repeated:
                raise ValueError(f"there are two {what}s {repeated[0]!r}")
        for row in self.rows:
            _check_names(f"columns of row {row.name!r}", [*row.settings_in, *row.columns], columns)
            _check_names(f"published of row {row.name!r}", row.published, columns)
            ours = [c.id for c in self.columns if c.ours and c.id in row.published]
            if (row.ours and row.published) or ours:
                raise ValueError(f"row {row.name!r}: what is 'ours' has no published number")
        named = [self.baseline, self.metric.reference]
        named += [column.baseline for column in self.columns]
        named += [self.metric_of(column).reference for column in self.columns]
        named += [row.baseline for row in self.rows]
        _check_names("baseline or reference", [name for name in named if name is not None], rows)
        if self.quick:
            _check_names("columns of quick", self.quick.columns, columns)
            _check_names("rows of quick", self.quick.rows, rows)
        for row, column in self.cells() if self.base else ():
            kinds = diagnose_of(self.experiment(row, column)).kinds
            diagnostic = self.metric_of(column).diagnostic
            if diagnostic and diagnostic.partition(".")[0] not in kinds:
                raise ValueError(
                    f"column {column.id!r}: diagnose.kinds lacks that of {diagnostic!r}"
                )
        return self

    @property
    def is_runnable(self) -> bool:
        """Whether some of its runs can be made, given the data."""
        return not self.missing

    def cells(self, quick: bool = False) -> list[tuple[Row, PaperColumn]]:
        """Return the cells that are run, row by row in each column."""
        columns: Sequence[str] = self.quick.columns if quick and self.quick else ()
        rows: Sequence[str] = self.quick.rows if quick and self.quick else ()
        return [
            (row, column)
            for column in self.columns
            for row in self.rows
            if not (column.missing or row.missing)
            and (not row.columns or column.id in row.columns)
            and (not columns or column.id in columns)
            and (not rows or row.name in rows)
        ]

    def experiment(
        self, row: Row, column: PaperColumn, seed: int | None = None, quick: bool = False
    ) -> config.Experiment:
        """Return the experiment of a cell.

        Args:
            row: the method.
            column: the setting.
            seed: the run's seed; None takes the base's.
            quick: whether it is the smaller version.

        Raises:
            ConfigError: the settings cannot be used together.
        """
        values = merge_settings(self.base, {"name": self.id, "method": row.method})
        for overrides in (column.settings, row.settings, row.settings_in.get(column.id, {})):
            values = merge_settings(values, overrides)
        if quick and self.quick:
            values = merge_settings(values, self.quick.settings)
        if seed is not None:
            values["seed"] = seed
        where = f"{self.id}, {row.name!r} in column {column.id!r}"
        return config.build(config.Experiment, values, where)

    def audit_of(
        self, row: Row, column: PaperColumn, seed: int, quick: bool = False
    ) -> config.Audit | None:
        """Return the attack on a cell's messages; None where its number is another.

        Raises:
            ConfigError: the settings cannot be used together.
        """
        attack = self.metric_of(column).attack
        if attack is None:
            return None
        values = {"attacks": attack, "seed": seed}
        of_quick = self.quick.audit if quick and self.quick else {}
        for overrides in (self.audit, column.audit, row.audit, of_quick):
            values = merge_settings(values, overrides)
        where = f"{self.id}, audit of {row.name!r} in column {column.id!r}"
        return config.build(config.Audit, values, where)

    def metric_of(self, column: PaperColumn) -> CellMetric:
        """Return the metric of a column."""
        return column.metric or self.metric


def merge_settings(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with some of them overridden, or removed where the value is "unset".

    >>> merge_settings(
    ...     {"local": {"lr": 0.1, "epochs": 1}}, {"local": {"epochs": "unset", "steps": 5}}
    ... )
    {'local': {'lr': 0.1, 'steps': 5}}
    """
    merged = dict(settings)
    for name, value in overrides.items():
        if value == UNSET:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            table = merged.get(name)
            merged[name] = merge_settings(table if isinstance(table, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged


def _check_names(where: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: there is no {name!r}")
