"""FedSOL, restated from Lee et al. 2024, section 4, and its public code's adaptive share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from each import each
from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.context import ClientInfo, Objective, Step
from fedkeel.method.grammar import parse
from fedkeel.task.batch import Batch
from fedkeel.task.network import Network
from fedkeel.tree import Tree
from harness import ToyMLP, toy_network
from method.players import LOCAL, equal, federation, gap, play
from method.test_reductions import one_step
from papers.numpy_net import Told, TrainingSetup, Vector, agree, averaged, softmax
from papers.test_fedsam import MOMENTUM

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]


def fedsol(
    setup: TrainingSetup,
    rho: float,
    adaptive: bool,
    T: float = 3.0,
    mu: float = 0.0,
    **local: object,
) -> Iterator[Told]:
    def share(moved: Vector) -> Vector:
        out = np.zeros_like(moved)
        for name, span in setup.net.spans.items():
            part = np.abs(moved[span].reshape(setup.net.shapes[name]))
            size = np.sqrt(np.sum(part**2, axis=0))
            out[span] = np.where(size > 0, part / np.where(size > 0, size, 1.0), 0.0).ravel()
        return out

    def gradient(w: Vector, x: Vector, bx: np.ndarray, by: np.ndarray, i: int) -> Vector:
        scores, taught = setup.net.outputs(w, bx)[1], setup.net.outputs(x, bx)[1]
        slopes = (softmax(scores / T) - softmax(taught / T)) / T / len(bx)
        g = setup.net.pull_back(w, bx, slopes)
        norm = np.sqrt(g @ g)
        e = rho * g / norm if norm > 0 else np.zeros_like(g)
        at = w + (e * share(w - x) if adaptive else e)
        return setup.net.grad(at, bx, by) + mu * (at - x)

    return averaged(setup, COHORTS, gradient, LR, **local)


@each("adaptive", [True, False])
@each(("rho", "T"), [(1.0, 3.0), (0.3, 1.0)])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_fedsol(adaptive: bool, rho: float, T: float, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    expression = f"fedsol(rho={rho}, adaptive={adaptive}, temperature={T})"
    story = fedsol(setup, rho, adaptive, T, **local)
    agree(setup.ours(expression, LR, **ours), story, COHORTS, tol=1e-10)


def test_penalties_are_taken_at_the_perturbed_model_too() -> None:
    setup = TrainingSetup(epochs=2)
    story = fedsol(setup, 1.0, True, mu=0.7)
    agree(setup.ours("fedsol+fedprox(mu=0.7)", LR), story, COHORTS, tol=1e-10)
    assert parse("fedsol+fedprox(mu=0.7)").pull == 0.0


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_perturbation_is_fedavg_bit_for_bit(adaptive: bool, local: Local) -> None:
    nothing = f"fedsol(rho=0.0, adaptive={adaptive})"
    assert equal(play(nothing, local=local), play("fedavg", local=local))
    there = f"fedsol(adaptive={adaptive})"
    assert gap(play(there, local=local), play("fedavg", local=local)) > 1e-3


@each("adaptive", [True, False])
@each("dtype", [torch.float32, torch.float64])
@each("autograd", ["eager", "functional"])
def test_a_first_step_is_fedavgs_bit_for_bit(
    adaptive: bool, dtype: torch.dtype, autograd: str
) -> None:
    """Nothing has moved; a perturbation of length 100 along rounding would not be small."""

    def network() -> Network:
        torch.manual_seed(0)
        return Network(ToyMLP(), head="fc2", dtype=dtype)

    rng = np.random.default_rng(0)
    kind = {torch.float32: np.float32, torch.float64: np.float64}[dtype]
    data = [(rng.normal(size=(9, 8)).astype(kind), rng.integers(0, 3, 9)) for _ in range(3)]
    options = {"batches": lambda k, _: [np.arange(7)], "rounds": 2, "autograd": autograd}
    ours = play(f"fedsol(rho=100.0, adaptive={adaptive})", data, network=network(), **options)
    assert equal(ours, play("fedavg", data, network=network(), **options))


def test_models_that_agree_to_rounding_are_not_told_apart() -> None:
    """A change of all scores by the same number changes no probability."""
    step, asked = watched()
    params = {**step.start, "fc2.bias": step.start["fc2.bias"] + 0.123456789}
    rule = parse("fedsol(rho=100.0, adaptive=False)").gradient_rule
    assert rule is not None
    rule.gradient(params, step)
    assert equal(asked[0], params)


def watched() -> tuple[Step, list[Tree]]:
    """A step that remembers where the gradient of its objective was asked for."""
    asked: list[Tree] = []
    network = toy_network()
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)))
    batch = Batch(x, torch.arange(6) % 3)

    class Watched(Step):
        def grad(self, params: Tree) -> Tree:
            asked.append(params)
            return super().grad(params)

    return Watched(batch, network.params, ClientInfo(0, 6), network, {}, Objective()), asked


def moved(start: Tree, size: float = 0.05) -> Tree:
    source = torch.Generator().manual_seed(1)
    noise = {k: torch.randn(v.shape, generator=source, dtype=v.dtype) for k, v in start.items()}
    return tree.add(start, noise, size)


def test_the_fixed_perturbation_has_its_length_and_climbs_the_divergence() -> None:
    step, asked = watched()
    params = moved(step.start)
    rule = parse("fedsol(rho=0.01, adaptive=False)").gradient_rule
    assert rule is not None
    rule.gradient(params, step)
    away = tree.sub(asked[0], params)
    assert float(tree.dot(away, away).sqrt()) == pytest.approx(0.01, rel=1e-12)

    def divergence(at: Tree) -> float:
        theirs, ours = (
            torch.log_softmax(step.logits(p, step.batch.x) / 3.0, dim=1) for p in (step.start, at)
        )
        return float((theirs.exp() * (theirs - ours)).sum(dim=1).mean())

    slope = step.grad_of(
        params,
        lambda output: (
            -(
                torch.softmax(step.teacher().logits / 3.0, dim=1)
                * torch.log_softmax(output.logits / 3.0, dim=1)
            ).sum(dim=1)
        ),
    )
    size = float(tree.dot(slope, slope).sqrt())
    assert gap(away, tree.scale(slope, 0.01 / size)) < 1e-10
    assert divergence(asked[0]) - divergence(params) == pytest.approx(0.01 * size, rel=0.2)


def test_the_adaptive_one_moves_only_what_has_moved() -> None:
    step, asked = watched()
    params = {**step.start, "fc1.weight": moved(step.start)["fc1.weight"]}
    rule = parse("fedsol").gradient_rule
    assert rule is not None
    rule.gradient(params, step)
    away = tree.sub(asked[0], params)
    assert away["fc1.weight"].abs().max() > 1e-3
    assert not any(v.any() for k, v in away.items() if k != "fc1.weight")


@pytest.mark.parametrize("adaptive", [True, False])
def test_padding_does_not_matter(adaptive: bool) -> None:
    step, _ = watched()
    params = moved(step.start)
    rule = parse(f"fedsol(adaptive={adaptive})").gradient_rule
    assert rule is not None
    b = step.batch
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]).double()
    padded = rule.gradient(params, replace(step, batch=Batch(b.x, b.y, weight), recorded_losses=[]))
    plain = rule.gradient(params, replace(step, batch=Batch(b.x[:4], b.y[:4]), recorded_losses=[]))
    assert gap(padded, plain) < 1e-12


def test_a_second_step_differs() -> None:
    two = {"batches": lambda k, t: one_step(k, t) * 2}
    for adaptive in (True, False):
        ours = federation(f"fedsol(adaptive={adaptive})", **two).round()
        theirs = federation("fedavg", **two).round()
        assert gap(ours.deltas[0], theirs.deltas[0]) > 1e-3
