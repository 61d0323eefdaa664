"""FedGC: constrain each client's update by the server's, and the server's by each client's.

Source
    Anonymous, FedGC: An Accurate and Efficient Federated Learning under Gradient Constraint for
    Heterogeneous Data, submitted to ICLR 2023 (key fedgc2023). Algorithm 1. Another method shares
    the name (Gradient Correction, AAAI 2022).

"Gradient" in the paper is the negative gradient: adding it moves downhill. So a pseudo-gradient is
the update divided by the learning rate, and nothing here changes sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Weights
from fedkeel.method.context import Outcome, Population, Round, RoundCohort
from fedkeel.method.part import Capability, Stage, param
from fedkeel.method.roles import AggregateTransform, Broadcast, ServerState, UpdateTransform
from fedkeel.solve import qp, span
from fedkeel.solve.span import Span
from fedkeel.tree import Groups, State, Tree


@dataclass(frozen=True)
class CGC(UpdateTransform, Broadcast, ServerState):
    r"""Moves each client's pseudo-gradient to an acute angle with the server's last one.

    .. math::
        g_k = \arg\min_u \tfrac12\lVert u - \tilde g_k\rVert^2 \quad\text{s.t.}\quad
        \langle u, g^{t-1}\rangle \ge C, \qquad \tilde g_k = (\theta_k - \theta^t) / \eta

    Source: fedgc2023, Algorithm 1 lines 16-18, Eq. (4)-(7), in closed form: g_k = h + v z with
        v = max(0, (C - <h, z>) / |z|^2).

    Args:
        margin: C, >= 0, on each group by itself. Absolute, so its effect depends on the size of
            the gradient: on a group where |g^{t-1}| is tiny the answer has norm >= C / |g^{t-1}|.
        groups: what is projected as one vector. "Layer by layer" in the paper; ``tensor`` is what
            public implementations of such projections do.
    Sent: g^{t-1} down, one model. The paper bills only one model down, because its clients keep
        theta^{t-1}; that requires every client in every round, so the model is sent and counted.
    State: g^{t-1} at the server, one model.
    Cost: three passes over the update.
    Laws: where the angle is acute enough nothing changes; where it is not, <g_k, g^{t-1}> = C.
    Deviations: in round 1 there is no g^0, and the paper does not treat this case; the update stays
        as it is. Where g^{t-1} is zero on a group, no u meets the constraint, and the group stays
        as it is. The same holds where g^{t-1} is only rounding error, as on a bias before batch
        normalisation: at most 32 times the type's precision, relative to the whole g^{t-1}. The
        printed line 6 writes g_k^{t-1}; the text means the server's.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedgc.cgc(margin=0.0)").expression
        'fedgc.cgc(margin=0.0)'
    """

    margin: float = param(1e-3, ge=0.0)
    groups: Groups = "tensor"

    name: ClassVar[str] = "fedgc.cgc"
    paper: ClassVar[str] = "fedgc2023"
    weights: ClassVar[Weights | None] = "processed"
    update_stage: ClassVar[Stage] = Stage.PROJECT

    def transform_update(self, update: Tree, round: Round) -> Tree:
        """Return the projected update."""
        server = tree.leaves(round.broadcast, "g")
        rounding_error = _rounding(server)
        projected = dict(update)
        active = []
        for names in tree.group_names(list(update), self.groups):
            local, last = tree.pick(update, names), tree.pick(server, names)
            inner = tree.dot(local, last) / round.lr
            size = tree.dot(last, last)
            v = qp.halfspace(inner, torch.where(size > rounding_error, size, 0.0), self.margin)
            projected.update({k: torch.add(local[k], last[k] * (v * round.lr)) for k in names})
            active.append((v > 0).to(inner.dtype))
        round.log("active", torch.stack(active).mean())
        return projected

    def init_server(self, params: Tree, population: Population) -> State:
        """Return g = 0, which constrains nothing."""
        return {"g": tree.zeros_like(params)}

    def message(self, state: State) -> State:
        """Return g^{t-1}."""
        return state

    def next_server(self, outcome: Outcome) -> State:
        """Return what the server did, for each unit of the local learning rate."""
        moved = tree.sub(outcome.end, outcome.start)
        return {"g": tree.scale(moved, 1.0 / outcome.cohort.lr)}


@dataclass(frozen=True)
class SGC(AggregateTransform):
    r"""Moves the aggregate to an acute angle with every client's pseudo-gradient.

    .. math::
        g = \arg\min_z \tfrac12\lVert z - \bar g\rVert^2 \quad\text{s.t.}\quad
        \langle z, g_k\rangle \ge C \;\;\forall k

    Source: fedgc2023, Algorithm 1 lines 21-22, Eq. (8)-(10).

    Args:
        margin: C, >= 0, on each group by itself, in units of squared pseudo-gradients.
        groups: what is projected as one vector. The paper states none for the server.
        singular: what happens where the clients' updates are linearly dependent, as they always are
            where there are more clients than entries: ``solve`` the programme, which may still have
            an answer, or ``keep`` the mean, as the paper's solver makes it.
    Sent: nothing beyond the model.
    State: none.
    Cost: one Gram matrix of the K updates, and one quadratic programme in K unknowns a group.
    Laws: without conflict it is FedAvg, bit for bit. Optimality conditions hold.
    Deviations: where no z meets the constraints, as the paper, the mean is kept, and the record
        has the share of such groups (`infeasible`). With one client for each class that is so on
        the classifier's bias, taken by itself, in every round without CGC and in the first with it;
        and on a bias before batch normalisation, whose updates are the rounding of zeros.
        The paper's solver also refuses programmes that have an answer, where the updates are
        linearly dependent: `singular = "keep"`.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedavg+fedgc.sgc").weights
        'processed'
    """

    margin: float = param(1e-3, ge=0.0)
    groups: Groups = "tensor"
    singular: Literal["solve", "keep"] = "solve"

    name: ClassVar[str] = "fedgc.sgc"
    paper: ClassVar[str] = "fedgc2023"
    weights: ClassVar[Weights | None] = "processed"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})
    aggregate_stage: ClassVar[Stage] = Stage.PROJECT

    def transform_aggregate(self, update: Tree, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the projected aggregate."""
        bound = self.margin * cohort.lr**2  # the constraint on updates, not pseudo-gradients
        coefficients: dict[str, span.Floats] = {}
        infeasible = active = 0
        groups = cohort.groups(self.groups)
        zero_length = float(_rounding(update)) if bound > 0 else -1.0
        for names in groups:
            inner = updates.inner_products(update, names)
            if (inner >= bound).all():
                continue
            gram, noise = updates.gram(names), span.relative_rounding(updates.rows, names)
            if (np.diagonal(gram) <= zero_length).any() or (
                self.singular == "keep" and qp.singular(gram, noise)
            ):
                infeasible += 1
                continue
            solution = qp.project(gram, inner, bound, noise)
            infeasible += not solution.feasible
            active += solution.feasible
            if solution.feasible:
                coefficients.update(dict.fromkeys(names, solution.multipliers))
        cohort.log("infeasible", infeasible / len(groups))
        cohort.log("active", active / len(groups))
        if not coefficients:
            return update
        still = np.zeros(len(updates))
        push = updates.sum({k: coefficients.get(k, still) for k in update})
        out = {k: v + push[k] if k in coefficients else v for k, v in update.items()}
        for names in groups:  # an answer of zero comes out as rounding, which would bind CGC
            if names[0] in coefficients:
                before, after = tree.pick(update, names), tree.pick(out, names)
                rounding = max(100 * span.relative_rounding(updates.rows, names), 32 * _eps(after))
                if tree.dot(after, after) <= rounding**2 * tree.dot(before, before):
                    out.update(tree.zeros_like(after))
        return out


def _eps(tree_: Tree) -> float:
    return torch.finfo(next(iter(tree_.values())).dtype).eps


def _rounding(params: Tree) -> torch.Tensor:
    """Return [] the squared norm below which a group of a vector is the rounding of a zero."""
    return (32 * _eps(params)) ** 2 * tree.dot(params, params)
