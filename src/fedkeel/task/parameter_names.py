"""Names of parameters and sub-modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def blocks(names: Sequence[str]) -> list[list[str]]:
    """Split parameter names into the blocks of the network, in order.

    A block is a child of the first module on the way down that has several with parameters.

    >>> blocks(["net.stem.weight", "net.fc.weight", "net.fc.bias"])
    [['net.stem.weight'], ['net.fc.weight', 'net.fc.bias']]
    """
    depth = 0
    while True:
        groups: dict[str, list[str]] = {}
        for name in names:
            owner = name.split(".")[:-1]
            groups.setdefault(".".join(owner[: depth + 1]), []).append(name)
        if len(groups) > 1 or depth >= max(name.count(".") for name in names):
            return list(groups.values())
        depth += 1


def under(name: str, module: str) -> bool:
    """Return whether a parameter belongs to a sub-module.

    >>> under("fc2.weight", "fc2"), under("fc21.weight", "fc2")
    (True, False)
    """
    return name == module or name.startswith(module + ".")


def module_names(module: nn.Module) -> Sequence[str]:
    """Return the names of the sub-modules that own parameters, in order."""
    seen = {name.rpartition(".")[0]: None for name, _ in module.named_parameters()}
    return list(seen)
