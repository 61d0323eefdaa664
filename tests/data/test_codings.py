"""Several codings of one thing are told from data that differ."""

from __future__ import annotations

import numpy as np
import pandas as pd

import fedkeel as fk
from each import each
from fedkeel.data.codings import coding_warnings

CODINGS = {
    "letters for words": (["F", "M"], ["female", "male"], ["female", "male"]),
    "two against two": (["F", "M"], ["F", "M"], ["female", "male"], ["female", "male"]),
    "only men": (["M"], ["female", "male"], ["male"]),
    "numbers for words": (["1"], ["no", "yes"], ["yes", "no"]),
    "two clients": (["ja", "nein"], ["no", "yes"]),
    "another language": (["ja", "nein"], ["no", "yes"], ["no", "yes"]),
    "other numbers": (["3", "4"], ["0", "1"], ["0", "1"]),
    "case": (["Yes", "no"], ["no", "yes"], ["no", "yes"]),
    "a common third": (["F", "M", "unknown"], ["female", "male", "unknown"], ["female", "male"]),
}

DIFFERENT = {
    "a rare class": (["no", "yes", "unclear"], ["no", "yes"], ["no", "yes"]),
    "one class each": (["cat"], ["dog"], ["horse"]),
    "wards": (["A1", "A2"], ["B1", "B2", "B3"], ["C1"], ["D4", "D5"]),
    "digits by client": (["0", "1", "2"], ["1", "2", "3"], ["7", "8"]),
    "shares of all": (["a", "b"], ["b", "c"], ["c", "d"]),
    "scanners": (["Philips"], ["Siemens", "GE"], ["GE"]),
}


def told(values: tuple[list[str], ...], is_label: bool) -> list[str]:
    """The warnings of clients with these labels, or these categories of a column."""
    frames = {}
    for k, names in enumerate(values):
        column = np.array([name for name in names for _ in range(4)])
        plain = np.array(["no", "yes"] * (2 * len(names)))
        frames[f"site {k}"] = pd.DataFrame(
            {
                "age": np.arange(len(column)) / 2 + k,
                "sex": plain if is_label else column,
                "y": column if is_label else plain,
            }
        )
    clients = fk.from_clients(frames, target="y", categories=["sex"])
    return list(coding_warnings(clients.data))


@each("name", list(CODINGS))
def test_a_coding_of_its_own_is_told(name: str) -> None:
    for is_label in (True, False):
        (text,) = told(CODINGS[name], is_label)
        assert text.startswith("the labels" if is_label else "the column 'sex'")
        assert "site 0" in text


@each("name", list(DIFFERENT))
def test_clients_with_different_data_are_not(name: str) -> None:
    assert told(DIFFERENT[name], is_label=True) == []
    assert told(DIFFERENT[name], is_label=False) == []


def test_no_warning_for_columns_with_gaps() -> None:
    frames = {
        name: pd.DataFrame({"age": range(8), "sex": ["f", "m", None, "f"] * 2, "y": [0, 1] * 4})
        for name in ("north", "south")
    }
    clients = fk.from_clients(frames, target="y", categories=["sex"], missing="indicator")
    assert list(coding_warnings(clients.data)) == []
