"""A user's own network by import path, and every refusal of `make`."""

import sys

import pytest

from fedkeel.errors import FedkeelError, ModelError
from fedkeel.task.models import make

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes, *, width=3):
        super().__init__()
        self.given = (shape, classes, width)
        self.fc = nn.Linear(shape[0], classes)

class Fixed(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.fc = nn.Linear(width, 2)

class Needs(nn.Module):
    def __init__(self, classes, width):
        super().__init__()

class Open(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        raise ValueError("two\\nlines")

def factory(classes):
    return nn.Linear(2, classes)

def wrong():
    return 3

class Plain:
    pass

built = nn.Linear(1, 1)
number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "my_net.py").write_text(NET)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


def test_own_network_beside_the_experiment(here):
    path = list(sys.path)
    assert make("my_net:Net", (4,), 2, {"width": 5}).given == ((4,), 2, 5)
    assert make("my_net:Net", (4,), 2, {"classes": 7}).given == ((4,), 7, 3)
    assert make("my_net:Fixed", (4,), 2).fc.in_features == 3
    assert make("my_net:Open", (4,), 2, {"depth": 1}).options == {"depth": 1}
    assert make("my_net:factory", (4,), 6).out_features == 6
    assert make("torch.nn:Linear", (4,), 6, {"in_features": 2, "out_features": 3}).out_features == 3
    assert sys.path == path


def test_own_network_in_a_package(here):
    (here / "lab").mkdir()
    (here / "lab" / "__init__.py").touch()
    (here / "lab" / "nets.py").write_text(NET)
    assert make("lab.nets:Net", (4,), 2).given == ((4,), 2, 3)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("my_net.py:Net", {}, "write 'my_net:Net'"),
        ("my_net", {}, "write 'my_net:Net' for the class Net in my_net.py"),
        ("my_net.py", {}, "write 'my_net:Net' for the class Net in my_net.py"),
        ("my_net:", {}, "not an import path"),
        (":Net", {}, "not an import path"),
        ("dir/my_net:Net", {}, "not an import path"),
        ("no_such:Net", {}, "no module 'no_such'"),
        ("my_net.deeper:Net", {}, "no module 'my_net.deeper'"),
        ("my_net:Nett", {}, "did you mean 'Net'?"),
        ("empty:Net", {}, "write a torch.nn.Module there"),
        ("hungry:Net", {}, "imports 'no_such_package'"),
        ("invalid:Net", {}, "SyntaxError"),
        ("invalid:Net", {}, "raised in line 1 of "),
        ("failing:Net", {}, "raised in <module>, line 2 of "),
        ("failing:Net", {}, "RuntimeError: on purpose"),
        ("my_net:Plain", {}, "another class"),
        ("my_net:built", {}, "an object of Linear"),
        ("my_net:number", {}, "an object of int"),
        ("my_net:wrong", {}, "a int"),
        ("my_net:Broken", {}, "ValueError: two"),
        ("my_net:Needs", {}, "needs the argument 'width'"),
        ("my_net:Fixed", {"widht": 1}, "did you mean 'width'?"),
        ("my_net:Broken", {"width": 1}, "has no arguments"),
    ],
)
def test_own_network_refused(here, name, args, said):
    (here / "empty.py").write_text("x = 1\n")
    (here / "hungry.py").write_text("import no_such_package\n")
    (here / "invalid.py").write_text("def :\n")
    (here / "failing.py").write_text("\nraise RuntimeError('on purpose')\n")
    path = list(sys.path)
    with pytest.raises(ModelError) as caught:
        make(name, (4,), 2, args)
    assert said in str(caught.value)
    assert name in caught.value.what
    assert 1 < len(str(caught.value).splitlines()) <= 4
    assert sys.path == path


def test_an_error_of_fedkeel_passes(here):
    (here / "raising.py").write_text(
        "from fedkeel.errors import ConfigError\ndef net():\n    raise ConfigError('mine')\n"
    )
    with pytest.raises(FedkeelError, match=r"^mine$"):
        make("raising:net", (4,), 2)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "args", "said"),
    [
        ("fixup_resnet", CIFAR, 10, {}, "did you mean 'fixup_resnet9'?"),
        ("my_net.Net", CIFAR, 10, {}, "package.module:Class"),
        ("mlp", CIFAR, 10, {"hiden": [3]}, "did you mean 'hidden'? known: hidden, norm"),
        ("2nn", MNIST, 10, {"hidden": [3]}, "has no arguments"),
        ("mlp", (), 10, {}, "whole numbers >= 1"),
        ("mlp", (0, 3), 10, {}, "shape (0, 3)"),
        ("mlp", CIFAR, 0, {}, "`classes` must be a whole number >= 1"),
        ("mlp", CIFAR, 10, {"hidden": []}, "`hidden` must be one or more"),
        ("mlp", CIFAR, 10, {"hidden": [3, -1]}, "[3, -1]"),
        ("mlp", CIFAR, 10, {"hidden": 64}, "in a list"),
        ("mlp", CIFAR, 10, {"norm": "layer"}, "batch, group, none"),
        ("cnn_gcfed", (784,), 10, {}, "(channels, height, width)"),
        ("cnn_gcfed", (28, 28), 10, {}, "(channels, height, width)"),
        ("cnn_fedgc", CIFAR, 101, {"final_layer": False}, "101 classes"),
        ("cnn_fedgc", CIFAR, 10, {"final_layer": "no"}, "true or false"),
        ("cnn_fedgh", (3, 10, 9), 10, {}, "at least 10 x 10"),
        ("cnn_fedgh", CIFAR, 10, {"dropout": 1.0}, "`dropout` must be"),
        ("cnn_fedgh", CIFAR, 10, {"dropout_fc": "half"}, "'half'"),
        ("resnet18_gn", CIFAR, 10, {"norm": "none"}, "batch, group"),
        ("resnet18_gn", CIFAR, 10, {"groups": 0}, "`groups` must be"),
        ("fixup_resnet9", CIFAR, 10, {"width": True}, "`width` must be"),
    ],
)
def test_refused(name, shape, classes, args, said):
    with pytest.raises(ModelError) as caught:
        make(name, shape, classes, args)
    assert said in str(caught.value)
    assert name in caught.value.what
    assert len(str(caught.value).splitlines()) <= 4
