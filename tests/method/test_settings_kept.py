"""No part puts something of its own in the place of a user's setting without a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.errors import CompositionError
from fedkeel.features.root.feature import root_for
from fedkeel.method.grammar import parse
from fedkeel.method.registry import REGISTRY
from fedkeel.method.roles import Reduction
from harness import EVERYTHING

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0.6).astype(np.int64)
TIMES = np.stack([RANDOM.random(60) + 0.5, Y], axis=1)


class Net(nn.Module):
    def __init__(self, outputs: int = 2, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.out = nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.body(x))))


def run(method: str, loss: Any = "cross_entropy", y: Any = Y, **more: Any) -> fk.Result:
    model = more.pop("model", lambda: Net(1 if loss == "cox" else 2))
    buffers = more.pop("buffers", "refuse")
    settings: dict[str, Any] = {
        "rounds": 2,
        "local": fk.Local(lr=0.1, steps=3, batch_size=10),
        "engine": fk.Engine(kind="sequential"),
        "progress": False,
        "root": root_for(method, 4),
    }
    return fk.run(
        method,
        task=fk.Task(model, loss=loss, buffers=buffers),
        clients=fk.iid(X[:40], y[:40], sizes=[20, 14, 6], clients=3),
        test=(X[40:], y[40:]),
        **{**settings, **more},
    )


WEIGHED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]))
LOSSES = {
    "class weights": WEIGHED,
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.5, reduction="none"),
    "a label left out": nn.CrossEntropyLoss(ignore_index=0, reduction="none"),
    "hinge": F.multi_margin_loss,
    "one's own": lambda o, t: F.cross_entropy(o, t, reduction="none") ** 2,
}


@pytest.mark.parametrize("method", ["fedlc", "fedrod"])
def test_a_part_with_a_loss_of_its_own_takes_no_other_loss_than_the_plain_one(method: str) -> None:
    plain = run(method)
    same = run(method, nn.CrossEntropyLoss(reduction="none"))
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(same.state_dict()[name], tensor)
    for loss in LOSSES.values():
        with pytest.raises(CompositionError, match="needs PLAIN_LOSS") as error:
            run(method, loss)
        assert "take loss = 'cross_entropy'" in str(error.value)


@pytest.mark.parametrize("method", ["dpsgd", "fedcurv"])
def test_weights_that_cancel_of_one_example_are_refused(method: str) -> None:
    """Of a batch of one, the mean by class weights is the loss without them."""
    with pytest.raises(CompositionError, match=r"reduction='none'"):
        run(method, WEIGHED)
    weights = torch.tensor([1.0, 9.0])
    of_each = run(method, nn.CrossEntropyLoss(weight=weights, reduction="none"))
    assert any((of_each.state_dict()[k] != v).any() for k, v in run(method).state_dict().items())
    run(method, nn.CrossEntropyLoss())  # the plain mean is that of its examples
    with pytest.raises(CompositionError):
        run(method, "cox", TIMES)


def reductions() -> list[str]:
    """The methods with a reduction that ignores the clients' weights, or says so."""
    names = []
    for name in REGISTRY:
        reduction = parse(name, EVERYTHING, "uniform").reduction
        if type(reduction).__name__ != "WeightedMean" and isinstance(reduction, Reduction):
            names.append(name)
    return names


@pytest.mark.parametrize("method", reductions())
def test_weights_change_the_model_or_the_run_says_that_they_do_not(method: str) -> None:
    if parse(method, EVERYTHING, "uniform").policy is not None or "dp" in method:
        pytest.skip("its weights are checked when it is composed, or by its policy")
    by_size, equal = run(method, weights="examples"), run(method, weights="uniform")
    changes = any((by_size.state_dict()[k] != v).any() for k, v in equal.state_dict().items())
    words = [w for w in by_size.record.warnings if w.startswith("weights = 'examples'")]
    assert changes == (not words), words
    assert not [w for w in equal.record.warnings if w.startswith("weights =")] or method == "afl"


@pytest.mark.parametrize(
    ("method", "local", "words"),
    [
        ("fedsgd", {"epochs": 5, "batch_size": 10}, "local.epochs = 5 and local.batch_size = 10"),
        ("fedsgd", {"steps": 1, "batch_size": "all"}, ""),
        ("scaffnew(p=0.5)", {"epochs": 5}, "local.epochs = 5 has no effect"),
        ("scaffnew(p=0.5)", {"steps": 2}, ""),
        ("fedswa", {"steps": 2}, ""),
        ("fedswa", {"steps": 2, "schedule": fk.Schedule(cycle=0.5)}, "cycle=0.5"),
        ("fedavg", {"epochs": 5}, ""),
    ],
)
def test_local_work_that_a_part_fixes_is_said(
    method: str, local: dict[str, Any], words: str
) -> None:
    result = run(method, local=fk.Local(lr=0.1, **local))
    said = [w for w in result.record.warnings if "says itself how clients train" in w]
    assert (words in said[0]) if words else not said


def test_buffers_that_stay_at_the_clients_are_said() -> None:
    result = run("fedbn", model=lambda: Net(norm=True), buffers="average")
    assert any("model.buffers = 'average' has no effect" in w for w in result.record.warnings)
