"""The larger networks against torch's own layers, their definitions and their laws."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from each import each
from fedkeel.errors import ModelError
from fedkeel.task.models import make
from fedkeel.task.models.densenet import DenseBlock, Transition
from fedkeel.task.models.norm import group_count
from fedkeel.task.models.recurrent import LSTM
from fedkeel.task.models.resnet import Block
from fedkeel.task.models.transformer import Attention, EncoderBlock

CIFAR = (3, 32, 32)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def shaken(module, seed=1):
    """The module in float64, with parameters that are nowhere 0 or 1."""
    module = module.double()
    for i, p in enumerate(module.parameters()):
        p.add_(0.3 * randn(*p.shape, seed=seed + i))
    return module


def spread(weight, std):
    """Whether the weights look normal with that deviation, to four standard errors."""
    error = 4 / (2 * weight.numel()) ** 0.5
    return weight.std().item() == pytest.approx(std, rel=error) and abs(
        weight.mean().item()
    ) < 4 * std / (weight.numel() ** 0.5)


# ---------------------------------------------------------------------------------- recurrent


@pytest.mark.parametrize("biases", [1, 2])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_lstm_is_torchs(layers, biases):
    torch.manual_seed(0)
    sizes = [4] + [6] * layers
    ours = [shaken(LSTM(i, o, biases)) for i, o in pairwise(sizes)]
    theirs = nn.LSTM(4, 6, layers, batch_first=True).double()
    with torch.no_grad():
        for i, layer in enumerate(ours):
            getattr(theirs, f"weight_ih_l{i}").copy_(layer.inputs.weight)
            getattr(theirs, f"weight_hh_l{i}").copy_(layer.hidden.weight)
            getattr(theirs, f"bias_ih_l{i}").copy_(layer.inputs.bias)
            second = torch.zeros(24) if biases == 1 else layer.hidden.bias
            getattr(theirs, f"bias_hh_l{i}").copy_(second)
    x = randn(5, 9, 4).requires_grad_()
    outs = nn.Sequential(*ours)(x), theirs(x)[0]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad((out**3).sum(), x)[0] for out in outs]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-12)


def test_the_character_network_reads_in_order_and_to_the_end():
    torch.manual_seed(0)
    module = make("char_lstm", (5,), 7, {"hidden": 6}).double()
    x = torch.tensor([[1, 2, 3, 4, 5], [5, 2, 3, 4, 1], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5]])
    out = module(x)
    torch.testing.assert_close(out[0], out[3])
    assert not torch.allclose(out[0], out[1])
    assert not torch.allclose(out[0], out[2])
    states = module.lstm(module.embed(x))
    torch.testing.assert_close(out, states[:, -1] @ module.fc.weight.T + module.fc.bias)


def test_character_initialisation():
    torch.manual_seed(0)
    module = make("char_lstm", (80,), 80)
    for name, p in module.lstm.named_parameters():
        assert 0.99 / 16 < p.abs().max() <= 1 / 16, name
        assert p.std().item() == pytest.approx(1 / 16 / 3**0.5, rel=0.06), name
    assert spread(module.embed.weight, 1.0)


# -------------------------------------------------------------------------------- transformer


def test_encoder_block_is_torchs():
    ours = shaken(EncoderBlock(12, 3, dropout=0.0))
    theirs = nn.TransformerEncoderLayer(
        12, 3, 48, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True,
        norm_first=True, dtype=torch.float64,
    )  # fmt: skip
    pairs = {
        "norm1": ours.norm1,
        "norm2": ours.norm2,
        "linear1": ours.fc1,
        "linear2": ours.fc2,
        "self_attn.out_proj": ours.attention.proj,
    }
    state = {
        f"{name}.{key}": t for name, layer in pairs.items() for key, t in layer.state_dict().items()
    }
    state["self_attn.in_proj_weight"] = ours.attention.qkv.weight
    state["self_attn.in_proj_bias"] = ours.attention.qkv.bias
    theirs.load_state_dict(state)
    x = randn(4, 7, 12)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_attention_does_not_mind_the_order_of_tokens():
    ours = shaken(Attention(12, 3))
    x, order = randn(2, 6, 12), [3, 0, 5, 1, 4, 2]
    torch.testing.assert_close(ours(x)[:, order], ours(x[:, order]))


def test_patches_are_cut_row_by_row():
    """The logits of an image are those of its patches, each embedded by hand."""
    torch.manual_seed(0)
    args = {"patch": 3, "width": 8, "heads": 2, "depth": 1}
    module = shaken(make("vit", (2, 6, 9), 5, args))
    x = randn(4, 2, 6, 9)
    parts = [x[:, :, r : r + 3, c : c + 3].flatten(1) for r in (0, 3) for c in (0, 3, 6)]
    weight = module.patches.weight.flatten(1)
    tokens = [module.class_token[0, 0].expand(4, -1)]
    tokens += [part @ weight.T + module.patches.bias for part in parts]
    seen = module.blocks(torch.stack(tokens, dim=1) + module.positions)[:, 0]
    torch.testing.assert_close(module(x), module.head(module.norm(seen)))


def test_transformer_initialisation():
    torch.manual_seed(0)
    module = make("vit", CIFAR, 10)
    assert (module.patches.kernel_size, module.patches.stride) == ((4, 4), (4, 4))
    assert all(spread(m.weight, 0.02) for m in module.modules() if isinstance(m, nn.Linear))
    assert spread(module.positions, 0.02)
    assert not any(m.bias.any() for m in module.modules() if isinstance(m, nn.Linear))


# ---------------------------------------------------------------------------------------- VGG


def convolutions(module):
    return [m.out_channels for m in module.modules() if isinstance(m, nn.Conv2d)]


@pytest.mark.parametrize(("name", "shape"), [("vgg11", (3, 65, 40)), ("vgg11_gradma", CIFAR)])
def test_vgg_layers(name, shape):
    with torch.device("meta"):
        module = make(name, shape, 10)
    assert convolutions(module) == [64, 128, 256, 256, 512, 512, 512, 512]
    linear = [(m.in_features, m.out_features) for m in module.classifier if hasattr(m, "weight")]
    own = [(25088, 4096), (4096, 4096), (4096, 10)]
    assert linear == (own if name == "vgg11" else [(512, 128), (128, 10)])
    assert [m.p for m in module.modules() if isinstance(m, nn.Dropout)] == [0.5] * (len(linear) - 1)
    norms = [m for m in module.features if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == (0 if name == "vgg11" else 8)


def test_vgg_has_the_names_of_torchvision():
    with torch.device("meta"):
        names = [n for n, _ in make("vgg11", CIFAR, 10).named_parameters()]
    places = [0, 3, 6, 8, 11, 13, 16, 18]
    assert names[::2] == [f"features.{i}.weight" for i in places] + [
        f"classifier.{i}.weight" for i in (0, 3, 6)
    ]


def test_vgg_initialisation():
    torch.manual_seed(0)
    module = make("vgg11", CIFAR, 100, {"width": 32, "hidden": [256, 256]})
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            assert spread(layer.weight, (2 / (9 * layer.out_channels)) ** 0.5)
        if isinstance(layer, nn.Linear):
            assert spread(layer.weight, 0.01)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert not layer.bias.any()


def test_on_small_images_vgg_repeats_its_maps():
    """One number for each channel, 49 times: so 49 columns always have the same gradient."""
    torch.manual_seed(0)
    module = make("vgg11", CIFAR, 5, {"width": 2, "hidden": [9], "dropout": 0.0}).double()
    F.cross_entropy(module(randn(4, 3, 32, 32)), torch.arange(4)).backward()
    grad = module.classifier[0].weight.grad.unflatten(1, (16, 49))
    assert grad.any()
    assert torch.equal(grad, grad[:, :, :1].expand_as(grad))


# ------------------------------------------------------------------------------------- ResNet


def test_resnet20_layers():
    with torch.device("meta"):
        module = make("resnet20", CIFAR, 10)
    assert convolutions(module) == [16] * 7 + [32] * 6 + [64] * 6
    assert sum(isinstance(m, nn.BatchNorm2d) for m in module.modules()) == 19


def test_a_shortcut_without_parameters():
    """Every second pixel passes; the new channels get nothing but the residual."""
    block = shaken(Block(3, 6, 2, "batch", 32, "identity")).eval()
    x = randn(2, 3, 5, 8)
    inner = F.relu(block.bn1(F.conv2d(x, block.conv1.weight, stride=2, padding=1)))
    inner = block.bn2(F.conv2d(inner, block.conv2.weight, padding=1))
    inner[:, :3] += x[:, :, ::2, ::2]
    torch.testing.assert_close(block(x), F.relu(inner))
    assert not list(block.downsample.parameters())


# ----------------------------------------------------------------------------------- DenseNet


def test_densenet_layers():
    with torch.device("meta"):
        module = make("densenet121_gn", (3, 64, 64), 2)
    convs = convolutions(module)
    assert len(convs) + 1 == 121
    assert convs[:3] == [64, 128, 32]
    norms = [m for m in module.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 121
    assert {m.num_groups for m in norms} == {4}
    assert module.classifier.in_features == 1024
    names = [n for n, _ in module.named_parameters()]
    assert names[0] == "features.conv0.weight"
    for name in ("denseblock3.denselayer24.conv2.weight", "transition3.norm.bias", "norm5.weight"):
        assert f"features.{name}" in names


def test_a_dense_block_adds_to_what_it_saw():
    torch.manual_seed(0)
    block = shaken(DenseBlock(6, 2, 3, "group", 4))
    x = randn(2, 6, 4, 5)

    def layer(i, x):
        p = dict(block.get_submodule(f"denselayer{i}").named_parameters())
        groups = group_count(x.shape[1], 4), 4
        x = F.group_norm(x, groups[0], p["norm1.weight"], p["norm1.bias"])
        x = F.conv2d(x.clamp(min=0), p["conv1.weight"])
        x = F.group_norm(x, groups[1], p["norm2.weight"], p["norm2.bias"])
        return F.conv2d(x.clamp(min=0), p["conv2.weight"], padding=1)

    first = layer(1, x)
    second = layer(2, torch.cat([x, first], 1))
    torch.testing.assert_close(block(x), torch.cat([x, first, second], 1))


def test_a_transition_halves():
    torch.manual_seed(0)
    move = shaken(Transition(8, "group", 4))
    x = randn(2, 8, 4, 6)
    out = F.conv2d(F.relu(move.norm(x)), move.conv.weight)
    means = out.unfold(2, 2, 2).unfold(3, 2, 2).mean((-2, -1))
    torch.testing.assert_close(move(x), means)
    assert means.shape == (2, 4, 2, 3)


def test_densenet_with_all_pixels():
    torch.manual_seed(0)
    args = {"growth": 4, "blocks": [1, 1, 1, 1]}
    mean, whole = (
        make("densenet121_gn", (3, 64, 96), 2, {**args, "pool": p}) for p in (True, False)
    )
    assert whole.classifier.in_features == 2 * 3 * mean.classifier.in_features
    with torch.no_grad():
        whole.features.load_state_dict(mean.features.state_dict())
        whole.classifier.weight.copy_(mean.classifier.weight.repeat_interleave(6, dim=1) / 6)
    x = randn(2, 3, 64, 96).float()
    torch.testing.assert_close(whole(x), mean(x))


# ---------------------------------------------------------------------------------- the CT CNN


def test_ct_network_layers():
    with torch.device("meta"):
        module = make("cnn_fedreg_ct", (3, 128, 128), 2)
    assert convolutions(module) == [128, 256, 256, *[512] * 6]
    kinds = [type(m).__name__ for m in module.features]
    assert [i for i, kind in enumerate(kinds) if kind == "GroupNorm"] == [11, 17]
    assert kinds.index("MaxPool2d") == 13
    assert module.fc.in_features == 512 * 42 * 42


# ----------------------------------------------------------------------------------- refusals


@each(
    ("name", "shape", "args", "said"),
    [
        ("vgg11", CIFAR, {"dropout": 1.0}, "`dropout` must be"),
        ("vgg11", CIFAR, {"hidden": []}, "`hidden` must be"),
        ("vgg11", CIFAR, {"width": 0}, "`width` must be"),
        ("vgg11_gradma", CIFAR, {"norm": "layer"}, "batch, group, none"),
        ("vgg11_gradma", (784,), {}, "(channels, height, width)"),
        ("resnet20", CIFAR, {"norm": "none"}, "batch, group"),
        ("resnet20", CIFAR, {"shortcut": "none"}, "identity, projection"),
        ("densenet121_gn", CIFAR, {"norm": "none"}, "batch, group"),
        ("densenet121_gn", CIFAR, {"pool": 1}, "`pool` must be true or false"),
        ("densenet121_gn", CIFAR, {"blocks": 6}, "`blocks` must be"),
        ("vit", CIFAR, {"patch": 5}, "patches of 5 x 5 on 32 x 32 pixels"),
        ("vit", CIFAR, {"patch": 0}, "`patch` must be"),
        ("vit", CIFAR, {"patch": 64}, "at least 64 x 64"),
        ("vit", CIFAR, {"heads": 5}, "width 192 and 5 heads"),
        ("vit", CIFAR, {"dropout": -0.1}, "`dropout` must be"),
        ("char_lstm", (1, 80), {}, "sequences of characters"),
        ("char_lstm", (80,), {"biases": 3}, "`biases` must be 1 or 2"),
        ("char_lstm", (80,), {"vocabulary": 0}, "`vocabulary` must be"),
        ("char_lstm", (80,), {"layers": 0}, "`layers` must be"),
    ],
)
def test_refused(name, shape, args, said):
    with pytest.raises(ModelError) as caught:
        make(name, shape, 10, args)
    assert said in str(caught.value)
    assert name in caught.value.what
    assert len(str(caught.value).splitlines()) <= 4
