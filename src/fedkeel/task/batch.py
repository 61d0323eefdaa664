"""The examples of a step, and what a network returns for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedkeel.base.lazy import Tensor, torch
from fedkeel.base.values import Values, count_of, map_values, only_tensor, rows_of, tensors_of
from fedkeel.errors import ModelError
from fedkeel.task.outputs import Outputs, scores_of
from fedkeel.tree import Tree


def _with_axis(tensor: Tensor) -> Tensor:
    return tensor[None]


@dataclass(frozen=True)
class Batch:
    """Examples of one step.

    Args:
        x: [B, ...] inputs, or several by name.
        y: [B, ...] targets: labels [B], class probabilities [B, Y], quantities, masks, tokens; or
            several by name.
        weight: [B] 1 for a real example and 0 for padding; None where all are real.
        expected: number of examples that a batch expects, over which sums are then divided, where
            each is drawn by itself; None where B is fixed.
    """

    x: Values
    y: Values
    weight: Tensor | None = None
    expected: int | None = None

    @classmethod
    def of_one(cls, x: Values, y: Values) -> Batch:
        """Return a batch of one example, whose tensors have no leading axis."""
        return cls(map_values(_with_axis, x), map_values(_with_axis, y))

    def __len__(self) -> int:
        return count_of(self.y)

    @property
    def labels(self) -> Tensor:
        """[B] labels, or [B, Y] class probabilities, for parts that need CLASSES."""
        return only_tensor(self.y, "a method of classes")

    def real(self, dtype: torch.dtype) -> Tensor:
        """Return [B] 1 for a real example and 0 for padding."""
        if self.weight is not None:
            return self.weight
        return tensors_of(self.x)[0].new_ones(len(self), dtype=dtype)

    def part(self, rows: slice) -> Batch:
        """Return some of the examples."""
        weight = None if self.weight is None else self.weight[rows]
        return Batch(rows_of(self.x, rows), rows_of(self.y, rows), weight)


@dataclass(frozen=True)
class Output:
    """What the network returns for a batch.

    Args:
        logits: the scores, [B, Y] of a classifier, see `fedkeel.task.outputs.scores_of`.
        features: [B, F] inputs of the classifier, flattened; None where the module has none.
        returned: what the module itself returned, which the task's loss receives.
        levels: [B, ...] what the blocks before the classifier returned, by their names; only in a
            step, and where the module has a head.
    """

    logits: Tensor
    features: Tensor | None = None
    returned: Outputs = None
    levels: Tree = field(default_factory=dict)

    @classmethod
    def of(
        cls, returned: Outputs, features: Tensor | None = None, levels: Tree | None = None
    ) -> Output:
        """Return the output of what the module returned."""
        return cls(scores_of(returned), features, returned, levels or {})


def batch_mean(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean of a value for each example, [B], over the real ones; [] as it stands.

    Of a batch that expects a number of examples it is their sum over that number.

    Raises:
        ModelError: some examples are padding, and there is one value for all.
    """
    if batch.expected is not None and values.ndim:
        return values.sum() / batch.expected
    if batch.weight is None:
        return values.mean() if values.ndim else values
    if values.ndim == 0:
        raise ModelError(
            "The loss is a mean over the batch, which cannot leave out padded examples.",
            expected="one loss for each example, [B]",
            do="return the losses before their mean, e.g. with reduction='none'",
        )
    return (values * batch.weight).sum() / batch.weight.sum()
