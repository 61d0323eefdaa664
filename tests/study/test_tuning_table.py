"""The table of a search: every line says what it was measured on."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from fedkeel.study.tuning_result import TunedMethod
from fedkeel.study.tuning_table import cells, footnotes, tuning_table


def row(**more: Any) -> TunedMethod:
    values: dict[str, Any] = {
        "method": "fedprox",
        "chosen": {"local.lr": 0.1, "method": "fedprox(mu=0.01)"},
        "value": 0.931,
        "spread": None,
        "seeds": 1,
        "trials": 12,
        "offered": 12,
        "failed": 0,
        "edge": {},
        "on": "validation",
        "metric": "best",
    }
    return TunedMethod(**(values | more))


def test_a_row_in_words() -> None:
    assert cells(row()) == [
        "fedprox",
        "93.1",
        "validation",
        "local.lr=0.1, fedprox(mu=0.01)",
        "12",
        "",
        "",
    ]
    many = row(spread=0.0123, offered=20, failed=2, edge={"local.lr": "high", "fedprox.mu": "low"})
    assert cells(many)[1] == "93.1 ± 1.2"
    assert cells(many)[4:] == ["12 of 20", "2", "local.lr high, fedprox.mu low"]
    plain = row(method="fedavg", chosen={"method": "fedavg"}, on="test", offered=None)
    assert cells(plain) == ["fedavg", "93.1", "test set", "–", "12", "", ""]
    assert cells(row(chosen={}, value=None, trials=3, offered=3, failed=3))[1:6] == [
        "–",
        "validation",
        "–",
        "3",
        "3",
    ]


def test_what_has_to_be_known() -> None:
    assert list(map(str, footnotes([row()], 1234))) == [
        "Validation: 1,234 examples held out from the clients' training data.",
        "Settings were chosen by: the best accuracy over rounds.",
    ]
    notes = footnotes([row(seeds=3, edge={"x": "low"}), row(seeds=3, trials=4, failed=1)], 9)
    assert "3 seeds" in notes[1].text
    assert [note.term for note in notes[2:]] == ["Trials differ", "Failed", "At the edge"]
    on_test = footnotes([row(on="test")], None)
    assert "too high" in on_test[0].text


def test_the_table_prints() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(
        tuning_table([row(), row(method="fedavg", on="test")], 5).terminal()
    )
    text = out.getvalue()
    assert "at the edge" in text
    assert "fedprox(mu=0.01)" in text
    assert text.count("validation") == 1
    assert text.count("test set") == 2
