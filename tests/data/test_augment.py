import numpy as np
import pytest
import torch

from fedkeel.data import crop_flip, crops


def changed(x, generator, padding=4):
    return crop_flip(x, crops(generator, len(x), padding))


def by_loops(x, generator, padding):
    """The definition, one image and one pixel at a time, from the same draws."""
    batch, _, height, width = x.shape
    down, right = generator.integers(0, 2 * padding + 1, size=(2, batch, 1))
    mirrored = generator.random((batch, 1)) < 0.5
    out = torch.zeros_like(x)
    for i in range(batch):
        for r in range(height):
            for c in range(width):
                row = r + int(down[i, 0]) - padding
                col = (width - 1 - c if mirrored[i] else c) + int(right[i, 0]) - padding
                if 0 <= row < height and 0 <= col < width:
                    out[i, :, r, c] = x[i, :, row, col]
    return out


@pytest.mark.parametrize(("shape", "padding"), [((7, 3, 5, 6), 4), ((3, 1, 4, 4), 1)])
def test_equals_the_definition(shape, padding):
    x = torch.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    got = changed(x, np.random.default_rng(5), padding)
    assert torch.equal(got, by_loops(x, np.random.default_rng(5), padding))


def test_without_padding_only_mirrors():
    x = torch.arange(6.0).reshape(1, 1, 2, 3).expand(64, 1, 2, 3)
    got = changed(x, np.random.default_rng(0), padding=0)
    mirrored = x.flip(3)
    kinds = [bool(torch.equal(a, b)) for a, b in zip(got, x, strict=True)]
    back = [bool(torch.equal(a, b)) for a, b in zip(got, mirrored, strict=True)]
    assert all(a != b for a, b in zip(kinds, back, strict=True))
    assert 16 < sum(kinds) < 48


def test_all_offsets_occur_and_the_input_stays():
    x = torch.zeros(2000, 1, 9, 9)
    x[:, :, 4, 4] = 1
    before = x.clone()
    got = changed(x, np.random.default_rng(1), padding=4)
    assert torch.equal(x, before)
    assert torch.equal(got.sum((1, 2, 3)), torch.ones(2000))  # offsets reach just to the border
    spots = got.reshape(2000, 81).argmax(1)
    assert sorted(set(spots.tolist())) == list(range(81))


def test_same_stream_same_images():
    x = torch.rand(5, 3, 8, 8)
    one, two = (changed(x, np.random.default_rng(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, changed(x, np.random.default_rng(4)))
