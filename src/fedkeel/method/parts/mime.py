"""Mime and MimeLite: every local step uses the server's momentum, and none changes it.

Source
    Karimireddy et al., Breaking the Centralized Barrier for Cross-Device Federated Learning,
    NeurIPS 2021 (key karimireddy2021mime). Algorithm 1, with SGD and momentum.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Weights
from fedkeel.method.context import Outcome, Population, Round, Step
from fedkeel.method.part import Traits, param
from fedkeel.method.roles import Broadcast, GradientTransform, ServerState, Survey, Upload
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree

PIECE = 256
"""Examples of which a gradient is taken at a time."""


def whole_gradient(step: Step, params: Tree) -> Tree:
    """Return the gradient of the objective over all examples of a step, a piece at a time.

    Args:
        step: its batch may be larger than what one forward pass can hold.
        params: where.
    """
    total, count = tree.zeros_like(params), torch.zeros(())
    for piece, weight in step.pieces(PIECE):
        grads = piece.grad(params)  # of a piece of nothing but padding it is not a number
        total = {k: t + torch.where(weight > 0, weight * grads[k], 0.0) for k, t in total.items()}
        count = count + weight
    return tree.map(lambda t: t / count, total)


@dataclass(frozen=True)
class Fixed(GradientTransform, Broadcast, ServerState):
    """Base class of both: a server's momentum that every local step uses and none changes."""

    beta: float = param(0.9, ge=0.0, lt=1.0)

    paper: ClassVar[str] = "karimireddy2021mime"
    weights: ClassVar[Weights | None] = "uniform"
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    def mix(self, grads: Tree, m: Tree) -> Tree:
        """Return (1 - beta) g + beta m."""
        return tree.map(lambda g, m: (1.0 - self.beta) * g + self.beta * m, grads, m)

    def init_server(self, params: Tree, population: Population) -> State:
        """Return m = 0."""
        return {"m": tree.zeros_like(params)}

    def message(self, state: State) -> State:
        """Return m."""
        return state

    @abstractmethod
    def mean(self, outcome: Outcome) -> Tree:
        """Return c, the mean of the clients' gradients at the model they received."""

    def next_server(self, outcome: Outcome) -> State:
        """Return m, moved towards c."""
        return {"m": self.mix(self.mean(outcome), tree.leaves(outcome.cohort.state, "m"))}


@dataclass(frozen=True)
class Mime(Survey, Fixed):
    r"""Corrects each local gradient by what it was at the received model, and mixes in momentum.

    .. math::
        c &= \sum_k p_k \nabla F_k(\theta^t), \qquad
        g \leftarrow (1-\beta)\bigl(\nabla f_B(\theta) - \nabla f_B(\theta^t) + c\bigr) + \beta m \\
        m &\leftarrow (1-\beta)\,c + \beta m

    with the first two gradients on the same mini-batch, and m the same in all steps of a round.

    Source: karimireddy2021mime, Algorithm 1. The server's step size is `addition(lr=...)`.

    Args:
        beta: momentum in [0, 1).
    Sent: m down; the gradient at the received model up before training, and c down. One model
        each beyond the model.
    State: m at the server, one model, starting at 0.
    Cost: two gradients for each step, and one over all examples of the client.
    Laws: with one client and beta = 0 it is SVRG, and with full batches and without augmentation
        FedAvg. On heterogeneous quadratics with unequal local work and full batches its fixed point
        is the optimum.
    Deviations: weight decay, and local momentum where the run has any, come on top; the paper has
        neither. The public code (FedJAX) weighs clients by examples. Gradients of losses that look
        at a whole batch are those of pieces of 256 examples. Gradients over all examples are taken
        without augmentation (`data.augment`). Augmentation changes both gradients of a mini-batch,
        so its effect cancels at the received model.

    Example:
        >>> import fedkeel
        >>> [part.name for part in fedkeel.parse("mime(beta=0.5)").surveys]
        ['mime']
    """

    name: ClassVar[str] = "mime"

    def survey(self, step: Step) -> State:
        """Return the gradient at the received model."""
        return dict(whole_gradient(step, step.start))

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return the corrected gradient, mixed with m."""
        anchor, mean = step.grad(step.start), tree.leaves(step.broadcast, "survey")
        corrected = tree.add(tree.sub(grads, anchor), mean)
        return self.mix(corrected, tree.leaves(step.broadcast, "m"))

    def mean(self, outcome: Outcome) -> Tree:
        """Return c, which the clients were sent."""
        return tree.tensors(outcome.cohort.answer)


@dataclass(frozen=True)
class MimeLite(Upload, Fixed):
    r"""Mixes the server's momentum into each local gradient.

    .. math::
        g \leftarrow (1-\beta)\,\nabla f_B(\theta) + \beta m, \qquad
        m \leftarrow (1-\beta) \sum_k p_k \nabla F_k(\theta^t) + \beta m

    with m the same in all steps of a round.

    Source: karimireddy2021mime, Algorithm 1 (MimeLite). The server's step size is
        `addition(lr=...)`.

    Args:
        beta: momentum in [0, 1).
    Sent: m down, and the gradient at the received model up, one model each beyond the model.
    State: m at the server, one model, starting at 0.
    Cost: one pass over the parameters for each step, and a gradient over all examples of the
        client.
    Laws: beta = 0 is FedAvg, bit for bit. One full-batch step of each client, without augmentation,
        is Mime's.
    Deviations: weight decay, and local momentum where the run has any, come on top; the paper has
        neither. The public code (FedJAX) weighs clients by examples. Gradients of losses that look
        at a whole batch are those of pieces of 256 examples. m is of examples that are not
        augmented.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("mimelite+fedprox").weights
        'uniform'
    """

    name: ClassVar[str] = "mimelite"

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return the gradient, mixed with m."""
        return self.mix(grads, tree.leaves(step.broadcast, "m"))

    def upload(self, round: Round) -> State:
        """Return the gradient at the received model."""
        return {"gradient": whole_gradient(round.all_examples_step(), round.start)}

    def mean(self, outcome: Outcome) -> Tree:
        """Return the weighted mean of the gradients."""
        return Span(tree.leaves(outcome.cohort.uploads, "gradient")).sum(outcome.cohort.weights)
