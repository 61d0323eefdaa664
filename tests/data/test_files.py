"""Files of one's own: tables, arrays and folders of images."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedkeel.config import Data
from fedkeel.data import load
from fedkeel.errors import DataError


def again(path: Path) -> Path:
    """A copy, so that every example is trained on and tested."""
    copy = path.with_name(f"again-{path.name}")
    if path.is_dir():
        shutil.copytree(path, copy)
    else:
        shutil.copy(path, copy)
    return copy


def loaded(path, seed=0, **more):
    return load(Data(source=str(path), **more), seed)


def refused(call, *words):
    with pytest.raises(DataError) as caught:
        call()
    lines = caught.value.lines()
    assert len(lines) <= 4
    assert not [line for line in lines if "\n" in line]
    for word in words:
        assert word in str(caught.value)


def rows_of(*halves):
    """All inputs with their labels by name, as a sorted list."""
    return sorted(
        (tuple(x), half.label_names[label])
        for half in halves
        for x, label in zip(half.x.tolist(), half.y.tolist(), strict=True)
    )


CSV = """age,label,bmi,smokes
41,sick,22.5,true
35,well,30.25,false
29,well,19.5,false
62,sick,27.5,true
50,well,21.0,true
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text(CSV)
    return path


def test_csv(table):
    train, test = loaded(table, test_fraction=0.4)
    assert (len(train), len(test)) == (3, 2)
    assert train.x.dtype == torch.float32
    assert train.label_names == ("sick", "well")
    assert train.sources == ("people",)
    assert train.clients == ()
    assert train.client is None
    assert rows_of(train, test) == [
        ((29.0, 19.5, 0.0), "well"),
        ((35.0, 30.25, 0.0), "well"),
        ((41.0, 22.5, 1.0), "sick"),
        ((50.0, 21.0, 1.0), "well"),
        ((62.0, 27.5, 1.0), "sick"),
    ]


def test_the_test_set_of_ones_own_file_is_drawn_by_the_seed(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,label\n" + "".join(f"{k},{k % 2}\n" for k in range(60)))
    one, again, other = (loaded(path, seed)[1].x.flatten().tolist() for seed in (0, 0, 1))
    assert one == again != other
    assert len(one) == 12
    assert sum(int(x) % 2 for x in one) == 6  # stratified


def test_parquet_with_categories_and_clients(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {
        "site": pa.array(["b", "a", "b", "a", "b", "a"]).dictionary_encode(),
        "x": pa.array([1, 2, 3, 4, 5, 6], pa.int16()),
        "z": pa.array([0.5] * 6, pa.float32()),
        "outcome": pa.array([7, -1, 7, -1, 7, -1]),
    }
    pq.write_table(pa.table(columns), path)
    train, test = loaded(path, label="outcome", client="site", test_fraction=0.34)
    assert train.label_names == ("-1", "7")
    assert train.clients == test.clients == ("a", "b")
    for half in (train, test):
        assert half.client.dtype == np.int64
        # odd x belongs to site b and to label 7
        assert half.client.tolist() == [int(x) % 2 for x in half.x[:, 0].tolist()]
        assert half.y.tolist() == half.client.tolist()


@pytest.mark.parametrize("column", ["one", "two", "three"])
def test_a_category_that_is_not_known_is_found_in_every_column(tmp_path, column):
    rows = [{"one": "a", "two": "b", "three": "c"}, {"one": "d", "two": "e", "three": "f"}]
    odd = [rows[0], rows[1] | {column: "odd"}]
    for name, table in {"train": rows * 2, "test": odd}.items():
        lines = [",".join([*row.values(), str(i % 2)]) for i, row in enumerate(table)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["one,two,three,label", *lines]))
    files = {"source": str(tmp_path / "train.csv"), "test": str(tmp_path / "test.csv")}
    data = Data(**files, categories=["one", "two", "three"])
    with pytest.raises(DataError, match=f"column '{column}' holds a category that is not known"):
        load(data, 0)


def test_clients_with_test_examples_only_come_last(tmp_path):
    (tmp_path / "a.csv").write_text("x,label,who\n1,0,m\n2,1,z\n3,0,m\n")
    (tmp_path / "b.csv").write_text("who,x,label\na,1,0\nz,2,1\n")
    train, test = loaded(tmp_path / "a.csv", test=str(tmp_path / "b.csv"), client="who")
    assert train.clients == ("m", "z")
    assert train.client.tolist() == [0, 1, 0]
    assert test.clients == ("m", "z", "a")
    assert test.client.tolist() == [2, 1]


def test_a_client_that_the_limit_leaves_without_examples_is_dropped(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,label,who\n" + "".join(f"{k},{k % 2},c{k:02}\n" for k in range(20)))
    train, _ = loaded(path, client="who", limit=5)
    assert len(train.clients) == 5
    assert train.client.tolist() == [0, 1, 2, 3, 4]
    assert [f"c{int(x):02}" for x in train.x.flatten()] == list(train.clients)


def test_the_draws_are_those_of_earlier_versions(tmp_path):
    """The values are what version 0.1 draws."""
    path = tmp_path / "a.csv"
    path.write_text("x,label\n" + "".join(f"{k},{'ab'[k % 2]}\n" for k in range(40)))
    train, test = loaded(path, limit=6, normalize="none")
    assert train.x.flatten().tolist() == [4, 6, 7, 8, 11, 25]
    assert test.x.flatten().tolist() == [10, 12, 16, 21, 23, 26, 31, 39]


def test_test_data_need_no_client_column(tmp_path):
    (tmp_path / "a.csv").write_text("x,label,who\n1,0,m\n2,1,z\n")
    (tmp_path / "b.csv").write_text("x,label\n1,0\n")
    train, test = loaded(tmp_path / "a.csv", test=str(tmp_path / "b.csv"), client="who")
    assert train.clients == ("m", "z")
    assert len(test) == 1


def test_test_columns_are_taken_by_name(table, tmp_path):
    (tmp_path / "test.csv").write_text("smokes,bmi,age,label\n1,20,30,well\n0,21,31,sick\n")
    train, test = loaded(table, test=str(tmp_path / "test.csv"))
    assert len(train) == 5
    assert test.x.tolist() == [[30, 20, 1], [31, 21, 0]]
    assert test.y.tolist() == [1, 0]


def test_test_data_that_do_not_fit(table, tmp_path):
    path = tmp_path / "test.csv"
    path.write_text("age,label,bmi\n30,well,20\n")
    refused(lambda: loaded(table, test=str(path)), "no column 'smokes'")
    path.write_text("age,label,bmi,smokes,iq\n30,well,20,1,100\n")
    refused(lambda: loaded(table, test=str(path)), "column 'iq'", "does not have")
    path.write_text("age,label,bmi,smokes\n30,well,20,1\n30,wel,20,1\n")
    refused(lambda: loaded(table, test=str(path)), "'wel' in row 1", "did you mean 'well'")
    refused(lambda: loaded(table, test=str(tmp_path)), "another kind")
    refused(lambda: loaded(table, test=str(tmp_path / "none.csv")), "none.csv")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("age,label\n1,0\nold,1\n", ("column 'age' holds text", "'old' in row 1")),
        ("age,sex,label\n1,f,0\n2,m,1\n", ("column 'sex' holds text", "'f' in row 0")),
        ("age,label\n1,0\n,1\n", ("column 'age' has a gap", "row 1")),
        ("age,label\n1,0\n2,\n", ("column 'label' has a gap", "row 1")),
        ("age,label\n1,a\n2,\n", ("'label' has a gap", "empty text in row 1")),
        ("age,label\n1,0\ninf,1\n", ("column 'age' is not finite", "inf in row 1")),
        (
            "age,label\n1,0.5\n2,1\n",
            ("the labels are quantities", "as 0.5;", "(regression)"),
        ),
        ("age,lable\n1,0\n2,1\n", ("no column 'label'", "did you mean 'lable'", "data.label")),
        ("day,label\n2020-01-01,0\n", ("column 'day' does not hold numbers", "date32")),
        ("age,age,label\n1,2,0\n", ("two columns named 'age'",)),
        ("label\n1\n2\n", ("no columns of inputs", "only 'label' (data.label)")),
        ("age,label\n", ("no examples", "age, label")),
        ("age,label\n1,0\n2\n", ("cannot be read", "Expected 2 columns, got 1")),
        ("age,label\n1,0\n2\n", ("as many values", "double quotes")),
        ("age;label\n1;0\n2;1\n", ("not separated by commas", "'age;label'")),
        ("a;b;label\n1,5;2,5;0\n", ("not separated by commas", "delimiter=';'")),
        ('age,label\n"1,5",0\n', ("column 'age' holds text", "with a point: 1.5")),
        ('age,label\n"1,234",0\n', ("with a point: 1.234", "without commas: 1234")),
        ('age,label\n"1,234,567.5",0\n', ("write thousands without commas: 1234567.5",)),
        (",age,label\n0,1,0\n1,2,1\n", ("column 0", "no name", "index=False", "data.drop = ['']")),
        ("Unnamed: 0,age,label\n7,1,0\n", ("has no name", "'Unnamed: 0', with 7 in", "pandas")),
        ("age,label\n1,well\n2,NA\n", ("'label' has a gap", "'NA' in row 1", "write another one")),
        ("age,label\n1,well\n2, nan\n", ("'label' has a gap", "' nan' in row 1")),
        ("", ("is empty",)),
    ],
)
def test_tables_that_are_refused(tmp_path, text, words):
    path = tmp_path / "a.csv"
    path.write_text(text)
    refused(lambda: loaded(path), str(path), *words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a;b;label\n1,5;-2;"x, y"\n', 'a,b,label\n1.5,-2,"x, y"\n'),
        ("\ufeffa\tb\tlabel\n1.5\t1,234\t0\n", 'a,b,label\n1.5,"1,234",0\n'),
    ],
)
def test_the_advice_for_other_separators_needs_no_package(tmp_path, monkeypatch, text, expected):
    """It is run as it is printed, and writes over nothing."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my table.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        loaded(path)
    assert "pandas" not in str(caught.value)
    assert "left out" not in str(caught.value)
    program = str(caught.value).split("in Python: ")[1]
    exec(program, {})
    new = tmp_path / "my table-commas.csv"
    assert new.read_text(encoding="utf-8") == expected
    with pytest.raises(FileExistsError):
        exec(program, {})


def test_a_client_column_that_is_not_there(table):
    refused(lambda: loaded(table, client="smoke"), "no column 'smoke'", "'smokes'", "data.client")


@pytest.mark.parametrize("text", ["age,label\n1,é\n2,a\n", "âge,label\n1,0\n2,1\n"])
def test_a_table_in_another_encoding(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin-1"))
    refused(lambda: loaded(path), str(path))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
@pytest.mark.parametrize("text", ["größe,label\n1,0\n", "größe;label\n1,5;0\n"])
def test_csv_in_another_encoding(tmp_path, text, encoding):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode(encoding))
    refused(lambda: loaded(path), "a.csv", "not text in UTF-8", "Latin-1", "iconv")


def test_parquet_that_is_damaged(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nothing")
    refused(lambda: loaded(path), "a.parquet cannot be read")


def test_standardize_a_table(tmp_path):
    path = tmp_path / "a.csv"
    rows = [(1_700_000_000 + k, 5, k % 2) for k in range(50)]
    path.write_text("time,unit,label\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    train, test = loaded(path, normalize="standardize")
    np.testing.assert_allclose(train.x.mean(0), [0, 0], atol=1e-6)
    np.testing.assert_allclose(train.x[:, 0].std(correction=0), 1, rtol=1e-6)
    assert len(train.x[:, 0].unique()) == 40  # times are not rounded together
    assert torch.equal(test.x[:, 1], torch.zeros(10))


def test_npz(tmp_path):
    path = tmp_path / "a.npz"
    x = np.random.default_rng(0).normal(size=(10, 4))
    np.savez(path, x=x, y=np.arange(10) % 2, who=np.array(["q", "p"] * 5))
    train, test = loaded(path, client="who")
    assert train.x.dtype == torch.float32
    assert train.clients == ("p", "q")
    back = {tuple(row) for row in torch.cat([train.x, test.x]).tolist()}
    assert back == {tuple(row) for row in x.astype(np.float32).tolist()}
    assert train.client.tolist() == [1 - label for label in train.y.tolist()]


@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 5, 4, 1), (6, 1, 5, 4)])
def test_npz_of_grey_bytes_are_images(tmp_path, shape):
    path = tmp_path / "a.npz"
    x = np.arange(120, dtype=np.uint8).reshape(shape)
    np.savez(path, x=x, label=np.arange(6) % 2)
    train, test = loaded(path, test_fraction=0.34)
    both = torch.cat([train.x, test.x])
    assert both.shape == (6, 1, 5, 4)
    both = both[both[:, 0, 0, 0].argsort()]
    assert torch.equal(both.flatten(), torch.arange(120) / 255)


def test_npz_of_coloured_bytes_with_the_channels_last(tmp_path):
    path = tmp_path / "a.npz"
    x = np.random.default_rng(0).integers(0, 256, (4, 6, 7, 3)).astype(np.uint8)
    np.savez(path, x=x, label=[0, 0, 1, 1])
    train, _ = loaded(path, test=str(again(path)))
    assert torch.equal(train.x, torch.from_numpy(x).permute(0, 3, 1, 2) / 255)


def test_npz_objects_are_not_unpickled(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((2, 2)), label=np.array(["a", 1], dtype=object))
    refused(lambda: loaded(path), "'label' holds Python objects", "pickle", "run any code")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.ones((2, 2)), "labels": [0, 1]}, ("no array 'label'", "'labels'")),
        ({"X": np.ones((2, 2)), "label": [0, 1]}, ("no array 'x'", "known: X, label")),
        ({"x": np.ones((3, 2)), "label": [0, 1]}, ("do not match", "x (3, 2), label (2,)")),
        ({"x": np.ones(2), "label": [0, 1]}, ("do not match", "two axes")),
        ({"x": np.ones((2, 1)), "label": [[0], [1]]}, ("do not match", "y.reshape(-1)")),
        ({"x": np.ones((2, 1)), "label": np.eye(2)}, ("do not match", "y.argmax(axis=1)")),
        ({"x": np.array([["a"], ["b"]]), "label": [0, 1]}, ("x does not hold numbers",)),
        ({"x": [[1.0], [np.nan]], "label": [0, 1]}, ("NaN or infinite", "row 1")),
        ({"x": np.ones((0, 2)), "label": np.ones(0)}, ("'x' is empty",)),
        ({"x": np.ones((2, 2)), "label": [0.5, 1]}, ("neither texts nor whole numbers",)),
    ],
)
def test_npz_that_is_refused(tmp_path, arrays, words):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    refused(lambda: loaded(path), str(path), *words)


def test_npz_that_is_damaged(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((9, 9)), label=np.arange(9))
    whole = path.read_bytes()
    for data in (whole[:200], whole[:3], b"\x80\x04N."):
        path.write_bytes(data)
        refused(lambda: loaded(path), "a.npz cannot be read")
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    refused(lambda: loaded(path), "a single array")


def save(path, *pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(pixels, dtype=np.uint8)).save(path)


def test_a_folder_of_images(tmp_path):
    folder = tmp_path / "scans"
    for k in range(5):
        save(folder / "well" / f"{k}.png", [k, 1, 2], [3, 4, 5])
        save(folder / "ill" / f"{k}.bmp", [100 + k, 1, 2], [3, 4, 5])
    (folder / "well" / ".hidden.png").write_text("")
    (folder / "well" / "notes.txt").write_text("")
    train, test = loaded(folder)
    assert train.x.shape == (8, 1, 2, 3)
    assert test.x.shape == (2, 1, 2, 3)
    assert train.label_names == ("ill", "well")
    assert train.sources == ("scans",)
    for half in (train, test):
        first = (half.x[:, 0, 0, 0] * 255).round().tolist()
        assert [pixel < 100 for pixel in first] == [label == 1 for label in half.y.tolist()]
    assert train.x[0, 0, 1].tolist() == pytest.approx([3 / 255, 4 / 255, 5 / 255])


def test_tiff_is_read_and_other_files_are_refused(tmp_path):
    for k in range(10):
        save(tmp_path / "f" / "a" / f"{k}.{'png' if k < 3 else 'tif'}", [k])
        save(tmp_path / "f" / "b" / f"{k}.TIFF", [k])
    train, test = loaded(tmp_path / "f")
    assert len(train) + len(test) == 20
    for k in range(2):
        (tmp_path / "f" / "b" / f"{k}.heic").write_text("")
    refused(lambda: loaded(tmp_path / "f"), "b has 2 files", "0.heic beside 10 images", ".tif")


def test_a_file_of_several_images_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    pages = [Image.new("L", (2, 2), k) for k in range(3)]
    pages[0].save(tmp_path / "a" / "1.tif", save_all=True, append_images=pages[1:])
    refused(lambda: loaded(tmp_path), "1.tif", "3 pages")


def test_a_folder_with_train_and_test(tmp_path):
    save(tmp_path / "train" / "a" / "1.png", [1])
    save(tmp_path / "train" / "b" / "1.png", [2])
    save(tmp_path / "test" / "b" / "1.png", [3])
    train, test = loaded(tmp_path)
    assert (train.x.flatten() * 255).tolist() == pytest.approx([1, 2])
    assert test.y.tolist() == [1]
    save(tmp_path / "test" / "c" / "1.png", [3])
    refused(lambda: loaded(tmp_path), "label 'c' in row 1", "training data")


def test_grey_among_colours_becomes_coloured(tmp_path):
    save(tmp_path / "f" / "a" / "1.png", [7])
    save(tmp_path / "f" / "b" / "1.png", [[1, 2, 3]])
    train, _ = loaded(tmp_path / "f", test=str(again(tmp_path / "f")))
    assert (train.x.reshape(2, 3) * 255).tolist() == [
        pytest.approx([7, 7, 7]),
        pytest.approx([1, 2, 3]),
    ]


def test_images_of_different_sizes(tmp_path):
    save(tmp_path / "f" / "a" / "1.png", [7, 7], [7, 7])
    save(tmp_path / "f" / "b" / "2.jpeg", [9, 9, 9, 9], [9, 9, 9, 9])
    refused(
        lambda: loaded(tmp_path / "f"),
        "a/1.png (2 high, 2 wide)",
        "b/2.jpeg (2 high, 4 wide)",
        "data.shape",
    )
    train, _ = loaded(tmp_path / "f", shape=(3, 3, 3), test=str(again(tmp_path / "f")))
    assert train.x.shape == (2, 3, 3, 3)
    assert torch.allclose(train.x[0] * 255, torch.tensor(7.0))
    assert torch.allclose(train.x[1] * 255, torch.tensor(9.0))


def test_folders_that_are_refused(tmp_path):
    refused(lambda: loaded(tmp_path), "no folders")
    (tmp_path / "a").mkdir()
    refused(lambda: loaded(tmp_path), "has no images", ".png")
    (tmp_path / "a" / "1.png").write_bytes(b"nothing")
    refused(lambda: loaded(tmp_path), "1.png", "cannot be read")


def test_sources_that_are_not_there(tmp_path):
    refused(lambda: loaded("cifar"), "'cifar' is neither", "did you mean 'cifar10'")
    refused(lambda: loaded(tmp_path / "none.csv"), "no file or folder", "none.csv")
    (tmp_path / "a.xlsx").write_text("x")
    refused(lambda: loaded(tmp_path / "a.xlsx"), "suffix '.xlsx'", ".npz, .csv, .parquet")


def test_test_data_for_a_known_set_are_refused(tmp_path):
    refused(lambda: load(Data(source="digits", test=str(tmp_path)), 0), "data.test", "0 paths")


def test_settings_that_mean_nothing(table):
    refused(lambda: load(Data(source=()), 0), "names nothing", "digits")
    refused(lambda: loaded(table, augment="crop_flip"), "for images")
