"""Centralisation and harmonisation: their laws, and small cases worked out by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from each import each
from fedkeel.solve.projections import centralise, harmonise
from solve.programmes import draw, project

AXES = ("input", "kernel", "output", "all")
SHAPES = [(6,), (1,), (3, 8), (1, 5), (5, 1), (2, 3, 4), (4, 3, 3, 3), (2, 1, 5, 5)]
RULES = ("originals", "inplace", "printed", "mutual")
PROJECTIONS = ("originals", "inplace", "mutual")


def tensor(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# --- centralisation --------------------------------------------------------------------------


@each(("shape", "axes"), list(product(SHAPES, AXES)))
def test_centralisation_subtracts_the_mean_over_its_axes(shape: tuple[int, ...], axes: str) -> None:
    w = tensor(shape)
    found = centralise(w, axes)
    over = {
        "input": range(1, len(shape)),
        "kernel": range(2, len(shape)),
        "output": [0],
        "all": range(len(shape)),
    }["input" if len(shape) == 2 else axes]
    if len(shape) == 1:
        assert found is w
        return
    expected = w.numpy() - w.numpy().mean(axis=tuple(over), keepdims=True)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-15)
    assert found.mean(dim=tuple(over)).abs().max() < 1e-15


@each(("shape", "axes", "vectors"), list(product(SHAPES, AXES, [False, True])))
def test_centralisation_is_a_linear_projection(
    shape: tuple[int, ...], axes: str, vectors: bool
) -> None:
    def phi(w: torch.Tensor) -> torch.Tensor:
        return centralise(w, axes, vectors)

    v, w = tensor(shape, 1), tensor(shape, 2)
    torch.testing.assert_close(phi(phi(v)), phi(v), rtol=0, atol=1e-15)
    torch.testing.assert_close(phi(2.0 * v - 3.0 * w), 2.0 * phi(v) - 3.0 * phi(w))
    assert abs(float((phi(v) * (v - phi(v))).sum())) < 1e-13  # along what it takes away


@each(("shape", "axes"), list(product(SHAPES, AXES)))
def test_centralisation_commutes_with_averaging_over_clients(
    shape: tuple[int, ...], axes: str
) -> None:
    clients = tensor((7, *shape))
    weights = torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = torch.tensordot(weights / weights.sum(), clients, dims=1)
    apart = torch.stack([centralise(w, axes, vectors=True) for w in clients])
    together = torch.tensordot(weights / weights.sum(), apart, dims=1)
    torch.testing.assert_close(centralise(mean, axes, vectors=True), together)


def test_tensors_of_one_axis_and_of_none() -> None:
    assert centralise(torch.tensor([1.0, 2.0, 6.0]), vectors=True).tolist() == [-2.0, -1.0, 3.0]
    assert centralise(torch.tensor([5.0]), vectors=True).tolist() == [0.0]
    assert float(centralise(torch.tensor(5.0), vectors=True)) == 0.0


# --- harmonisation ---------------------------------------------------------------------------


def harmonised(vectors: np.ndarray, rule: str, seed: int = 0) -> np.ndarray:
    """The vectors themselves, after a rule."""
    return harmonise(vectors @ vectors.T, np.random.default_rng(seed), rule) @ vectors


TWO = np.array([[1.0, 0.0], [-1.0, 1.0]])  # <1,2> = -1, |1|^2 = 1, |2|^2 = 2


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("originals", [[0.5, 0.5], [0.0, 1.0]]),  # 1 + 1/2 * 2, and 2 + 1/1 * 1
        ("inplace", [[0.5, 0.5], [-1.0, 1.0]]),  # the first as above; then <2, 1'> = 0
        ("printed", [[0.0, 1.0], [-1.0, 1.0]]),  # 1 + 1/|1|^2 * 2; then <2, 1'> = 1
        ("mutual", [[0.5, 0.5], [0.0, 1.0]]),  # both against what the other was
    ],
)
def test_two_clients_by_hand(rule: str, expected: list[list[float]]) -> None:
    for seed in range(4):  # with two clients there is one order only
        np.testing.assert_allclose(harmonised(TWO, rule, seed), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("rule", RULES)
def test_no_conflict_changes_nothing_and_draws_nothing(rule: str) -> None:
    gram = np.array([[2.0, 0.0, 1.0], [0.0, 1.0, 0.5], [1.0, 0.5, 3.0]])
    rng, lazy_zeros = np.random.default_rng(0), np.random.default_rng(0)
    np.testing.assert_array_equal(harmonise(gram, rng, rule), np.eye(3))
    assert rng.random() == lazy_zeros.random()


@each("factor", [7.0, -1.0, -0.01, 1e6])
@each("rule", RULES)
def test_a_common_factor_comes_out(rule: str, factor: float) -> None:
    """So it does not matter that updates, and not gradients, are harmonised."""
    for seed in range(20):
        V = np.random.default_rng(seed).normal(size=(5, 4))
        size = np.abs(factor) * np.abs(harmonised(V, rule, seed)).max()
        error = harmonised(factor * V, rule, seed) - factor * harmonised(V, rule, seed)
        assert np.abs(error).max() < 1e-9 * size


@pytest.mark.parametrize("rule", PROJECTIONS)
def test_how_long_the_other_is_does_not_matter(rule: str) -> None:
    a, b = harmonised(TWO, rule)
    longer = harmonised(TWO * np.array([[1.0], [5.0]]), rule)
    np.testing.assert_allclose(longer, [a, 5.0 * b], rtol=0, atol=1e-14)


def test_how_long_the_other_is_does_matter_as_printed() -> None:
    """The slides divide by the wrong norm: with |g_2| five times as long, 1 - (-5)/1 * (-5, 5)."""
    longer = harmonised(TWO * np.array([[1.0], [5.0]]), "printed")
    np.testing.assert_allclose(longer[0], [1.0 - 25.0, 25.0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("rule", PROJECTIONS)
def test_two_clients_do_not_conflict_afterwards_nor_change_again(rule: str) -> None:
    for seed in range(50):
        V = np.random.default_rng(seed).normal(size=(2, 3))
        V[1] *= -np.sign(V[0] @ V[1])
        once = harmonised(V, rule)
        assert once[0] @ once[1] > -1e-14
        assert abs(once[0] @ V[1]) < 1e-14
        np.testing.assert_allclose(harmonised(once, rule), once, rtol=0, atol=1e-13)


@each("rule", PROJECTIONS)
@each("size", [1, 2, 3, 20])
def test_projections_make_no_vector_longer(rule: str, size: int) -> None:
    """Also where vectors are opposite, or more than their dimensions, and come to nothing."""
    for seed in range(50):
        V = np.random.default_rng(seed).normal(size=(6, size))
        V[1] = -0.3 * V[0]
        found = harmonised(V, rule, seed)
        assert np.isfinite(found).all()
        before, after = np.linalg.norm(V, axis=1), np.linalg.norm(found, axis=1)
        assert (after <= before * (1 + 1e-6)).all()


@pytest.mark.parametrize("rule", RULES)
def test_opposite_clients_are_left_with_nothing_but_numbers(rule: str) -> None:
    """Their running vectors are rounding, which must not be divided by."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        V = rng.normal(size=(4, 10))
        V[1], V[3] = -rng.uniform(0.1, 3) * V[0], -V[2]
        A = harmonise(V @ V.T, np.random.default_rng(seed), rule)
        assert np.isfinite(A).all()
        assert np.abs(A).max() < 1e4


def test_both_of_a_pair_change_at_once_in_the_mutual_rule() -> None:
    """Opposite clients cancel each other; one after the other, the second would stay."""
    V = np.array([[3.0, 1.0], [-1.5, -0.5]])
    np.testing.assert_allclose(harmonised(V, "mutual"), np.zeros((2, 2)), rtol=0, atol=1e-15)
    np.testing.assert_allclose(harmonised(V, "inplace")[1], V[1], rtol=0, atol=1e-15)


# --- the Gram matrix is enough ---------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_harmonising_coefficients_is_harmonising_vectors(rule: str) -> None:
    for seed in range(20):
        V = np.random.default_rng(seed).normal(size=(4, 6))
        rng, k = np.random.default_rng(seed), len(V)
        running = V.copy()
        if rule == "originals":  # all orders are drawn first
            orders = [rng.permutation(np.delete(np.arange(k), i)) for i in range(k)]
        if rule == "mutual":
            for i, j in rng.permutation(np.stack(np.triu_indices(k, 1), axis=1)):
                a, b = running[i].copy(), running[j].copy()
                if a @ b < 0:
                    running[i], running[j] = a - a @ b / (b @ b) * b, b - a @ b / (a @ a) * a
        else:
            for i in range(k):
                drawn = rule != "originals"
                for j in rng.permutation(np.delete(np.arange(k), i)) if drawn else orders[i]:
                    other = running[j] if drawn else V[j]
                    below = running[i] if rule == "printed" else other
                    if running[i] @ other < 0:
                        running[i] -= running[i] @ other / (below @ below) * other
        size = np.abs(running).max()
        np.testing.assert_allclose(harmonised(V, rule, seed), running, rtol=0, atol=1e-9 * size)


@each("seed", range(10))
def test_a_programme_of_means_needs_no_more_than_the_gram_matrix(seed: int) -> None:
    """The point is a mean of the rows: c = G w, and the answer is rows @ (w + lambda)."""
    M, _ = draw("random", seed)
    weights = np.full(len(M), 1 / len(M))
    direct = project(M, weights @ M)
    u = weights @ M + M.T @ direct.multipliers
    gram = M @ M.T
    together = weights + project_gram(gram, gram @ weights)
    np.testing.assert_allclose(together @ M, u, rtol=0, atol=1e-9)
    assert (gram @ together).min() > -1e-9


def project_gram(gram: np.ndarray, inner: np.ndarray) -> np.ndarray:
    from fedkeel.solve import qp

    return qp.project(gram, inner).multipliers
