"""A text that describes a module and its loss: all that decides what they compute, but numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from fedkeel.source_digest import (
    describe_attributes,
    describe_hooks,
    source_digest,
    without_addresses,
)


def describe_model(
    module: nn.Module, head: str, loss: Callable[[Tensor, Tensor], Tensor], trained: Iterable[str]
) -> str:
    """Return a text that describes a module and a loss, the same in every process.

    Args:
        module: described by its structure; a module that is not torch's own also by its source and
            attributes, hooks by their source. Numbers of parameters and buffers are left out.
        head: name of the classifier.
        loss: described by its source and by what it holds, numbers too.
        trained: names of the parameters that are trained.
    """
    name = getattr(loss, "__qualname__", repr(loss))
    lines = [f"{module!r} head={head!r} loss={name} {source_digest(loss)}"]
    lines.append(f"trained={','.join(trained)}")
    tensors = (*module.parameters(), *module.buffers())
    for path, submodule in module.named_modules():
        kind = type(submodule)
        if not kind.__module__.startswith("torch."):
            attributes = describe_attributes(submodule, tensors)
            lines.append(f"{path}: {source_digest(kind)} {attributes}")
        lines += [f"{path}: {hook}" for hook in describe_hooks(submodule, tensors)]
    return without_addresses("\n".join(lines))
