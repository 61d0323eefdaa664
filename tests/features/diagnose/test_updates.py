"""Norms, angles, conflicts and diversity of updates, against NumPy on the vectors themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedkeel.features.diagnose import forgetting, updates


@pytest.fixture
def tree() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {"a.weight": (4, 3), "a.bias": (3,), "b": (2, 2, 2)}
    return {
        name: torch.randn(5, *shape, generator=random, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def vectors(tree: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([t.numpy().reshape(5, -1) for t in tree.values()], axis=1)


def test_all_from_the_gram_matrix(tree: dict[str, torch.Tensor]) -> None:
    u, p = vectors(tree), np.array([0.1, 0.3, 0.2, 0.25, 0.15])
    gram, weights = updates.gram(tree), torch.from_numpy(7 * p)
    mean, lengths = p @ u, np.linalg.norm(u, axis=1)
    pairs = [(i, j) for i in range(5) for j in range(i + 1, 5)]
    cosine = [u[i] @ u[j] / lengths[i] / lengths[j] for i, j in pairs]
    np.testing.assert_allclose(updates.norms(gram), lengths, rtol=1e-12)
    np.testing.assert_allclose(updates.pairwise(updates.cosines(gram)), cosine, rtol=1e-10)
    np.testing.assert_allclose(
        updates.cosines_with_mean(gram, weights),
        u @ mean / lengths / np.linalg.norm(mean),
        rtol=1e-10,
    )
    np.testing.assert_allclose(
        updates.distances_to_mean(gram, weights), np.linalg.norm(u - mean, axis=1), rtol=1e-10
    )
    assert updates.mean_norm(gram, weights) == pytest.approx(np.linalg.norm(mean), rel=1e-12)
    assert updates.conflict_share(gram) == np.mean([c < 0 for c in cosine])
    assert updates.gradient_diversity(gram, weights) == pytest.approx(
        p @ lengths**2 / (mean @ mean), rel=1e-12
    )


def test_layers_add_up(tree: dict[str, torch.Tensor]) -> None:
    layers = updates.layers_of(tree)
    assert {name: list(part) for name, part in layers.items()} == {
        "a": ["a.weight", "a.bias"],
        "model": ["b"],
    }
    total = sum(updates.gram(part) for part in layers.values())
    torch.testing.assert_close(total, updates.gram(tree))


def test_without_a_pair_and_without_length() -> None:
    one = updates.gram({"w": torch.tensor([[3.0, 4.0]])})
    assert np.isnan(updates.conflict_share(one))
    assert updates.gradient_diversity(one) == 1.0
    opposite = updates.gram({"w": torch.tensor([[1.0], [-1.0]])})
    assert updates.conflict_share(opposite) == 1.0
    assert updates.gradient_diversity(opposite) == np.inf


def test_loss_increase_of_fedreg() -> None:
    before, after = np.array([0.5, 2.0]), np.array([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    np.testing.assert_array_equal(forgetting.loss_increase(before, after), [1.5, -1.0])


def test_class_forgetting_of_fedntd() -> None:
    accuracies = np.array([[0.5, 0.2, np.nan], [0.9, 0.1, np.nan], [0.6, 0.3, np.nan]])
    expected = [0.9 - 0.6, 0.2 - 0.3, np.nan]
    np.testing.assert_allclose(forgetting.class_forgetting(accuracies), expected)
    assert np.isnan(forgetting.class_forgetting(accuracies[:1])).all()
