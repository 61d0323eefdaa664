"""Statistics of the sites of a federation, as plain values: for tables, the doctor and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedkeel.base.named_files import RECORD_BYTES, read_regular
from fedkeel.errors import RunError
from fedkeel.records.files import finite_values, write_text

FILE = "statistics.json"
"""Name of the file of statistics."""


@dataclass(frozen=True)
class Counts:
    """How many examples have each label, or each category of a column.

    Args:
        shown: of each; 0 also where a site has fewer than it tells of.
        rest: examples that are counted in none of them, so that no small count is told.
    """

    shown: tuple[int, ...]
    rest: int


@dataclass(frozen=True)
class QuantileValue:
    """A quantile of a column.

    Args:
        share: of the values that it is not below, in (0, 1).
        value: an estimate; None where its bounds are far apart, or not both known.
        low: it is at least this; None where nothing bounds it.
        high: it is at most this, likewise.
    """

    share: float
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ColumnStatistics:
    """Statistics of a column; None for what was not asked for, or is not told.

    Args:
        name: its name.
        categories: names of its categories, None of numbers.
        missing: examples without a value, as the sites have told. Where fewer are missing at a
            site than it tells of, it tells of none, and counts them as known; where fewer are
            known, it tells that all are missing.
        missing_between: their true number is certainly between these; None where that is not
            known, as with noise.
        known: values of which mean and deviation are; those that are missing and count as known
            do so with the mean and the deviation of their site.
        mean: of the values; of one site exact.
        deviation: of the population; of one site exact.
        counts: of the categories; values that count as known are in a site's most frequent one.
        quantiles: of the values, by their shares.
    """

    name: str
    categories: tuple[str, ...] | None = None
    missing: int | None = None
    missing_between: tuple[int, int] | None = None
    known: int | None = None
    mean: float | None = None
    deviation: float | None = None
    counts: Counts | None = None
    quantiles: tuple[QuantileValue, ...] = ()


@dataclass(frozen=True)
class SiteStatistics:
    """Statistics of one site, or of all together.

    Args:
        name: of the site.
        examples: of the site, training and test together.
        minimum: smallest count that is told; of all sites, the largest of theirs.
        noise: standard deviation of the noise of a count, by kind; of all sites, of a sum.
        labels: examples by label; None where they were not asked for, or are not told.
        columns: of the inputs; empty where they are not told.
    """

    name: str
    examples: int
    minimum: int = 1
    noise: Mapping[str, float] = field(default_factory=dict)
    labels: Counts | None = None
    columns: tuple[ColumnStatistics, ...] = ()


@dataclass(frozen=True)
class NodeStatistics:
    """Statistics of a federation.

    Args:
        name: of the experiment.
        kinds: what was asked for.
        is_secure: whether the server has seen only sums over sites; of a single site only the
            number of its examples is then known.
        label_names: Y names, empty where labels are numbers or there are none.
        sites: those that have answered.
        total: all of these together.
        faults: why others have not, with their client numbers.
    """

    name: str
    kinds: tuple[str, ...]
    is_secure: bool
    label_names: tuple[str, ...]
    sites: tuple[SiteStatistics, ...]
    total: SiteStatistics
    faults: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values: dict[str, Any] = finite_values(asdict(self))
        return values

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        write_text(folder / FILE, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, file: Path) -> NodeStatistics:
        """Read it from a file.

        Raises:
            RunError: it cannot be read, or holds something else.
        """
        try:
            return _RECORD.validate_json(read_regular(file, RECORD_BYTES))
        except (OSError, ValidationError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it holds something else"
            raise RunError(
                "The statistics of the sites cannot be read.",
                got=f"{file}: {reason}",
                do="name a file that `fedkeel flower stats` has written",
            ) from None


_RECORD = TypeAdapter(NodeStatistics)
