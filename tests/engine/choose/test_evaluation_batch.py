"""How many examples an evaluation takes at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.engine.choose.memory import EVALUATION_BATCH, EVALUATION_BYTES, evaluation_batch
from fedkeel.task.models import make
from fedkeel.task.network import Network
from toys import prepared


class Wide(nn.Module):
    """Makes two tensors of so many numbers of each example."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(numbers))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :1] * self.scale).relu().sum(dim=1, keepdim=True)


@pytest.mark.parametrize("numbers", [10, 10**5, 10**6])
def test_it_keeps_the_bytes_between_the_layers_bounded(numbers: int) -> None:
    count = evaluation_batch(Network(Wide(numbers)), torch.zeros(2, 3))
    expected = EVALUATION_BYTES // (2 * 4 * numbers + 4)
    assert count == max(1, min(EVALUATION_BATCH, expected))


@pytest.mark.parametrize("name", ["cnn_mcmahan", "lenet5", "mlp"])
def test_small_models_are_evaluated_in_large_batches(name: str) -> None:
    assert (
        evaluation_batch(Network(make(name, (1, 28, 28), 10, {})), torch.zeros(2, 1, 28, 28))
        == 1000
    )


def test_a_number_that_is_given_counts() -> None:
    assert prepared(evaluation=fk.Evaluation(batch_size=7)).setup.eval_batch == 7
    assert prepared(evaluation=fk.Evaluation()).setup.eval_batch == EVALUATION_BATCH
