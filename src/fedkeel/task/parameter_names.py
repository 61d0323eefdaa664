"""Names of parameters and sub-modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fedkeel.base.lazy import torch
from fedkeel.errors import ModelError, did_you_mean


def blocks(names: Sequence[str]) -> list[list[str]]:
    """Split parameter names into the blocks of the network, in order; see `blocks_by_module`.

    >>> blocks(["net.stem.weight", "net.fc.weight", "net.fc.bias"])
    [['net.stem.weight'], ['net.fc.weight', 'net.fc.bias']]
    """
    return list(blocks_by_module(names).values())


def blocks_by_module(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the parameter names of each block of the network, by the block's sub-module, in order.

    A block is a child of the first module on the way down that has several with parameters.

    >>> blocks_by_module(["net.stem.weight", "net.fc.weight", "net.fc.bias"])
    {'net.stem': ['net.stem.weight'], 'net.fc': ['net.fc.weight', 'net.fc.bias']}
    """
    depth = 0
    while True:
        groups: dict[str, list[str]] = {}
        for name in names:
            owner = name.split(".")[:-1]
            groups.setdefault(".".join(owner[: depth + 1]), []).append(name)
        if len(groups) > 1 or depth >= max(name.count(".") for name in names):
            return groups
        depth += 1


def under(name: str, module: str) -> bool:
    """Return whether a parameter belongs to a sub-module.

    >>> under("fc2.weight", "fc2"), under("fc21.weight", "fc2")
    (True, False)
    """
    return name == module or name.startswith(module + ".")


def module_names(module: torch.nn.Module) -> Sequence[str]:
    """Return the names of the sub-modules that own parameters, in order."""
    seen = {name.rpartition(".")[0]: None for name, _ in module.named_parameters()}
    return list(seen)


@dataclass(frozen=True)
class ParameterLayout:
    """The trained parameters of a model, as a part that chooses among them sees them.

    Args:
        names: every trained parameter, in order.
        head: those of the classifier; none where the model has no head.
        normalisation: those of batch and instance normalisation, and of all layers whose class has
            a name that ends in ``Norm``.
        modules: names of the sub-modules that own parameters, in order.
    """

    names: tuple[str, ...]
    head: frozenset[str]
    normalisation: frozenset[str]
    modules: tuple[str, ...]

    @classmethod
    def of(cls, module: torch.nn.Module, head: str = "") -> ParameterLayout:
        """Return the layout of a module.

        Args:
            module: its parameters that take no gradient are left out.
            head: name of the classifier sub-module, "" for none.
        """
        names = tuple(n for n, p in module.named_parameters() if p.requires_grad)
        norms = [
            name
            for name, layer in module.named_modules()
            if isinstance(layer, torch.nn.modules.batchnorm._NormBase)
            or type(layer).__name__.endswith("Norm")
        ]
        return cls(
            names,
            frozenset(n for n in names if head and under(n, head)),
            frozenset(n for n in names if any(under(n, norm) for norm in norms)),
            tuple(module_names(module)),
        )

    def choose(self, patterns: str, *, part: str) -> frozenset[str]:
        """Return the parameters that comma-separated names of sub-modules or parameters mean.

        ``*`` in a name stands for any characters.

        Args:
            patterns: such as ``"fc2"``, ``"layers.0, head"`` or ``"*.bias"``.
            part: who asks, for the message.

        Raises:
            ModelError: a name fits no trained parameter.
        """
        chosen: set[str] = set()
        for pattern in (text.strip() for text in patterns.split(",")):
            fitting = {n for n in self.names if _fits(n, pattern)}
            if not fitting:
                raise ModelError(
                    f"{part}: no trained parameter belongs to {pattern!r}.",
                    expected="names of sub-modules or parameters, comma-separated; * for any text",
                    do=did_you_mean(pattern, [*self.modules, *self.names]),
                )
            chosen |= fitting
        return frozenset(chosen)


def _fits(name: str, pattern: str) -> bool:
    """Return whether a parameter, or a module that it belongs to, has a name of a pattern."""
    words = name.split(".")
    return any(fnmatchcase(".".join(words[:n]), pattern) for n in range(1, len(words) + 1))
