"""The worked examples of tasks, each on small data in the layout of its publisher."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def voice(patient: int, day: int) -> dict[str, Any]:
    """A recording in the columns of the publisher, in whose order the later days come first."""
    random = np.random.default_rng([patient, day])
    severity = 20 + 5 * np.sin(patient + 0.2 * day)
    measures = {f"Shimmer:{i}": severity * i + random.normal() for i in range(1, 17)}
    about = {"subject#": patient, "age": 60 + patient, "sex": patient % 2, "test_time": day / 2}
    return {**about, "motor_UPDRS": severity, "total_UPDRS": severity + 8, **measures}


def test_parkinsons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [voice(patient, day) for patient in (1, 2, 3) for day in range(20, 0, -1)]
    write_rows(tmp_path / "parkinsons_updrs.data", rows)
    module = example("parkinsons")
    train, test = module.split(module.read(tmp_path))
    assert [*train] == [*test] == ["1", "2", "3"]
    for patient in train:
        (x, y), (x_late, y_late) = train[patient], test[patient]
        assert (x.shape, y.shape, x_late.shape, y_late.shape) == ((14, 19), (14,), (6, 19), (6,))
        assert x[:, 2].tolist() == [day / 2 for day in range(1, 15)]
        assert x_late[:, 2].tolist() == [day / 2 for day in range(15, 21)]
        assert y_late[-1] == pytest.approx(20 + 5 * np.sin(int(patient) + 4))
    errors = module.main([str(tmp_path), "--quick"])
    early, late = (np.concatenate([y for _, y in part.values()]) for part in (train, test))
    plain = np.abs(late - early.mean()).mean()
    assert errors["mean score of all patients"] == [pytest.approx(plain)]
    own = [np.abs(test[k][1] - train[k][1].mean()).mean() for k in train]
    assert errors["mean score of the patient"] == [pytest.approx(np.mean(own))]
    assert errors["last score of the patient"] != errors["mean score of the patient"]
    assert errors["centralised"][0] < 0.9 * plain
    assert errors["scaffold"][0] < plain
    assert f"| mean score of all patients | {plain:.2f} ± 0.00 |" in capsys.readouterr().out


def patient(*number: int) -> tuple[dict[str, Any], float, int]:
    """What both tables tell of a patient, her days until the event, and whether it was seen."""
    random = np.random.default_rng(number)
    nodes = int(random.integers(0, 20))
    days = float(random.exponential(2000 / (1 + nodes))) + 1
    known = {"pid": 0, "age": 40 + number[-1] % 30, "meno": 0, "grade": 2 + number[-1] % 2}
    return {**known, "nodes": nodes, "pgr": 10, "er": 20, "hormon": 0}, days, int(days < 3000)


def test_survival(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = [], []
    for number in range(200):
        known, days, seen = patient(number)
        outcome = {"rtime": days, "recur": seen, "dtime": days + 1, "death": 0}
        first.append({**known, "size": ("<=20", "20-50", ">50")[number % 3], **outcome})
        known, days, seen = patient(1, number)
        second.append({**known, "size": 10 + number % 60, "rfstime": days, "status": seen})
    write_rows(tmp_path / "rotterdam.csv", first)
    write_rows(tmp_path / "gbsg.csv", second)
    module = example("survival")
    (x, y), (x2, y2) = module.rotterdam(tmp_path), module.gbsg(tmp_path)
    assert (x.shape, y.shape, x2.shape, y2.shape) == ((200, 9), (200, 2)) * 2
    assert x[:3, 2:4].tolist() == [[0, 0], [1, 0], [1, 1]]  # the bands
    assert x2[[10, 11, 41], 2:4].tolist() == [[0, 0], [1, 0], [1, 1]]
    assert y[0].tolist() == [first[0]["rtime"] / 365.25, first[0]["recur"]]
    scores = module.main([str(tmp_path), "--quick"])
    assert [*scores] == ["local", "centralised", "fedavg", "fedprox(mu=0.1)", "scaffold"]
    for of_hospital in scores.values():
        assert of_hospital.keys() == {"Rotterdam", "Germany"}
        assert all(value[0] > 0.6 for value in of_hospital.values())
    assert "| fedavg | 0." in capsys.readouterr().out


@pytest.mark.slow
def test_segmentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"fluorescence_256": (150, 140), "histology_320": (128, 160)}
    rows = []
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    for domain, (width, height) in sizes.items():
        for number in range(7):
            random = np.random.default_rng([width, number])
            labels = np.zeros((height, width), dtype=np.uint16)
            row, column = random.integers(30, 60, size=2)
            labels[row : row + 40, column : column + 30] = 300 + number  # more than a byte holds
            image = np.where(labels > 0, 200, 40).astype(np.uint8)
            if domain == "histology_320":
                image = np.stack([255 - image, 200 - image // 2, 255 - image], axis=2)
            key = f"{domain}-{number}"
            Image.fromarray(image).save(tmp_path / "images" / f"{key}.png")
            Image.fromarray(labels).save(tmp_path / "labels" / f"{key}.png")
            rows.append({"image_id": key, "domain": domain, "width": width, "height": height})
    write_rows(tmp_path / "domains.csv", rows)
    module = example("segmentation")
    for x, y in module.read(tmp_path).values():
        assert (x.shape, y.shape) == ((7, 3, 64, 64), (7, 64, 64))
        is_bright = x[:, 0] > 0
        assert (y == is_bright).all() or (y == ~is_bright).all()
        assert y.sum(axis=(1, 2)).tolist() == [20 * 15] * 7
    count = sum(p.numel() for p in module.UNet().parameters())
    assert f"{count:,} numbers" in module.UNet.__doc__
    scores = module.main([str(tmp_path), "--quick"])
    assert [*scores] == ["local", "centralised", "fedavg", "scaffold"]
    for of_domain in scores.values():
        assert of_domain.keys() == sizes.keys()
        assert all(0 <= value <= 1 for values in of_domain.values() for value in values)
    assert scores["fedavg"] == scores["scaffold"]  # its corrections begin at 0
    assert "| Dice | fluorescence_256 | histology_320 |" in capsys.readouterr().out


def test_shakespeare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["To be, or not to be, that is the question:\n" * 3] * 20
    blocks = [f"{role}:\n{line}" for line in lines for role in ("HAMLET", "First Citizen")]
    blocks += ["GHOST:\nList, list, O, list!", "ALL:"]  # too short for a client, and no speech
    (tmp_path / "input.txt").write_text("\n\n".join(blocks), encoding="ascii")
    module = example("shakespeare")
    texts = module.read(tmp_path)
    assert [*texts] == ["HAMLET", "First Citizen"]
    alphabet = "".join(sorted(set(texts["HAMLET"])))
    x, y = module.examples(texts["HAMLET"], alphabet)
    assert x.shape == y.shape == ((len(texts["HAMLET"]) - 1) // 64, 64)
    assert (x[:, 1:] == y[:, :-1]).all()
    assert "".join(alphabet[code] for code in x[0]) == texts["HAMLET"][:64]
    # of a and b in turn the next is known, but for the pairs that are counted once more
    pairs = np.array([[0, 1, 0, 1]]), np.array([[1, 0, 1, 0]])
    assert module.perplexity_of_pairs(pairs, pairs, 2) == pytest.approx(4 / 3)
    model = module.Transformer(5)
    text = torch.arange(5)[None]
    before = model(text)[:, :4]
    text[0, 4] = 0
    assert torch.equal(model(text)[:, :4], before)  # no place sees what comes later
    scores = module.main([str(tmp_path), "--quick"])
    assert 1 < scores["pairs of characters"][0] < len(alphabet)
    assert all(1 < scores[method][0] < len(alphabet) for method in ("centralised", "fedavg"))
    assert f"| fedavg | {scores['fedavg'][0]:.2f} ± 0.00 |" in capsys.readouterr().out


def write_blood(folder: Path, name: str, cells: list[tuple[str, int, int, int, int]]) -> None:
    """An image of 640 x 480 and its boxes, whose pixels the publisher counts from 1."""
    image = np.full((480, 640, 3), 220, dtype=np.uint8)
    objects = ""
    for kind, *box in cells:
        left, top, right, bottom = box
        image[top - 1 : bottom, left - 1 : right] = (
            (90, 40, 160) if kind == "WBC" else (200, 60, 60)
        )
        corners = "".join(
            f"<{key}>{value}</{key}>" for key, value in zip(CORNERS, box, strict=True)
        )
        objects += f"<object><name>{kind}</name><bndbox>{corners}</bndbox></object>"
    Image.fromarray(image).save(folder / "JPEGImages" / f"{name}.jpg")
    text = f"<annotation>{objects}</annotation>"
    (folder / "Annotations" / f"{name}.xml").write_text(text, encoding="ascii")


CORNERS = ("xmin", "ymin", "xmax", "ymax")


def test_blood_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (tmp_path / name).mkdir(parents=True)
    for part, count in (("trainval", 10), ("test", 3)):
        names = [f"{part}_{number}" for number in range(count)]
        for number, name in enumerate(names):
            white = ("WBC", 101 + 10 * number, 201, 260 + 10 * number, 360)
            write_blood(tmp_path, name, [white, ("RBC", 401, 41, 480, 120), ("RBC", 9, 9, 9, 40)])
        (tmp_path / "ImageSets/Main" / f"{part}.txt").write_text("\n".join(names) + "\n")
    module = example("blood_cells")
    x, y = module.read(tmp_path, "test")
    assert (x.shape, y["boxes"].shape) == ((3, 3, 120, 160), (3, 40, 5))
    assert y["count"].tolist() == [2] * 3  # the box without an area is left out
    # a cell of the grid is 32 pixels of the image
    assert y["boxes"][1, 0].tolist() == pytest.approx([1, 190 / 32, 280 / 32, 160 / 32, 160 / 32])
    assert y["boxes"][0, 1].tolist() == pytest.approx([0, 440 / 32, 80 / 32, 80 / 32, 80 / 32])
    assert (
        sum(len(x) for x, _ in module.laboratories(*module.read(tmp_path, "trainval")).values())
        == 10
    )

    truth = {name: torch.tensor(array) for name, array in y.items()}
    maps = torch.full((3, 7, 15, 20), -20.0)
    for image in range(3):
        for kind, *box in y["boxes"][image, :2]:
            column, row = int(box[0]), int(box[1])
            maps[image, int(kind), row, column] = 20
            offsets = (box[0] - column, box[1] - row, *np.log(box[2:]))
            maps[image, 3:, row, column] = torch.tensor(offsets)
    perfect = module.found_and_true(maps, truth).double()
    assert module.mean_average_precision(perfect) == 1
    assert float(module.detection_loss(maps, truth).max()) < 1e-5
    maps[0, 1, :, :] = -20  # one white cell of three is missed, so the mean is of 1 and 2 / 3
    kept = module.found_and_true(maps, truth).double()
    assert module.mean_average_precision(kept) == pytest.approx((1 + 2 / 3) / 2)
    boxes = np.array([[0.0, 0.0, 2.0, 2.0], [1.0, 0.0, 3.0, 2.0], [2.0, 2.0, 4.0, 4.0]])
    assert module.overlaps(boxes[0], boxes).tolist() == pytest.approx([1, 1 / 3, 0])

    scores = module.main([str(tmp_path), "--quick"])
    assert all(0 <= values[0] <= 1 for values in scores.values())
    assert "| fedavg | " in capsys.readouterr().out


def test_heart_disease(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also as a federation of nodes, by the experiment beside it."""
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        random, lines = np.random.default_rng(len(hospital)), []
        for number in range(30):
            ill, chol = number % 2, 0 if hospital == "switzerland" else 200 + number
            thal = "?" if number % 3 == 0 else ("3.0", "7")[ill]
            values = (
                50 + number,
                1,
                1 + number % 4,
                120,
                chol,
                number % 5 // 4 or "?",
                0,
                150 - 30 * ill,
                0,
                ".7",
            )
            lines.append(",".join(map(str, (*values, 1 + number % 3, 0, thal, ill * 3))))
        random.shuffle(lines)
        (tmp_path / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    module = example("heart_disease/compare")
    rows = module.read(tmp_path, "switzerland")
    assert {row["chol"] for row in rows} == {""}
    assert {row["thal"] for row in rows} == {"", "3", "7"}
    assert all((row["thal"] == "7") <= (row["disease"] == "ill") for row in rows)
    train, test = module.split(rows, 0)
    assert (len(train), len(test)) == (22, 8)
    assert sum(row["disease"] == "ill" for row in test) == 4
    out = tmp_path / "out"
    auroc = module.main([str(tmp_path), "--quick", "--out", str(out)])
    assert [*auroc] == ["local", "centralised", "fedavg", "fedprox(mu=0.1)", "scaffold", "fedgh"]
    assert all(value == [1.0] for value in auroc["centralised"].values())
    assert "| fedavg | 100.0% ± 0.0% |" in capsys.readouterr().out
    schema = json.loads(next(out.glob("split-0/fedavg-*/run.json")).read_text())["data"]["schema"]
    assert [column["name"] for column in schema][:3] == ["age", "sex", "cp"]

    pytest.importorskip("flwr")
    from fedkeel.cli.common import ExperimentSource
    from fedkeel.cli.experiment import read_experiment
    from fedkeel.flower.node.configuration import make_node
    from fedkeel.flower.server.serve import RunOptions, serve
    from in_process_grid import InProcessGrid

    path = EXAMPLES / "heart_disease" / "experiment.toml"
    experiment = read_experiment(ExperimentSource(path, None, ("rounds=2",), trust=False))
    nodes = {
        100 + i: make_node(
            experiment,
            {"partition-id": i, "data": str(out / f"{name}.csv"), "state": str(tmp_path / "s")},
        )
        for i, name in enumerate(module.HOSPITALS)
    }
    last = serve(InProcessGrid(nodes), experiment, RunOptions(tmp_path / "run")).rows[-1]
    assert last.test.examples == 4 * 9
    assert last.test["auroc"] > 0.9
    assert (last.faults, len(last.sources)) == ({}, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    speech = "So shaken as we are, so wan with care,\nfind we a time\n" * 4
    blocks = [f"{role}:\n{speech}" for _ in range(12) for role in ("HENRY", "JOHN", "ANNE", "PAGE")]
    (tmp_path / "input.txt").write_text("\n\n".join(blocks), encoding="ascii")
    module = example("lora")
    scores = module.main([str(tmp_path), "--quick"])
    adapters, whole = scores["adapters"], scores["whole model"]
    assert adapters["before"] == pytest.approx(whole["before"])  # adapters begin as nothing
    assert adapters["after"] < adapters["before"]
    assert whole["after"] < whole["before"]
    rank, width, layers = 4, 64, 2
    assert adapters["kB up"] * 1000 == 4 * layers * rank * (width + 3 * width)
    assert whole["kB up"] > 10 * adapters["kB up"]
    assert "| adapters | " in capsys.readouterr().out
    sys.modules.pop("shakespeare", None)


def test_training_by_a_loop_of_ones_own() -> None:
    module = example("own_training/plain_loop")
    one, two = module.main(rounds=3, engine="sequential"), module.main(rounds=3, engine="workers")
    assert one.last > 0.3 > one.scores()[0][1]
    assert one.rows[-1].diagnostics["local_training.accuracy"] > 0.5
    assert all(torch.equal(t, two.state_dict()[name]) for name, t in one.state_dict().items())


def test_training_by_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are those that fedkeel makes by itself."""
    pytest.importorskip("lightning")
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_training"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        module = example("own_training/with_lightning")
        own = module.main(rounds=2)
    monkeypatch.setattr(module.fk, "LocalTraining", lambda train: None)
    plain = module.main(rounds=2)
    assert own.record.local.startswith("your own train")
    assert plain.record.local.startswith("SGD")
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], tensor, rtol=1e-6, atol=1e-7)
    sys.modules.pop("plain_loop", None)


def test_training_of_adapters_by_the_trainer_of_hugging_face() -> None:
    for package in ("transformers", "peft", "accelerate"):
        pytest.importorskip(package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        module = example("own_training/with_trainer")
        one, again = module.main(rounds=2, examples=48), module.main(rounds=2, examples=48)
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in one.state_dict().items())
    names = set(one.params)
    assert names
    assert all("lora_" in name or "modules_to_save" in name for name in names)
    sent = sum(tensor.nbytes for tensor in one.params.values())
    assert sum(one.rows[-1].bytes_up.values()) == 4 * sent
    assert one.rows[-1].steps == 4 * 3
    assert one.rows[2].train_loss < one.rows[1].train_loss
