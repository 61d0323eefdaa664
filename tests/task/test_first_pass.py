"""What a call makes and sets is found out, and refused or said."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from each import each
from fedkeel.errors import ModelError
from fedkeel.runner.result import Result
from fedkeel.task.first_pass import find_reset, new_parameters
from fedkeel.task.losses import Loss
from toys import Net, federation, held, same

# --- parameters made in a forward pass ------------------------------------------------------------


class MadeOnce(nn.Module):
    """Makes its last layer when its input is known: the habit that nn.LazyLinear stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(5, 4), None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.out is None:
            self.out = nn.Linear(h.shape[1], 3)
        return self.out(h)


class MadeEachTime(MadeOnce):
    """Has a random layer in each call, which no attribute holds."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear(4, 3)(torch.tanh(self.first(x)))


class MadeInTraining(MadeOnce):
    """Makes its layer where a call of evaluation does not see it."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.training and not hasattr(self, "more"):
            self.more = [nn.Linear(4, 4)]  # in a list, as torch does not know it
        return h[:, :3]


class Assigns(Net):
    """Puts another parameter in the place of one that it has: not a new one."""

    def forward(self, x: Tensor) -> Tensor:
        self.fc1.weight = nn.Parameter(self.fc1.weight.clamp(-1.0, 1.0))
        return super().forward(x)


def run(
    model: Callable[[], nn.Module], loss: Loss | None = None, kind: str = "sequential"
) -> Result:
    return fk.run(
        "fedavg",
        task=fk.Task(model) if loss is None else fk.Task(model, loss=loss),
        clients=federation(),
        test=held(20),
        rounds=2,
        local=fk.Local(lr=0.1, epochs=1, batch_size=4),
        engine=fk.Engine(kind=kind, workers=1, dtype="float64"),
        progress=False,
    )


@pytest.mark.parametrize("model", [MadeOnce, MadeEachTime, MadeInTraining])
def test_a_model_that_makes_parameters_in_its_forward_pass_is_refused(
    model: type[nn.Module],
) -> None:
    with pytest.raises(ModelError, match="makes parameters in its forward pass") as raised:
        run(model)
    assert "Linear.weight [" in str(raised.value.got)
    assert "module(torch.zeros(2, 5))" in str(raised.value.do)


def test_one_that_was_called_before_trains() -> None:
    def called() -> nn.Module:
        module = MadeOnce()
        module(torch.zeros(2, 5))
        return module

    result = run(called)
    assert result.record.model.head == "out"
    assert same(result, run(called))


def test_a_parameter_in_the_place_of_another_is_no_new_one() -> None:
    module = Assigns()
    with new_parameters() as made:
        module(torch.zeros(2, 5))
    assert made == []
    with new_parameters() as made:
        nn.Linear(2, 3, bias=False)
    nn.Linear(2, 3)
    assert made == ["Linear.weight [3, 2]"]


# --- global random numbers ------------------------------------------------------------------------


def noise() -> Tensor:
    return nn.functional.dropout(torch.ones(100), 0.5) + torch.rand(100)


def sets_and_draws() -> None:
    torch.manual_seed(0)
    noise()


def puts_back() -> None:
    with torch.random.fork_rng():
        noise()


def puts_back_between() -> None:
    noise()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noise()
    noise()


def of_its_own() -> None:
    torch.rand(3, generator=torch.Generator().manual_seed(0))


@each(
    ("call", "library"),
    [
        (lambda: None, ""),
        (noise, ""),
        (of_its_own, ""),
        (lambda: (random.random(), np.random.rand()), ""),
        (lambda: torch.manual_seed(7), "torch"),
        (sets_and_draws, "torch"),
        (puts_back, "torch"),
        (puts_back_between, "torch"),
        (lambda: torch.set_rng_state(STATE), "torch"),
        (lambda: random.seed(0), "Python"),
        (lambda: np.random.seed(0), "NumPy"),
    ],
)
def test_a_call_that_sets_global_random_numbers_is_found_out(
    call: Callable[[], object], library: str
) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    assert find_reset(call) == library
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tobytes() == before[2]


STATE = torch.get_rng_state()


class Seeds(Net):
    """Draws the same dropout in each step."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return super().forward(x)


class Forks(Seeds):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return Net.forward(self, x)


class SeedsPython(Seeds):
    """Takes a factor from Python's random numbers, the same each time."""

    def forward(self, x: Tensor) -> Tensor:
        random.seed(0)
        return random.random() * Net.forward(self, x)


class Drops(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.5)


def seeding(z: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(0)
    return nn.functional.cross_entropy(z, y, reduction="none")


@pytest.mark.parametrize(
    ("model", "loss", "library"),
    [
        (Seeds, None, "torch"),
        (Forks, None, "torch"),
        (SeedsPython, None, "Python"),
        (Drops, seeding, "torch"),
    ],
)
def test_engines_agree_on_a_model_that_sets_random_numbers(
    model: type[nn.Module], loss: Loss | None, library: str
) -> None:
    state = random.getstate()
    alone, side_by_side = (run(model, loss, kind) for kind in ("sequential", "vectorized"))
    random.setstate(state)
    for name, tensor in alone.params.items():
        torch.testing.assert_close(side_by_side.params[name], tensor, rtol=0.0, atol=1e-12)
    for result in (alone, side_by_side):
        (warning,) = [w for w in result.record.warnings if "sets the random numbers" in w]
        assert f"random numbers of {library}" in warning
    reason = f"sets the random numbers of {library}"
    assert any(reason in r for r in side_by_side.record.engine.reasons)


def test_a_model_with_dropout_alone_is_not_warned_of() -> None:
    record = run(Drops).record
    assert not any("random numbers" in w for w in record.warnings)
