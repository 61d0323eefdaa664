"""What a module returns and its loss, tried on two examples before a run begins."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedkeel.data.dataset import Dataset
from fedkeel.errors import ModelError, counted, first_line
from fedkeel.task.losses import OF_QUANTITIES, cross_entropy
from fedkeel.task.network import Network
from fedkeel.task.outputs import Outputs, describe_output, map_output, scores_of, tensors_in
from fedkeel.user_code import one_line, where_raised


def check_output(network: Network, name: str, x: Tensor, data: Dataset) -> Outputs:
    """Return what a module makes of a few inputs, or refuse it where it does not fit the targets.

    Args:
        network: the model and its loss.
        name: what to call the module.
        x: [B, ...] inputs.
        data: the training set.

    Raises:
        ModelError: the module cannot take the inputs, or its output does not fit the targets.
    """
    try:
        with torch.no_grad():
            buffers = network.copy_buffers(network.buffers)
            output = network.forward(network.params, buffers, x, train=False)
    except ModelError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise ModelError(
            f"{name} cannot take the data.",
            got=f"inputs of shape {list(x.shape)}: {one_line(error)}",
            why=f"raised in {where_raised(error)}",
            do=_input_remedy(error, x),
        ) from error
    needs_scores = network.task_loss is cross_entropy
    if needs_scores and not data.classes:
        raise ModelError(
            "The loss 'cross_entropy' needs labels, and the targets are quantities.",
            got=f"targets of {str(data.y.dtype).removeprefix('torch.')}, such as "
            f"{data.y.flatten()[0].item():g}",
            do="name another loss, e.g. fk.Task(model, loss='mse'), or number the classes from 0",
        )
    found = tensors_in(output)
    if not found or any(len(tensor.shape) < 1 or len(tensor) != len(x) for tensor in found[:1]):
        raise ModelError(
            f"{name} does not return one row of scores for each example.",
            got=describe_output(output),
            expected=_expected_output(needs_scores, x, data),
            do=_output_remedy(output),
        )
    scores = scores_of(output)
    if not needs_scores:
        return output
    if scores.ndim != data.y.ndim + 1 or scores.shape[2:] != data.y.shape[1:]:
        raise ModelError(
            f"{name} does not return one row of scores for each example.",
            got=describe_output(output),
            expected=_expected_output(True, x, data),
            do=_output_remedy(output),
        )
    if scores.shape[1] < data.classes:
        raise ModelError(
            f"The output of {name} does not fit the labels.",
            got=f"{counted(scores.shape[1], 'output')} for {counted(data.classes, 'class')}",
            expected=f"at least {counted(data.classes, 'output')}",
            why=_about_labels(data),
            do="give the last layer one output for each class, or check the labels",
        )
    return output


def _expected_output(needs_scores: bool, x: Tensor, data: Dataset) -> str:
    count = len(x)
    if not needs_scores:
        return f"[{count}, ...] for {count} examples"
    places = "".join(f", {size}" for size in data.y.shape[1:])
    return f"[{count}, {data.classes}{places}] for {count} examples of {data.classes} classes"


def _about_labels(data: Dataset) -> str | None:
    """Return a number that is no label, or else the names of the labels, or None."""
    if data.y.ndim > 1:
        return None
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


def check_loss(network: Network, output: Outputs, y: Tensor) -> None:
    """Refuse a loss that is neither one number for each example nor one for the batch.

    Args:
        network: the model and its loss.
        output: what the module returned for a few examples.
        y: [B, ...] their targets.

    Raises:
        ModelError: the loss cannot be taken, or is something else.
    """
    scores = scores_of(output)
    if len(y) == 1 or (scores.ndim == 2 and len(y) == scores.shape[1]):
        # the targets would pass for a row of scores
        rows = torch.arange(len(y) + scores.shape[-1]) % len(y)
        output, y = map_output(lambda tensor: tensor[rows], output), y[rows]
    arguments = f"an output {describe_output(output)} and targets {list(y.shape)}"
    try:
        with torch.no_grad():
            losses: object = network.task_losses(output, y)
    except Exception as error:  # a user's loss may raise anything
        raise ModelError(
            "The loss cannot be taken of the model's output and the targets.",
            got=f"{arguments}: {first_line(error)}",
            expected="a loss of (output, target), such as 'cross_entropy' for labels or 'mse' for "
            "quantities",
            why="" if network.task_loss not in OF_QUANTITIES else "the target is no label here",
            do="check the loss against what the model returns",
        ) from error
    has_shape = isinstance(losses, Tensor) and losses.shape in ((len(y),), ())
    if not (isinstance(losses, Tensor) and has_shape and losses.is_floating_point()):
        dtype = f" of {losses.dtype}" if isinstance(losses, Tensor) and has_shape else ""
        raise ModelError(
            "The loss is not one number for each example.",
            got=f"{describe_output(losses)}{dtype} for {arguments}",
            expected=f"[{len(y)}], or one number for the batch []",
            do="return the losses before their mean, e.g. with reduction='none'",
        )
    if losses.ndim == 0 and bool(losses.isfinite() and losses != 0):
        with torch.no_grad():
            doubled = network.task_losses(
                map_output(lambda tensor: torch.cat([tensor, tensor]), output), torch.cat([y, y])
            )
        if torch.allclose(doubled, 2 * losses):
            raise ModelError(
                "The loss is a sum over the batch.",
                got="twice the number for twice the same examples",
                expected=f"[{len(y)}], or their mean []",
                why="its size would depend on the number of examples in the batch",
                do="return the losses before their sum, e.g. with reduction='none'",
            )
