"""Own tables without a test file: what is set aside, and how their clients are told apart."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from fedkeel.config import Data
from fedkeel.data.read.load import load
from fedkeel.errors import DataError


def table(folder: Path, rows: list[str], name: str = "own.csv") -> str:
    file = folder / name
    file.write_text("a,site,label\n" + "\n".join(rows) + "\n")
    return str(file)


def test_a_client_with_one_example_is_not_lost(tmp_path: Path) -> None:
    rows = [f"{i},site{i % 30},{i % 2}" for i in range(60)] + ["1,tiny,0"]
    for fraction in (0.2, 0.5, 0.8):
        settings = Data(source=table(tmp_path, rows), client="site", test_fraction=fraction)
        train, test = load(settings)
        assert len(train.clients) == 31
        assert len(train) + len(test) == 61


def test_where_everybody_has_one_example_some_are_set_aside(tmp_path: Path) -> None:
    rows = [f"{i},site{i},{i % 2}" for i in range(20)]
    train, test = load(Data(source=table(tmp_path, rows), client="site", test_fraction=0.5))
    assert (len(train), len(test)) == (10, 10)


def test_leading_zeros_tell_clients_and_labels_apart(tmp_path: Path) -> None:
    rows = [f"{i},{('007', '7', '8')[i % 3]},{('00', '01')[i % 2]}" for i in range(60)]
    train, _ = load(Data(source=table(tmp_path, rows), client="site"))
    assert sorted(train.clients) == ["007", "7", "8"]
    assert train.label_names == ("00", "01")
    plain, _ = load(Data(source=table(tmp_path, [f"1,2,{i % 12}" for i in range(60)])))
    assert plain.label_names == tuple(map(str, range(12)))  # as numbers, in their order


@pytest.mark.parametrize(
    "names",
    [
        [2**63 + 11, 2**64 - 5, 2**63 + 999999999, 12, 2**62],
        ["89460000000000000011", "89460000000000000029", "89460000000000000037"],
        [9007199254740993, 9007199254740992, "10000000000000000000"],
        ["0x1A", "0x1B", "7"],
        [-1, 0, 2**63 - 1],
    ],
    ids=["hashes", "20 digits", "2 to the 53rd", "hex", "int64"],
)
def test_large_ids_and_labels_stay_apart(tmp_path: Path, names: list[object]) -> None:
    texts = tuple(map(str, names))
    rows = [f"{i},{one},{one}" for i in range(30) for one in texts]
    train, _ = load(Data(source=table(tmp_path, rows), client="site"))
    assert sorted(train.clients) == sorted(train.label_names) == sorted(texts)
    again, _ = load(
        Data(source=table(tmp_path, rows), client="site", test=table(tmp_path, rows, "t.csv"))
    )
    assert again.label_names == train.label_names


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_large_ids_of_other_files_stay_apart(tmp_path: Path, suffix: str) -> None:
    for k, site in enumerate(
        (np.array([2.0**63, 2.0**64, 5.0]), np.array([2**63 + 1, 2**63 + 2, 5], dtype=np.uint64))
    ):
        file = tmp_path / f"own{k}.{suffix}"
        given = {"site": np.tile(site, 20), "label": np.tile([0, 1, 1], 20)}
        if suffix == "npz":
            np.savez(file, x=np.ones((60, 1)), **given)
        else:
            parquet.write_table(pa.table({"a": np.ones(60), **given}), file)
        train, _ = load(Data(source=str(file), client="site"))
        assert sorted(train.clients) == sorted(str(int(one)) for one in site)


@pytest.mark.parametrize("gap", ["", "NA"])
def test_a_gap_among_numbers_is_said(tmp_path: Path, gap: str) -> None:
    rows = [f"{i},{i % 3},{i % 2}" for i in range(20)] + [f"1,{gap},0"]
    with pytest.raises(DataError, match="'site' has a gap"):
        load(Data(source=table(tmp_path, rows), client="site"))


def test_large_quantities_are_no_labels(tmp_path: Path) -> None:
    own = table(tmp_path, [f"1,a,{i}e18\n1,a,{i}.5" for i in range(20)])
    with pytest.raises(DataError, match="the labels are quantities"):
        load(Data(source=own, client="site"))


def test_the_training_file_is_no_test_file(tmp_path: Path) -> None:
    own = table(tmp_path, [f"{i},x,{i % 2}" for i in range(20)])
    with pytest.raises(DataError, match="the file that is trained on"):
        load(Data(source=own, test=str(tmp_path / "." / "own.csv")))


def test_what_inputs_were_standardised_by_is_known(tmp_path: Path) -> None:
    own = table(tmp_path, [f"{100 * i},x,{i % 2}" for i in range(60)])
    plain, _ = load(Data(source=own, client="site"))
    train, test = load(Data(source=own, client="site", normalize="standardize"))
    assert (plain.columns, plain.scale, train.columns) == (("a",), None, ("a",))
    assert train.scale is not None
    assert train.scale == test.scale
    ((mean,), (deviation,)) = train.scale
    torch.testing.assert_close((plain.x - mean) / deviation, train.x)


def test_several_tables_are_joined_by_the_names_of_their_columns(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("a,b,label\n" + "1,2,x\n1,2,y\n" * 5)
    (tmp_path / "two.csv").write_text("b,label,a\n" + "2,x,1\n2,y,1\n" * 5)
    train, test = load(Data(source=(str(tmp_path / "one.csv"), str(tmp_path / "two.csv"))))
    assert train.columns == test.columns == ("a", "b")
    for half in (train, test):
        torch.testing.assert_close(half.x, torch.tensor([[1.0, 2.0]]).expand_as(half.x))


def test_a_number_that_float32_does_not_hold_is_named_with_its_column(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("a,b,label\n" + "1,2,x\n1,2,y\n" * 5 + "1,1e39,x\n")
    with pytest.raises(DataError) as caught:
        load(Data(source=str(tmp_path / "own.csv")))
    for words in ("too large for float32", "1e+39 in column 'b'", "standardize"):
        assert words in str(caught.value)
    train, _ = load(Data(source=str(tmp_path / "own.csv"), normalize="standardize"))
    assert torch.isfinite(train.x).all()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_can_be_left_out(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"own.{suffix}"
    rows = {"id": [f"p{i}" for i in range(20)], "a": list(range(20)), "label": [0, 1] * 10}
    own = pa.table(rows)
    csv.write_csv(own, file) if suffix == "csv" else parquet.write_table(own, file)
    with pytest.raises(DataError, match="column 'id' holds text") as caught:
        load(Data(source=str(file)))
    assert "data.drop" in str(caught.value)
    train, test = load(Data(source=str(file), drop=("id",)))
    assert (train.columns, train.shape) == (("a",), (1,))
    without = tmp_path / "without" / file.name  # what is set aside is drawn by the file's name
    without.parent.mkdir()
    left = own.drop_columns(["id"])
    csv.write_csv(left, without) if suffix == "csv" else parquet.write_table(left, without)
    plain, _ = load(Data(source=str(without)))
    torch.testing.assert_close(train.x, plain.x)
    train, test = load(Data(source=str(file), drop=("id",), test=str(without)))
    assert (len(train), len(test)) == (20, 20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Data(source="own.csv", drop=("sit",)), "no column 'sit'.*'site'.*data.drop"),
        (Data(source="own.csv", drop=("label",)), "leaves out 'label'"),
        (Data(source="own.csv", drop=("site",), client="site"), "leaves out 'site'"),
        (Data(source="digits", drop=("site",)), "for columns of tables, and digits is not a table"),
    ],
)
def test_columns_that_cannot_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Data, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path, [f"{i},{i},{i % 2}" for i in range(20)])
    with pytest.raises(DataError) as caught:
        load(settings)
    assert re.search(message, str(caught.value), re.DOTALL)


def test_the_index_of_pandas_is_no_input(tmp_path: Path) -> None:
    """It was one, so that a table sorted by label was learned by heart."""
    columns = {"a": [0.5, 1.5, 2.5, 3.5], "label": [0, 1, 0, 1], "__index_level_0__": [3, 1, 0, 2]}
    parquet.write_table(pa.table(columns), tmp_path / "own.parquet")
    train, test = load(Data(source=str(tmp_path / "own.parquet"), test_fraction=0.5))
    assert train.columns == test.columns == ("a",)
    named = Data(source=str(tmp_path / "own.parquet"), drop=("__index_level_0__",))
    assert load(named)[0].columns == ("a",)
    file = tmp_path / "own.csv"
    file.write_text(",a,label\n" + "".join(f"{i},{i / 2},{i % 2}\n" for i in range(8)))
    assert load(Data(source=str(file), drop=("",)))[0].columns == ("a",)


def test_names_that_look_the_same_are_not_two_classes(tmp_path: Path) -> None:
    file = table(tmp_path, ["1,north,caf\u00e9", "2,north,cafe\u0301", "3,south,th\u00e9"])
    with pytest.raises(DataError, match="in other code points") as error:
        load(Data(source=file, client="site"))
    assert error.value.got == r"'cafe\u0301' and 'caf\xe9'"
