"""What a feature declares: its table of settings, its record, and the numbers that it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any, ClassVar, Literal

from fedkeel.base.settings import Settings
from fedkeel.errors import ConfigError

ENTRY_POINTS = "fedkeel.features"
"""Group of entry points by which an installed package adds features: table = module:Declaration."""


@dataclass(frozen=True)
class Figure:
    """A number of each round that tables, the page, trackers and the terminal show.

    Args:
        key: its key in a round record, and in tables that are written as JSON.
        heading: heading of its column.
        unit: unit, shown with the heading.
        description: what it is, in a sentence.
        better: which values are better, or None where neither are.
        of_run: the number of a run: that of its ``last`` round, the ``sum`` over rounds, or that of
            the round whose score reached the ``target``.
        per_unit: how much of it is one of the unit that is shown, such as 3600 of seconds that are
            shown in hours.
        progress: what a line of progress says of a round's number, such as ``"epsilon {:.3g}"``.
        tracked: its name in trackers, such as ``"privacy/epsilon"``.
        tile: title of its tile on the page of a single method; "" shows none.
        chart: title of its chart over rounds; "" draws none.
        footnote: what stands below a table that has its column, without its heading.
        time: what its seconds are called where scores are drawn against them, such as ``"virtual
            time"``; "" draws nothing.
    """

    key: str
    heading: str
    unit: str
    description: str
    better: Literal["high", "low"] | None = None
    of_run: Literal["last", "sum", "target"] = "last"
    per_unit: float = 1.0
    progress: str = ""
    tracked: str = ""
    tile: str = ""
    chart: str = ""
    footnote: str = ""
    time: str = ""

    @property
    def key_of_run(self) -> str:
        """Its key in the numbers of a run."""
        return f"{self.key}_to_target" if self.of_run == "target" else self.key

    def value(self, features: Mapping[str, Any]) -> float | None:
        """Return the number in what features have written into a round record."""
        value = features.get(self.key)
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Entry:
    """What a feature adds to a round beside numbers, such as a list of clients.

    Args:
        key: its key in a round record.
        form: its type, which is checked where a file is read.
        description: what it is, in a sentence.
        default: what it is in a round to which nothing has been added.
        is_always_written: whether rounds.jsonl has the default, too.
    """

    key: str
    form: Any
    description: str
    default: Any = None
    is_always_written: bool = False


@dataclass(frozen=True)
class Option:
    """An option of the commands that read an experiment; it sets one setting.

    Args:
        flag: as it is typed, such as ``"--epsilon"``.
        setting: the setting, such as ``"privacy.epsilon"``.
        help: what it does, in a sentence.
        is_list: whether its value is a list with commas. Given several times, their lists are
            joined.
    """

    flag: str
    setting: str
    help: str
    is_list: bool = False


class Declaration:
    """What is known of a feature without a run: what settings, records and report need.

    Class attributes:
        feature: import path of the feature itself, ``module:Class``; it is loaded for runs only.
        table: name of its table of settings in a file; its key in run.json.
        settings_class: the settings in that table; `Settings` itself where other settings, such as
            the method's name, ask for the feature, and a file has no such table.
        default: the settings where a file has no such table; None: no feature then.
        needs: tables of the features whose code or numbers it uses.
        shorthand: the setting that a text or a list in place of the table sets; "" for none.
        places: settings of its table that name a file, a folder or an address.
        decides_numbers: whether its settings can change a number of a run.
        hides_values: whether run.json has no value of a single example, such as the highest age.
        baselines: runs that send nothing and that it makes, by the name that stands in place of a
            method, and what each is.
        figures: the numbers that its hooks add to round records.
        charts: titles of charts of what its hooks add to `diagnostics` and `breakdowns` of round
            records, by name there.
        entries: what else they add to round records, where it is not the default.
        in_short_runs: whether the short runs of the doctor have it, as those that they stand for.
        options: of the commands that read an experiment.
        record_class: type of what run.json has under its key, such as a dataclass; None where it
            writes nothing.
        record_meaning: what that is, in a sentence, where it is not a dataclass.
        label: what its record is called in tables of settings; "" takes the name of its table.
        is_in_overview: whether its record is below the title of a page, too.
        report: import path of what it adds to reports, a `report.feature_report.FeatureReport`;
            "" adds nothing.
        meaning: what its table is for, in a sentence.
        example: arguments of the settings, as somebody may write them.
    """

    feature: ClassVar[str]
    table: ClassVar[str]
    settings_class: ClassVar[type[Settings]] = Settings
    default: ClassVar[Settings | None] = None
    needs: ClassVar[tuple[str, ...]] = ()
    shorthand: ClassVar[str] = ""
    places: ClassVar[tuple[str, ...]] = ()
    decides_numbers: ClassVar[bool] = True
    hides_values: ClassVar[bool] = False
    baselines: ClassVar[Mapping[str, str]] = {}
    figures: ClassVar[tuple[Figure, ...]] = ()
    charts: ClassVar[Mapping[str, str]] = {}
    entries: ClassVar[tuple[Entry, ...]] = ()
    in_short_runs: ClassVar[bool] = False
    options: ClassVar[tuple[Option, ...]] = ()
    record_class: ClassVar[type | None] = None
    record_meaning: ClassVar[str] = ""
    label: ClassVar[str] = ""
    is_in_overview: ClassVar[bool] = False
    report: ClassVar[str] = ""
    meaning: ClassVar[str] = ""
    example: ClassVar[str] = ""

    @classmethod
    def text(cls, record: Any) -> str:  # noqa: ANN401 - of `record_class`
        """Return what run.json has under its key in a few words, for tables of settings."""
        return str(record)

    @classmethod
    def tile_note(cls, record: Any) -> str:  # noqa: ANN401 - of `record_class`
        """Return what stands below its tile, made of what run.json has under its key."""
        return ""


@cache
def declarations() -> Mapping[str, type[Declaration]]:
    """Return every feature by its table: those of this package, then those that others install.

    Raises:
        ConfigError: a feature of an installed package cannot be loaded, takes another's table, or
            needs a feature that is not there.
    """
    own: tuple[str, ...] = import_module("fedkeel.features").FEATURES
    found = {kind.table: kind for kind in map(_declaration, own)}
    for point in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda p: (p.name, p.value)):
        kind = _declaration(point.value)
        if found.setdefault(kind.table, kind) is not kind:
            raise ConfigError(
                f"Two features have the table [{kind.table}].",
                got=f"{point.value} and {found[kind.table].__module__}",
                do="uninstall one of their packages",
            )
    for kind in found.values():
        if absent := [table for table in kind.needs if table not in found]:
            raise ConfigError(
                f"The feature [{kind.table}] needs the feature [{absent[0]}].",
                got=f"[{'], ['.join(found)}]",
                do="install the package that has it",
            )
    return found


@cache
def declared_tables() -> Mapping[str, type[Declaration]]:
    """Return the features that have a table of settings of their own."""
    every = declarations().items()
    return {table: kind for table, kind in every if kind.settings_class is not Settings}


@cache
def baselines() -> Mapping[str, str]:
    """Return the runs that send nothing, by the name in place of a method, and what each is."""
    kinds = declarations().values()
    return {name: meaning for kind in kinds for name, meaning in kind.baselines.items()}


@cache
def figures() -> tuple[Figure, ...]:
    """Return the numbers of all features."""
    return tuple(figure for kind in declarations().values() for figure in kind.figures)


@cache
def entries() -> tuple[Entry, ...]:
    """Return what all features add to round records beside numbers."""
    return tuple(entry for kind in declarations().values() for entry in kind.entries)


def loaded(path: str) -> Any:  # noqa: ANN401 - a class
    """Return a class by its import path, ``module:Class``.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"The feature {path!r} cannot be loaded.", got=error) from error


def _declaration(path: str) -> type[Declaration]:
    kind = loaded(path)
    if isinstance(kind, type) and issubclass(kind, Declaration):
        return kind
    raise ConfigError(
        f"{path!r} does not declare a feature.", got=kind, expected="a subclass of Declaration"
    )
