"""Arrays and tables that are damaged, lie about themselves, or unpack to more than they are."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedkeel.config import Data
from fedkeel.data.read.load import load
from fedkeel.errors import DataError


class Ran:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


def member(array: np.ndarray, header: str | None = None) -> bytes:
    """An array as an .npz file has it, perhaps with another header."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array)
    data = stream.getvalue()
    if header is None:
        return data
    text = header.encode("latin-1").ljust(117) + b"\n"
    return data[:8] + len(text).to_bytes(2, "little") + text + array.tobytes()


def archive(path: Path, sizes: dict[str, int] | None = None, **members: bytes) -> str:
    """An .npz file; `sizes` are what its table of contents says of members."""
    members = {"label": member(np.arange(6) % 2), **members}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in members.items():
            out.writestr(f"{name}.npy", data)
        for name, size in (sizes or {}).items():
            out.getinfo(f"{name}.npy").file_size = size
    return str(path)


def refusal(source: str) -> str:
    with pytest.raises(DataError) as caught:
        load(Data(source=source))
    assert source in str(caught.value)
    return str(caught.value)


X = np.ones((6, 2))


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (6, 2",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (6, -2), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 1000000), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (6, 1), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': 12, }",
        "{'descr': '<q9', 'fortran_order': False, 'shape': (6, 2), }",
        "{'descr': [('a', '<f8'), 7], 'fortran_order': False, 'shape': (6, 2), }",
        "{'descr': ('<f8', (6,)), 'fortran_order': False, 'shape': (6, 2), }",
        "{'descr': '<f8', b'fortran_order': False, 'shape': (6, 2), }",
        "'''",
        "((((((((((",
        "\xff\xfe",
    ],
)
def test_a_damaged_header(tmp_path: Path, header: str) -> None:
    refusal(archive(tmp_path / "own.npz", x=member(X, header)))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    file, trap = tmp_path / "own.npz", tmp_path / "ran"
    raw = pickle.dumps(Ran(trap))
    assert "which begins with" in refusal(archive(file, x=raw))
    objects = member(X, "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }")[:128] + raw
    assert "holds Python objects" in refusal(archive(file, x=objects))
    file.write_bytes(raw)
    assert "cannot be read" in refusal(str(file))
    assert not trap.exists()


def test_what_unpacks_to_a_thousand_times_its_size(tmp_path: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (6, 125000000), }"
    data = member(np.zeros(0, np.float32), header) + bytes(1_000_000)
    file = archive(tmp_path / "own.npz", {"x": 128 + 3_000_000_000}, x=data)
    message = refusal(file)
    assert "'x' is much larger than the file" in message
    assert "got 3.0 GB in" in message


def test_what_does_not_fit_into_memory(tmp_path: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (6, 125000000000000), }"
    file = tmp_path / "own.npz"
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("x.npy", member(np.zeros(0, np.float32), header))
        out.writestr("y.npy", member(np.arange(6) % 2))
        out.getinfo("x.npy").file_size = 128 + 3 * 10**15
        out.getinfo("x.npy").compress_size = 128 + 3 * 10**15
    found = refusal(str(file))  # newer Pythons see themselves that members overlap
    assert "does not fit into memory" in found or "Overlapped entries" in found


def test_a_column_of_one_value(tmp_path: Path) -> None:
    """A few bytes of Parquet that stand for many were decoded."""
    same, file = pa.array(np.zeros(2_000_000, np.int8)), tmp_path / "own.parquet"
    parquet.write_table(pa.table({"label": same} | {f"a{k}": same for k in range(70)}), file)
    assert file.stat().st_size < 1_000_000
    assert "the table is much larger than the file" in refusal(str(file))


def test_a_long_text_of_many_rows_is_kept_once(tmp_path: Path) -> None:
    """As an array of numpy it would take 40 GB."""
    names = ["x" * 1_000_000, "y" * 1_000_000]
    codes = pa.array(np.arange(10_000, dtype=np.int32) % 2)
    label = pa.DictionaryArray.from_arrays(codes, pa.array(names))
    file = tmp_path / "own.parquet"
    parquet.write_table(pa.table({"a": np.arange(10_000.0), "label": label}), file)
    train, test = load(Data(source=str(file)))
    assert train.label_names == test.label_names == tuple(names)
    with pytest.raises(DataError, match="column 'label' holds text"):
        load(Data(source=str(file), label="a"))


def test_a_wide_table_is_read(tmp_path: Path) -> None:
    """Looking for a name among all names took a minute for 100,000 columns."""
    names = [f"c{k}" for k in range(1500)]
    x = np.random.default_rng(0).integers(0, 9, (6, 1500))
    table = pa.table({name: x[:, k] for k, name in enumerate(names)} | {"label": [0, 1] * 3})
    parquet.write_table(table, tmp_path / "own.parquet")
    rows = "".join(",".join(map(str, row)) + f",{k % 2}\n" for k, row in enumerate(x.tolist()))
    (tmp_path / "own.csv").write_text(",".join([*names, "label"]) + "\n" + rows)
    for suffix in ("csv", "parquet"):
        train, test = load(Data(source=str(tmp_path / f"own.{suffix}"), test_fraction=0.4))
        both = np.concatenate([train.x.numpy(), test.x.numpy()])
        assert train.columns == tuple(names)
        assert sorted(both.tolist()) == sorted(x.tolist())


def test_a_table_with_damaged_names(tmp_path: Path) -> None:
    file = tmp_path / "own.parquet"
    parquet.write_table(pa.table({"größe": [1.0, 2.0], "label": [0, 1]}), file, store_schema=False)
    file.write_bytes(file.read_bytes().replace("größe".encode(), b"gr\xff\xfe\xffsze"[:7]))
    refusal(str(file))


@pytest.mark.parametrize("suffix", ["npz", "parquet", "csv"])
def test_damaged_bytes_are_refused_or_read(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    file = tmp_path / f"own.{suffix}"
    sites = np.array(["north", "south"] * 20)
    if suffix == "npz":
        np.savez(file, x=np.ones((40, 2)), label=np.arange(40) % 2, site=sites)
    elif suffix == "parquet":
        table = pa.table({"a": np.arange(40.0), "label": np.arange(40) % 2, "site": sites})
        parquet.write_table(table, file)
    else:
        rows = "".join(f"{k}.5,{k % 2},{site}\n" for k, site in enumerate(sites))
        file.write_text("a,label,site\n" + rows)
    whole = file.read_bytes()
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            damaged[place] = rng.integers(256)
        file.write_bytes(bytes(damaged))
        try:
            load(Data(source=str(file), client="site"))
        except DataError:
            refused += 1
    assert refused
