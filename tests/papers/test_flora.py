"""FLoRA, restated from Wang et al. 2024 on one layer with an adapter, W + s BA, and its softmax."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from each import each
from fedkeel import config, tree
from fedkeel.base.rng import generator
from fedkeel.config import Local
from fedkeel.errors import CompositionError
from fedkeel.task.models.lora import AdaptedBuilder
from fedkeel.task.network import Network
from harness import Federation
from method.players import equal, gap, play
from papers.numpy_net import Told, TrainingSetup, agree, softmax

LR, RANK, SCALE = 0.3, 2, 1.5
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 1, 2, 3]]


class Layer(nn.Module):
    """A layer and its adapter, with peft's names."""

    def __init__(self, is_frozen: bool = False) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 3, bias=False).requires_grad_(not is_frozen)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, 3, bias=False)})
        self.scaling = {"default": SCALE}
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        added = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + self.scaling["default"] * added


class Adapted(nn.Module):
    def __init__(self, is_frozen: bool = False) -> None:
        super().__init__()
        self.layer = Layer(is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


W, A, B = (f"layer.{name}.weight" for name in ("base_layer", "lora_A.default", "lora_B.default"))


def network(is_frozen: bool = False) -> Network:
    torch.manual_seed(0)
    return Network(Adapted(is_frozen), dtype=torch.float64)


def ours(expression: str, setup: TrainingSetup, **local: object) -> Federation:
    settings = Local(lr=LR, epochs=setup.epochs, batch_size=setup.batch, **local)
    return Federation(expression, network(), setup.data, settings, setup.batches)


def story(
    setup: TrainingSetup,
    ranks: Sequence[int] = (RANK,),
    decay: float = 0.0,
    bound: float = np.inf,
) -> Iterator[Told]:
    """Each client has an adapter of its own rank: its factors are cut before it trains."""
    w, a0, b0 = (network().params[name].numpy() for name in (W, A, B))
    for t, clients in enumerate(COHORTS):
        ends, sent = {}, {}
        for k in clients:
            rank = ranks[k % len(ranks)]
            a, b = a0[:rank], b0[:, :rank]
            for x, y in setup.examples(k, t):
                errors = (softmax(x @ (w + SCALE * b @ a).T) - np.eye(3)[y]) / len(x)
                slope = SCALE * errors.T @ x  # by BA
                by_a, by_b = b.T @ slope, slope @ a.T
                norm = np.sqrt(np.sum(by_a**2) + np.sum(by_b**2))
                shorter = min(1.0, bound / (norm + 1e-6))  # as torch clips
                a = a - LR * (shorter * by_a + decay * a)
                b = b - LR * (shorter * by_b + decay * b)
            ends[k] = b @ a
            moved = np.zeros_like(a0), np.zeros_like(b0)
            moved[0][:rank], moved[1][:, :rank] = a - a0[:rank], b - b0[:, :rank]
            sent[k] = np.concatenate([0.0 * w.ravel(), moved[0].ravel(), moved[1].ravel()])
        p = setup.shares("examples", clients)
        w = w + SCALE * sum(s * ends[k] for s, k in zip(p, clients, strict=True))
        a0 = generator(0, "flora", t).uniform(-(8**-0.5), 8**-0.5, size=a0.shape)
        b0 = np.zeros_like(b0)
        yield Told(np.concatenate([w.ravel(), a0.ravel(), b0.ravel()]), sent)


@each("ranks", [(RANK,), (2, 1), (1, 2, 2)])
@each("bound", [np.inf, 0.05])
def test_flora(ranks: tuple[int, ...], bound: float) -> None:
    """A bound on the gradient's length counts neither what rests nor the ranks that are missing."""
    setup = TrainingSetup(epochs=2)
    words = "" if ranks == (RANK,) else ",".join(map(str, ranks))
    local = {} if bound == np.inf else {"clip_norm": bound}
    played = ours(f"flora(ranks='{words}')", setup, **local)
    assert agree(played, story(setup, ranks, bound=bound), COHORTS) == len(COHORTS)


def test_weight_decay_does_not_move_what_rests() -> None:
    setup = TrainingSetup(epochs=2)
    played = ours("flora", setup, weight_decay=0.1)
    assert agree(played, story(setup, decay=0.1), COHORTS) == len(COHORTS)


# --- another implementation of the product ---------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 2)
        self.body = nn.Linear(12, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.relu(self.conv(x.view(-1, 1, 2, 4)))
        return self.head(torch.relu(self.body(maps.flatten(1))))


def adapted() -> nn.Module:
    """A network with adapters of peft beside a convolution and a layer; the head is trained."""
    pytest.importorskip("peft")
    settings = config.Lora(
        rank=RANK, alpha=3.0, layers=("conv", "body"), train=("head",), merged=True
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AdaptedBuilder(Small, settings)()


def deltas(module: nn.Module) -> dict[str, Tensor]:
    """What peft itself would add to each layer on merging."""
    return {
        f"{name}.base_layer.weight": layer.get_delta_weight("default").detach()
        for name, layer in module.named_modules()
        if hasattr(layer, "get_delta_weight")
    }


def test_the_server_adds_the_weighted_sum_of_what_peft_would_merge() -> None:
    setup = TrainingSetup(epochs=2)
    net = Network(adapted(), dtype=torch.float64)
    assert len(net.adapters) == 2
    local = Local(lr=LR, epochs=2, batch_size=setup.batch)
    played = Federation("flora", net, setup.data, local, setup.batches)
    for clients in COHORTS:
        start = played.params
        done = played.round(clients)
        merged = [deltas(net.module(tree.add(start, done.deltas[k]), {}).double()) for k in clients]
        p = setup.shares("examples", clients)
        for name in merged[0]:
            exact = sum(s * one[name] for s, one in zip(p, merged, strict=True))
            assert float((played.params[name] - start[name] - exact).abs().max()) < 1e-12
            assert float(exact.abs().max()) > 1e-3
        heads = [name for name in start if "modules_to_save" in name]
        assert heads
        for name in heads:  # outside of adapters it is FedAvg
            mean = sum(s * done.deltas[k][name] for s, k in zip(p, clients, strict=True))
            assert float((played.params[name] - start[name] - mean).abs().max()) < 1e-14


# --- laws ------------------------------------------------------------------------------------


def test_the_mean_of_factors_is_not_that_of_products() -> None:
    """What FLoRA mends: FedAvg on the same adapters misses the mean of the clients' functions."""
    setup = TrainingSetup(epochs=2)
    x = torch.randn(10, 8, dtype=torch.float64)
    errors = {}
    for expression in ("flora", "ffalora", "fedavg"):
        played = ours(expression, setup)
        errors[expression] = 0.0
        for _ in range(3):
            start = played.params
            done = played.round()
            p = setup.shares("examples", range(4))
            ends = [tree.add(start, done.deltas[k]) for k in range(4)]
            mean = sum(s * scores(end, x) for s, end in zip(p, ends, strict=True))
            error = float((scores(played.params, x) - mean).abs().max())
            errors[expression] = max(errors[expression], error)
    assert errors["flora"] < 1e-13
    assert errors["fedavg"] > 1e-4


def scores(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return network().logits(params, {}, x)


def test_one_client_gets_its_own_model_back() -> None:
    played, x = ours("flora", TrainingSetup(epochs=2)), torch.randn(5, 8, dtype=torch.float64)
    for _ in range(3):
        start = played.params
        done = played.round([2])
        own = scores(tree.add(start, done.deltas[2]), x)
        assert float((scores(played.params, x) - own).abs().max()) < 1e-13
        assert not played.params[B].any()
        assert not torch.equal(played.params[A], start[A])


def test_ranks_as_large_as_the_networks_change_nothing() -> None:
    setup = TrainingSetup()
    models = []
    for expression in ("flora", "flora(ranks='2')", "flora(ranks='2, 5')"):
        played = ours(expression, setup)
        for clients in COHORTS:
            played.round(clients)
        models.append(played.params)
    assert equal(models[0], models[1])
    assert equal(models[0], models[2])


def test_the_matrices_are_sent_down_only() -> None:
    played = ours("flora", TrainingSetup())
    done = played.round()
    assert list(done.replies[0].uploads["flora"]) == [A, B]
    assert list(played.message([0]).params) == [W, A, B]


def test_without_adapters_it_is_fedavg() -> None:
    assert equal(play("flora", rounds=3), play("fedavg", rounds=3))
    assert gap(play("flora+fedprox", rounds=2), play("fedprox", rounds=2)) == 0.0


@each("kind", ["vectorized", "workers"])
def test_engines_agree(kind: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 8))
    y = (x[:, 0] > 0).astype(np.int64)

    def run(kind: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return fk.run(
            "flora(ranks='2,1')",
            task=fk.Task(Adapted()),
            clients=fk.iid(x[:32], y[:32], clients=4),
            test=(x[32:], y[32:]),
            rounds=3,
            local=fk.Local(lr=LR, epochs=2, batch_size=4),
            engine=fk.Engine(kind=kind, dtype="float64"),
            progress=False,
        ).params

    expected = run("sequential")
    assert float(expected[W].sub(torch.as_tensor(run(kind)[W])).abs().max()) < 1e-12


# --- refusals --------------------------------------------------------------------------------


def test_constant_layers_are_refused() -> None:
    setup = TrainingSetup()
    local = Local(lr=LR, epochs=1, batch_size=4)
    played = Federation("flora", network(is_frozen=True), setup.data, local, setup.batches)
    with pytest.raises(CompositionError, match="are constants of the network") as raised:
        played.round()
    assert "model.lora.merged = true" in str(raised.value)


@each("ranks", ["0", "2,", "a", "1.5", "-1"])
def test_ranks_are_whole_numbers(ranks: str) -> None:
    with pytest.raises(CompositionError, match="`ranks` of flora must be whole numbers"):
        ours(f"flora(ranks='{ranks}')", TrainingSetup()).round()


def test_a_setting_that_is_not_used_is_not_written() -> None:
    """Keys of runs of before stay as they were."""
    assert "merged" not in config.Lora().model_dump(mode="json")
    assert config.Lora.model_validate(config.Lora(merged=True).model_dump()).merged
