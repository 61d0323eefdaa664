"""kNN-Per, restated from Marfoq et al. 2022, Eq. (6) to (8), and fine-tuning's global model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from each import each
from fedkeel.method.grammar import parse
from fedkeel.task.batch import Output
from harness import oracle
from method.players import equal, play
from papers.numpy_net import softmax


def output(features: np.ndarray, scores: np.ndarray) -> Output:
    scores = torch.from_numpy(scores)
    return Output(scores, torch.from_numpy(features))


def predicted(method: str, query: Output, known: Output, labels: np.ndarray) -> np.ndarray:
    part = parse(method).personal_prediction
    return part.predict(query, known, torch.from_numpy(labels)).exp().numpy()


def knn(
    features: np.ndarray, known: np.ndarray, labels: np.ndarray, k: int, scale: float
) -> np.ndarray:
    shares = np.zeros((len(features), 3))
    for row, f in zip(shares, features, strict=True):
        d = np.array([np.sqrt(np.sum((f - g) ** 2)) for g in known]) / scale
        for i in np.argsort(d)[:k]:
            row[labels[i]] += np.exp(-d[i])
    return shares / shares.sum(axis=1, keepdims=True)


def example(seed: int = 0) -> tuple[Output, Output, np.ndarray]:
    rng = np.random.default_rng(seed)
    query = output(rng.normal(size=(5, 4)), rng.normal(size=(5, 3)))
    known = output(rng.normal(size=(9, 4)), rng.normal(size=(9, 3)))
    return query, known, np.array([0, 1, 2, 0, 1, 1, 0, 2, 0])


@each("lam", [0.0, 0.3, 1.0])
@each(("k", "scale"), [(1, 1.0), (4, 0.5), (20, 2.0)])
def test_knnper(lam: float, k: int, scale: float) -> None:
    query, known, labels = example()
    ours = predicted(f"knnper(lam={lam}, k={k}, scale={scale})", query, known, labels)
    near = knn(query.features.numpy(), known.features.numpy(), labels, k, scale)
    theirs = lam * near + (1 - lam) * softmax(query.logits.numpy())
    assert np.abs(ours - theirs).max() < 1e-12


def hidden(o: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ o["model.fc1.weight"].T + o["model.fc1.bias"], 0.0)


def test_knnper_follows_fl_bench() -> None:
    """Theirs has exp(-d^2 / (F s)): features on a line have these distances."""
    o = oracle("flbench_knnper_a")
    features, known = hidden(o, o["query.x"]), hidden(o, o["train.x"])
    assert np.abs(features - o["query.features"]).max() < 1e-14
    labels = o["train.y"]
    zeros = np.zeros((len(known), 3))
    for row, f in enumerate(features):
        far = np.sum((known - f) ** 2, axis=1) / (len(f) * float(o["hp.scale"]))
        query = output(np.zeros((1, 1)), o["model_logits"][row : row + 1])
        method = f"knnper(lam={float(o['hp.weight'])!r}, k={int(o['hp.k'])})"
        ours = predicted(method, query, output(far[:, None], zeros), labels)
        assert np.abs(ours - o["mixed_probabilities_paper"][row]).max() < 1e-8  # they add 1e-9


# --- laws and reductions ---------------------------------------------------------------------


def test_without_neighbours_it_predicts_as_the_global_model() -> None:
    query, known, labels = example()
    ours = predicted("knnper(lam=0.0)", query, known, labels)
    assert np.abs(ours - softmax(query.logits.numpy())).max() < 1e-15


def test_a_training_example_is_its_own_nearest_neighbour() -> None:
    _, known, labels = example()
    ours = predicted("knnper(k=1, lam=1.0)", known, known, labels)
    assert np.abs(ours - np.eye(3)[labels]).max() < 1e-15


@pytest.mark.parametrize("part", ["knnper", "finetune(epochs=2)"])
@pytest.mark.parametrize("method", ["", "scaffold+", "fedgh+"])
def test_the_global_model_is_that_of_the_method_without_it(part: str, method: str) -> None:
    assert equal(play(method + part), play(method.rstrip("+") or "fedavg"))
