"""Labels and clients of a user's files keep their names as they are written."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedkeel.config import Data
from fedkeel.data.read.load import load
from fedkeel.errors import DataError


def csv_file(folder: Path, name: str, labels: list[str], sites: list[str], rows: int = 60) -> str:
    file = folder / name
    lines = [f"{i},{sites[i % len(sites)]},{labels[i % len(labels)]}" for i in range(rows)]
    file.write_text("\n".join(["a,site,label", *lines, ""]))
    return str(file)


@pytest.mark.parametrize(
    ("names", "in_order"),
    [
        (["1E2", "10E1", "2E3", "100"], ["100", "10E1", "1E2", "2E3"]),
        (["250.00", "250.0", "428.0"], ["250.0", "250.00", "428.0"]),
        (["427.31", "250.00", "428.0"], ["250.00", "427.31", "428.0"]),
        (["10.0", "9.0"], ["9.0", "10.0"]),
        (["+1", "1", "01"], ["+1", "01", "1"]),
        (["2024-02-01", "2024-01-31"], ["2024-01-31", "2024-02-01"]),
        (["12:30", "07:00:00"], ["07:00:00", "12:30"]),
        (["2024-02-01 12:30:00", "2024-02-01T12:30"], ["2024-02-01 12:30:00", "2024-02-01T12:30"]),
        (["TRUE", "true", "0"], ["0", "TRUE", "true"]),
        (['"0.10"', "0.1"], ["0.1", "0.10"]),
        (["inf", "1e999"], ["1e999", "inf"]),
    ],
)
def test_texts_of_csv_are_kept(tmp_path: Path, names: list[str], in_order: list[str]) -> None:
    train, test = load(Data(source=csv_file(tmp_path, "own.csv", names, names), client="site"))
    assert list(train.label_names) == list(train.clients) == in_order
    for half in (train, test):
        expected = [in_order.index(names[int(a) % len(names)].strip('"')) for a in half.x[:, 0]]
        assert half.y.tolist() == half.client.tolist() == expected


def test_inputs_stay_numbers(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("a,b,label\n" + "1E2,250.00,x\n10E1,0.5,y\n" * 5)
    train, _ = load(Data(source=str(file)))
    assert set(train.x[:, 0].tolist()) == {100.0}


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (pa.array([Decimal("250.00"), Decimal("427.31")]), ("250.00", "427.31")),
        (
            pa.array([datetime.date(2024, 1, 31), datetime.date(2024, 2, 1)]),
            ("2024-01-31", "2024-02-01"),
        ),
        (
            pa.array([datetime.time(7), datetime.time(12, 30)], pa.time32("ms")),
            ("07:00:00.000", "12:30:00.000"),
        ),
        (
            pa.array(
                [datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2)], pa.timestamp("ns")
            ),
            ("2024-01-01 00:00:00.000000000", "2024-01-02 00:00:00.000000000"),
        ),
        (pa.array([10.0, 9.0]), ("9", "10")),
        (pa.array(["1E2", "100"]), ("100", "1E2")),
        (pa.array([b"1E2", b"100"]), ("100", "1E2")),
        (pa.array([True, False]), ("False", "True")),
        (pa.array([9, 10]).dictionary_encode(), ("9", "10")),
        (pa.DictionaryArray.from_arrays(pa.array([0, 2]), pa.array(["a", "b", "c"])), ("a", "c")),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_names_in_parquet(tmp_path: Path, values: pa.Array, names: tuple[str, ...]) -> None:
    column = pa.chunked_array([values] * 20)
    file = tmp_path / "own.parquet"
    parquet.write_table(pa.table({"a": np.arange(40), "label": column, "site": column}), file)
    train, _ = load(Data(source=str(file), client="site"))
    assert train.label_names == train.clients == names
    own = [str(names.index(name)) for name in train.label_names]
    assert own == ["0", "1"]


def test_dates_and_bytes_in_npz(tmp_path: Path) -> None:
    days = np.array(["2024-01-31", "2024-02-01"] * 20, dtype="datetime64[D]")
    np.savez(tmp_path / "own.npz", x=np.ones((40, 1)), label=days, site=np.array([b"b", b"a"] * 20))
    train, _ = load(Data(source=str(tmp_path / "own.npz"), client="site"))
    assert (train.label_names, train.clients) == (("2024-01-31", "2024-02-01"), ("a", "b"))


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_numbers_with_decimals_are_refused_with_how_to_write_them(
    tmp_path: Path, suffix: str
) -> None:
    file, label = tmp_path / f"own.{suffix}", np.array([427.31, 250.0] * 20)
    if suffix == "npz":
        np.savez(file, x=np.ones((40, 1)), label=label)
    else:
        parquet.write_table(pa.table({"a": np.ones(40), "label": label}), file)
    with pytest.raises(DataError, match=r"such as 427\.31(.|\n)*\.astype\(str\)"):
        load(Data(source=str(file)))


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_a_missing_date_is_a_gap(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"own.{suffix}"
    label = np.array(["2024-01-31", "NaT"] * 20, dtype="datetime64[D]")
    if suffix == "npz":
        np.savez(file, x=np.ones((40, 1)), label=label)
    else:
        parquet.write_table(pa.table({"a": np.ones(40), "label": label}), file)
    with pytest.raises(DataError, match=r"'label' has a gap(.|\n)*row 1"):
        load(Data(source=str(file)))


def test_quantities_are_still_no_labels(tmp_path: Path) -> None:
    labels = [f"{i / 7:.3f}" for i in range(60)]
    with pytest.raises(DataError, match="the labels are quantities"):
        load(Data(source=csv_file(tmp_path, "own.csv", labels, ["a"]), client="site"))


def test_one_number_in_two_ways_in_two_files(tmp_path: Path) -> None:
    """They would be twice as many classes, or clients that only have test examples."""
    first = csv_file(tmp_path, "first.csv", ["0", "1"], ["1", "2"])
    second = csv_file(tmp_path, "second.csv", ["0.0", "1.0"], ["1", "2"])
    other_site = csv_file(tmp_path, "third.csv", ["0", "1"], ["1.0", "2.0"])
    with pytest.raises(DataError, match=r"'0' and '0.0'(.|\n)*in one way in all files"):
        load(Data(source=(first, second), client="site"))
    with pytest.raises(DataError, match=r"label '0\.0'"):
        load(Data(source=first, test=second, client="site"))
    with pytest.raises(DataError, match=r"'1' and '1\.0'"):
        load(Data(source=first, test=other_site, client="site"))
    codes = [csv_file(tmp_path, f"{k}.csv", ["250.0", "250.00"], ["a"]) for k in range(2)]
    assert load(Data(source=tuple(codes), client="site"))[0].label_names == ("250.0", "250.00")


def test_sources_of_decimals_are_joined_in_their_order(tmp_path: Path) -> None:
    files = (
        csv_file(tmp_path, "a.csv", ["9.5", "10.5"], ["x"]),
        csv_file(tmp_path, "b.csv", ["10.5", "²"], ["x"]),
        csv_file(tmp_path, "c.csv", ["11"], ["x"]),
    )
    assert load(Data(source=(files[0], files[2]), client="site"))[0].label_names == (
        "9.5",
        "10.5",
        "11",
    )
    assert load(Data(source=files, client="site"))[0].label_names == ("10.5", "11", "9.5", "²")


def sources(folder: Path) -> tuple[str, str]:
    (folder / "north.csv").write_text("a,label\n" + "1,x\n2,y\n" * 10)
    (folder / "south.csv").write_text("a,ward,label\n" + "1,7,x\n2,8,y\n" * 10)
    return str(folder / "north.csv"), str(folder / "south.csv")


def test_a_column_that_only_some_sources_have_can_be_left_out(tmp_path: Path) -> None:
    both = sources(tmp_path)
    with pytest.raises(DataError) as caught:
        load(Data(source=both))
    assert caught.value.got == "'ward' in south only"
    assert 'data.drop = ["ward"]' in str(caught.value.do)
    for source in (both, both[::-1]):
        train, test = load(Data(source=source, drop=("ward",)))
        assert (train.columns, len(train), len(test)) == (("a",), 32, 8)
    with pytest.raises(DataError, match=r"None of the tables has the column 'wart'(.|\n)*'ward'"):
        load(Data(source=both, drop=("ward", "wart")))
    with pytest.raises(DataError, match=r"'ward' that the training(.|\n)*data\.drop = \['ward'\]"):
        load(Data(source=both[0], test=both[1]))
    assert load(Data(source=both[0], test=both[1], drop=("ward",)))[1].columns == ("a",)


def test_a_small_site_is_all_trained_on(tmp_path: Path) -> None:
    north, _ = sources(tmp_path)
    small = tmp_path / "small.csv"
    small.write_text("label,a\nx,1\n")
    train, test = load(Data(source=(north, str(small))))
    assert (len(train), len(test)) == (17, 4)
    assert (train.source == 1).sum() == 1
    assert (test.source == 0).all()
    (warning,) = train.warnings
    assert (
        warning == f"{small} has one example: too few to set some aside for testing, so all "
        "are trained on"
    )
    with pytest.raises(DataError) as caught:
        load(Data(source=str(small)))
    assert caught.value.what == f"{small} has too few examples to set some aside for testing."
    with pytest.raises(DataError, match="No source has enough examples"):
        load(Data(source="digits", test_fraction=0.0001))
    with pytest.raises(DataError, match="No source has enough examples"):
        load(
            Data(
                source=(str(small), csv_file(tmp_path, "tiny.csv", ["x"], [""], 1)), drop=("site",)
            )
        )


def test_a_node_is_one_of_many(tmp_path: Path) -> None:
    small = tmp_path / "small.csv"
    small.write_text("label,a\nx,1\n")
    train, test = load(Data(source=str(small), drop=("ward",)), is_one_of_many=True)
    assert (len(train), len(test), test.shape) == (1, 0, (1,))
    assert [text.split(str(small))[1] for text in train.warnings] == [
        " has one example: too few to set some aside for testing, so all are trained on",
        " has no column 'ward' to leave out (data.drop)",
    ]
