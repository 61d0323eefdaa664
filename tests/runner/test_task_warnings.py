"""What is said of scores that a loss takes for others, and of targets that say nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.config import Lora
from fedkeel.runner.prepare import prepare
from fedkeel.runner.warnings import find_warnings
from fedkeel.task.models.lora import AdaptedBuilder
from toys import prepared

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 4)).astype(np.float32)
IDS = RANDOM.integers(1, 9, (40, 6))
NEXT = np.concatenate([IDS[:, 1:], np.full((40, 1), -100)], axis=1)


def dense(outputs: int, *last: nn.Module) -> Any:
    return lambda: nn.Sequential(nn.Linear(4, outputs), *last)


class Words(nn.Module):
    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.last = last or nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.out(self.words(ids)))


def warned(model: Any, loss: Any, x: Any, y: Any, tokens: bool = False) -> list[str]:
    result = fk.run(
        "fedavg",
        task=fk.Task(model, loss=loss, metrics=[]),
        clients=fk.iid(x[:30], y[:30], clients=2, tokens=tokens),
        test=(x[30:], y[30:]),
        rounds=1,
        local=fk.Local(lr=0.01, epochs=1, batch_size=10),
        engine=fk.Engine(kind="sequential"),
        progress=False,
    )
    words = ("the model returns", "takes logarithms", "target of each token", "has an event")
    return [text for text in result.record.warnings if any(word in text for word in words)]


LABELS = np.arange(40) % 2
FLOATS = LABELS[:, None].astype(np.float32)


@pytest.mark.parametrize(
    ("loss", "y", "plain", "ending"),
    [
        ("cross_entropy", LABELS, dense(2), dense(2, nn.Softmax(1))),
        (nn.CrossEntropyLoss(), LABELS, dense(2), dense(2, nn.Softmax(1))),
        ("bce", LABELS, dense(1), dense(1, nn.Sigmoid())),
        (nn.BCEWithLogitsLoss(), FLOATS, dense(1), dense(1, nn.Sigmoid())),
        (nn.NLLLoss(), LABELS, dense(2, nn.LogSoftmax(1)), dense(2)),
    ],
)
def test_scores_that_the_loss_takes_for_others(loss: Any, y: Any, plain: Any, ending: Any) -> None:
    assert warned(plain, loss, X, y) == []
    (text,) = warned(ending, loss, X, y)
    assert "remove it from the model" in text or "log_softmax" in text


@pytest.mark.parametrize(
    ("base", "train", "says"),
    [
        ("random", (), "random and frozen, base_model.model.0.base_layer.weight and 3 more: name"),
        ("trained", (), "random and frozen, base_model.model.2.weight and 1 more: name"),
        ("trained", ("2",), ""),
    ],
)
def test_adapters_need_trained_weights(base: str, train: tuple[str, ...], says: str) -> None:
    """The last layer is fresh in both, as the classifier on a trained network is."""
    pytest.importorskip("peft")

    def made() -> nn.Module:
        body = nn.Linear(4, 8)
        if base == "trained":
            body.load_state_dict({"weight": torch.ones(8, 4), "bias": torch.ones(8)})
        return nn.Sequential(body, nn.ReLU(), nn.Linear(8, 2))

    build = AdaptedBuilder(made, Lora(rank=2, layers=("0",), train=train))
    result = fk.run(
        "fedavg",
        task=fk.Task(build, metrics=[]),
        clients=fk.iid(X[:30], LABELS[:30], clients=2),
        test=(X[30:], LABELS[30:]),
        rounds=1,
        local=fk.Local(lr=0.01, epochs=1, batch_size=10),
        engine=fk.Engine(kind="sequential"),
        progress=False,
    )
    found = [text for text in result.record.warnings if "adapters" in text]
    assert [says in text for text in found] == ([True] if says else [])


def test_token_targets() -> None:
    assert warned(Words, "token_cross_entropy", IDS, NEXT, tokens=True) == []
    (text,) = warned(Words, "token_cross_entropy", IDS, IDS, tokens=True)
    assert "y[:, :-1] = ids[:, 1:]" in text
    softmax = lambda: Words(nn.Softmax(-1))  # noqa: E731
    (text,) = warned(softmax, "token_cross_entropy", IDS, NEXT, tokens=True)
    assert "softmax is then taken twice" in text
    masked = np.where(RANDOM.random(IDS.shape) < 0.3, IDS, -100)  # of words that are left out
    hidden = np.where(masked != -100, 0, IDS)
    assert warned(Words, "token_cross_entropy", hidden, masked, tokens=True) == []


def test_times_without_an_event() -> None:
    times = np.stack([RANDOM.random(40) + 1, np.zeros(40)], axis=1)
    (text,) = warned(dense(1), "cox", X, times)
    assert "no training example has an event" in text
    times[torch.arange(0, 40, 3), 1] = 1.0
    assert warned(dense(1), "cox", X, times) == []


def test_without_test_examples_others_are_looked_at() -> None:
    """Of no scores at all it was said that they are probabilities."""
    ready = prepared()
    empty = replace(ready.ingredients, test=ready.setup.test.part(slice(0, 0)))
    assert not [text for text in find_warnings(prepare(ready.settings, empty)) if "scores" in text]
