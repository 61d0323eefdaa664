"""CKA, Fisher information, the Hessian and lines between models, against NumPy and outsiders."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
import toys
from fedkeel.engine.base import TrainingSetup
from fedkeel.features.diagnose import cka, landscape
from fedkeel.features.diagnose.fisher import correlation, fisher_information
from fedkeel.features.diagnose.models import ModelState, measure
from fedkeel.records.rows import RoundRecord
from harness import ORACLES

CASES = json.loads((ORACLES / "cka.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def setup() -> TrainingSetup:
    """A network of two layers with tanh, in float64."""
    return toys.prepared(dtype="float64").setup


def model(setup: TrainingSetup, seed: int) -> ModelState:
    random = torch.Generator().manual_seed(seed)
    params = setup.training.network.params
    return ModelState(
        {k: torch.randn(v.shape, generator=random, dtype=v.dtype) for k, v in params.items()}, {}
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case['x'])} examples")
def test_cka_is_that_of_a_public_package(case: dict[str, list[list[float]]]) -> None:
    k, other = (
        cka.linear_gram(torch.tensor(case[name], dtype=torch.float64)) for name in ("x", "y")
    )
    assert cka.cka(k, other, unbiased=False) == pytest.approx(case["biased"], rel=1e-10)
    assert cka.cka(k, other) == pytest.approx(case["unbiased"], rel=1e-10)
    assert cka.biased_hsic(k, other) == pytest.approx(case["hsic_biased"], rel=1e-10)
    assert cka.unbiased_hsic(k, other) == pytest.approx(case["hsic_unbiased"], rel=1e-10)


def test_cka_sees_neither_rotation_nor_scale() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(9, 4))
    rotation = np.linalg.qr(random.normal(size=(4, 4)))[0]
    k, other = (cka.linear_gram(torch.from_numpy(m)) for m in (x, 3 * x @ rotation))
    assert cka.cka(k, other) == pytest.approx(1.0)
    assert cka.cka(k, other, unbiased=False) == pytest.approx(1.0)


def test_layers_are_those_of_the_module(setup: TrainingSetup) -> None:
    one, data = model(setup, 1), toys.held(20)
    hidden = data.x.double() @ one.params["fc1.weight"].T + one.params["fc1.bias"]
    scores = torch.tanh(hidden) @ one.params["fc2.weight"].T + one.params["fc2.bias"]
    data = data.to(torch.float64)
    grams = cka.layer_grams(setup, one, data)
    assert list(grams) == ["fc1", "fc2"]
    torch.testing.assert_close(grams["fc1"], hidden @ hidden.T)
    torch.testing.assert_close(grams["fc2"], scores @ scores.T)
    expected = torch.stack([torch.tanh(hidden)[data.y == c].mean(dim=0) for c in range(3)])
    torch.testing.assert_close(cka.class_means(setup, one, data), expected)


def test_largest_eigenvalue_is_that_of_the_whole_hessian(setup: TrainingSetup) -> None:
    data, network = toys.held(40).to(torch.float64), setup.training.network
    one = model(setup, 2)
    shapes = {name: (tensor.shape, tensor.numel()) for name, tensor in one.params.items()}

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split([n for _, n in shapes.values()])
        params = {k: p.view(shapes[k][0]) for k, p in zip(shapes, pieces, strict=True)}
        hidden = torch.tanh(data.x @ params["fc1.weight"].T + params["fc1.bias"])
        scores = hidden @ params["fc2.weight"].T + params["fc2.bias"]
        return nn.functional.cross_entropy(scores, data.y)

    flat = torch.cat([t.flatten() for t in one.params.values()])
    whole = torch.autograd.functional.hessian(loss, flat).numpy()
    product, zero = landscape.hessian_product(setup, one, data)
    v = torch.from_numpy(np.random.default_rng(1).normal(size=len(zero)))
    torch.testing.assert_close(product(v), torch.from_numpy(whole @ v.numpy()))
    value, _ = landscape.largest_eigenvalue(product, v)
    assert value == pytest.approx(np.linalg.eigvalsh(whole)[-1], rel=1e-3)
    assert network.names == tuple(shapes)


def test_an_eigenvalue_of_negative_sign_is_not_taken_for_the_largest() -> None:
    matrix = torch.diag(torch.tensor([-5.0, 2.0, 1.0, -3.0], dtype=torch.float64))
    value, _ = landscape.largest_eigenvalue(lambda v: matrix @ v, torch.ones(4).double())
    assert value == pytest.approx(2.0, rel=1e-3)


def test_fisher_information_of_softmax_regression() -> None:
    data = toys.held(30)
    prepared = toys.prepared(model=lambda: nn.Linear(5, 3), dtype="float64")
    random = np.random.default_rng(4)
    weight, bias = random.normal(size=(3, 5)), random.normal(size=3)
    one = ModelState({"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)}, {})
    x, soft = data.x.double().numpy(), random.dirichlet(np.ones(3), size=30)
    p = np.exp(x @ weight.T + bias)
    p /= p.sum(axis=1, keepdims=True)
    for y, target in ((np.eye(3)[data.y.numpy()], data.y), (soft, torch.from_numpy(soft))):
        slope = y - p * y.sum(axis=1, keepdims=True)  # of y^T log P by the scores
        by_weight = (slope[:, :, None] * x[:, None, :]) ** 2
        expected = np.r_[by_weight.mean(axis=0).ravel(), (slope**2).mean(axis=0)]
        found = fisher_information(prepared.setup, one, torch.from_numpy(x), target)
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    a, b = torch.from_numpy(random.normal(size=(2, 9)))
    assert correlation(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])


def test_a_line_goes_from_one_model_to_the_other(setup: TrainingSetup) -> None:
    a, b, data = model(setup, 5), model(setup, 6), toys.held(20).to(torch.float64)
    assert measure(setup, landscape.between(a, b, 0.0), data) == measure(setup, a, data)
    assert measure(setup, landscape.between(a, b, 1.0), data) == measure(setup, b, data)
    quarter = landscape.between(a, b, 0.25).params["fc1.weight"]
    expected = 0.75 * a.params["fc1.weight"] + 0.25 * b.params["fc1.weight"]
    torch.testing.assert_close(quarter, expected)
    losses = np.array([1.0, 1, 1, 1, 4, 1, 1, 1, 3])
    assert landscape.barrier(losses) == 2.0
    assert landscape.barrier(np.linspace(3, 1, 9)) == pytest.approx(0.0)


def test_the_other_kinds_of_a_run() -> None:
    """Including FedReg's pseudo data, whose Fisher information is compared with earlier data."""
    result = fk.run(
        "fedreg",
        task=fk.Task(toys.Net),
        clients=toys.federation(),
        test=toys.held(),
        rounds=3,
        local=fk.Local(lr=0.05, epochs=1, batch_size=8),
        clients_per_round=3,
        engine=fk.Engine(kind="sequential"),
        diagnose=fk.Diagnose(kinds="fisher, cka, landscape, sharpness", every=2, examples=16),
    )
    assert "sharpness.eigenvalue" not in result.rows[1].diagnostics
    for row in result.rows[2:]:
        found, tables = row.diagnostics, row.breakdowns
        for name in ("own", "pseudo"):
            values = list(tables[f"fisher.correlation_{name}.client"].values())
            assert len(values) == 3
            assert found[f"fisher.correlation_{name}"] == pytest.approx(np.mean(values))
            assert all(-1 <= value <= 1 for value in values)
        assert set(tables["cka.unbiased.layer"]) == {"fc1", "fc2"}
        assert 0 < tables["cka.biased.layer"]["fc1"] <= 1
        assert set(tables["cka.class_drift.class"]) == {"0", "1", "2"}
        assert len(tables["landscape.client_score.position"]) == 9
        assert found["landscape.global_barrier"] >= 0
        assert found["sharpness.eigenvalue"] > 0


class Tokens(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(7, 4), nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


class Masks(nn.Module):
    """Marks pixels, with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.last = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))))[:, 0]


def run_of(task: fk.Task, data: fk.Dataset, kinds: str, **more: object) -> RoundRecord:
    clients = fk.iid(data.x, data.y, clients=3, **more)
    result = fk.run(
        "fedavg",
        task=task,
        clients=clients,
        test=data,
        rounds=2,
        local=fk.Local(lr=0.05, epochs=1, batch_size=8),
        engine=fk.Engine(kind="sequential"),
        diagnose=kinds,
    )
    return result.rows[-1]


def test_tokens_and_masks() -> None:
    random = np.random.default_rng(0)
    x = random.integers(0, 7, size=(24, 5))
    data = fk.dataset(x, np.roll(x, -1, axis=1), tokens=True)
    task = fk.Task(Tokens, loss="token_cross_entropy")
    row = run_of(task, data, "forgetting, fisher, cka, landscape, sharpness", tokens=True)
    assert set(row.breakdowns["cka.unbiased.layer"]) == {"embed", "lstm", "head"}
    assert row.diagnostics["fisher.trace_own"] > 0
    images = random.normal(size=(24, 1, 5, 5)).astype(np.float32)
    data = fk.dataset(images, (images[:, 0] > 0).astype(np.float32))
    task = fk.Task(Masks, loss="bce", metrics=["dice"], score="dice", buffers="average")
    row = run_of(task, data, "forgetting, cka, landscape, sharpness")
    assert set(row.breakdowns["cka.unbiased.layer"]) == {"conv", "norm", "last"}
    at_global = row.breakdowns["landscape.global_score.position"]["0"]
    assert row.test is not None
    assert at_global == pytest.approx(row.test["dice"], abs=1e-6)
