"""FedAdamW: local AdamW that starts from averaged second moments and leans to the global update.

Source
    Liu et al., FedAdamW: A Communication-Efficient Optimizer with Convergence and Generalization
    Guarantees for Federated Large Models, AAAI 2026 (key liu2026fedadamw). Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.config import Local, Weights
from fedkeel.method.context import Outcome, Population, Round
from fedkeel.method.local_optimiser import LocalOptimiser, decayed, descend, moments
from fedkeel.method.part import Traits, param
from fedkeel.method.roles import Broadcast, ClientOptimiser, ServerState, Upload
from fedkeel.tree import State, Tree

Blocks = Literal["row", "tensor", "entry"]


@dataclass(frozen=True)
class AlignedAdamW(LocalOptimiser):
    """AdamW whose step has a constant part beside its own direction.

    Args:
        betas: beta_1 and beta_2.
        eps: epsilon.
        alpha: weight of the constant direction.
        whole_run: whether m is corrected by the steps of the whole run, not by those of the round.
        weight_decay: lambda, decoupled.
        no_decay: parameters without weight decay.
    """

    betas: tuple[float, float]
    eps: float
    alpha: float
    whole_run: bool
    weight_decay: float
    no_decay: frozenset[str]

    def init(self, params: Tree) -> State:
        """Return m, v and the direction at 0, and no steps, in this round and in the run."""
        count = next(iter(params.values())).new_zeros((), dtype=torch.float64)
        state: State = {"steps": count, "total": count.clone()}
        for name in ("m", "v", "direction"):
            state[name] = tree.zeros_like(params)
        return state

    def step(
        self, params: Tree, grads: Tree, state: State, lr: float | Tensor
    ) -> tuple[Tree, State]:
        """Return parameters and state after one step."""
        (beta1, beta2), toward = self.betas, tree.leaves(state, "direction")
        steps, total = (tree.leaf(state, name) + 1.0 for name in ("steps", "total"))
        m, v = moments(tree.leaves(state, "m"), tree.leaves(state, "v"), grads, self.betas)
        first = 1.0 - beta1 ** (total if self.whole_run else steps)
        second = (1.0 - beta2**total).sqrt()

        def aligned(g: Tensor, m: Tensor, v: Tensor, toward: Tensor) -> Tensor:
            root = v.sqrt() / second.to(g.dtype) + self.eps
            return m / first.to(g.dtype) / root + self.alpha * toward

        direction = tree.map(aligned, grads, m, v, toward)
        direction = decayed(direction, params, self.weight_decay, self.no_decay)
        after: State = {"steps": steps, "total": total}
        after |= {"m": m, "v": v, "direction": toward}
        return descend(params, direction, lr), after


@dataclass(frozen=True)
class FedAdamW(ClientOptimiser, Upload, Broadcast, ServerState):
    r"""Takes AdamW's steps from the clients' mean second moments, with a share of the global step.

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
        \theta &\leftarrow \theta - \eta\Bigl(
            \frac{m/(1-\beta_1^s)}{\sqrt{v/(1-\beta_2^t)}+\epsilon}
            + \alpha\Delta_G + \lambda\theta\Bigr) \\
        \bar v &= \tfrac1K\sum_k \mathrm{blocks}(v_k), \qquad
        \Delta_G = -\frac{\theta^{t+1} - \theta^t}{\eta\, S}

    In each round m starts at 0 and v at v-bar; s counts the steps of the round, t those of the run.
    S is the clients' mean number of steps. Each client sends the mean of v over each block.

    Source: liu2026fedadamw, Algorithm 2.

    Args:
        alpha: weight of the global update, >= 0. 0.5 in the paper.
        beta1: how much of the mean gradient stays in each step, in [0, 1).
        beta2: how much of the mean squared gradient stays in each step, in [0, 1).
        eps: added to the root of the mean squared gradient, > 0.
        blocks: entries that share a mean of v. ``row`` is a row of a matrix (an output neuron, or a
            filter of a convolution) and a whole vector; ``tensor`` is a whole tensor; ``entry``
            sends v itself, as the authors' public code does.
        corrected: steps that correct the bias of m: those of the ``round``, in which m starts at 0,
            or of the whole ``run``, as in the authors' public code, where first steps are short.
    Sent: the global update down, one model beyond the model; v-bar down and up, one number for each
        block, and two counts.
    State: the global update and v-bar at the server, starting at 0.
    Cost: AdamW, and one pass over the parameters for each step.
    Laws: the first round is that of local AdamW. beta1 = beta2 = 0 and alpha = 0 with a large eps
        is FedAvg with the learning rate over eps. Of one client with ``entry``, alpha = 0 and
        beta1 = 0 it is AdamW over all rounds.
    Deviations: the paper's blocks follow Adam-mini (attention heads, output neurons, tokens); here
        they are rows. The paper prints the weight decay with the other sign. Weight decay is the
        run's `local.weight_decay`, which is 0.01 in the paper; the public code also clips gradients
        at 10 (`local.clip_norm`).

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedadamw(alpha=0.1)").client_optimiser.alpha
        0.1
    """

    alpha: float = param(0.5, ge=0.0)
    beta1: float = param(0.9, ge=0.0, lt=1.0)
    beta2: float = param(0.999, ge=0.0, lt=1.0)
    eps: float = param(1e-8, gt=0.0)
    blocks: Blocks = "row"
    corrected: Literal["round", "run"] = "round"

    name: ClassVar[str] = "fedadamw"
    paper: ClassVar[str] = "liu2026fedadamw"
    weights: ClassVar[Weights | None] = "uniform"
    traits: ClassVar[Traits] = Traits(needs_only_sum=True)

    def local_optimiser(self, local: Local, no_decay: frozenset[str]) -> LocalOptimiser:
        """Return AdamW with a constant direction."""
        betas, whole_run = (self.beta1, self.beta2), self.corrected == "run"
        return AlignedAdamW(betas, self.eps, self.alpha, whole_run, local.weight_decay, no_decay)

    def start_optimiser(self, initial: State, broadcast: State, client_state: State) -> State:
        """Return m = 0, the mean v, and the count of the run."""
        mean, zeros = tree.leaves(broadcast, "v"), tree.leaves(initial, "v")
        return {
            **initial,
            "v": tree.map(torch.add, zeros, mean),
            "direction": tree.leaves(broadcast, "direction"),
            "total": tree.leaf(broadcast, "total"),
        }

    def upload(self, round: Round) -> State:
        """Return the means of v, and the counts."""
        means = tree.map(self._mean, tree.leaves(round.optimiser, "v"))
        counts = {name: tree.leaf(round.optimiser, name) for name in ("steps", "total")}
        return {"v": means, **counts}

    def init_server(self, params: Tree, population: Population) -> State:
        """Return v-bar = 0, no direction and no steps."""
        count = next(iter(params.values())).new_zeros((), dtype=torch.float64)
        means = tree.map(self._mean, tree.zeros_like(params))
        return {"v": means, "direction": tree.zeros_like(params), "total": count}

    def message(self, state: State) -> State:
        """Return all of it."""
        return state

    def next_server(self, outcome: Outcome) -> State:
        """Return the means over the clients, and the global update of this round."""
        cohort = outcome.cohort
        share = 1.0 / len(cohort.clients)
        steps, total = (tree.leaf(cohort.uploads, n).sum() * share for n in ("steps", "total"))
        v = tree.scale(tree.sum_rows(tree.leaves(cohort.uploads, "v")), share)
        moved = tree.sub(outcome.end, outcome.start)
        direction = tree.scale(moved, -1.0 / (cohort.lr * steps))
        return {"v": v, "direction": direction, "total": total}

    def _mean(self, v: Tensor) -> Tensor:
        """Return the mean of v over each block, in a shape that spreads over v's."""
        if self.blocks == "entry":
            return v
        if self.blocks == "tensor" or v.ndim < 2:
            return v.mean()
        return v.mean(dim=tuple(range(1, v.ndim)), keepdim=True)
