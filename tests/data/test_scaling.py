"""Mean and deviation of all clients' inputs by sums."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch

from fedkeel.data.read.scaling import CONSTANT, Moments, Scale, measure_scale

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("offset", "exact"), [(0.0, 1e-12), (1e8, 1e-7)])
def test_merged_sums_are_those_of_all_examples(offset: float, exact: float) -> None:
    """Also far from 0, where a mean of squares less a square of means has no digit left."""
    parts = [
        torch.from_numpy(offset + RNG.normal(k, 1 + k, size=(n, 3)))
        for k, n in enumerate((1, 40, 7, 200))
    ]
    pooled = torch.cat(parts).numpy()
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        merged = reduce(Moments.merged, [Moments.of(parts[k]) for k in order])
        scale = merged.scale()
        np.testing.assert_allclose(scale.mean, pooled.mean(0), rtol=1e-13)
        centred = pooled - pooled.mean(0)
        np.testing.assert_allclose(scale.std, np.sqrt((centred**2).mean(0)), rtol=exact)
    assert merged.count == 248


def test_images_are_measured_by_channel() -> None:
    x = torch.from_numpy(RNG.normal(3, 2, size=(30, 2, 4, 5)))
    halves = Moments.of(x[:11]).merged(Moments.of(x[11:])).scale()
    np.testing.assert_allclose(halves.mean, x.mean((0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(halves.std, x.std((0, 2, 3), correction=0), rtol=1e-13)


def test_what_is_constant_everywhere_becomes_zero() -> None:
    one, other = torch.tensor([[0.1, 5.0]] * 3), torch.tensor([[0.1, 6.0]] * 2)
    scale = Moments.of(one).merged(Moments.of(other)).scale()
    assert scale.std[0] == 0
    assert scale.std[1] > 0
    x = torch.tensor([[7.0, 5.0]])
    scale.apply_(x)
    assert x[0, 0] == 0
    assert scale.recorded()[1][0] == CONSTANT


def test_columns_of_categories_stay() -> None:
    x = torch.from_numpy(RNG.normal(4, 3, size=(20, 2)))
    binary = torch.tensor([False, True])
    for scale in (Moments.of(x).without(binary).scale(), measure_scale(x).without(binary)):
        assert (float(scale.mean[1]), float(scale.std[1])) == (0, 1)
        np.testing.assert_allclose(scale.mean[0], x[:, 0].mean())
        assert torch.equal(Scale.of(*scale.recorded()).applied(x)[:, 1], x[:, 1])
