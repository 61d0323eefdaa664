"""Normalisation of the papers' networks, and GroupNorm in place of a user's BatchNorm."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedkeel.errors import ModelError
from fedkeel.task.models import checks

Norm = Literal["batch", "group", "none"]
"""Normalisation of a network: by batch statistics, by groups of channels, or none."""


FEATURES = 8
"""Smallest number of features in a group: of two, little more than signs would be left."""


def norm1d(kind: Norm, width: int, groups: int = 32) -> nn.Module:
    """Return the normalisation of [B, width] features."""
    if checks.one_of("norm", kind, ("batch", "group", "none")) == "batch":
        return nn.BatchNorm1d(width)
    if kind == "none":
        return nn.Identity()
    return nn.GroupNorm(group_count(width, checks.positive_int("groups", groups), FEATURES), width)


def norm2d(kind: Norm, width: int, groups: int = 32) -> nn.Module:
    """Return the normalisation of [B, width, height, width] maps."""
    if checks.one_of("norm", kind, ("batch", "group", "none")) == "batch":
        return nn.BatchNorm2d(width)
    if kind == "none":
        return nn.Identity()
    return nn.GroupNorm(group_count(width, checks.positive_int("groups", groups)), width)


def group_count(width: int, groups: int, min_size: int = 1) -> int:
    """Return the largest divisor of `width` up to `groups` with groups of `min_size` or more.

    >>> group_count(64, 32), group_count(100, 32), group_count(7, 4), group_count(32, 32, 2)
    (32, 25, 1, 16)
    """
    divisors = (n for n in range(min(groups, width), 1, -1) if width % n == 0)
    return next((n for n in divisors if width // n >= min_size), 1)


def replace_batch_norm(module: nn.Module, groups: int = 32) -> nn.Module:
    """Return a copy of `module` with GroupNorm in place of every BatchNorm.

    Batch statistics of one client say little about another, and they are buffers: a method that
    moves parameters does not move them. GroupNorm has no buffers and no batch statistics.

    Weight, bias, eps, type, device, training mode and `requires_grad` are those of the BatchNorm;
    its running statistics are dropped, so a trained network needs some training afterwards. Hooks
    on a BatchNorm are dropped too. Draws no random numbers.

    Args:
        module: any module; it is left as it is.
        groups: upper bound of the number of groups, >= 1. Each layer gets the largest divisor of
            its channels that is not above. `BatchNorm1d` also keeps eight channels in a group,
            or all: on [B, channels] inputs a group of one is normalised to 0, and one of two to
            little more than signs.
    """
    checks.positive_int("groups", groups)
    if any(is_lazy(t) for t in (*module.parameters(), *module.buffers())):
        raise ModelError(
            f"{type(module).__name__} has lazy layers",
            why="they have no channels before their first batch",
            do="send one batch through the model first",
        )
    made = copy.deepcopy(module)
    if isinstance(made, _BatchNorm):
        return _group_norm("", made, groups)
    # A BatchNorm that is shared stays shared: by the identity of the one in the copy.
    new: dict[int, nn.Module] = {}
    norms = [
        (name, child)
        for name, child in made.named_modules(remove_duplicate=False)
        if isinstance(child, _BatchNorm)
    ]
    for name, child in norms:
        if id(child) not in new:
            new[id(child)] = _group_norm(name, child, groups)
        made.set_submodule(name, new[id(child)])
    return made


def _group_norm(name: str, old: _BatchNorm, groups: int) -> nn.GroupNorm:
    width = old.num_features
    one_dimensional = isinstance(old, nn.BatchNorm1d)
    if one_dimensional and width < 2:
        raise ModelError(
            f"the batch normalisation {name!r} cannot become a group normalisation",
            got=f"{type(old).__name__} of 1 channel",
            why="a single channel is normalised to 0",
            do="remove or replace this layer by hand",
        )
    count = group_count(width, groups, FEATURES if one_dimensional else 1)
    new = nn.GroupNorm(count, width, eps=old.eps, affine=old.affine)
    if old.affine:
        new = new.to(device=old.weight.device, dtype=old.weight.dtype)
        with torch.no_grad():
            new.weight.copy_(old.weight)
            new.bias.copy_(old.bias)
        new.weight.requires_grad_(old.weight.requires_grad)
        new.bias.requires_grad_(old.bias.requires_grad)
    return new.train(old.training)
