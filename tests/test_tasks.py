"""Every kind of task through `fk.run`: it learns, and the engines agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.runner.result import Result


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Tokens(nn.Module):
    """A score for each token at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.out(h + self.attention(h, h, h, need_weights=False)[0])


class Segment(nn.Module):
    """A score for each place of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.body(x)))


class Named(nn.Module):
    """Two inputs by name, and an output by name, as of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Mapping[str, Tensor]:
        h = self.embed(input_ids) * attention_mask[..., None]
        return {"hidden": h, "logits": self.out(h.sum(1) / attention_mask.sum(1, keepdim=True))}


class Pair(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.place, self.kind = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.body(x))
        return self.place(h), self.kind(h)


def of_pair(output: tuple[Tensor, Tensor], y: Mapping[str, Tensor]) -> Tensor:
    place = ((output[0] - y["place"]) ** 2).mean(dim=1)
    return place + nn.functional.cross_entropy(output[1], y["kind"], reduction="none")


def place_error(output: tuple[Tensor, Tensor], y: Mapping[str, Tensor]) -> Tensor:
    return (output[0] - y["place"]).abs().mean(dim=1)


@dataclass(frozen=True)
class Case:
    """A task, and N examples."""

    task: fk.Task
    x: Any
    y: Any
    lr: float = 0.1
    tokens: bool = False


X = draw(72, 4)
TEXT = torch.randint(0, 7, (72, 5), generator=torch.Generator().manual_seed(1))
IMAGES = draw(72, 1, 6, 6)
IDS = torch.randint(0, 5, (72, 4), generator=torch.Generator().manual_seed(2))
MASK = (torch.arange(4) <= torch.arange(72)[:, None] % 4).long()
CASES = {
    "regression": Case(
        fk.Task(lambda: nn.Linear(4, 1), loss="mse", metrics=["mae", "r2"]), X, X @ draw(4) + 20.5
    ),
    "quantities": Case(
        fk.Task(lambda: nn.Linear(4, 2), loss="huber", metrics=["rmse"]), X, X @ draw(4, 2)
    ),
    "binary": Case(
        fk.Task(lambda: nn.Linear(4, 1), loss="bce", metrics=["auroc", "accuracy"]),
        X,
        (X.sum(1) > 0).long(),
    ),
    "several labels": Case(
        fk.Task(lambda: nn.Linear(4, 3), loss="bce", metrics=["macro_f1"]),
        X,
        (X[:, :3] > 0).double(),
        lr=1.0,
    ),
    "segmentation": Case(
        fk.Task(Segment, loss="dice", metrics=["dice", "iou"]),
        IMAGES,
        (IMAGES[:, 0] > 0).long(),
        0.5,
    ),
    "tokens": Case(
        fk.Task(Tokens, loss="token_cross_entropy", metrics=["perplexity", "token_accuracy"]),
        TEXT,
        (TEXT + 1) % 7,
        lr=1.0,
        tokens=True,
    ),
    "survival": Case(
        fk.Task(lambda: nn.Linear(4, 1, bias=False), loss="cox", metrics=["concordance"]),
        X,
        torch.stack([torch.exp(-X @ draw(4)), (draw(72, seed=3) > -1).double()], dim=1),
    ),
    "inputs by name": Case(
        fk.Task(Named), {"input_ids": IDS, "attention_mask": MASK}, (IDS * MASK).amax(1) % 3, 0.5
    ),
    "targets by name": Case(
        fk.Task(Pair, loss=of_pair, metrics=[fk.metric(place_error, higher_is_better=False)]),
        X,
        {"place": X[:, :2], "kind": X.argmax(dim=1) % 3},
    ),
}


def rows(values: Any, start: int, stop: int) -> Any:
    if isinstance(values, Mapping):
        return {name: tensor[start:stop] for name, tensor in values.items()}
    return values[start:stop]


def run(name: str, kind: str = "sequential", method: str = "fedavg", **more: Any) -> Result:
    case = CASES[name]
    parts = {f"c{i}": (a, b) for i, (a, b) in enumerate([(0, 17), (17, 29), (29, 48)])}
    clients = {k: (rows(case.x, *at), rows(case.y, *at)) for k, at in parts.items()}
    return fk.run(
        method,
        task=case.task,
        clients=fk.from_clients(clients, tokens=case.tokens),
        test=(rows(case.x, 48, 72), rows(case.y, 48, 72)),
        local=fk.Local(lr=case.lr, epochs=1, batch_size=5),
        engine=fk.Engine(kind=kind, dtype="float64", **more),
        rounds=8,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_engines_agree_on_every_task(name: str) -> None:
    one = run(name)
    losses = one.scores("loss")
    assert losses[-1][1] < losses[0][1]
    two = run(name, "workers", workers=2)
    three = run(name, "vectorized", parallel_clients=3, workers=1)
    for a, b, c in zip(one.rows, two.rows, three.rows, strict=True):
        assert a.test == b.test
        assert c.test is not None
        assert a.test is not None
        assert c.test.values == pytest.approx(a.test.values, rel=1e-9, abs=1e-12)
    for key, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[key])
        assert torch.allclose(tensor, three.state_dict()[key], rtol=0, atol=1e-12)


def test_the_score_and_its_direction() -> None:
    one = run("regression")
    assert (one.record.score.name, one.record.score.higher_is_better) == ("mae", False)
    values = [value for _, value in one.scores()]
    assert (one.best, one.last) == (min(values), values[-1])
    assert one.record.best_model is not None
    assert one.record.best_model.score == min(values)
    two = run("inputs by name")
    assert two.record.score.name == "accuracy"
    assert two.best == max(value for _, value in two.accuracies)


@pytest.mark.parametrize(
    ("name", "method"),
    [("regression", "fedlc"), ("several labels", "fedntd"), ("tokens", "fedmlb")],
)
def test_a_method_that_needs_classes_is_refused_elsewhere(name: str, method: str) -> None:
    with pytest.raises(fk.FedkeelError) as caught:
        run(name, method=method)
    text = str(caught.value)
    assert "one label for each example, and a score for each class" in text


METHODS = ("scaffold", "fedprox(mu=0.1)+fedgh", "gradma", "fedgc", "fedreg(ascent=2)", "moon")


@pytest.mark.parametrize("method", METHODS)
def test_corrections_work_on_other_tasks(method: str) -> None:
    names = {"regression", "segmentation", "tokens"}
    names -= {"regression"} if method == "moon" else set()  # it has no features
    names -= {"tokens", "segmentation"} if "fedreg" in method else set()  # see SOFT_TARGETS
    for name in names:
        losses = run(name, method=method).scores("loss")
        assert losses[-1][1] < losses[0][1], name


def test_a_metric_may_have_a_unit_of_its_own(tmp_path: Path) -> None:
    distance = fk.metric(
        lambda output, y: (output[:, 0] - y).abs(),
        name="distance",
        higher_is_better=False,
        unit="mm",
    )
    x, y = draw(60, 3), draw(60, 3) @ torch.ones(3, dtype=torch.float64)
    study = fk.Simulation(
        task=fk.Task(lambda: nn.Linear(3, 1), loss="mse", metrics=[distance]),
        clients=fk.iid(x, y, clients=3),
        test=(x, y),
        local=fk.Local(lr=0.05, epochs=1, batch_size=10),
        rounds=2,
    )
    folder = tmp_path / "runs"
    comparison = study.compare(["fedavg", "fedprox"], seeds=2, out=folder, progress=False)
    assert " mm" in str(comparison)
    page = comparison.report().html
    assert "test distance, mm" in page
    assert "distance, %" not in page
