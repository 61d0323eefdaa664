"""Gradient inversion: examples whose gradient is the one that was seen.

Sources
    Zhu et al., Deep Leakage from Gradients, NeurIPS 2019: `dlg`. Geiping et al., Inverting
    Gradients, NeurIPS 2020: `match_images`, as FedReg (xu2022fedreg, Appendix B.4) uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeel.config.audit import Distance
from fedkeel.study.audit.matching import Direction, GradientModel, Match

Progress = Callable[[int], None]
"""Called with the number of iterations that were made since the last call."""


@dataclass(frozen=True)
class Reconstruction:
    """What an attacker made of a gradient.

    Args:
        x: [n, ...] inputs, as the network takes them.
        y: [n] labels.
        distance: how far the gradient of these is from the one that was seen.
        iterations: steps of the optimiser in the best try.
    """

    x: Tensor
    y: Tensor
    distance: float
    iterations: int


@dataclass(frozen=True)
class Guess:
    """What an attacker begins with.

    Args:
        shape: (n, ...) of the inputs.
        random: draws the first inputs.
        classes: Y.
        labels: [n] labels that the attacker knows already; None where they are looked for too.
    """

    shape: tuple[int, ...]
    random: torch.Generator
    classes: int
    labels: Tensor | None = None

    def inputs(self) -> Tensor:
        """Return standard normal inputs."""
        return torch.randn(self.shape, generator=self.random, dtype=torch.float64)

    def targets(self) -> Tensor | None:
        """Return [n, Y] scores of labels to be looked for; None where labels are known."""
        if self.labels is not None:
            return None
        size = (self.shape[0], self.classes)
        return torch.randn(size, generator=self.random, dtype=torch.float64)

    def as_target(self, free: Tensor | None) -> Tensor:
        """Return what the loss takes, made of what is looked for."""
        if free is None:
            if self.labels is None:
                raise ValueError("neither labels nor free targets")
            return self.labels
        return free.softmax(dim=1)

    def as_labels(self, free: Tensor | None) -> Tensor:
        """Return [n] labels."""
        target = self.as_target(free)
        return target if free is None else target.argmax(dim=1)


@torch.enable_grad()
def dlg(
    model: GradientModel,
    guess: Guess,
    iterations: int = 300,
    tries: int = 1,
    unknown: tuple[Direction, ...] = (),
    tolerance: float = 0.0,
    progress: Progress = lambda _: None,
) -> Reconstruction:
    """Look for inputs and labels whose gradient is the one that was seen, by L-BFGS.

    Source: Zhu et al. 2019, Algorithm 1: L-BFGS with rate 1 on the squared distance; each iteration
    is one call of torch's optimiser, of at most 20 evaluations.
    Deviations: a strong Wolfe line search, in float64; several starts, of which the one that ends
    nearest is kept; it ends early where the distance is within `tolerance`, or does not shrink.

    Args:
        model: the gradient of made-up examples, and the one that was seen.
        guess: where to begin.
        iterations: most iterations of each try.
        tries: starts.
        unknown: directions along which the gradient is not known.
        tolerance: the squared distance at which it ends, such as that of rounding errors.
        progress: called with the number of iterations that are done.
    """
    best: Reconstruction | None = None
    match = Match(model.target, "l2", unknown)
    for attempt in range(1, tries + 1):
        x, free = guess.inputs().requires_grad_(), guess.targets()
        variables = [x] if free is None else [x, free.requires_grad_()]
        optimiser = torch.optim.LBFGS(
            variables, lr=1.0, history_size=100, line_search_fn="strong_wolfe"
        )
        distance, steps = math.inf, 0

        def closure(x: Tensor = x, free: Tensor | None = free) -> Tensor:
            optimiser.zero_grad()  # noqa: B023 - called within this iteration of the loop
            value = match(model(x, guess.as_target(free)))
            value.backward()  # type: ignore[no-untyped-call]
            return value

        for steps in range(1, iterations + 1):  # noqa: B007 - told of below
            before = distance
            distance = float(optimiser.step(closure).detach())  # type: ignore[no-untyped-call]
            progress(1)
            is_stuck = distance >= before * (1 - 1e-9)
            if not math.isfinite(distance) or distance <= tolerance or is_stuck:
                break
        progress(iterations - steps)
        distance = float(match(model(x, guess.as_target(free))).detach())
        distance = distance if math.isfinite(distance) else math.inf
        if best is None or distance < best.distance:
            y = guess.as_labels(free).detach()
            best = Reconstruction(x.detach().nan_to_num(), y, distance, steps)
        if best.distance <= tolerance:
            progress(iterations * (tries - attempt))
            break
    if best is None:
        raise ValueError("tries has to be 1 at least")
    return best


@dataclass(frozen=True)
class Descent:
    """How `match_images` looks for inputs.

    Args:
        distance: how gradients are compared.
        iterations: steps of Adam; 32,000 in FedReg's paper.
        lr: Adam's learning rate, a tenth of it from 3/8, 5/8 and 7/8 of the steps on.
        variation: weight of the total variation.
        signed: whether Adam takes the sign of the gradient, as in Geiping et al.'s code.
        low: smallest value of an input; None where it is unbounded.
        high: largest value of an input.
    """

    distance: Distance = "cosine"
    iterations: int = 32_000
    lr: float = 1.0
    variation: float = 1e-6
    signed: bool = True
    low: float | None = None
    high: float | None = None


@torch.enable_grad()
def match_images(
    model: GradientModel,
    guess: Guess,
    how: Descent,
    unknown: tuple[Direction, ...] = (),
    progress: Progress = lambda _: None,
) -> Reconstruction:
    """Look for inputs whose gradient is like the one that was seen, by Adam.

    Source: Geiping et al. 2020, Eq. (4); FedReg, Appendix B.4, for rate, steps and weights.
    Deviations: inputs are kept in their range, and Adam takes signs, as in Geiping et al.'s code;
    FedReg's paper says neither. Computed in float64.

    Args:
        model: the gradient of made-up examples, and the one that was seen.
        guess: where to begin.
        how: distance, steps, weight of the total variation, range.
        unknown: directions along which the gradient is not known.
        progress: called with the number of iterations that are done.
    """
    match = Match(model.target, how.distance, unknown)
    x, free = guess.inputs().requires_grad_(), guess.targets()
    variables = [x] if free is None else [x, free.requires_grad_()]
    optimiser = torch.optim.Adam(variables, lr=how.lr)
    milestones = [how.iterations * part // 8 for part in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones, gamma=0.1)
    best_x, best_free, best_distance = x.detach().clone(), free, math.inf
    for _ in range(how.iterations):
        optimiser.zero_grad()
        distance = match(model(x, guess.as_target(free)))
        cost = distance + how.variation * total_variation(x)
        cost.backward()  # type: ignore[no-untyped-call]
        if float(distance.detach()) < best_distance:
            best_x, best_distance = x.detach().clone(), float(distance.detach())
            best_free = None if free is None else free.detach().clone()
        if how.signed and x.grad is not None:
            x.grad.sign_()
        optimiser.step()
        schedule.step()
        if how.low is not None and how.high is not None:
            with torch.no_grad():
                x.clamp_(how.low, how.high)
        progress(1)
    labels = guess.as_labels(best_free).detach()
    return Reconstruction(best_x, labels, best_distance, how.iterations)


def total_variation(x: Tensor) -> Tensor:
    """Return [] the mean absolute difference of neighbours in each of the last two axes.

    0 where inputs have fewer than two axes of space, as rows of a table.
    """
    if x.ndim < 4:
        return x.new_zeros(())
    return (x.diff(dim=-1).abs().mean()) + (x.diff(dim=-2).abs().mean())
