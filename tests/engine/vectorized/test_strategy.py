"""How the vectorized engine chooses a strategy, and what reaches the user when it takes another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import fedkeel as fk
from engine.vectorized.test_engine import ready, trained
from fedkeel.base.dispatch import OperationMode
from fedkeel.engine.compiler import passes
from fedkeel.engine.trainer import SequentialTrainer
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.engine.vectorized.facts import SetupFacts, establish
from fedkeel.engine.vectorized.strategy import ONE_BY_ONE, Strategy
from fedkeel.errors import TrainingError

FACTS = SetupFacts(not_compilable="", draws=None, padding_obstacle="", short_rounds=True)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_facts_choose_the_fastest_strategy() -> None:
    whole = Strategy.choose(FACTS, 8, CPU)
    assert whole == Strategy(8, whole_rounds_side_by_side=True, whole_rounds_single=True)
    assert Strategy.choose(replace(FACTS, short_rounds=False), 8, CPU) == Strategy(8)
    assert Strategy.choose(replace(FACTS, not_compilable="writes"), 8, CPU) == ONE_BY_ONE
    assert Strategy.choose(FACTS, 8, GPU) == replace(whole, whole_rounds_single=False)


def test_a_strategy_becomes_plainer_step_by_step() -> None:
    strategy = Strategy.choose(FACTS, 8, CPU)
    assert strategy.compiles_whole_round(8)
    strategy = strategy.without_whole_rounds(8)
    assert not strategy.compiles_whole_round(8)
    assert strategy.compiles_whole_round(1)
    strategy = strategy.lowered(8)
    assert (strategy.parallel_clients, strategy.is_compiled) == (1, True)
    strategy = strategy.lowered(1)  # perhaps the layout of images was the obstacle
    assert (strategy.channels_last, strategy.is_compiled) == (False, True)
    assert not strategy.lowered(1).is_compiled


@pytest.mark.parametrize(("clients", "left"), [(8, 4), (3, 1), (1, 1)])
def test_less_memory_means_fewer_clients(clients: int, left: int) -> None:
    strategy = Strategy(8).with_less_memory(clients)
    assert strategy.parallel_clients == left
    assert strategy.is_compiled == (clients > 1)


class Linear(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


class Raises(Linear):
    """Raises an error of its own for batches of one example."""

    error: type[Exception] = ValueError

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise self.error("one example is not enough")
        return super().forward(x)


class RaisesRuntimeError(Raises):
    """The same by the type of error that torch raises."""

    error = RuntimeError


@pytest.mark.parametrize("parallel_clients", [1, 3])
@pytest.mark.parametrize("model", [Raises, RaisesRuntimeError])
def test_a_models_own_error_reaches_the_user(model: type[Raises], parallel_clients: int) -> None:
    p = ready(model, sizes=(4, 4, 4, 1))  # a group of three, and the last client by itself
    with pytest.raises(TrainingError, match="client 3, step 1") as caught:
        trained(VectorizedTrainer(p.setup, parallel_clients), p)
    assert f"{model.error.__name__}: one example is not enough" in str(caught.value)
    assert "raised in forward, line" in str(caught.value)
    assert __file__ in str(caught.value)
    assert type(caught.value.__cause__) is model.error


def test_the_error_of_a_loss_reaches_the_user() -> None:
    def loss(scores: Tensor, y: Tensor) -> Tensor:
        if len(y) == 1:
            raise KeyError("weights")
        return nn.functional.cross_entropy(scores, y, reduction="none")

    x, y = torch.randn(13, 6), torch.arange(13) % 3
    clients = fk.federation(fk.dataset(x, y, classes=3), [np.arange(12), np.array([12])])

    with pytest.raises(TrainingError, match=r"client 1, step 1(.|\n)*KeyError: 'weights'"):
        fk.run(
            "fedavg",
            task=fk.Task(lambda: nn.Linear(6, 3), loss=loss),
            clients=clients,
            test=(x, y),
            rounds=1,
            local=fk.Local(lr=0.1, epochs=1, batch_size=4),
            engine=fk.Engine(kind="vectorized", parallel_clients=1, workers=1),
            progress=False,
        )


class RefusesToBeTraced(Linear):
    """Raises an error of its own where its operations are watched, and only there."""

    def forward(self, x: Tensor) -> Tensor:
        if _get_current_dispatch_mode() is not None:
            raise ValueError("operations are watched")
        return super().forward(x)


def test_an_error_that_a_plain_run_does_not_raise_is_a_reason() -> None:
    p = ready(RefusesToBeTraced, sizes=(4,) * 7)
    trainer = VectorizedTrainer(p.setup, 3)
    expected, replies = trained(SequentialTrainer(p.setup), p), trained(trainer, p)
    assert not trainer.strategy.is_compiled
    assert trainer.reasons == [
        "clients are not trained side by side: operations are watched",
        "steps are not compiled: operations are watched",
    ]
    for client, reply in expected.items():
        for path, tensor in reply.items():
            assert torch.equal(replies[client][path], tensor), (client, path)


def test_an_error_of_the_compiler_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(passes, "remove_no_ops", broken)
    p = ready(Linear)
    with pytest.raises(KeyError, match="a mistake of ours"):
        trained(VectorizedTrainer(p.setup, 3), p)


def scaled_by_batch(scores: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, y, reduction="none") / len(y)


@pytest.mark.parametrize(
    ("loss", "obstacle"),
    [
        (nn.functional.cross_entropy, "a padded batch raises ModelError: The loss is a mean"),
        (scaled_by_batch, "padding changes "),
    ],
)
def test_why_batches_are_not_padded_is_known(loss: Any, obstacle: str) -> None:
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    data = fk.dataset(x, y, classes=3)
    p = ready()
    network = fk.Task(lambda: nn.Linear(6, 3), loss=loss).network(data, 0, torch.float32)
    federation = fk.federation(data, [np.arange(9)])
    training = replace(p.setup.training, network=network)
    facts = establish(replace(p.setup, training=training, federation=federation))
    assert facts.padding_obstacle.startswith(obstacle)
    assert not facts.pads


@pytest.mark.parametrize(
    ("layer", "may_be_last"),
    [
        (nn.Conv2d(4, 4, 1, stride=2), False),  # the process would die in its weights' gradient
        (nn.Conv2d(4, 4, 1), True),
        (nn.Conv2d(4, 4, 3, stride=2, padding=1), True),
        (nn.Sequential(nn.Conv2d(4, 16, 1), nn.Conv2d(16, 4, 1, stride=2)), True),
    ],
)
def test_strided_pointwise_convolutions_of_few_channels_keep_the_usual_layout(
    layer: nn.Module, may_be_last: bool
) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 1), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)
    )
    prepared = ready(lambda: module, epochs=1, engine={"dtype": "float32"})
    trainer = VectorizedTrainer(prepared.setup, 1)
    assert trainer.strategy.channels_last == may_be_last
    found, expected = (
        trained(trainer, prepared),
        trained(SequentialTrainer(prepared.setup), prepared),
    )
    for client, reply in expected.items():
        torch.testing.assert_close(found[client], reply, rtol=1e-4, atol=1e-5)
    assert trainer.strategy.is_compiled


class Kernels(OperationMode):
    """Notes whether group normalisation's gradient was one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func is torch.ops.aten.native_group_norm_backward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clients", [1, 3])
def test_a_single_client_keeps_the_kernels_of_the_tape(clients: int) -> None:
    layers = nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(256, 4)
    prepared = ready(lambda: nn.Sequential(*layers), epochs=1)
    trainer = VectorizedTrainer(prepared.setup, clients)
    trained(trainer, prepared)  # compiles
    with Kernels() as kernels:
        trained(trainer, prepared)
    assert trainer.strategy.is_compiled
    assert kernels.found == (clients == 1)
