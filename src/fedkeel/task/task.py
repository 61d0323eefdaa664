"""What is learned: a model, its loss, its classifier, and what happens to its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedkeel.base.rng import torch_seed
from fedkeel.base.user_code import one_line
from fedkeel.base.values import shape_of
from fedkeel.config import Buffers
from fedkeel.data.dataset import Dataset
from fedkeel.errors import FedkeelError, ModelError, counted, did_you_mean, first_line
from fedkeel.task.client_network import ClientNetwork
from fedkeel.task.first_pass import find_reset, new_parameters
from fedkeel.task.losses import (
    OF_QUANTITIES,
    Loss,
    cox,
    cross_entropy,
    losses_of_each,
    make_loss,
    named_like,
    quantity_of,
)
from fedkeel.task.metrics.base import TaskInfo
from fedkeel.task.metrics.metric_set import MetricSet, make_metric_set
from fedkeel.task.metrics.pictures import picture_metrics
from fedkeel.task.metrics.registry import MetricLike
from fedkeel.task.network import Network, with_same_frozen
from fedkeel.task.output_check import check_loss, check_output, check_tokens
from fedkeel.task.outputs import scores_of
from fedkeel.task.parameter_names import module_names
from fedkeel.task.target_check import check_targets
from fedkeel.task.traits import (
    FIRST_INPUTS,
    FURTHER_BATCHES,
    FURTHER_INPUTS,
    find_changed_attribute,
)
from fedkeel.tree import Tree


@dataclass(frozen=True)
class Task:
    """A model to train and the loss to train it on.

    Args:
        model: a module, whose parameters are then the initial ones for every seed; or a function
            or class that makes one, which is called anew for each seed under that seed.
        head: name of the classifier sub-module, e.g. ``"fc2"``; None takes the module that owns the
            last parameter.
        loss: name of a loss, see `fedkeel.task.losses`; an import path ``module:function``; or a
            function (output, target) -> losses [B] or one number for the batch []. The output is
            what the module returns. For methods with soft labels the target is class probabilities
            [B, Y].
        buffers: what happens to buffers: ``refuse``, ``average`` or ``local``.
        metrics: what is measured besides the loss: names, see `fedkeel.task.metrics.registry`;
            functions of (output, target) with a value for each example; metrics of torchmetrics.
            None takes accuracy and top-3 accuracy for labels, and only the loss for the rest.
        score: name of the metric by which models are judged; None takes the first one.
        others: networks that some clients have in place of `model`, by name, for methods in which
            clients share no parameters, such as ``fedproto``.

    Raises:
        ModelError: the model is not a module and makes none, the head is not a name, the loss is
            not a function or has parameters to train, or there is no such policy for buffers.

    >>> Task(nn.Linear(2, 3)).head is None
    True
    """

    model: nn.Module | Callable[[], nn.Module]
    head: str | None = None
    loss: str | Loss = cross_entropy
    buffers: Buffers = "refuse"
    metrics: Sequence[MetricLike] | None = None
    score: str | None = None
    others: Mapping[str, ClientNetwork] = field(default_factory=dict)

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
        make_loss(self.loss)
        if isinstance(self.metrics, str) or not isinstance(self.metrics, Sequence | None):
            raise ModelError(
                "The metrics are not a list.",
                got=repr(self.metrics),
                expected="names, functions or metrics of torchmetrics, e.g. ['mae', 'r2']",
            )
        if not all(isinstance(other, ClientNetwork) for other in self.others.values()):
            raise ModelError(
                "'others' is not a mapping of names to networks.",
                got=repr(self.others),
                do="write others={'small': fedkeel.ClientNetwork(Small, clients=[0, 1])}",
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
            DataError: targets that the loss cannot take.
            ModelError: lazy parameters, or such as are made in a forward pass; no trainable
                parameters; a name with a slash; complex numbers; buffers under the policy
                ``refuse``, or that have no mean under ``average``; a module that cannot be copied;
                a head that does not exist; a forward pass that fails; an output that does not fit
                the labels; a loss that is not one number for each example; modules nested
                too deeply.
        """
        module = self.module(seed)
        try:
            return self._network_of(module, data, dtype)
        except RecursionError as error:
            raise ModelError(
                f"{type(module).__name__} has modules within modules that are too deep for Python.",
                got=one_line(error),
                expected="a few hundred levels at most",
                do="put layers one after the other into a single nn.Sequential or nn.ModuleList",
            ) from error

    def module(self, seed: int) -> nn.Module:
        """Return the module, made with the initial parameters of a seed where `model` makes it."""
        return self.model if isinstance(self.model, nn.Module) else self._make(self.model, seed)

    def of_network(self, name: str) -> Task:
        """Return the task with one of the other networks in place of its own."""
        other = self.others[name]
        return replace(self, model=other.model, head=other.head, others={})

    def _network_of(self, module: nn.Module, data: Dataset, dtype: torch.dtype) -> Network:
        _check_lazy(module, data)
        if not any(p.requires_grad for p in module.parameters()):
            raise ModelError(
                f"{type(module).__name__} has no parameters to train.",
                do="check requires_grad, and that sub-modules are attributes of the module",
            )
        _check_tensors(module)
        head = _head_name(module, self.head)
        _check_copy(module)
        network = Network(module, head, make_loss(self.loss), dtype, self.buffers == "local")
        count = FIRST_INPUTS + FURTHER_BATCHES * FURTHER_INPUTS
        rows = np.unique(np.linspace(0, len(data) - 1, num=count).astype(np.int64))
        sample = data.take(rows).to(dtype)
        pair = sample.take(np.arange(min(2, len(data))))
        network.leave_out_constants(pair.x)
        _check_buffers(type(module).__name__, network.buffers, self.buffers)
        with _no_new_parameters(module, data):
            output = check_output(network, type(module).__name__, pair.x, data)
        scores = scores_of(output)
        network.scores_shape = tuple(scores.shape[1:])
        check_targets(network, data, "The training set")
        check_tokens(network, data, "The training set")
        changed = find_changed_attribute(
            lambda: check_loss(network, output, pair.y), make_loss(self.loss)
        )
        network.has_mean_loss = network.task_losses(output, pair.y).ndim == 0
        network.weighs_examples = network.has_mean_loss and _weighs_examples(network, data)
        network.scores_classes = scores.ndim == 2 and scores.shape[1] >= max(2, data.classes)
        with _no_new_parameters(module, data):
            network.detect_traits(sample.x)
        if changed:
            network.traits = replace(network.traits, hidden_state=f"{changed} of its loss")
        if reset := find_reset(lambda: network.task_losses(output, pair.y)):
            network.traits = replace(network.traits, sets_generator=reset)
        network.choose_memory_format(pair.x)
        return network

    def metric_set(self, network: Network, data: Dataset) -> MetricSet:
        """Return what is measured of a network, and refuse metrics that do not fit the data.

        Args:
            network: from `network`.
            data: the training set, in the network's type.

        Raises:
            ModelError: there is no such metric, it does not fit the task, or it fails.
        """
        pair = data.take(np.arange(min(2, len(data))))
        with torch.no_grad():
            scores = network.test_logits(network.params, network.buffers, pair.x)
        classes = 0 if named_like(network.task_loss) in OF_QUANTITIES else data.classes
        target = shape_of(pair.y)
        info = TaskInfo(
            tuple(scores.shape[1:]),
            target if isinstance(target, tuple) else (),
            classes,
            quantity_of(network.task_loss),
        )
        metrics = make_metric_set(network, self.metrics, self.score, info, pair.x, pair.y)
        cells = metrics.score_cells.values()
        return replace(metrics, pictures=picture_metrics(info, network.task_loss, data.y, cells))

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
                    do="construct it in Python yourself, without arguments; one that needs some is "
                    f"given as a function: Task(lambda: {name}(...))",
                ) from error
        if not isinstance(module, nn.Module):
            raise ModelError(
                "The model function did not return a torch.nn.Module.",
                got=type(module).__name__,
            )
        return module


def _weighs_examples(network: Network, data: Dataset) -> bool:
    """Return whether a mean loss is another one than the mean of those of single examples.

    It is tried on one example of each label, and on the first ones where there are no labels. Class
    weights of torch's losses are seen without: a node may have only one label.
    """
    loss = network.task_loss
    if loss is cox or (
        isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None
    ):
        return True
    rows = np.arange(min(len(data), _TRIED))
    if data.has_labels:
        rows = np.unique(data.labels, return_index=True)[1][:_TRIED]
        rows = np.append(rows, rows[:1])  # of one label too there are two examples
    few = data.take(rows.astype(np.int64)).to(network.dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = network.test_output(network.params, network.buffers, few.x)
        of_batch = network.task_losses(output, few.y)
        of_each = losses_of_each(network.task_losses, output, few.y)
    return not torch.allclose(of_each.mean(), of_batch, rtol=1e-4, atol=1e-6)


_TRIED = 64
"""Examples, at most, on which it is tried how a loss weighs them."""


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
    inputs = data.x if isinstance(data.x, dict) else {"": data.x}
    arguments = []
    for name, tensor in inputs.items():
        sizes = ", ".join(map(str, [2, *tensor.shape[1:]]))
        kind = "" if tensor.is_floating_point() else ", dtype=torch.long"
        arguments.append(
            f"{name}={''}torch.zeros({sizes}{kind})" if name else f"torch.zeros({sizes}{kind})"
        )
    return (
        "call the module once in a function that makes it, before it is returned: "
        f"module({', '.join(arguments)})"
    )


def _check_tensors(module: nn.Module) -> None:
    """Refuse parameters and buffers that cannot be named or sent."""
    kind = type(module).__name__
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
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
                expected="real numbers, because only those can have the run's type",
                do="keep torch.view_as_real(...) of it, and take torch.view_as_complex(...) of "
                "that in forward()",
            )


def _check_buffers(kind: str, buffers: Tree, policy: Buffers) -> None:
    """Refuse buffers without a policy, and such as cannot be averaged."""
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
        with_same_frozen(module)
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
