"""GroupNorm in place of BatchNorm."""

import copy

import pytest
import torch
from torch import nn

from each import each
from fedkeel.errors import ModelError
from fedkeel.task.models import make, replace_batch_norm
from fedkeel.task.models.norm import group_count


def test_replace_batch_norm_in_a_network():
    module = make("lenet5", (3, 16, 16), 5)
    state = copy.deepcopy(module.state_dict())
    made = replace_batch_norm(module)
    assert not list(made.buffers())
    assert [p.shape for p in made.parameters()] == [p.shape for p in module.parameters()]
    assert [k for k, _ in made.named_parameters()] == [k for k, _ in module.named_parameters()]
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert isinstance(module.norm1, nn.BatchNorm2d)
    assert isinstance(made.norm1, nn.GroupNorm)
    assert made.norm1.weight is not module.norm1.weight
    assert made(torch.randn(4, 3, 16, 16)).isfinite().all()


def test_replace_batch_norm_copies_what_a_layer_is():
    old = (
        nn.Sequential(nn.BatchNorm3d(12, eps=0.1), nn.BatchNorm2d(7, affine=False)).double().eval()
    )
    nn.init.normal_(old[0].weight)
    nn.init.normal_(old[0].bias)
    old[0].weight.requires_grad_(False)
    new = replace_batch_norm(old, groups=5)
    assert (new[0].num_groups, new[0].eps, new[0].affine, new[0].training) == (4, 0.1, True, False)
    assert torch.equal(new[0].weight, old[0].weight)
    assert torch.equal(new[0].bias, old[0].bias)
    assert new[0].weight.dtype == torch.float64
    assert (new[0].weight.requires_grad, new[0].bias.requires_grad) == (False, True)
    assert (new[1].num_groups, new[1].affine) == (1, False)


def test_replace_batch_norm_draws_nothing():
    module = make("resnet18", (3, 16, 16), 5, {"width": 8})
    before = torch.get_rng_state()
    replace_batch_norm(module)
    assert torch.equal(torch.get_rng_state(), before)


def test_replace_batch_norm_at_the_top_and_shared():
    assert isinstance(replace_batch_norm(nn.BatchNorm2d(4)), nn.GroupNorm)
    shared = nn.BatchNorm2d(4)
    made = replace_batch_norm(nn.Sequential(shared, nn.Sequential(shared), shared))
    assert isinstance(made[0], nn.GroupNorm)
    assert made[0] is made[1][0] is made[2]


def test_replace_batch_norm_never_leaves_one_feature_alone():
    made = replace_batch_norm(nn.BatchNorm1d(32))
    assert made.num_groups == 4
    assert made(torch.randn(3, 32)).abs().min() > 0
    with pytest.raises(ModelError, match="a single channel"):
        replace_batch_norm(nn.Sequential(nn.BatchNorm1d(1)))


def test_replace_batch_norm_refuses():
    with pytest.raises(ModelError, match="`groups`"):
        replace_batch_norm(nn.BatchNorm2d(4), groups=0)
    with pytest.raises(ModelError, match="lazy"):
        replace_batch_norm(nn.Sequential(nn.LazyBatchNorm2d()))


@each("width", [1, 2, 7, 12, 64, 100])
@each("groups", [1, 4, 32])
def test_group_count(width, groups):
    n = group_count(width, groups)
    assert width % n == 0
    assert n <= groups
    assert not any(width % d == 0 for d in range(n + 1, min(groups, width) + 1))
