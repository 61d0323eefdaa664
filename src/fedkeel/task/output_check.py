"""What a module returns and its loss, tried on two examples before a run begins."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedkeel.base.user_code import one_line, where_raised
from fedkeel.base.values import Values, count_of, joined, rows_of, shape_text, tensors_of
from fedkeel.data.dataset import Dataset
from fedkeel.data.user_arrays import remedy_for_labels
from fedkeel.errors import DataError, ModelError, counted, first_line
from fedkeel.task.losses import LOSSES, OF_QUANTITIES, cross_entropy
from fedkeel.task.network import Network
from fedkeel.task.outputs import Outputs, describe_output, map_output, scores_of, tensors_in
from fedkeel.task.target_check import remedy_for_classes


def check_output(network: Network, name: str, x: Values, data: Dataset) -> Outputs:
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
            got=f"inputs of shape {shape_text(x)}: {one_line(error)}",
            why=f"raised in {where_raised(error)}",
            do=_input_remedy(error, x, data),
        ) from error
    needs_scores = network.task_loss is cross_entropy
    if needs_scores and isinstance(data.y, dict):
        raise ModelError(
            "The loss 'cross_entropy' needs labels, and the targets are several tensors.",
            got=shape_text(data.y),
            do="name a loss of your own: fk.Task(model, loss=function of (output, target))",
        )
    y = data.y if isinstance(data.y, Tensor) else None
    if needs_scores and not data.classes and y is not None:
        raise ModelError(
            "The loss 'cross_entropy' needs labels, and the targets are quantities.",
            got=f"targets of {str(y.dtype).removeprefix('torch.')}, such as "
            f"{y.flatten()[0].item():g}",
            do="name another loss, e.g. fk.Task(model, loss='mse'), or number the classes from 0",
        )
    tensors = tensors_in(output)
    if not tensors or any(
        len(tensor.shape) < 1 or len(tensor) != count_of(x) for tensor in tensors[:1]
    ):
        raise ModelError(
            f"{name} does not return one row of scores for each example.",
            got=describe_output(output),
            expected=_expected_output(needs_scores, x, data),
            do=_output_remedy(output),
        )
    scores = scores_of(output)
    if not needs_scores or y is None:
        return output
    other = _fitting_loss(scores, y)
    if y.ndim == 2 and scores.ndim == 2:
        raise ModelError(
            "The loss 'cross_entropy' takes one label for each example.",
            got=f"targets {list(y.shape)}",
            expected=f"[{len(y)}]",
            do=remedy_for_labels(y.numpy()),
        )
    if scores.ndim != y.ndim + 1 or scores.shape[2:] != y.shape[1:]:
        raise ModelError(
            f"{name} does not return one row of scores for each example.",
            got=describe_output(output),
            expected=_expected_output(True, x, data),
            do=other or _output_remedy(output, y),
        )
    if scores.shape[1] < data.classes:
        raise ModelError(
            f"The output of {name} does not fit the labels.",
            got=f"{counted(scores.shape[1], 'output')} for {counted(data.classes, 'class')}",
            expected=f"at least {counted(data.classes, 'output')}",
            why=_about_labels(data),
            do=remedy_for_classes(y, scores.shape[1])
            or (other and f"{other}; or give the last layer one output for each class")
            or "give the last layer one output for each class, or check the labels",
        )
    return output


def check_tokens(network: Network, data: Dataset, what: str) -> None:
    """Refuse whole numbers among the inputs that the module has no row of a table for.

    Each input is tried on the example that has its largest number. On a GPU such a number ends the
    whole process, and in a test set it would be seen only after the first round.

    Args:
        network: the model.
        data: a data set.
        what: what to call it in messages.

    Raises:
        DataError: the module fails on one of these examples, and not on the first one.
    """
    inputs = data.x if isinstance(data.x, dict) else {"": data.x}
    for name, tensor in inputs.items():
        if tensor.is_floating_point() or not tensor.numel() or tensor.stride(0) == 0:
            continue
        row = int(tensor.reshape(len(tensor), -1).amax(dim=1).argmax())
        largest = int(tensor[row].max())
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                network.test_output(network.params, network.buffers, rows_of(data.x, [row, row]))
        except Exception as error:  # a user's module may raise anything
            raise DataError(
                f"{what}: the model cannot take an input.",
                got=f"{name or 'input'}: the number {largest} in row {row} (counted from 0): "
                + one_line(error),
                why="a table such as nn.Embedding(n, ...) has rows for the numbers 0..n-1",
                do="make the table as large as the largest number of the training and the test set "
                "plus 1, or write the number that stands for unknown tokens there",
            ) from error


def _expected_output(needs_scores: bool, x: Values, data: Dataset) -> str:
    count = count_of(x)
    if not needs_scores or isinstance(data.y, dict):
        return f"[{count}, ...] for {count} examples"
    places = "".join(f", {size}" for size in data.y.shape[1:])
    of_loss = " and the loss 'cross_entropy'" if places else ""
    return (
        f"[{count}, {data.classes}{places}] for {count} examples of {data.classes} classes{of_loss}"
    )


def _about_labels(data: Dataset) -> str | None:
    """Return a number that is not a label, or else the names of the labels, or None."""
    if isinstance(data.y, dict) or data.y.ndim > 1:
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


def _input_remedy(error: Exception, x: Values, data: Dataset) -> str:
    """Return what to do about inputs that a network cannot take."""
    if isinstance(error, NotImplementedError) and '"forward"' in str(error):
        return "write its method forward(self, x), which returns one row of scores for each example"
    if "Long" in str(error) and tensors_of(x)[0].is_floating_point():  # what nn.Embedding asks for
        return (
            "in Python: fk.dataset(x, y, tokens=True), fk.from_clients(..., tokens=True), "
            "fk.iid(..., tokens=True); an experiment file has no such inputs, and forward() can "
            "begin with x.long()"
        )
    if "same dtype" in str(error):
        return (
            "do not convert types in the module: its parameters and inputs are of engine.dtype, "
            "'float32' or 'float64'"
        )
    if not isinstance(error, RuntimeError):
        return "correct the module until it takes such inputs by itself"
    if data.schema is not None:
        return f"give the first layer {data.schema.width_told}"
    return "check the first layer against the shape of one example"


def _fitting_loss(scores: Tensor, y: Tensor) -> str:
    """Return which loss to name for such scores of such labels, "" where none is known.

    Args:
        scores: [B, ...] what the module returns.
        y: [N, ...] targets, of more examples or the same.
    """
    if not y.numel():
        return ""
    classes, shape, places = float(y.max()) + 1, list(scores.shape[1:]), list(y.shape[1:])
    if not y.is_floating_point() and len(shape) == len(places) + 1 and min(shape) > 1:
        if shape[1:] == places and shape[0] >= classes:
            return "name the loss of classes: loss = 'cross_entropy'"
        if len(places) == 1 and shape[:1] == places and shape[1] >= classes:
            return "name the loss of tokens: loss = 'token_cross_entropy'"
    if classes <= 2 and [n for n in shape if n > 1] == [n for n in places if n > 1]:
        names = "'bce' or 'dice'" if len(places) > 1 else "'bce'"
        return f"name a loss of one score for each label: loss = {names}"
    return ""


def _output_remedy(output: object, y: Tensor | None = None) -> str:
    """Return what to do about an output that is not a row of scores for each example."""
    if not isinstance(output, Tensor):
        return "return only the scores from forward(), e.g. the first of a tuple"
    if output.ndim < 2:
        return (
            "give the last layer one output for each class, of two classes too, and keep its axis"
        )
    if y is not None and y.ndim > 1:
        return "return a score of each class for each place of the target, the classes first"
    return "flatten what enters the last layer, so that an example has one row: x.flatten(1)"


def check_loss(network: Network, output: Outputs, y: Values) -> None:
    """Refuse a loss that is neither one number for each example nor one for the batch.

    Args:
        network: the model and its loss.
        output: what the module returned for a few examples.
        y: [B, ...] their targets.

    Raises:
        ModelError: the loss cannot be taken, or is something else.
    """
    scores = scores_of(output)
    is_named = network.task_loss in LOSSES.values()
    count = count_of(y)
    if count == 1 or (scores.ndim == 2 and count == scores.shape[1]):
        # the targets would pass for a row of scores
        rows = torch.arange(count + scores.shape[-1]) % count
        output, y = map_output(lambda tensor: tensor[rows], output), rows_of(y, rows)
        count = len(rows)
    arguments = f"an output {describe_output(output)} and targets {shape_text(y)}"
    try:
        with torch.no_grad():
            losses: object = network.task_losses(output, y)
    except Exception as error:  # a user's loss may raise anything
        raise ModelError(
            "The loss cannot be taken of the model's output and the targets.",
            got=f"{arguments}: {first_line(error)}",
            expected="a loss of (output, target), such as 'cross_entropy' for labels or 'mse' for "
            "quantities",
            why="" if network.task_loss not in OF_QUANTITIES else "the target is not a label here",
            do=(is_named and isinstance(y, Tensor) and _fitting_loss(scores, y))
            or "check the loss against what the model returns",
        ) from error
    has_shape = isinstance(losses, Tensor) and losses.shape in ((count,), ())
    if not (isinstance(losses, Tensor) and has_shape and losses.is_floating_point()):
        dtype = f" of {losses.dtype}" if isinstance(losses, Tensor) and has_shape else ""
        raise ModelError(
            "The loss is not one number for each example.",
            got=f"{describe_output(losses)}{dtype} for {arguments}",
            expected=f"[{count}], or one number for the batch []",
            do="return the losses before their mean, e.g. with reduction='none'",
        )
    if losses.ndim == 0 and bool(losses.isfinite() and losses != 0):

        def loss_of_copies(count: int) -> Tensor:
            copies = map_output(lambda tensor: torch.cat([tensor] * count), output)
            with torch.no_grad():
                return network.task_losses(copies, joined([y] * count))

        # twice the loss may be Cox's too: log 4 of four at risk, and log 2 of two
        if all(torch.allclose(loss_of_copies(n), n * losses) for n in (2, 3)):
            raise ModelError(
                "The loss is a sum over the batch.",
                got="twice the number for twice the same examples",
                expected=f"[{count}], or their mean []",
                why="its size would depend on the number of examples in the batch",
                do="return the losses before their sum, e.g. with reduction='none'",
            )
