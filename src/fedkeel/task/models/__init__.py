"""The papers' networks by name, and a user's own by import path.

>>> from fedkeel.task.models import make
>>> make("2nn", shape=(1, 28, 28), classes=10).fc3
Linear(in_features=256, out_features=10, bias=True)

Initial parameters come from torch's global generator, which the caller seeds, and from nothing
else. To add a network: a function (shape, classes, *, ...) in a file beside this one, and one line
in `MODELS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedkeel.base.memory import format_bytes, free_memory
from fedkeel.base.user_code import one_line
from fedkeel.errors import FedkeelError, ModelError, did_you_mean
from fedkeel.task.models import (
    checks,
    cnn,
    custom,
    densenet,
    fixup,
    hub,
    lenet,
    mlp,
    recurrent,
    resnet,
    transformer,
    vgg,
)
from fedkeel.task.models.norm import replace_batch_norm

__all__ = ["MODELS", "ModelInfo", "builder", "make", "replace_batch_norm"]


@dataclass(frozen=True)
class ModelInfo:
    """A network that is known by name.

    Args:
        name: the name.
        about: one line.
        paper: the paper that uses it, "" where none in particular.
        build: makes it from (shape, classes, and keyword arguments of its own).
    """

    name: str
    about: str
    paper: str
    build: Callable[..., nn.Module]


_KNOWN = (
    ModelInfo("logistic", "linear softmax regression", "", mlp.logistic),
    ModelInfo("mlp", "fully connected layers, hidden sizes as given", "", mlp.mlp),
    ModelInfo("2nn", "784-512-256-10, for MNIST", "FedGH", mlp.two_nn),
    ModelInfo("mlp_gcfed", "784-512-256-62, Kaiming, for EMNIST", "GC-Fed", mlp.mlp_gcfed),
    ModelInfo("tinynn", "784-200-100-10 with BatchNorm, for MNIST", "GradMA", mlp.tinynn),
    ModelInfo("cnn_mcmahan", "2 convolutions + 512 units, for MNIST", "FedAvg", cnn.cnn_mcmahan),
    ModelInfo(
        "cnn_gcfed", "2 convolutions + 512 units, Kaiming, for CIFAR", "GC-Fed", cnn.cnn_gcfed
    ),
    ModelInfo(
        "cnn_fedgc", "2 convolutions + 512 and 100 units, for digits", "FedGC", cnn.cnn_fedgc
    ),
    ModelInfo(
        "cnn_fedgh", "2 convolutions + 128 units, dropout, for CIFAR", "FedGH", cnn.cnn_fedgh
    ),
    ModelInfo("cnn_fedreg", "3 convolutions + 256 units, for MNIST", "FedReg", cnn.cnn_fedreg),
    ModelInfo(
        "cnn_fedreg_ct", "9 convolutions, GroupNorm, for CT images", "FedReg", cnn.cnn_fedreg_ct
    ),
    ModelInfo("lenet5", "wide LeNet-5, BatchNorm, dropout, for CIFAR", "GradMA", lenet.lenet5),
    ModelInfo("lenet_dlg", "LeNet with sigmoids, to be attacked", "DLG", lenet.lenet_dlg),
    ModelInfo("vgg11", "no normalisation, 4096 units twice, dropout", "GC-Fed", vgg.vgg11),
    ModelInfo(
        "vgg11_gradma", "BatchNorm, 128 units, dropout, for CIFAR", "GradMA", vgg.vgg11_gradma
    ),
    ModelInfo(
        "resnet20", "BatchNorm, 16 to 64 channels, for small images", "GradMA", resnet.resnet20
    ),
    ModelInfo("resnet18_gn", "GroupNorm, 3 x 3 stem, for CIFAR", "GC-Fed", resnet.resnet18_gn),
    ModelInfo("resnet18", "BatchNorm, 7 x 7 stem, from 64 x 64", "FedGH", resnet.resnet18),
    ModelInfo("fixup_resnet9", "no normalisation, for CIFAR", "FedReg, FedGC", fixup.fixup_resnet9),
    ModelInfo("densenet121_gn", "GroupNorm, 7 x 7 stem", "FedReg", densenet.densenet121_gn),
    ModelInfo("vit", "vision transformer, 6 blocks of width 192, for CIFAR", "", transformer.vit),
    ModelInfo(
        "char_lstm", "2 layers of 256 on 80 characters, for tokens", "FedAvg", recurrent.char_lstm
    ),
)

_COPIES = 4
"""How often parameters are in memory, at least: the server's, a client's, its gradients, a step."""

MODELS: Mapping[str, ModelInfo] = MappingProxyType({info.name: info for info in _KNOWN})
"""The networks that are known by name."""


def builder(name: str) -> Callable[..., object]:
    """Return what makes the network of this name: a key of `MODELS`, an import path, or a hub's.

    Raises:
        ModelError: an unknown name, or a class that cannot be imported.
    """
    if hub.is_hub_name(name):
        return hub.builder(name)
    if ":" in name:
        return custom.load(name)
    if name in MODELS:
        return MODELS[name].build
    suggestion = custom.suggested(name)
    raise ModelError(
        f"there is no model {name!r}",
        expected="a known name, or an import path package.module:Class",
        do=suggestion or did_you_mean(name, MODELS, limit=len(MODELS)),
    )


def make(
    name: str, shape: Sequence[int], classes: int, args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Make a network with fresh parameters.

    Args:
        name: a key of `MODELS`, or an import path ``package.module:Class``, which is looked for in
            the current working directory first.
        shape: shape of one input.
        classes: number of classes, Y.
        args: keyword arguments of the network. `shape` and `classes` are added where the network
            has arguments of these names and `args` has not.

    Raises:
        ModelError: an unknown name or argument, a wrong value, an input shape the network cannot
            take, or a class that cannot be imported or built.
    """
    build = builder(name)
    keywords = _keywords(name, build, {"shape": tuple(shape), "classes": classes}, dict(args or {}))
    return _build(name, build, keywords)


def _keywords(
    name: str, build: Callable[..., object], data: Mapping[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Return `given` and what the data adds, after a look at the arguments there are."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError:  # a builtin without a signature: the call will tell
        return given
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    keywords = {k: v for k, v in data.items() if k in named} | given
    arguments = [name for name in named if name not in data]
    extra = [word for word in given if word not in named]
    if extra and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ModelError(
            f"model {name!r} has no argument {extra[0]!r}",
            do=did_you_mean(extra[0], arguments)
            if arguments
            else "remove it: the model has no arguments",
        )
    missing = [word for word, p in named.items() if p.default is p.empty and word not in keywords]
    if missing:
        raise ModelError(
            f"model {name!r} needs the argument {missing[0]!r}",
            expected=f"arguments {', '.join(arguments)}",
            do="give it in the arguments of the model",
        )
    return keywords


def _build(name: str, build: Callable[..., object], keywords: dict[str, Any]) -> nn.Module:
    try:
        if name in MODELS:
            checks.positive_int("classes", keywords["classes"])
            _check_memory(build, keywords)
        module = build(**keywords)
    except ModelError as error:
        raise _named(name, error) from error
    except FedkeelError:
        raise
    except Exception as error:  # a user's class may raise anything
        raise ModelError(
            f"model {name!r} cannot be built",
            got=one_line(error),
            do=f"construct it in Python yourself, with the arguments {keywords}",
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"model {name!r} is not a torch.nn.Module",
            got=f"a {type(module).__name__}",
            do="return a new module",
        )
    return module


def _check_memory(build: Callable[..., object], keywords: dict[str, Any]) -> None:
    """Refuse a network that does not fit into memory, before its parameters are made."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _WithoutNumbers():
        module = build(**keywords)
    if not isinstance(module, nn.Module):
        return
    needed = _COPIES * sum(p.nbytes for p in module.parameters())
    free = free_memory()
    if free is not None and needed > free:
        raise ModelError(
            "it does not fit into memory",
            got=f"{sum(p.numel() for p in module.parameters()):,} parameters, which take "
            f"{format_bytes(needed)} while a client trains",
            expected=f"at most {format_bytes(free)}, which are free",
            do="make the network or its inputs smaller",
        )


class _WithoutNumbers(TorchFunctionMode):
    """Leaves tensors without memory as they are; torch's own way loads modules for seconds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func in _FILLING or getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


_FILLING = {
    Tensor.normal_,
    Tensor.uniform_,
    Tensor.fill_,
    Tensor.zero_,
    Tensor.erfinv_,
    Tensor.mul_,
    Tensor.add_,
    Tensor.clamp_,
}
"""What initialises parameters in place."""


def _named(name: str, error: ModelError) -> ModelError:
    """Return the same error, told of the model that the user named."""
    what = f"model {name!r}: {error.what}"
    return ModelError(what, got=error.got, expected=error.expected, why=error.why, do=error.do)
