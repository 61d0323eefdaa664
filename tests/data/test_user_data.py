"""Examples in the forms in which users have them: tables, data sets of other libraries, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import csv
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

import fedkeel as fk
from fedkeel.data.read.folders import read_folder
from fedkeel.data.read.scaling import measure_scale
from fedkeel.data.read.user_data import like

RNG = np.random.default_rng(0)
ROWS = {"north": 40, "south": 30}
TABLES = {
    site: pa.table(
        {
            "age": pa.array([None if i % 7 == 3 else 40 + i + 0.5 * rows for i in range(rows)]),
            "sex": [("f", "m")[i % 2] for i in range(rows)],
            "ill": [("no", "yes")[i % 3 == 0] for i in range(rows)],
        }
    )
    for site, rows in ROWS.items()
}
OPTIONS = {"target": "ill", "categories": ["sex"], "missing": "mean"}


class Scans(torch.utils.data.Dataset):
    """Pairs of an input and a label."""

    def __init__(self, count: int = 6, broken: int = -1, ragged: int = -1) -> None:
        self.count, self.broken, self.ragged, self.read = count, broken, ragged, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int):
        self.read += 1
        if i == self.broken:
            raise ValueError("broken scan")
        return torch.full((2, 3 + (i == self.ragged)), float(i)), i % 2


def test_tables_of_clients_have_one_schema() -> None:
    clients = fk.from_clients(TABLES, **OPTIONS)
    assert clients.names == ("north", "south")
    assert clients.sizes.tolist() == [40, 30]
    data = clients.data
    assert data.columns == ("age", "sex=f", "sex=m")
    assert data.label_names == ("no", "yes")
    ages = [v for table in TABLES.values() for v in table["age"].to_pylist()]
    mean = np.mean([v for v in ages if v is not None])
    np.testing.assert_allclose(data.x[:, 0], [mean if v is None else v for v in ages], rtol=1e-6)
    assert data.x[:, 1].tolist() == [1, 0] * 35
    assert data.y[:4].tolist() == [1, 0, 0, 1]


def test_paths_are_read_as_tables(tmp_path: Path) -> None:
    for site, table in TABLES.items():
        csv.write_csv(table, tmp_path / f"{site}.csv")
    paths = {site: tmp_path / f"{site}.csv" for site in TABLES}
    by_path, by_table = (fk.from_clients(given, **OPTIONS) for given in (paths, TABLES))
    assert by_path.data.fingerprint() == by_table.data.fingerprint()
    single = fk.dataset(str(paths["north"]), **OPTIONS)
    assert (len(single), single.columns) == (40, by_table.data.columns)


def test_frames_of_pandas_are_tables() -> None:
    pandas = pytest.importorskip("pandas")
    frames = {site: pandas.DataFrame(table.to_pydict()) for site, table in TABLES.items()}
    made = [fk.from_clients(given, **OPTIONS) for given in (frames, TABLES)]
    assert made[0].data.fingerprint() == made[1].data.fingerprint()
    iid = fk.iid(fk.dataset(frames["north"], **OPTIONS), clients=4)
    assert iid.sizes.tolist() == [10] * 4


def test_data_sets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    tables = {site: datasets.Dataset(table) for site, table in TABLES.items()}
    made = [fk.from_clients(given, **OPTIONS) for given in (tables, TABLES)]
    assert made[0].data.fingerprint() == made[1].data.fingerprint()
    arrays = {"pixels": RNG.random((4, 2, 3)).tolist(), "label": [0, 1, 1, 0]}
    images = datasets.Dataset.from_dict(arrays)
    images = images.cast_column("label", datasets.ClassLabel(names=["ill", "healthy"]))
    data = fk.dataset(images)
    assert (data.shape, data.label_names) == ((2, 3), ("ill", "healthy"))
    assert data.y.tolist() == [0, 1, 1, 0]
    np.testing.assert_allclose(data.x.double(), arrays["pixels"])


def test_data_sets_of_torch() -> None:
    scans = Scans()
    clients = fk.iid(scans, clients=3)
    assert clients.data.x[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert clients.data.y.tolist() == [0, 1] * 3
    assert scans.read == 8  # each once, and the first also for its form and its kind
    named = fk.from_clients({"a": Subset(scans, [4, 2]), "b": scans})
    assert named.sizes.tolist() == [2, 6]
    assert named.data.x[:3, 0, 0].tolist() == [4, 2, 0]
    tensors = TensorDataset(torch.arange(8.0)[:, None], torch.arange(8) % 2)
    for make in (
        lambda: fk.dirichlet(tensors, clients=2, alpha=5.0),
        lambda: fk.by_classes(tensors, clients=2, k=1),
        lambda: fk.by_client(tensors, client_ids=[0, 1] * 4),
    ):
        assert make().data.x.flatten().tolist() == list(range(8))


def test_mappings_and_images_are_examples() -> None:
    red = np.zeros((4, 5, 3), dtype=np.uint8)
    red[:, :, 0] = 51
    items = [{"id": k, "image": Image.fromarray(red), "label": ("a", "b")[k % 2]} for k in range(4)]

    class Images:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int):
            return items[i]

    data = fk.dataset(Images(), drop=["id"])
    assert data.shape == (3, 4, 5)
    assert data.x.amax((0, 2, 3)).tolist() == pytest.approx([0.2, 0, 0])
    assert data.label_names == ("a", "b")
    with pytest.raises(fk.FedkeelError, match="an example has 2 inputs"):
        fk.dataset(Images())


class Listed:
    """A map-style data set of a list, with the class names of torchvision where there are some."""

    def __init__(self, items: list[Any], classes: list[str] | None = None) -> None:
        self.items = items
        if classes is not None:
            self.classes, self.class_to_idx = classes, {name: k for k, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def in_modes() -> list[Image.Image]:
    """Pictures of all modes that are read: of half a red, half a transparent or a blue square."""
    colour = np.zeros((4, 6, 3), dtype=np.uint8)
    colour[:, :3], colour[:, 3:] = (220, 30, 30), (30, 30, 220)
    rgb = Image.fromarray(colour)
    alpha = rgb.copy()
    alpha.putalpha(Image.fromarray(np.repeat([[255, 255, 255, 0, 0, 0]], 4, 0).astype(np.uint8)))
    return [
        rgb.convert("L"),  # the first is grey
        rgb,
        rgb.quantize(4),
        rgb.convert("1"),
        rgb.convert("CMYK"),
        rgb.convert("YCbCr"),
        alpha,
        alpha.convert("LA"),
        alpha.quantize(4),
    ]


def test_images_of_data_sets_are_read_as_those_of_folders(tmp_path: Path) -> None:
    pictures = in_modes()
    for k, picture in enumerate(pictures):
        folder = tmp_path / "images" / ("red", "blue")[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        kind = "tif" if picture.mode in ("CMYK", "YCbCr") else "png"
        picture.save(folder / f"{k}.{kind}")
    expected = {}
    raw = read_folder(tmp_path / "images", None)
    files = sorted((tmp_path / "images").rglob("*.*"))
    for file, pixels in zip(files, raw.x, strict=True):
        expected[int(file.stem)] = pixels.float() / 255
    data = fk.dataset(Listed([(picture, 0) for picture in pictures]))
    assert data.shape == (3, 4, 6)
    for k in range(len(pictures)):
        assert torch.equal(data.x[k], expected[k]), pictures[k].mode
    # all examples of all clients, and of the test set, have one mode
    clients = fk.from_clients(
        {"a": Listed([(pictures[0], 0)] * 4), "b": Listed([(pictures[2], 1)])}
    )
    assert clients.data.shape == (3, 4, 6)
    assert torch.equal(clients.data.x[0], expected[0])
    test = like(clients.data, Listed([(pictures[0], 0)]), "test")
    assert torch.equal(test.x[0], expected[0])
    deep = Image.fromarray(np.full((4, 6), 40_000, dtype=np.uint16))
    with pytest.raises(fk.FedkeelError, match="image of example 0 has a kind of pixel"):
        fk.dataset(Listed([(deep, 0)]))
    with pytest.raises(fk.FedkeelError, match=r"palette(.|\n)*convert"):
        fk.dataset([pictures[2], pictures[2]], [0, 1])


def test_class_names_of_data_sets_align_the_clients() -> None:
    one = [(np.ones(2), 0), (np.zeros(2), 1)]
    sites = {"a": Listed(one, ["cat", "dog"]), "b": Listed(one, ["dog", "emu"])}
    clients = fk.from_clients(sites)
    assert clients.data.label_names == ("cat", "dog", "emu")
    assert clients.data.y.tolist() == [0, 1, 1, 2]
    part = fk.from_clients({"a": Subset(sites["a"], [1]), "b": sites["b"]})
    assert part.data.y.tolist() == [1, 1, 2]
    for test in (sites["b"], fk.dataset(sites["b"])):
        assert like(clients.data, test, "test").y.tolist() == [1, 2]
    with pytest.raises(fk.FedkeelError, match="number their classes in several ways"):
        fk.dataset(ConcatDataset(list(sites.values())))
    alike = ConcatDataset([sites["a"], Listed(one, ["cat", "dog"])])
    assert fk.dataset(alike).label_names == ("cat", "dog")
    with pytest.raises(fk.FedkeelError, match=r"client c has numbers as labels(.|\n)*several"):
        fk.from_clients({**sites, "c": (np.ones((2, 2)), [0, 1])})
    kept = fk.from_clients({"a": Listed(one, ["z", "b"]), "c": (np.ones((2, 2)), [0, 1])})
    assert kept.data.label_names == ("z", "b")
    assert kept.data.y.tolist() == [0, 1, 0, 1]


def test_rows_of_a_tokenizer_are_inputs_by_name() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {
        "input_ids": [[5, 7, 0], [3, 0, 0], [2, 2, 9], [8, 1, 0]],
        "attention_mask": [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]],
        "label": [0, 1, 1, 0],
    }
    split = datasets.Dataset.from_dict(rows)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(10, 4), nn.Linear(4, 2)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            mask = attention_mask[..., None].float()
            out: torch.Tensor = self.out((self.words(input_ids) * mask).sum(1))
            return out

    for one in (split, split.with_format("torch")):
        clients = fk.from_clients({"a": one, "b": one.select([1, 2])})
        assert clients.data.x["input_ids"].tolist()[4:] == rows["input_ids"][1:3]
        assert clients.data.x["attention_mask"].dtype == torch.int64
        result = fk.run(
            "fedavg",
            task=fk.Task(Bag),
            clients=clients,
            test=one,
            rounds=2,
            local=fk.Local(lr=0.1, epochs=1, batch_size=2),
            engine=fk.Engine(kind="sequential"),
            progress=False,
        )
        assert result.rows[-1].test.examples == 4
    more = split.add_column("idx", [0, 1, 2, 3])
    with pytest.raises(fk.FedkeelError, match=r"drop=\['idx'\]"):
        fk.from_clients({"a": more})
    assert set(fk.from_clients({"a": more}, drop=["idx"]).data.x) == {"input_ids", "attention_mask"}


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


class Random(Scans):
    def __getitem__(self, i: int):
        return torch.rand(2), i % 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Scans(broken=3), ("client a: reading example 3", "ValueError: broken", "__getitem__")),
        (Scans(ragged=2), ("client a: the inputs have several shapes", "(2, 4) of example 2")),
        (Scans(count=0), ("client a: there are no examples",)),
        (Endless(), ("client a: the examples cannot be read by their number",)),
        (DataLoader(Scans()), ("cannot be read by their number", "loader.dataset")),
        (["x", "y"], ("client a",)),
    ],
)
def test_what_cannot_be_read_is_named(value: object, says: tuple[str, ...]) -> None:
    with pytest.raises(fk.FedkeelError) as caught:
        fk.from_clients({"a": value})
    assert len(caught.value.lines()) <= 4
    for words in says:
        assert words in str(caught.value)


def test_the_users_own_exception_is_kept() -> None:
    with pytest.raises(fk.FedkeelError) as caught:
        fk.dataset(Scans(broken=0))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_data_set_that_is_random_is_told_of() -> None:
    assert "other numbers each time" in fk.dataset(Random()).warnings[0]
    assert fk.dataset(Scans()).warnings == ()


def test_tables_and_arrays_are_not_mixed() -> None:
    with pytest.raises(fk.FedkeelError, match=r"tables or files[\s\S]*got north and other"):
        fk.from_clients({"north": TABLES["north"], "other": ([[1.0]], [0])}, target="ill")
    with pytest.raises(fk.FedkeelError, match="are for tables"):
        fk.from_clients({"a": ([[1.0]], [0])}, missing="mean")


def parts(offset: float = 0.0, rows: int = 30):
    x = RNG.normal(offset, 1 + abs(offset), (rows, 4)).astype("f4")
    return x, (x.sum(axis=1) > 4 * offset).astype(int)


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_each_client_has_its_own_test_part(holdout: float) -> None:
    train = {"a": parts(), "b": parts(2.0), "c": parts(-1.0, 10)}
    test = {"b": parts(2.0, 7), "a": parts(0.0, 5)}
    clients = fk.from_clients(train, test=test, holdout=holdout)
    assert clients.test is not None
    assert clients.test.sources == ("a", "b")
    assert clients.rows.max() < 70
    result = fk.run(
        "fedavg",
        task=fk.Task(lambda: nn.Linear(4, 2)),
        clients=clients,
        rounds=2,
        local=fk.Local(lr=0.1, epochs=1, batch_size=10),
        evaluation=fk.Evaluation(every=1, clients_every=1),
        engine=fk.Engine(dtype="float64"),
    )
    row = result.rows[-1]
    net = nn.Linear(4, 2).double()
    net.load_state_dict(result.state_dict())
    for name, (x, y) in test.items():
        right = float((net(torch.from_numpy(x).double()).argmax(1).numpy() == y).mean())
        assert row.sources[name]["accuracy"] == pytest.approx(right, abs=1e-12)
        if not holdout:
            k = clients.names.index(name)
            assert row.per_client["accuracy"][k] == pytest.approx(right, abs=1e-12)
    assert row.per_client["examples"] == ([6, 6, 2] if holdout else [5, 7, 0])
    assert row.test.examples == 12


def test_test_parts_of_nobody() -> None:
    with pytest.raises(fk.FedkeelError, match="'test' names a client 'd'"):
        fk.from_clients({"a": parts()}, test={"d": parts()})
    with pytest.raises(fk.FedkeelError, match="'test' is not a test set"):
        fk.run(
            "fedavg",
            task=fk.Task(nn.Linear(4, 2)),
            clients=fk.from_clients({"a": parts()}),
            rounds=1,
            local=fk.Local(lr=0.1, epochs=1),
        )


def test_test_tables_are_made_ready_as_the_training_tables() -> None:
    options = {**OPTIONS, "normalize": "standardize"}
    train = {site: table.slice(10) for site, table in TABLES.items()}
    test = {site: table.slice(0, 10) for site, table in TABLES.items()}
    clients = fk.from_clients(train, test=test, **options)
    assert clients.test is not None
    local, task = fk.Local(lr=0.1, epochs=1, batch_size=10), fk.Task(nn.Linear(3, 2))
    both = [
        fk.run(
            "fedavg",
            task=task,
            clients=clients,
            test=given,
            rounds=1,
            local=local,
            seed=1,
        )
        for given in (None, pa.concat_tables(test.values()))
    ]
    assert both[0].rows[-1].test == both[1].rows[-1].test
    known = [v for table in train.values() for v in table["age"].to_pylist()]
    known = np.array([np.nan if v is None else v for v in known])
    filled = np.where(np.isnan(known), np.nanmean(known), known)
    first = (TABLES["north"]["age"][0].as_py() - filled.mean()) / filled.std()
    np.testing.assert_allclose(float(clients.test.x[0, 0]), first, rtol=1e-5)


@pytest.mark.parametrize("how", ["standardize", "client", "pixels"])
def test_arrays_are_standardised_by_all_clients_or_by_their_own(how: str) -> None:
    train, test = {"a": parts(3.0), "b": parts(-5.0)}, {"a": parts(3.0, 5), "b": parts(-5.0, 4)}
    clients = fk.from_clients(train, test=test, normalize=how)
    pooled = np.concatenate([x for x, _ in train.values()]).astype(float)
    for k, name in enumerate(train):
        own = train[name][0].astype(float) if how == "client" else pooled
        expected = (test[name][0] - own.mean(0)) / (own.std(0) + 0.001 / 255 * (how == "pixels"))
        rows = clients.test.x[torch.from_numpy(clients.test.source == k)]
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)
    assert clients.how["normalize"] == how
    assert measure_scale(clients.data.x[clients.rows]).mean.abs().max() < 1e-6


def test_clients_may_have_several_inputs_by_name_and_quantities() -> None:
    rows = {"a": 8, "b": 5}
    train = {
        name: ({"ids": np.arange(2 * n).reshape(n, 2), "x": RNG.normal(size=(n, 3))}, np.arange(n))
        for name, n in rows.items()
    }
    halves = {name: (x, y + 0.5 * (name == "b")) for name, (x, y) in train.items()}
    clients = fk.from_clients(halves, test={"b": halves["b"]})
    assert clients.sizes.tolist() == [8, 5]
    assert clients.data.classes == 0  # one client has quantities, so that all do
    assert clients.data.y.is_floating_point()
    assert clients.data.shape == {"ids": (2,), "x": (3,)}
    assert clients.test.x["ids"].tolist() == halves["b"][0]["ids"].tolist()
    with pytest.raises(fk.FedkeelError, match="for one array of numbers"):
        fk.from_clients(train, normalize="standardize")
