"""Mathematics in the span of the updates, against the same on the vectors themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from each import each
from fedkeel.solve import span
from fedkeel.solve.span import Span

SHAPES = {"w": (4, 3), "b": (4,), "s": (), "c": (2, 2, 3, 3)}
NAMES = list(SHAPES)
K = 5


def rows(dtype: torch.dtype = torch.float64, count: int = K, seed: int = 0) -> dict:
    """Updates with matrices, a vector, a single number and a kernel."""
    generator = torch.Generator().manual_seed(seed)
    return {
        k: torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for k, shape in SHAPES.items()
    }


def flat(tree: dict, names: list[str] = NAMES) -> np.ndarray:
    """[K, n] the vectors themselves, in float64."""
    return np.concatenate([tree[k].double().reshape(len(tree[k]), -1) for k in names], axis=1)


def mixes(seed: int = 0, shared: bool = False) -> dict[str, np.ndarray]:
    """Coefficients for each tensor, or one object for all of them."""
    rng = np.random.default_rng(seed)
    if shared:
        return dict.fromkeys(NAMES, rng.normal(size=(K, K)))
    return {k: rng.normal(size=(K, K)) for k in NAMES}


def by_hand(tree: dict, mix: dict[str, np.ndarray]) -> dict:
    """The combinations, tensor by tensor and row by row."""
    return {
        k: torch.stack([sum(float(c) * v[j] for j, c in enumerate(row)) for row in mix[k]])
        for k, v in tree.items()
    }


@pytest.mark.parametrize("names", [NAMES, ["w"], ["s"], ["b", "c"]])
def test_inner_products_are_those_of_the_vectors(names: list[str]) -> None:
    a, b = rows(count=3), rows(count=7, seed=1)
    found = span.inner(a, b, names)
    assert found.shape == (3, 7)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, flat(a, names) @ flat(b, names).T, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(span.inner(b, a, names), found.T)


@pytest.mark.parametrize("size", [span.CHUNK, span.EXACT, span.EXACT + 1, 5 * span.CHUNK + 1])
def test_no_column_is_forgotten_where_chunks_meet(size: int) -> None:
    """Every entry counts once: a one in each place, one after the other."""
    ones = torch.ones(1, size)
    single = torch.zeros(4, size)
    places = [0, span.CHUNK - 1, size // 2, size - 1]
    single[range(4), places] = 1.0
    found = span.inner({"w": single}, {"w": ones}, ["w"])
    assert found.tolist() == [[1.0]] * 4
    assert span.inner({"w": ones}, {"w": ones}, ["w"]).tolist() == [[float(size)]]


@each("offset", [0.0, 1.0])
@each("size", [100, 4096, 60_000, 500_000])
def test_float32_products_are_good_to_the_noise_that_is_told(size: int, offset: float) -> None:
    """Rows of one sign too, whose sums grow and round most."""
    vectors = torch.randn(4, size, generator=torch.Generator().manual_seed(size)) + offset
    tree = {"w": vectors}
    exact = (vectors.double() @ vectors.double().T).numpy()
    length = np.sqrt(np.diagonal(exact))
    error = np.abs(span.inner(tree, tree, ["w"]) - exact) / np.outer(length, length)
    assert error.max() <= 2 * span.relative_rounding(tree, ["w"])
    assert error.max() < 1e-7 or size == 60_000


def test_noise_is_that_of_the_worst_tensor() -> None:
    wide = {"a": torch.zeros(2, span.EXACT), "b": torch.zeros(2, span.EXACT + 1)}
    assert span.relative_rounding(wide, ["a"]) == 1e-13
    assert span.relative_rounding(wide, ["b"]) == span.relative_rounding(wide, ["a", "b"]) == 1e-7
    assert span.relative_rounding({"b": wide["b"].double()}, ["b"]) == 1e-13


@each("dtype", [torch.float32, torch.float64])
@each("count", [1, 2, K])
@each("name", NAMES)
def test_combine_is_a_product_with_rows(name: str, count: int, dtype: torch.dtype) -> None:
    coefficients = np.random.default_rng(0).normal(size=(count, K))
    tree = rows(dtype)
    found = span.combine(coefficients, tree[name])
    assert found.dtype == dtype
    assert found.shape == (count, *SHAPES[name])
    expected = coefficients @ flat(tree, [name])
    error = np.abs(flat({name: found}, [name]) - expected).max()
    assert error < (1e-12 if dtype == torch.float64 else 1e-6)


def test_combine_does_not_read_rows_that_do_not_count() -> None:
    tree = rows()["w"].clone()
    tree[[1, 3]] = float("nan")
    coefficients = np.array([[1.0, 0.0, 2.0, 0.0, -1.0]])
    expected = tree[0] + 2.0 * tree[2] - tree[4]
    torch.testing.assert_close(span.combine(coefficients, tree)[0], expected)
    assert not span.combine(np.zeros((2, K)), torch.full((K, 3), float("nan"))).any()


@pytest.mark.parametrize("shared", [False, True])
def test_a_span_is_its_vectors(shared: bool) -> None:
    tree, mix = rows(), mixes(shared=shared)
    vectors = by_hand(tree, mix)
    one = Span(tree).combined(mix)
    assert len(one) == K
    for names in (NAMES, ["w", "s"], ["b"]):
        made = flat(vectors, names)
        np.testing.assert_allclose(one.gram(names), made @ made.T, rtol=0, atol=1e-11)
        point = {k: v[0] for k, v in rows(seed=9).items()}
        line = flat({k: v[None] for k, v in point.items()}, names)[0]
        np.testing.assert_allclose(
            one.inner_products(point, names), made @ line, rtol=0, atol=1e-12
        )
    for name, found in one.materialise().items():
        torch.testing.assert_close(found, vectors[name], rtol=0, atol=1e-12)


def test_a_span_that_nothing_mixed_is_the_rows_themselves() -> None:
    tree = rows()
    one = Span(tree)
    assert one.materialise() is tree
    np.testing.assert_allclose(one.gram(NAMES), flat(tree) @ flat(tree).T, rtol=0, atol=1e-12)


def test_mixing_twice_is_mixing_with_the_product() -> None:
    tree, first, second = rows(), mixes(1), mixes(2)
    twice = Span(tree).combined(first).combined(second).materialise()
    for name, found in by_hand(by_hand(tree, first), second).items():
        torch.testing.assert_close(twice[name], found, rtol=0, atol=1e-11)


@pytest.mark.parametrize("mixed", [False, True])
def test_sums_by_one_weighting_or_one_for_each_tensor(mixed: bool) -> None:
    tree, rng = rows(), np.random.default_rng(3)
    one = Span(tree).combined(mixes()) if mixed else Span(tree)
    vectors = by_hand(tree, mixes()) if mixed else tree
    same = rng.normal(size=K)
    each = {k: rng.normal(size=K) for k in NAMES}
    for name in NAMES:
        for found, weights in ((one.sum(same), same), (one.sum(each), each[name])):
            expected = sum(float(w) * v for w, v in zip(weights, vectors[name], strict=True))
            assert found[name].shape == SHAPES[name]
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12)


def test_half_a_million_float32_parameters() -> None:
    """A weighted mean and its inner products keep seven digits."""
    generator = torch.Generator().manual_seed(1)
    tree = {"w": torch.randn(6, 500, 1000, generator=generator)}
    wide = {"w": tree["w"].double()}
    mix = {"w": np.eye(6) - 0.5 * np.eye(6, k=1)}
    weights = np.full(6, 1 / 6)
    ours, exact = Span(tree).combined(mix), Span(wide).combined(mix)
    mean, true = ours.sum(weights)["w"].double(), exact.sum(weights)["w"]
    assert float((mean - true).norm() / true.norm()) < 1e-7
    length = np.sqrt(np.diagonal(exact.gram(["w"])))
    error = np.abs(ours.gram(["w"]) - exact.gram(["w"])) / np.outer(length, length)
    assert error.max() < 1e-7


def test_what_cancels_has_no_direction() -> None:
    """Two opposite updates whose common part is taken away: rounding is left, and counts as 0."""
    for seed in range(20):
        tree = rows(seed=seed)
        tree = {k: torch.cat([v, -0.7 * v[:1]]) for k, v in tree.items()}
        mix = np.eye(K + 1)
        mix[0, K] = 1 / 0.7
        gram = Span(tree).combined(dict.fromkeys(NAMES, mix)).gram(NAMES)
        assert not gram[0].any()
        assert not gram[:, 0].any()
        expected = flat(tree)[1:]
        np.testing.assert_allclose(gram[1:, 1:], expected @ expected.T, rtol=0, atol=1e-12)
