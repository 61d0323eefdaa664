"""Tables of statistics: whole names at 80 columns, and numbers that say how sure they are."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from fedkeel.records.node_statistics import (
    ColumnStatistics,
    Counts,
    NodeStatistics,
    QuantileValue,
    SiteStatistics,
)
from fedkeel.report.statistics_text import statistics_page

CELL = 2.0**-35
"""Width of the cell beside 0."""

ECG = tuple(
    QuantileValue(share, value, low, high)
    for share, value, low, high in (
        (0.25, 0.0, 0.0, CELL),
        (0.5, None, 0.0, 2.125),
        (0.75, 2.0616, 2.0, 2.125),
    )
)
LONG = "pressure_systolic_at_admission_in_mm"
SUGAR = ColumnStatistics(
    "sugar", missing=69, missing_between=(69, 96), known=791, mean=0.163, quantiles=ECG
)
NAMES = ("Heidelberg university hospital", "Switzerland", "Krankenhausverbund", "C", "D")
FOUND = NodeStatistics(
    name="heart",
    kinds=("labels", "missing", "categories", "moments", "quantiles"),
    is_secure=False,
    label_names=("no", "yes"),
    sites=tuple(SiteStatistics(name, 172, 10, {}, Counts((72, 100), 0)) for name in NAMES),
    total=SiteStatistics(
        "all",
        860,
        10,
        {},
        Counts((360, 500), 0),
        (
            SUGAR,
            ColumnStatistics("cholesterol", missing=0, missing_between=(0, 36), mean=2.4e-11),
            ColumnStatistics(
                LONG, missing=9, missing_between=(9, 9), mean=-1234567.0, deviation=1.2e12
            ),
            ColumnStatistics(
                "pain", ("1", "2"), 0, missing_between=(0, 36), counts=Counts((800, 60), 0)
            ),
        ),
    ),
)


def page(found: NodeStatistics, width: int = 80) -> str:
    stream = StringIO()
    Console(width=width, file=stream).print(statistics_page(found))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return "\n".join(lines)


def test_names_are_whole_and_small_numbers_are_short() -> None:
    text = page(FOUND)
    assert "…" not in text
    for name in ("sugar", "cholesterol"):
        assert text.count(f"\n {name} ") == 2  # in the table of means and in that of quantiles
    for width in (80, 60):  # long names go on in another line, and keep all their characters
        letters = "".join(page(FOUND, width).split())
        assert all(part in letters for part in ("pressure_systolic_at_", "admission_in_mm"))
    for name in NAMES:
        assert name.split()[0][:10] in text
    assert "0.00000" not in text
    assert "2.4e-11" in text
    assert "1.2e12" in text


def test_quantiles_have_their_bounds_and_none_that_is_not_known() -> None:
    (row,) = [line for line in page(FOUND).splitlines() if "[0, 2.13]" in line]
    assert row.split(maxsplit=1) == ["sugar", "0  [0, 2.13]  2.06 [2, 2.13]"]
    one_end = (QuantileValue(0.5, None, None, 44.0),)
    total = replace(FOUND.total, columns=(replace(SUGAR, quantiles=one_end),))
    assert "[..., 44]" in page(replace(FOUND, total=total))


def test_missing_values_are_between_the_numbers_that_sites_have_left_open() -> None:
    text = page(FOUND)
    for words in ("8.0 to 11.2", "0.0 to 4.2", " 1.0 ", "0 to 36", "The true number of missing"):
        assert words in text
    assert "exact for a site, and nearly for all" in " ".join(text.split())
    older = replace(SUGAR, missing_between=None)
    text = page(replace(FOUND, total=replace(FOUND.total, minimum=1, columns=(older,))))
    assert " 8.0 " in text
    assert "true number" not in text
    assert "nearly" not in text


def test_the_note_on_secure_sums_says_that_sizes_are_known() -> None:
    sites = tuple(SiteStatistics(name, 172, 10) for name in NAMES)
    text = page(replace(FOUND, is_secure=True, sites=sites))
    assert "172" in text
    assert "nobody has seen more than how many examples it has" in " ".join(text.split())
