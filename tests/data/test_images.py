import numpy as np
import pytest
import torch

from fedkeel.data.read import images, scaling
from fedkeel.errors import DataError


def filled(x, shape):
    out = torch.full((len(x), *shape), float("nan"))
    images.write_images(out, x, "pictures")
    return out


def test_bytes_become_fractions():
    x = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1, 1)
    assert filled(x, (1, 1, 1)).flatten().tolist() == pytest.approx([0, 0.2, 1])


def test_one_channel_becomes_three_by_repeating():
    x = torch.tensor([10, 20], dtype=torch.uint8).reshape(1, 1, 1, 2)
    got = filled(x, (3, 1, 2))
    assert torch.equal(got, torch.tensor([10, 20]).div(255).expand(1, 3, 1, 2))


def test_three_channels_become_one_by_luma():
    x = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255]], dtype=torch.uint8)
    got = filled(x.reshape(3, 3, 1, 1), (1, 1, 1))
    assert got.flatten().tolist() == pytest.approx([0.299, 0.587, 0.114])


def test_halving_averages_with_the_triangle_filter():
    # Half the width: a triangle of base 4 centred between pixels 0 and 1, cut at the border and
    # normalised: weights 3, 3, 1 of 7.
    x = torch.tensor([70.0, 0.0, 0.0, 140.0]).reshape(1, 1, 1, 4)
    got = filled(x, (1, 1, 2)).flatten().tolist()
    assert got == pytest.approx([70 * 3 / 7, 140 * 3 / 7])


def test_a_constant_image_stays_constant_at_any_size():
    x = torch.full((2, 1, 16, 16), 51, dtype=torch.uint8)
    assert torch.allclose(filled(x, (3, 32, 32)), torch.tensor(0.2))


def test_more_rows_than_are_handled_at_a_time():
    x = torch.arange(2000).remainder(256).to(torch.uint8).reshape(2000, 1, 1, 1)
    assert torch.equal(filled(x, (1, 1, 1)).flatten(), x.flatten() / 255)
    assert torch.allclose(filled(x, (3, 2, 2))[:, 2, 1, 1], x.flatten() / 255)


def test_two_channels_are_refused():
    with pytest.raises(DataError, match="cannot be brought to 3 channels"):
        filled(torch.zeros(1, 2, 4, 4), (3, 4, 4))


def test_measure_equals_numpy_in_float64():
    x = torch.rand(700, 3, 5, 4) * torch.tensor([1.0, 10.0, 0.1]).reshape(3, 1, 1)
    got = scaling.measure_scale(x)
    a = x.numpy().astype(np.float64)
    np.testing.assert_allclose(got.mean, a.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(got.std, a.std((0, 2, 3)), rtol=1e-12)


def test_large_numbers_that_differ_by_little_are_not_lost():
    x = torch.tensor([1.7e9, 1.7e9 + 1, 1.7e9 + 2], dtype=torch.float64).reshape(3, 1)
    got = scaling.measure_scale(x)
    assert got.std.item() == pytest.approx((2 / 3) ** 0.5, rel=1e-12)
    got.apply_(x)
    assert x.flatten().tolist() == pytest.approx([-(1.5**0.5), 0, 1.5**0.5], rel=1e-9)


def test_a_constant_column_becomes_zero_also_where_it_is_another_constant():
    train = torch.tensor([[0.1, 1.0]] * 9 + [[0.1, 3.0]])
    test = torch.tensor([[7.0, 1.0]])
    found = scaling.measure_scale(train)
    found.apply_(train)
    found.apply_(test)
    assert torch.equal(train[:, 0], torch.zeros(10))
    assert test[0, 0] == 0
    assert test[0, 1].item() == pytest.approx((1 - 1.2) / 0.6, rel=1e-6)


def test_what_is_recorded_does_to_new_data_what_was_done_to_these():
    train = torch.tensor([[0.1, 1.0]] * 9 + [[0.1, 3.0]])
    new = torch.tensor([[7.0, 1.0], [0.1, 2.0]])
    found = scaling.measure_scale(train)
    mean, deviation = (torch.tensor(one, dtype=torch.float64) for one in found.recorded())
    by_hand = ((new - mean) / deviation).to(torch.float32)
    found.apply_(new)
    torch.testing.assert_close(by_hand, new)


def test_the_scale_is_that_of_its_channel():
    x = torch.ones(2, 2, 3, 3)
    scaling.Scale.of((1.0, 0.5), (1.0, 0.25)).apply_(x)
    assert torch.equal(x[:, 0], torch.zeros(2, 3, 3))
    assert torch.equal(x[:, 1], torch.full((2, 3, 3), 2.0))
