"""What is learned: a model, its loss, its classifier, and what happens to its buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fedkeel.config import Buffers
from fedkeel.data.dataset import Dataset
from fedkeel.errors import ModelError, did_you_mean
from fedkeel.rng import torch_seed
from fedkeel.task.network import Loss, Network, cross_entropy, module_names


@dataclass(frozen=True)
class Task:
    """A model to train and the loss to train it on.

    Args:
        model: a module, whose parameters are then the initial ones for every seed; or a function
            or class that makes one, which is called anew for each seed under that seed.
        head: name of the classifier sub-module, e.g. ``"fc2"``; None takes the module that owns the
            last parameter.
        loss: (logits [B, Y], y) -> losses [B] or their mean []; `y` is labels [B], and for methods
            with soft labels class probabilities [B, Y].
        buffers: what happens to buffers: ``refuse``, ``average`` or ``local``.

    >>> Task(nn.Linear(2, 3)).head is None
    True
    """

    model: nn.Module | Callable[[], nn.Module]
    head: str | None = None
    loss: Loss = cross_entropy
    buffers: Buffers = "refuse"

    def network(self, data: Dataset, seed: int, dtype: torch.dtype) -> Network:
        """Make the network for one run, and refuse a model that does not fit the data.

        Args:
            data: the training set.
            seed: seed of the initial parameters, where `model` makes a module.
            dtype: type of the parameters.

        Raises:
            ModelError: no trainable parameters; a name with a slash; buffers under the policy
                ``refuse``; a head that does not exist; a forward pass that fails; an output that
                does not fit the labels.
        """
        module = self.model if isinstance(self.model, nn.Module) else self._make(self.model, seed)
        if not any(p.requires_grad for p in module.parameters()):
            raise ModelError(
                f"{type(module).__name__} has no parameters to train.",
                do="check requires_grad, and that sub-modules are attributes of the module",
            )
        _check_names(module)
        _check_buffers(module, self.buffers)
        head = _head(module, self.head)
        network = Network(module, head, self.loss, dtype, self.buffers == "local")
        network.try_layout(_check_output(network, type(module).__name__, data))
        return network

    @staticmethod
    def _make(model: Callable[[], nn.Module], seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "init"))
            module = model()
        if not isinstance(module, nn.Module):
            raise ModelError(
                "The model function did not return a torch.nn.Module.",
                got=type(module).__name__,
            )
        return module


def _check_names(module: nn.Module) -> None:
    """Refuse the sign that stands between the names of nested states, see `fedkeel.tree.walk`."""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    for name in names:
        if "/" in name:
            raise ModelError(
                f"{type(module).__name__} has a tensor whose name holds a '/'.",
                got=repr(name),
                do="give that sub-module or parameter another name",
            )


def _check_buffers(module: nn.Module, policy: Buffers) -> None:
    names = [name for name, _ in module.named_buffers()]
    if not names or policy != "refuse":
        return
    raise ModelError(
        f"{type(module).__name__} has buffers, which clients with different data disagree on.",
        got=f"{len(names)} buffers, such as {names[0]!r}",
        expected="none, or a policy for them",
        do="set model.buffers = 'average' or 'local', or use fedkeel.replace_batch_norm(module)",
    )


def _head(module: nn.Module, head: str | None) -> str:
    owners = [name for name in module_names(module) if name]
    if head is None:
        return owners[-1] if owners else ""
    known = [name for name, _ in module.named_modules() if name]
    if head not in known:
        raise ModelError(
            f"{type(module).__name__} has no sub-module {head!r} to be its head.",
            do=did_you_mean(head, owners or known),
        )
    if not any(name == head or name.startswith(head + ".") for name in owners):
        raise ModelError(f"The head {head!r} of {type(module).__name__} has no parameters.")
    return head


def _first_line(error: Exception) -> str:
    """Return what an error says, or what it is where it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _check_output(network: Network, name: str, data: Dataset) -> torch.Tensor:
    """Send two examples through the network, look at what comes out, and return the examples."""
    x = data.x[: min(2, len(data))]
    x = x.to(network.dtype) if x.is_floating_point() else x
    try:
        with torch.no_grad():
            buffers = network.throwaway(network.buffers)
            out = network.logits(network.params, buffers, x, train=False)
    except ModelError:
        raise
    except Exception as error:  # whatever a user's module may raise
        raise ModelError(
            f"{name} cannot take the data.",
            got=f"inputs of shape {list(x.shape)}: {_first_line(error)}",
            do="check the first layer against the shape of one example",
        ) from error
    shown = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
    if not isinstance(out, torch.Tensor) or out.ndim != 2 or len(out) != len(x):
        raise ModelError(f"{name} does not return one row of scores for each example.", got=shown)
    if out.shape[1] < data.classes:
        raise ModelError(
            f"The output of {name} does not fit the labels.",
            got=f"{out.shape[1]} outputs for {data.classes} classes",
            expected=f"at least {data.classes} outputs",
            do="change the last layer, or check the label column",
        )
    return x
