"""What the tables' texts and the pages say is what their numbers say."""

from __future__ import annotations

import re
from pathlib import Path

from each import each
from fedkeel.reproduce.catalogue import load

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def published(table: str) -> dict[tuple[str, str], float | str]:
    rows = load(table).rows
    return {(row.name, name): p.value for row in rows for name, p in row.published.items()}


def test_gcfeds_numbers_do_not_decide_its_setting() -> None:
    """(accuracy - 10 %) / mean change a round, of Tables 5 and 2."""
    changes = published("gcfed-table2")
    rounds: dict[str, dict[str, int]] = {}
    for (row, column), accuracy in published("gcfed-table5").items():
        change = changes.get((row, "mean"))
        if isinstance(accuracy, float) and isinstance(change, float):
            rounds.setdefault(column, {})[row] = round((accuracy - 10) / change)
    ranges = {column: (min(of.values()), max(of.values())) for column, of in rounds.items()}
    text = " ".join(load("gcfed-table2").deviations)
    assert rounds["c10-100-a0.1"].pop("Global GC") == 901
    assert (min(rounds["c10-100-a0.1"].values()), ranges["c10-100-a0.1"][1]) == (932, 1085)
    for column in ("c10-100-a0.05", "c10-200-a0.05", "c10-200-a0.1"):
        assert "{} to {}".format(*ranges[column]) in text
    assert "932 to 1,085" in text
    assert "Global GC" not in rounds["c10-100-a0.05"]  # it failed there


def test_gradmas_rounds_beyond_the_horizon_are_counted() -> None:
    numbers = published("gradma-table2")
    late = {k: v for k, v in numbers.items() if isinstance(v, float) and v > 1000}
    assert len(late) == 15
    assert max(v for (_, c), v in late.items() if c.startswith("cifar100")) == 1404
    assert max(v for (_, c), v in late.items() if c.startswith("tiny")) == 1181
    for table in map(load, ("gradma-table1", "gradma-table2")):
        text = " ".join(table.deviations)
        assert "15 published numbers" in text or "15 numbers of its Table 2" in text
        for row, column in table.cells():
            rounds = numbers.get((row.name, column.id), 0)
            assert rounds == "never" or rounds <= table.experiment(row, column).rounds


def test_the_signs_of_gradmas_first_column_are_counted() -> None:
    page = (RESULTS / "gradma-table1.md").read_text("utf-8")
    first = page.split("## MNIST, omega 0.1, S 10")[0]
    signs = [line.split("|")[7].strip() for line in first.splitlines() if line.startswith("| ")]
    assert sum(sign.startswith("no") for sign in signs) == 6
    assert sum(sign.startswith(("no", "yes")) for sign in signs) == 15
    assert "6 of 15 gains over FedAvg have the other sign" in page


@each(
    ("page", "table"),
    [
        ("fedgh-table1", "fedgh-table1"),
        ("fedgh-table2", "fedgh-table2"),
        ("fedgh-table3", "fedgh-table3"),
        ("fedgh-table4-quick", "fedgh-table4"),
        ("fedgc-figure5-quick", "fedgc-figure5"),
        ("fedreg-figure-c3-quick", "fedreg-figure-c3"),
        ("gcfed-table5-quick", "gcfed-table5"),
        ("gradma-table1", "gradma-table1"),
        ("gradma-table1-quick", "gradma-table1"),
        ("gradma-table2", "gradma-table2"),
        ("gradma-table2-quick", "gradma-table2"),
    ],
)
def test_pages_print_the_deviations_of_their_tables(page: str, table: str) -> None:
    text = (RESULTS / f"{page}.md").read_text("utf-8")
    section = text.split("## Assumptions and deviations")[1].split("\n## ")[0]
    assert re.findall(r"^- (.*)$", section, re.M) == list(load(table).deviations)
