"""A module and its loss in words: all that decides what is computed, but the module's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from fedkeel.source_digest import (
    describe_attributes,
    describe_hooks,
    source_digest,
    without_addresses,
)


def in_words(
    module: nn.Module, head: str, loss: Callable[[Tensor, Tensor], Tensor], trained: Iterable[str]
) -> str:
    """Return how a module and a loss are written, the same text in every process.

    Args:
        module: told by its structure; what is not torch's own also by code and attributes, hooks by
            theirs. Numbers of parameters and buffers are left out.
        head: name of the classifier.
        loss: told by its code and by what it holds, numbers too.
        trained: names of the parameters that are trained.
    """
    name = getattr(loss, "__qualname__", repr(loss))
    told = [f"{module!r} head={head!r} loss={name} {source_digest(loss)}"]
    told.append(f"trained={','.join(trained)}")
    own = (*module.parameters(), *module.buffers())
    for place, one in module.named_modules():
        if not type(one).__module__.startswith("torch."):
            told.append(f"{place}: {source_digest(type(one))} {describe_attributes(one, own)}")
        told += [f"{place}: {hook}" for hook in describe_hooks(one, own)]
    return without_addresses("\n".join(told))
