"""What is learned: a model, its loss, its classifier, and what happens to its buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedkeel.config import Buffers
from fedkeel.data.dataset import Dataset
from fedkeel.errors import FedkeelError, ModelError, counted, did_you_mean, first_line
from fedkeel.rng import torch_seed
from fedkeel.task.first_pass import find_reset, new_parameters
from fedkeel.task.losses import Loss, cross_entropy
from fedkeel.task.network import Network
from fedkeel.task.parameter_names import module_names
from fedkeel.task.traits import (
    FIRST_INPUTS,
    FURTHER_BATCHES,
    FURTHER_INPUTS,
    find_changed_attribute,
)
from fedkeel.user_code import one_line, where_raised


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

    Raises:
        ModelError: the model is no module and makes none, the head is no name, the loss is no
            function or has parameters to train, or there is no such policy for buffers.

    >>> Task(nn.Linear(2, 3)).head is None
    True
    """

    model: nn.Module | Callable[[], nn.Module]
    head: str | None = None
    loss: Loss = cross_entropy
    buffers: Buffers = "refuse"

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise ModelError(
                "The model is neither a module nor a function that makes one.",
                got=repr(self.model),
                do="give a torch.nn.Module, its class, or a function without arguments",
            )
        if not (self.head is None or isinstance(self.head, str)):
            raise ModelError(
                "The head is named by the attributes that lead to it.",
                got=type(self.head).__name__,
                expected="a name such as 'fc2' or 'body.2', or None",
            )
        if not callable(self.loss) or isinstance(self.loss, type):
            raise ModelError(
                "The loss is no function.",
                got=repr(self.loss),
                expected="(scores [B, Y], labels [B]) -> losses [B]",
                do="e.g. torch.nn.CrossEntropyLoss(reduction='none')",
            )
        learns = isinstance(self.loss, nn.Module) and [
            name for name, p in self.loss.named_parameters() if p.requires_grad
        ]
        if learns:
            raise ModelError(
                "The loss has parameters of its own, which are not trained.",
                got=learns[0],
                expected="a loss of scores and labels alone",
                do="make them part of the model, or set requires_grad_(False) where they stay",
            )
        if self.buffers not in get_args(Buffers):
            raise ModelError(
                f"There is no policy {self.buffers!r} for a model's buffers.",
                do=did_you_mean(str(self.buffers), get_args(Buffers)),
            )

    def network(self, data: Dataset, seed: int, dtype: torch.dtype) -> Network:
        """Make the network for one run, and refuse a model that does not fit the data.

        Args:
            data: the training set.
            seed: seed of the initial parameters, where `model` makes a module.
            dtype: type of the parameters.

        Raises:
            ModelError: lazy parameters, or such as are made in a forward pass; no trainable
                parameters; a name with a slash; complex numbers; buffers under the policy
                ``refuse``, or that have no mean under ``average``; a module that cannot be copied;
                a head that does not exist; a forward pass that fails; an output that does not fit
                the labels; a loss that is not one number for each example.
        """
        module = self.model if isinstance(self.model, nn.Module) else self._make(self.model, seed)
        _check_lazy(module, data)
        if not any(p.requires_grad for p in module.parameters()):
            raise ModelError(
                f"{type(module).__name__} has no parameters to train.",
                do="check requires_grad, and that sub-modules are attributes of the module",
            )
        _check_tensors(module, self.buffers)
        head = _head_name(module, self.head)
        _check_copy(module)
        network = Network(module, head, self.loss, dtype, self.buffers == "local")
        count = FIRST_INPUTS + FURTHER_BATCHES * FURTHER_INPUTS
        rows = np.unique(np.linspace(0, len(data) - 1, num=count).astype(np.int64))
        sample = data.take(rows).to(dtype)
        pair = sample.take(np.arange(min(2, len(data))))
        with _no_new_parameters(module, data):
            scores = _check_output(network, type(module).__name__, pair.x, data)
        changed = find_changed_attribute(lambda: _check_loss(network, scores, pair.y), self.loss)
        if network.task_losses(scores, pair.y).ndim == 0:
            network.mean_loss_outputs = scores.shape[1]
        with _no_new_parameters(module, data):
            network.detect_traits(sample.x)
        if changed:
            network.traits = replace(network.traits, hidden_state=f"{changed} of its loss")
        if reset := find_reset(lambda: network.task_losses(scores, pair.y)):
            network.traits = replace(network.traits, sets_generator=reset)
        network.choose_memory_format(pair.x)
        return network

    @staticmethod
    def _make(model: Callable[[], nn.Module], seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "init"))
            try:
                module = model()
            except FedkeelError:
                raise
            except Exception as error:  # a user's class may raise anything
                function = getattr(model, "func", model)  # of a functools.partial
                name = getattr(function, "__name__", type(function).__name__)
                raise ModelError(
                    f"model {name!r} cannot be built",
                    got=one_line(error),
                    do="make it alone in Python, without arguments; one that needs some is given "
                    f"as a function: Task(lambda: {name}(...))",
                ) from error
        if not isinstance(module, nn.Module):
            raise ModelError(
                "The model function did not return a torch.nn.Module.",
                got=type(module).__name__,
            )
        return module


def _check_lazy(module: nn.Module, data: Dataset) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if not lazy:
        return
    raise ModelError(
        f"{type(module).__name__} has lazy layers, which have no shape before their first batch.",
        got=_first_three(map(repr, lazy)),
        do=_call_once(data),
    )


@contextmanager
def _no_new_parameters(module: nn.Module, data: Dataset) -> Iterator[None]:
    """Refuse a module that makes parameters in the forward passes that are made here."""
    raised: ModelError | None = None
    with new_parameters() as names:
        try:
            yield
        except ModelError as error:  # it may come of such a parameter, as one of another type
            raised = error
    if names:
        raise ModelError(
            f"{type(module).__name__} makes parameters in its forward pass.",
            got=_first_three(dict.fromkeys(names)),
            why="no seed draws them, and they are neither sent nor trained",
            do="make them in __init__; where their shape is known only then, " + _call_once(data),
        ) from raised
    if raised is not None:
        raise raised


def _first_three(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _call_once(data: Dataset) -> str:
    sizes = ", ".join(map(str, [2, *data.shape]))
    kind = "" if data.x.is_floating_point() else ", dtype=torch.long"
    return (
        "call the module once in a function that makes it, before it is returned: "
        f"module(torch.zeros({sizes}{kind}))"
    )


def _check_tensors(module: nn.Module, policy: Buffers) -> None:
    """Refuse parameters and buffers that cannot be named, sent or averaged."""
    kind, buffers = type(module).__name__, dict(module.named_buffers())
    for name, tensor in (*module.named_parameters(), *buffers.items()):
        if "/" in name:  # stands between the names of nested states, see `fedkeel.tree.walk`
            raise ModelError(
                f"{kind} has a tensor whose name holds a '/'.",
                got=repr(name),
                do="give that sub-module or parameter another name",
            )
        if tensor.is_complex():
            raise ModelError(
                f"{kind} has complex parameters or buffers.",
                got=f"{name!r} of {tensor.dtype}",
                expected="real numbers, which alone have the run's type",
                do="keep torch.view_as_real(...) of it, and take torch.view_as_complex(...) of "
                "that in forward()",
            )
    if buffers and policy == "refuse":
        raise ModelError(
            f"{kind} has buffers (tensors that are not trained).",
            got=f"{counted(len(buffers), 'buffer')}, such as {next(iter(buffers))!r}",
            expected="none, or a policy for them",
            why="clients with different data would each have other values in them",
            do="set model.buffers = 'average', or 'local' for constants; or use "
            "fedkeel.replace_batch_norm(module)",
        )
    for name, buffer in buffers.items():
        has_mean = not buffer.is_floating_point() or bool(buffer.isfinite().all())
        if policy == "average" and not has_mean:
            raise ModelError(
                f"The buffer {name!r} of {kind} has no mean over the clients.",
                got="NaN or infinity in it",
                expected="finite numbers under the policy 'average'",
                do="set model.buffers = 'local' if it is constant, as a mask is; or write "
                "torch.finfo(dtype).min in place of -inf",
            )


def _check_copy(module: nn.Module) -> None:
    """Refuse a module that torch cannot copy, such as one with old-style weight norm."""
    try:
        copy.deepcopy(module)
    except Exception as error:  # whatever a user's module may raise
        raise ModelError(
            f"{type(module).__name__} cannot be copied, and each process trains a copy.",
            got=first_line(error),
            do="keep no tensor that was computed from parameters as an attribute; "
            "torch.nn.utils.parametrizations.weight_norm does so in place of weight_norm",
        ) from error


def _head_name(module: nn.Module, head: str | None) -> str:
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
        tied = any(True for _ in module.get_submodule(head).parameters())
        raise ModelError(
            f"The head {head!r} of {type(module).__name__} has no parameters of its own.",
            got="parameters that another layer has, too" if tied else None,
            do=did_you_mean(head, owners) if tied else None,
        )
    return head


def _check_output(network: Network, name: str, x: Tensor, data: Dataset) -> Tensor:
    """Return the scores of a few inputs, or refuse them where they do not fit the labels."""
    try:
        with torch.no_grad():
            buffers = network.copy_buffers(network.buffers)
            scores: object = network.logits(network.params, buffers, x, train=False)
    except ModelError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise ModelError(
            f"{name} cannot take the data.",
            got=f"inputs of shape {list(x.shape)}: {one_line(error)}",
            why=f"raised in {where_raised(error)}",
            do=_input_remedy(error, x),
        ) from error
    if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != len(x):
        raise ModelError(
            f"{name} does not return one row of scores for each example.",
            got=_shape_or_type(scores),
            expected=f"[{len(x)}, {data.classes}] for {len(x)} examples of {data.classes} classes",
            do=_output_remedy(scores),
        )
    if scores.shape[1] < data.classes:
        raise ModelError(
            f"The output of {name} does not fit the labels.",
            got=f"{counted(scores.shape[1], 'output')} for {counted(data.classes, 'class')}",
            expected=f"at least {counted(data.classes, 'output')}",
            why=_about_labels(data),
            do="give the last layer one output for each class, or check the labels",
        )
    return scores


def _about_labels(data: Dataset) -> str | None:
    """Return a number that is no label, or else the names of the labels, or None."""
    missing = np.flatnonzero(np.bincount(data.y.numpy(), minlength=data.classes) == 0)
    if len(missing):
        return (
            f"labels are numbers from 0 up to the largest, {data.classes - 1}, "
            f"and none of these is {missing[0]}"
        )
    names = ", ".join(map(repr, data.label_names[:6]))
    more = f" and {len(data.label_names) - 6} more" if len(data.label_names) > 6 else ""
    return f"the labels are {names}{more}" if names else None


def _input_remedy(error: Exception, x: Tensor) -> str:
    """Return what to do about inputs that a network cannot take."""
    if "Long" in str(error) and x.is_floating_point():  # what nn.Embedding asks for
        return (
            "in Python: fk.dataset(x, y, tokens=True), fk.iid(..., tokens=True); an experiment "
            "file has no such inputs, and forward() can begin with x.long()"
        )
    if "same dtype" in str(error):
        return (
            "do not convert types in the module: its parameters and inputs are of engine.dtype, "
            "'float32' or 'float64'"
        )
    if not isinstance(error, RuntimeError):
        return "correct the module until it takes such inputs by itself"
    return "check the first layer against the shape of one example"


def _output_remedy(output: object) -> str:
    """Return what to do about an output that is no row of scores for each example."""
    if not isinstance(output, Tensor):
        return "return the scores alone from forward(), e.g. the first of a tuple"
    if output.ndim < 2:
        return (
            "give the last layer one output for each class, of two classes too, and keep its axis"
        )
    return "flatten what enters the last layer, so that an example has one row: x.flatten(1)"


def _shape_or_type(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _check_loss(network: Network, scores: Tensor, y: Tensor) -> None:
    """Refuse a loss that is neither one number for each example nor their mean."""
    if len(y) in (1, scores.shape[1]):  # labels would pass for a row of scores
        rows = torch.arange(len(y) + scores.shape[1]) % len(y)
        scores, y = scores[rows], y[rows]
    arguments = f"scores {list(scores.shape)} and labels {list(y.shape)}"
    try:
        with torch.no_grad():
            losses: object = network.task_losses(scores, y)
    except Exception as error:  # a user's loss may raise anything
        raise ModelError(
            "The loss cannot be taken of scores and labels.",
            got=f"{arguments}: {first_line(error)}",
            expected="a loss of scores [B, Y] and classes [B], such as cross-entropy",
            why="classes are learned; a quantity (regression) and single scores are not",
            do="check the loss against what the model returns",
        ) from error
    has_shape = isinstance(losses, Tensor) and losses.shape in ((len(y),), ())
    if not (isinstance(losses, Tensor) and has_shape and losses.is_floating_point()):
        dtype = f" of {losses.dtype}" if isinstance(losses, Tensor) and has_shape else ""
        raise ModelError(
            "The loss is not one number for each example.",
            got=f"{_shape_or_type(losses)}{dtype} for {arguments}",
            expected=f"[{len(y)}], or their mean []",
            do="return the losses before their mean, e.g. with reduction='none'",
        )
    if losses.ndim == 0 and bool(losses.isfinite() and losses != 0):
        with torch.no_grad():
            doubled = network.task_losses(torch.cat([scores, scores]), torch.cat([y, y]))
        if torch.allclose(doubled, 2 * losses):
            raise ModelError(
                "The loss is a sum over the batch.",
                got="twice the number for twice the same examples",
                expected=f"[{len(y)}], or their mean []",
                why="its size would depend on the number of examples in the batch",
                do="return the losses before their sum, e.g. with reduction='none'",
            )
