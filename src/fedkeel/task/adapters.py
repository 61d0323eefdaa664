"""Low-rank adapters of a module, by the names that `peft` gives to their tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedkeel.base.lazy import torch
from fedkeel.tree import Tree

_FACTOR = re.compile(r"(?P<layer>.*)\.lora_A\.(?P<key>[^.]+)\.weight")

_OF_ADAPTERS = re.compile(r"\.lora_|\.original_module\.")
"""Parameters that peft adds, or keeps beside those that it trains."""

_MOST_MADE_AGAIN = 200_000_000
"""Parameters up to which a network is made a second time."""


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


def on_random_weights(
    trained: Tree, frozen: Tree, make_again: Callable[[], torch.nn.Module]
) -> str:
    """Return a warning where frozen weights under adapters are others with another seed.

    Args:
        trained: parameters that are trained, by name.
        frozen: all others.
        make_again: makes the network with another seed; a very large one is not made again.
    """
    base = {name: p for name, p in frozen.items() if not _OF_ADAPTERS.search(name)}
    has_adapters = any(".lora_A." in name for name in (*trained, *frozen))
    if not has_adapters or not 0 < sum(p.numel() for p in base.values()) <= _MOST_MADE_AGAIN:
        return ""
    again = dict(make_again().named_parameters())
    random = [n for n, p in base.items() if n in again and not torch.equal(again[n].to(p), p)]
    if not random:
        return ""
    more = f" and {len(random) - 1:,} more" if len(random) > 1 else ""
    return (
        f"the adapters lie on weights that are random and frozen, {random[0]}{more}: name trained "
        "ones ('hf:NAME' without config), train these too (model.lora.train), or leave out the "
        "adapters"
    )
