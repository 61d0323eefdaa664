"""Low-rank adapters of a module, by the names that `peft` gives to their tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedkeel.base.lazy import torch

_FACTOR = re.compile(r"(?P<layer>.*)\.lora_A\.(?P<key>[^.]+)\.weight")


@dataclass(frozen=True)
class Adapter:
    """A product of two factors that is added to a matrix or a filter: W + scale B A.

    Args:
        base: name of W, [out, in, ...].
        a: name of A, [r, in, ...].
        b: name of B, [out, r, ...].
        scale: of the product.
        is_transposed: whether W is [in, out].
    """

    base: str
    a: str
    b: str
    scale: float
    is_transposed: bool


def adapters_of(module: torch.nn.Module) -> Sequence[Adapter]:
    """Return the adapters of layers with a matrix or a filter, in order."""
    found: list[Adapter] = []
    names = [name for name, _ in module.named_parameters()]
    for match in filter(None, map(_FACTOR.fullmatch, names)):
        layer, key = match["layer"], match["key"]
        owner = module.get_submodule(layer)
        base, b = f"{layer}.base_layer.weight", f"{layer}.lora_B.{key}.weight"
        scales = getattr(owner, "scaling", None)
        if base in names and b in names and isinstance(scales, Mapping):
            is_transposed = bool(getattr(owner, "fan_in_fan_out", False))
            found.append(Adapter(base, match[0], b, float(scales[key]), is_transposed))
    return tuple(found)
