"""A text that describes a module and its loss: all that decides what they compute, but numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType

from torch import Tensor, nn

from fedkeel.base.fingerprint.reached_values import Describer, Description, without_addresses


def describe_model(
    module: nn.Module, head: str, loss: Callable[[Tensor, Tensor], Tensor], trained: Iterable[str]
) -> Description:
    """Return a text that describes a module and a loss, the same in every process.

    Args:
        module: described by its structure, and by all that its code can reach. Numbers of its own
            parameters and buffers are left out. Torch's modules within one of fedkeel's networks
            are described only by their structure.
        head: name of the classifier.
        loss: described by all that it can reach, numbers of its tensors too.
        trained: names of the parameters that are trained.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    modules = dict(module.named_modules())
    known = {id(value): f"@{path}" for path, value in (*tensors, *modules.items())}
    describer = Describer(known)
    if isinstance(loss, FunctionType):
        source = describer.source(loss, "loss")
    else:
        source = describer.describe(loss, "loss")
    name = getattr(loss, "__qualname__", repr(loss))
    lines = [f"{module!r} head={head!r} loss={name} {source}"]
    lines.append(f"trained={','.join(trained)}")
    is_own = type(module).__module__.startswith("fedkeel.")
    for path, submodule in modules.items():
        kind = type(submodule)
        if not (kind.__module__.startswith("torch.") and is_own):
            attributes = describer.attributes(submodule, f"model.{path}".rstrip("."))
            lines.append(f"{path}: {describer.source(kind)} {attributes}")
        lines += [f"{path}: {hook}" for hook in describer.hooks(submodule)]
    return describer.description(without_addresses("\n".join(lines)))
