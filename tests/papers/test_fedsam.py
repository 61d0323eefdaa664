"""FedSAM, restated from Qu et al. 2022, section 4: two gradients for each step of a client."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from each import each
from fedkeel.config import Local
from fedkeel.method.grammar import parse
from fedkeel.task.batch import Batch
from method.players import LOCAL, equal, federation, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]
MOMENTUM = Local(lr=0.05, epochs=2, batch_size=4, momentum=0.9, weight_decay=0.01)


def fedsam(setup: TrainingSetup, rho: float, mu: float = 0.0, **local: object) -> Iterator[Told]:
    x = setup.start
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:

            def at(bx, by, x=x):
                def f(w: Vector) -> Vector:
                    return setup.net.grad(w, bx, by) + mu * (w - x)

                return lambda w: f(w + rho * f(w) / np.sqrt(np.sum(f(w) ** 2)))

            steps = [at(*batch) for batch in setup.examples(i, t)]
            sent[i] = descend(x, iter(steps), LR, **local) - x
        p = setup.shares("examples", clients)
        x = x + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(x, sent)


@each("rho", [0.05, 0.5])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
@each("mu", [0.0, 0.7])
def test_fedsam(rho: float, local: dict, mu: float) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    expression = f"fedprox(mu={mu})+fedsam(rho={rho})" if mu else f"fedsam(rho={rho})"
    agree(setup.ours(expression, LR, **ours), fedsam(setup, rho, mu, **local), COHORTS)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_step_uphill_is_fedavg_bit_for_bit(local: Local) -> None:
    assert equal(play("fedsam(rho=0.0)", local=local), play("fedavg", local=local))
    assert gap(play("fedsam(rho=0.1)", local=local), play("fedavg", local=local)) > 1e-3


def test_the_loss_recorded_is_the_one_before_the_step_uphill() -> None:
    """With one step a client's loss is that of the received model, as FedAvg's."""
    batches = {"batches": lambda k, t: [np.arange(4)]}
    ours = federation("fedsam(rho=5.0)", **batches).round()
    theirs = federation("fedavg", **batches).round()
    for k, reply in ours.replies.items():
        assert torch.equal(reply.loss, theirs.replies[k].loss)


class Given:
    """A step whose gradient is a given function, and that remembers where it was asked."""

    def __init__(self, gradient: object) -> None:
        self.gradient, self.asked = gradient, []

    def grad(self, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.asked.append({k: v.clone() for k, v in params.items()})
        return self.gradient(params)  # type: ignore[operator]


def at(values: list[float]) -> dict[str, torch.Tensor]:
    v = torch.tensor(values, dtype=torch.float64)
    return {"a": v[:1], "b": v[1:].reshape(1, -1)}


def test_it_goes_a_fixed_distance_over_the_whole_model() -> None:
    """3, 4 and 12 have norm 13, in two tensors."""
    step = Given(lambda _: at([3.0, 4.0, 12.0]))
    part = parse("fedsam(rho=1.3)").gradient_rule
    found = part.gradient(at([1.0, 1.0, 1.0]), step)  # type: ignore[union-attr, arg-type]
    assert len(step.asked) == 2
    assert gap(step.asked[1], at([1.3, 1.4, 2.2])) < 1e-15
    assert equal(found, at([3.0, 4.0, 12.0]))  # a linear loss has the same gradient there


def test_on_a_quadratic_the_gradient_is_longer_along_the_hessian() -> None:
    """H w becomes H w + rho H (H w) / |H w|."""
    H = torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))

    def gradient(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return at((H @ torch.cat([params["a"], params["b"][0]])).tolist())

    w = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    g = H @ w
    part = parse("fedsam(rho=0.5)").gradient_rule
    found = part.gradient(at(w.tolist()), Given(gradient))  # type: ignore[union-attr, arg-type]
    assert gap(found, at((g + 0.5 * H @ g / g.norm()).tolist())) < 1e-14


@pytest.mark.parametrize("value", [0.0, 1e-200, 1e-30])
def test_a_gradient_of_nothing_gives_no_nan(value: float) -> None:
    """Squares of 1e-200 are 0: there is no direction then; those of 1e-30 are not."""
    step = Given(lambda _: at([value] * 3))
    part = parse("fedsam(rho=7.0)").gradient_rule
    found = part.gradient(at([1.0, 1.0, 1.0]), step)  # type: ignore[union-attr, arg-type]
    assert equal(found, at([value] * 3))
    away = [float(v) - 1.0 for v in step.asked[1]["b"][0]]
    assert away == pytest.approx([7.0 / 3**0.5 if value == 1e-30 else 0.0] * 2, rel=1e-12)


def test_a_federation_at_a_stationary_point_stays_finite() -> None:
    """With inputs of 0 and classes in equal numbers, zero parameters have a gradient of 0."""
    data = [(np.zeros((6, 8)), np.arange(6) % 3)] * 2
    batches = {"batches": lambda k, t: [np.arange(6)] * 2}
    played = federation("fedsam", data, **batches)
    for v in played.params.values():
        v.zero_()
    network = played.network
    grads = network.value_and_grad(played.params, {}, Batch(*played.data[0]), "eager")[1]
    assert max(float(g.abs().max()) for g in grads.values()) < 1e-16
    done = played.round()
    assert all(bool(reply.finite) for reply in done.replies.values())


def test_a_proximal_term_does_not_pull_where_the_gradient_is_taken_elsewhere() -> None:
    assert parse("fedprox(mu=0.5)+fedsam").pull == 0.0
    assert parse("scaffold+fedsam").gradient_rule is not None
