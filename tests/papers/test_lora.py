"""FFA-LoRA and RoLoRA, restated on one layer with an adapter, W + BA, and its softmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from fedkeel.config import Local
from fedkeel.task.network import Network
from fedkeel.tree import Tree
from harness import Federation
from method.players import equal, gap, play
from papers.numpy_net import Told, TrainingSetup, agree, softmax

LR, RANK = 0.3, 2
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1]]


class Adapted(nn.Module):
    """A frozen layer and its adapter, with peft's names of the factors."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 3, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, 3, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B["default"](self.lora_A["default"](x))


def network() -> Network:
    torch.manual_seed(0)
    return Network(Adapted(), dtype=torch.float64)


def ours(expression: str, setup: TrainingSetup, **local: object) -> Federation:
    settings = Local(lr=LR, epochs=setup.epochs, batch_size=setup.batch, **local)
    return Federation(expression, network(), setup.data, settings, setup.batches)


def story(
    setup: TrainingSetup, cohorts: Sequence[Sequence[int]], alternate: bool, decay: float = 0.0
) -> Iterator[Told]:
    start = network()
    A, B = (v.numpy() for v in start.params.values())
    W = start.frozen["base.weight"].numpy()
    for t, clients in enumerate(cohorts):
        trains_B = t % 2 == 0 or not alternate
        ends = {}
        for k in clients:
            a, b = A, B
            for x, y in setup.examples(k, t):
                errors = (softmax(x @ (W + b @ a).T) - np.eye(3)[y]) / len(x)
                slope = errors.T @ x  # by W + BA
                if trains_B:
                    b = b - LR * (slope @ a.T + decay * b)
                else:
                    a = a - LR * (b.T @ slope + decay * a)
            ends[k] = (a, b)
        p = setup.shares("examples", clients)
        sent = {k: np.concatenate([(a - A).ravel(), (b - B).ravel()]) for k, (a, b) in ends.items()}
        A, B = (sum(s * ends[k][i] for s, k in zip(p, clients, strict=True)) for i in (0, 1))
        yield Told(np.concatenate([A.ravel(), B.ravel()]), sent)


@pytest.mark.parametrize("expression", ["ffalora", "rolora"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lora(expression: str, decay: float) -> None:
    """Weight decay does not move what rests either."""
    setup = TrainingSetup(epochs=2)
    told = story(setup, COHORTS, expression == "rolora", decay)
    played = ours(expression, setup, weight_decay=decay)
    assert agree(played, told, COHORTS) == len(COHORTS)


# --- laws ------------------------------------------------------------------------------------


def product(model: Tree) -> torch.Tensor:
    A, B = model.values()
    return B @ A


def inexactness(played: Federation) -> float:
    """How far the product of the means is from the mean of the products, over a round."""
    start = played.params
    done = played.round()
    sizes = torch.tensor([len(y) for _, y in played.data], dtype=torch.float64)
    ends = [{k: start[k] + d[k] for k in start} for d in done.deltas.values()]
    mean = sum(w * product(end) for w, end in zip(sizes / sizes.sum(), ends, strict=True))
    return float((product(played.params) - mean).abs().max())


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_the_mean_of_products_is_the_product_of_means(optimiser: str) -> None:
    setup = TrainingSetup(epochs=2)
    options = {"optimiser": optimiser, "weight_decay": 0.1}
    for expression in ("ffalora", "rolora"):
        played = ours(expression, setup, **options)
        assert all(inexactness(played) < 1e-14 for _ in range(4))
    plain = ours("fedavg", setup, **options)
    assert max(inexactness(plain) for _ in range(4)) > 1e-4


def test_what_rests_keeps_its_bits_and_is_not_sent() -> None:
    played = ours("ffalora", TrainingSetup())
    A = played.params["lora_A.default.weight"]
    for _ in range(3):
        done = played.round()
    assert torch.equal(played.params["lora_A.default.weight"], A)
    assert list(done.replies[0].uploads["ffalora"]) == ["lora_B.default.weight"]
    played = ours("rolora", TrainingSetup())
    moved = []
    for _ in range(4):
        start = played.params
        played.round()
        moved.append([k for k in start if not torch.equal(start[k], played.params[k])])
    assert moved == [["lora_B.default.weight"], ["lora_A.default.weight"]] * 2


def test_rolora_learns_what_ffalora_cannot() -> None:
    setup = TrainingSetup(sizes=(20, 20, 20, 20))
    ends = {}
    for expression in ("ffalora", "rolora"):
        played = ours(expression, setup)
        for _ in range(60):
            played.round()
        net, loss = played.network, 0.0
        for x, y in played.data:
            scores = net.logits(played.params, {}, x)
            loss += float(nn.functional.cross_entropy(scores, y)) / 4
        ends[expression] = loss
    assert ends["rolora"] < ends["ffalora"] - 0.01


@pytest.mark.parametrize("expression", ["ffalora", "rolora"])
def test_without_adapters_it_is_fedavg(expression: str) -> None:
    assert equal(play(expression, rounds=3), play("fedavg", rounds=3))
    assert gap(play(f"{expression}+fedprox", rounds=2), play("fedprox", rounds=2)) == 0.0
