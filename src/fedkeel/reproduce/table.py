"""A table or figure of a paper as data: experiments, published numbers, and what is not so here.

Each is a TOML file in `tables/`. A cell is one row (a method) in one column (a setting); its
experiment is the base with the settings of the column, the row, and the row in that column laid
over it, in this order. Cells with the same settings share their runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedkeel import config
from fedkeel.config import UNSET, Settings

ID = r"^[a-z0-9][a-z0-9.-]*$"

Number = float | Literal["never", "failed"]
"""A published number; ``never`` where a target was not reached, ``failed`` where training did."""


class Metric(Settings):
    """What a cell's number is, made of the rounds of one run.

    Args:
        kind: ``best``: the highest over rounds. ``last``. ``last_mean``: mean of the last `window`
            evaluations. ``at``: after `round` rounds. ``rounds_to``: completed rounds until the
            score reaches `target`. ``rounds_to_share``: the same for `share` of the highest score
            of the row `reference` with the same seed, which is FedReg's R_a. ``bytes_to_share``:
            bytes sent both ways until then, over all clients, in 10^6. ``fluctuation_mean``,
            ``_std``, ``_min``: of the differences between consecutive evaluations, in points.
        score: ``top1`` or ``top3`` accuracy on the test set, in percent.
        window: evaluations in the mean, for ``last_mean``.
        round: for ``at``.
        target: share in (0, 1], for ``rounds_to``.
        share: a in (0, 1], for ``rounds_to_share`` and ``bytes_to_share``.
        reference: name of the row that sets the scale there.
    """

    kind: Literal[
        "best",
        "last",
        "last_mean",
        "at",
        "rounds_to",
        "rounds_to_share",
        "bytes_to_share",
        "fluctuation_mean",
        "fluctuation_std",
        "fluctuation_min",
    ] = "best"
    score: Literal["top1", "top3"] = "top1"
    window: int = Field(10, ge=1)
    round: int | None = Field(None, ge=1)
    target: float | None = Field(None, gt=0.0, le=1.0)
    share: float | None = Field(None, gt=0.0, le=1.0)
    reference: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        wanted: dict[str, tuple[str, ...]] = {
            "at": ("round",),
            "rounds_to": ("target",),
            "rounds_to_share": ("share", "reference"),
            "bytes_to_share": ("share", "reference"),
        }
        for name in ("round", "target", "share", "reference"):
            if (getattr(self, name) is not None) != (name in wanted.get(self.kind, ())):
                needs = " and ".join(wanted.get(self.kind, ())) or "none of these"
                raise ValueError(f"kind {self.kind!r} needs {needs}: {name!r} is wrong")
        return self

    @property
    def unit(self) -> str:
        """What the number counts."""
        if self.kind.startswith("fluctuation"):
            return "points"
        return {"rounds_to": "rounds", "rounds_to_share": "rounds", "bytes_to_share": "MB"}.get(
            self.kind, "%"
        )

    @property
    def better(self) -> Literal["high", "low"]:
        """Whether a high or a low number is the better one."""
        return "low" if self.reaches or self.kind == "fluctuation_std" else "high"

    @property
    def reaches(self) -> bool:
        """Whether it tells when a target was reached, so that None is never."""
        return self.unit in ("rounds", "MB")


class Published(Settings):
    """A number of the paper; in TOML ``87.5``, ``[87.5, 0.3]`` with its spread, or ``"never"``."""

    value: Number
    spread: float | None = Field(None, ge=0.0)


class Column(Settings):
    """A setting that all methods are compared in.

    Args:
        id: name for ``--columns`` and for the published numbers of the rows.
        name: header, as the paper has it.
        settings: laid over the base experiment.
        metric: in place of the table's.
        baseline: the row that gains are taken over in this column, in place of the table's.
        ours: whether it is not in the paper.
        missing: why it cannot be run; it is shown with the published numbers alone.
        note: what to know of it.
    """

    id: str = Field(pattern=ID)
    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    metric: Metric | None = None
    baseline: str | None = None
    ours: bool = False
    missing: str = ""
    note: str = ""


class Row(Settings):
    """A method.

    Args:
        name: as the paper calls it.
        method: our expression.
        settings: laid over base and column: what the paper gives this method alone.
        settings_in: the same for single columns, by their id; ``method`` is a setting too.
        published: the paper's number by column id.
        columns: ids of the columns it is run in; all where nothing is given.
        baseline: the row it is compared with, in place of the column's or the table's.
        ours: whether it is not in the paper.
        missing: why it cannot be run.
        note: what to know of it.
    """

    name: str
    method: str = "fedavg"
    settings: dict[str, Any] = Field(default_factory=dict)
    settings_in: dict[str, dict[str, Any]] = Field(default_factory=dict)
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
    """A smaller version, for a look.

    Args:
        name: what was made smaller, in words; every line of a quick result says it.
        settings: laid over everything else.
        seeds: number of seeds.
        columns: ids of the columns that are run; all where nothing is given.
        rows: names of the rows that are run; all where nothing is given.
    """

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    seeds: int = Field(1, ge=1)
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


class Table(Settings):
    """A table or figure.

    Args:
        id: such as ``fedgh-table1``.
        paper: citation key; empty for a table of one's own.
        title: paper, number, and what it is, in one line.
        shows: what the paper concludes from it.
        source: where the published numbers and the settings stand.
        data: the data sets that are needed, as ``fedkeel data list`` names them, or in words where
            fedkeel has no reader.
        base: the experiment; the keys of an experiment file.
        columns: settings.
        rows: methods.
        baseline: name of the row that gains are taken over; None where there is none.
        metric: what the numbers are.
        seeds: number of seeds that are run; the first is the base's own.
        published_seeds: number of seeds behind the published numbers; None where that is unstated.
        tune: the search for hyper-parameters that ``--tune`` makes.
        quick: the smaller version.
        deviations: where our setting is an assumption, and where paper and code disagree.
        missing: why it cannot be run at all.
        waits: which measurement it waits for.
    """

    id: str = Field(pattern=ID)
    paper: str = ""
    title: str
    shows: str
    source: str
    data: tuple[str, ...]
    base: dict[str, Any] = Field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    rows: tuple[Row, ...] = ()
    baseline: str | None = None
    metric: Metric = Metric()
    seeds: int = Field(3, ge=1)
    published_seeds: int | None = Field(None, ge=1)
    tune: config.Space | None = None
    quick: Quick | None = None
    deviations: tuple[str, ...] = ()
    missing: str = ""
    waits: str = ""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.runnable and not (self.base and self.columns and self.rows):
            raise ValueError(
                "give base, columns and rows, or say what is 'missing' or it 'waits' for"
            )
        columns, rows = [c.id for c in self.columns], [r.name for r in self.rows]
        for what, names in (("column", columns), ("row", rows)):
            twice = [name for name, n in Counter(names).items() if n > 1]
            if twice:
                raise ValueError(f"there are two {what}s {twice[0]!r}")
        for row in self.rows:
            _known(f"columns of row {row.name!r}", [*row.settings_in, *row.columns], columns)
            _known(f"published of row {row.name!r}", row.published, columns)
            ours = [c.id for c in self.columns if c.ours and c.id in row.published]
            if (row.ours and row.published) or ours:
                raise ValueError(f"row {row.name!r}: what is 'ours' has no published number")
        named = [self.baseline, *(c.baseline for c in self.columns)]
        named += [r.baseline for r in self.rows]
        named += [
            m.reference for m in (self.metric, *(c.metric or self.metric for c in self.columns))
        ]
        _known("baseline or reference", [name for name in named if name is not None], rows)
        if self.quick:
            _known("columns of quick", self.quick.columns, columns)
            _known("rows of quick", self.quick.rows, rows)
        for row, column in self.cells() if self.base else ():
            self.experiment(row, column)
        return self

    @property
    def runnable(self) -> bool:
        """Whether something of it can be run, given its data."""
        return not (self.missing or self.waits)

    def cells(self, quick: bool = False) -> list[tuple[Row, Column]]:
        """Return what is run, row by row in each column: without what is missing."""
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
        self, row: Row, column: Column, seed: int | None = None, quick: bool = False
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
        values = laid_over(self.base, {"name": self.id, "method": row.method})
        for more in (column.settings, row.settings, row.settings_in.get(column.id, {})):
            values = laid_over(values, more)
        if quick and self.quick:
            values = laid_over(values, self.quick.settings)
        if seed is not None:
            values["seed"] = seed
        where = f"{self.id}, {row.name!r} in column {column.id!r}"
        return config.build(config.Experiment, values, where)

    def metric_of(self, column: Column) -> Metric:
        """Return what the numbers of a column are."""
        return column.metric or self.metric


def laid_over(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `more` laid over them, table by table.

    >>> laid_over({"local": {"lr": 0.1, "epochs": 1}}, {"local": {"epochs": "unset", "steps": 5}})
    {'local': {'lr': 0.1, 'steps': 5}}
    """
    out = dict(values)
    for name, value in more.items():
        below = out.get(name)
        if value == UNSET:
            out.pop(name, None)
        elif isinstance(value, Mapping):
            out[name] = laid_over(below if isinstance(below, Mapping) else {}, value)
        else:
            out[name] = value
    return out


def _known(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what}: there is no {name!r}")
