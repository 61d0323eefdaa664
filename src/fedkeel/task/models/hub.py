"""Networks of other libraries by name: ``hf:NAME`` of transformers, ``timm:NAME`` of timm."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from fedkeel.base.optional import imported
from fedkeel.base.user_code import one_line
from fedkeel.config.code_names import HUBS
from fedkeel.errors import ModelError, did_you_mean

HEADS: Mapping[str, str] = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
}
"""What a network of transformers is for -> the class that makes it."""

_FOREIGN_WEIGHTS = (
    *("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_custom_load"),
    "cache_dir",
)
"""Arguments of ``timm.create_model`` by which it would read weights of elsewhere."""

_WITHOUT_CLASSES = ("causal-lm", "masked-lm")
"""Heads whose size is that of the vocabulary."""


def is_hub_name(name: str) -> bool:
    """Return whether a name is of another library."""
    return name.startswith(HUBS)


def builder(name: str) -> Callable[..., nn.Module]:
    """Return what makes the network of such a name."""
    library, _, of_library = name.partition(":")
    return partial(_transformers if library == "hf" else _timm, of_library)


def _transformers(
    name: str,
    classes: int,
    *,
    task: str = "sequence-classification",
    config: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Make a network of transformers: trained weights of that name, or a fresh one.

    Code that comes with weights, or that a configuration names, is never run, and weights are read
    as tensors only.

    Args:
        name: a name on the hub, or a folder; with `config` a kind of network, such as ``bert``.
        classes: number of classes.
        task: one of `HEADS`.
        config: the sizes of a fresh network; None takes trained weights.
    """
    transformers = imported("transformers", f"model.name = 'hf:{name}'")
    if task not in HEADS:
        raise ModelError(f"there is no task {task!r} of transformers", do=did_you_mean(task, HEADS))
    auto = getattr(transformers, HEADS[task])
    labels = {} if task in _WITHOUT_CLASSES else {"num_labels": classes}
    try:
        if config is not None:
            sizes = transformers.AutoConfig.for_model(name, **{**labels, **config})
            module: nn.Module = auto.from_config(sizes, trust_remote_code=False)
        else:
            module = auto.from_pretrained(name, trust_remote_code=False, **labels)
    except Exception as error:  # whatever the network, the cache or the files give
        raise ModelError(
            "transformers cannot make it",
            got=one_line(error),
            expected="a name on the hub, a folder that save_pretrained wrote, or a kind of network "
            "such as 'bert' with config = {...}",
            do="check the name; without a network trained weights have to be in the cache",
        ) from error
    return module.train()


def _timm(name: str, shape: tuple[int, ...], classes: int, **args: Any) -> nn.Module:  # noqa: ANN401
    """Make a network of timm; `args` are those of ``timm.create_model``.

    Weights of a file or of anybody's repository may be pickled, which timm would run: only those
    are taken that timm itself lists under the name.
    """
    foreign = [word for word in args if word in _FOREIGN_WEIGHTS]
    if foreign or not re.fullmatch(r"[\w.-]+", name):
        raise ModelError(
            "only networks and weights that timm itself lists can be named",
            got=f"the argument {foreign[0]!r}" if foreign else repr(name),
            why="other weights may be pickled, and a pickle can run any code when it is read",
            do="make the network in a function of your own, and name that",
        )
    timm = imported("timm", f"model.name = 'timm:{name}'")
    options = {"num_classes": classes, "in_chans": shape[0] if len(shape) == 3 else 3, **args}
    module: nn.Module = timm.create_model(name, **options)
    return module
