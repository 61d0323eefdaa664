"""Own tables without a test file: what is set aside, and how their clients are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
