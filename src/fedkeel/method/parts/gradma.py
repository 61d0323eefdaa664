"""GradMA: correct each worker's gradient and the server's momentum by what they remember.

Source
    Luo et al., GradMA: A Gradient-Memory-based Accelerated Federated Learning with Alleviated
    Catastrophic Forgetting, CVPR 2023 (key luo2023gradma). Algorithms 1-4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.config import Weights
from fedkeel.errors import CompositionError
from fedkeel.method.context import Ints, Population, Round, RoundCohort, Step
from fedkeel.method.part import Capability, Stage, Traits, param
from fedkeel.method.roles import Carry, ClientState, GradientTransform, ServerOptimiser
from fedkeel.solve import qp, span
from fedkeel.solve.span import Floats, Span
from fedkeel.tree import Groups, State, Tree

SMALLEST_SCALE = 1e-300
"""Smallest factor of a stored row: a memory that decays does not become 0."""

SHORT = 256
"""Columns of which products are added up in float32. A Gram matrix squares the condition of its
rows, and a worker's way is nearly opposite to a gradient: with one sum over half a million columns
the answer was off by up to a tenth of the gradient. Shorter sums are no better, and take longer."""


@dataclass(frozen=True)
class GradMAW(GradientTransform, Carry, ClientState):
    r"""Turns each local gradient to an acute angle with three remembered directions.

    .. math::
        \tilde g = \arg\min_u \tfrac12\lVert u - g\rVert^2 \quad\text{s.t.}\quad
        \langle u, \nabla f(\theta_{\tau-1})\rangle,\;
        \langle u, \nabla f(\theta^t)\rangle,\;
        \langle u, \theta_\tau - \theta^t\rangle \;\ge\; 0

    with all gradients on the same mini-batch.

    Source: luo2023gradma, Algorithm 2, Eq. (5).

    Args:
        previous: theta_{-1} of the first step: the worker's ``last`` local model from its previous
            participation (the paper), or the ``start``, the received model (the public code of the
            full method), which makes the first constraint inactive in that step and the client
            stateless.
        groups: what is projected as one vector: the ``model`` (the paper), or each ``tensor`` (the
            public code).
        margin: rho >= 0: constraints become <u, M_i> >= rho |g| |M_i|. 0 in the paper. Where two of
            the directions are nearly opposite, no margin can be met without a step that is many
            times as long as the gradient: keep rho small, or clip.
    Sent: nothing beyond the model.
    State: the last local model for each client, one model; none with previous = ``start``.
    Cost: 3 gradients for each step.
    Laws: the answer meets the constraints and the optimality conditions. After a full-batch step
        the next one is orthogonal to it, so the model nearly stalls one step from where it began.
    Deviations: the paper starts every worker from theta^0; a worker's first theta_{-1} here is the
        received model, as in the public code, which in round 1 is the same. Weight decay acts after
        the projection; the public code adds it to each of the three gradients. A margin that cannot
        be met leaves the gradient as it is.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("gradma.w(previous='start')").expression
        "gradma.w(previous='start')"
    """

    previous: Literal["last", "start"] = "last"
    groups: Groups = "model"
    margin: float = param(0.0, ge=0.0)

    name: ClassVar[str] = "gradma.w"
    paper: ClassVar[str] = "luo2023gradma"
    weights: ClassVar[Weights | None] = "uniform"
    gradient_stage: ClassVar[Stage] = Stage.PROJECT
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        """Clients that can be found again, where they keep their last model."""
        return frozenset({Capability.STABLE_CLIENTS} if self.previous == "last" else ())

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return the projected gradient."""
        rows = (
            step.grad(tree.leaves(step.carry, "previous")),
            step.grad(step.start),
            tree.sub(params, step.start),
        )
        out: Tree = {}
        for names in tree.group_names(list(grads), self.groups):
            flat = [t[k].reshape(-1) for t in (*rows, grads) for k in names]
            m = torch.cat(flat).view(4, -1)  # [4, F]: the three directions and the gradient
            products = span.row_products(m, m, SHORT)
            gram, inner = products[:3, :3], products[:3, 3]
            if self.margin > 0.0:
                sizes = torch.diagonal(products).clamp(min=0.0).sqrt()
                inner = inner - self.margin * sizes[3] * sizes[:3]
            push = qp.enumerate_cone(gram, inner, solvable=self.margin == 0.0).to(m.dtype)
            pieces = torch.split(m[3] + push @ m[:3], [grads[k].numel() for k in names])
            out.update({k: v.view_as(grads[k]) for k, v in zip(names, pieces, strict=True)})
        return tree.pick(out, grads)

    def init_carry(self, start: Tree, client_state: State) -> State:
        """Return theta_{-1}."""
        return {"previous": dict(tree.leaves(client_state, "last") if client_state else start)}

    def next_carry(self, before: Tree, carry: State) -> State:
        """Return the model before this step, which the next step calls the previous one."""
        return {"previous": dict(before)}

    def init_client(self, start: Tree) -> State:
        """Return the received model, for a worker that has no last one."""
        return {"last": dict(start)} if self.previous == "last" else {}

    def next_client(self, round: Round) -> State:
        """Return the local model after the last step."""
        return {"last": dict(round.end)} if self.previous == "last" else {}


@dataclass(frozen=True)
class GradMAS(ServerOptimiser):
    r"""Turns the server's momentum to an acute angle with every remembered worker's updates.

    .. math::
        m &= \beta_1\tilde m + \Delta, \qquad
        D_i \leftarrow \beta_2 D_i + [i \in S_t]\,\Delta_i \\
        \tilde m &= \arg\min_u \tfrac12\lVert u - m\rVert^2
            \;\text{s.t.}\; \langle u, D_i\rangle \ge 0 \;\forall i, \qquad
        \theta \leftarrow \theta + \eta_g\tilde m

    Source: luo2023gradma, Algorithm 3, Eq. (6)-(8); Algorithm 4 for the memory's reduction.

    Args:
        memory: m, the number of workers remembered: 0, or at least those of one round; None
            remembers every worker. When it is full, the stored worker outside this round with the
            fewest participations is removed; among equals, the one stored first.
        beta1: momentum in [0, 1).
        beta2: what is left of a memory after a round, in [0, 1). At 0 inactive workers are
            forgotten, contrary to the paper's text.
        lr: eta_g, > 0.
        groups: what is projected as one vector: the ``model`` (the paper), or each ``tensor`` (the
            public code), where tensors smaller than the number of memories are soon set to zero.
        margin: rho >= 0: constraints become <u, D_i> >= rho |m| |D_i|. 0 in the paper.
    Sent: nothing beyond the model.
    State: m~ and m memories at the server, m + 1 models, and their m x m Gram matrix.
    Cost: inner products of the round's new memories with all memories, one quadratic programme in m
        unknowns, one combination.
    Laws: memory = 0 is server momentum (FedAvgM), bit for bit. Optimality conditions hold.
    Deviations: d in the paper points uphill, so signs are mirrored, which changes nothing. The
        order of a round's workers is that of their indices. The public code weighs workers by
        examples, projects each tensor, and refuses memory = 0. Its solver's tolerance is absolute,
        so on small updates it is off by a third; ours solves scaled rows.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("gradma.s(memory=0, beta1=0.9)").expression
        'gradma.s(memory=0, beta1=0.9)'
    """

    memory: int | None = param(None, ge=0)
    beta1: float = param(0.5, ge=0.0, lt=1.0)
    beta2: float = param(0.5, ge=0.0, lt=1.0)
    lr: float = param(1.0, gt=0.0)
    groups: Groups = "model"
    margin: float = param(0.0, ge=0.0)

    name: ClassVar[str] = "gradma.s"
    paper: ClassVar[str] = "luo2023gradma"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PER_CLIENT_UPDATES, Capability.STABLE_CLIENTS, Capability.SEPARATE_UPDATES}
    )

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return no momentum and empty slots.

        Raises:
            CompositionError: the memory is too small for a round.
        """
        slots = population.clients if self.memory is None else min(self.memory, population.clients)
        if 0 < slots < population.per_round:
            raise CompositionError(
                "gradma.s cannot remember the workers of one round.",
                got=f"memory={self.memory} for {population.per_round} clients a round",
                expected=f"0, or at least {population.per_round}",
                why="Algorithm 1 needs S <= m: every worker of a round enters the memory",
            )
        groups = len(tree.group_names(list(params), self.groups))
        return {
            "m": tree.zeros_like(params),
            "rows": tree.map(lambda v: tree.lazy_zeros((slots, *v.shape), v.dtype), params),
            "scale": torch.zeros(slots, dtype=torch.float64),
            "gram": tree.lazy_zeros((groups, slots, slots), torch.float64),
            "worker": torch.full((slots,), -1, dtype=torch.int64),
            "count": torch.zeros(slots, dtype=torch.int64),
            "age": torch.zeros(slots, dtype=torch.int64),
        }

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the model after a step along the projected momentum, and the memory."""
        state = cohort.state
        m = tree.add(update, tree.leaves(state, "m"), self.beta1)
        if len(tree.leaf(state, "worker")):
            rows, gram, inner = self._remember(m, updates, cohort)
            m = self._project(m, rows, gram, inner, cohort)
        return tree.add(params, m, self.lr), {**state, "m": m}

    def _remember(self, m: Tree, updates: Span, cohort: RoundCohort) -> tuple[Tree, Floats, Floats]:
        """Enter the round's updates into the memory, in place.

        A memory is `scale` times its row, so that the decay of those that nobody added to costs
        nothing. The length of a memory means nothing to the programme, only whether it has one: so
        the Gram matrix is that of the rows, and a worker that stays away long is not forgotten.

        Returns:
            Of the n workers stored so far: rows [n, ...], and of those with a length gram [G, n, n]
            and the inner products with the momentum, [G, n]; zeros elsewhere.
        """
        state = cohort.state
        slots, new = _reduce_memory(state, cohort.clients)
        stored = int((tree.leaf(state, "worker") >= 0).sum())  # in the first slots
        cohort.log("stored", float(stored))
        rows = tree.map(lambda rows: rows[:stored], tree.leaves(state, "rows"))
        scale = tree.leaf(state, "scale").numpy()[:stored]
        gram = tree.leaf(state, "gram").numpy()[:, :stored, :stored]
        scale *= self.beta2
        if self.beta2 > 0.0:
            scale[scale < SMALLEST_SCALE] = SMALLEST_SCALE
        kept = np.where(new, 0.0, scale[slots])
        fresh: Tree = {}  # [S + 1, ...]: the round's memories as they are now, and the momentum
        for k, update in updates.materialise().items():
            fresh[k] = update.new_empty(len(slots) + 1, *update.shape[1:])
            for i, slot in enumerate(slots):  # one by one: while it is near
                memory = fresh[k][i]
                torch.add(update[i], rows[k][slot], alpha=float(kept[i]), out=memory)
                rows[k][slot] = memory
            fresh[k][-1] = m[k]
        scale[slots] = 1.0
        held_on = (scale > 0.0).astype(np.float64)
        gram *= np.outer(held_on, held_on)
        inner = np.zeros(gram.shape[:2])
        for g, names in enumerate(cohort.groups(self.groups)):
            products = held_on[:, None] * span.inner(rows, fresh, names)
            gram[g][:, slots] = products[:, :-1]
            gram[g][slots, :] = products[:, :-1].T
            inner[g] = products[:, -1]
        return rows, gram, inner

    def _project(
        self, m: Tree, rows: Tree, gram: Floats, inner: Floats, cohort: RoundCohort
    ) -> Tree:
        """Return the momentum, projected group by group."""
        out = dict(m)
        failed = active = 0
        groups = cohort.groups(self.groups)
        for g, names in enumerate(groups):
            bound = np.zeros(len(inner[g]))
            if self.margin > 0.0:
                p = tree.pick(m, names)
                size = float(tree.dot(p, p)) ** 0.5
                bound = self.margin * size * np.sqrt(np.clip(np.diagonal(gram[g]), 0.0, None))
            solution = qp.project(gram[g], inner[g], bound, span.relative_rounding(rows, names))
            failed += not solution.feasible
            if not solution.multipliers.any():
                continue
            active += 1
            push = solution.multipliers[None]
            out.update({k: m[k] + span.combine(push, rows[k])[0] for k in names})
        cohort.log("active", active / len(groups))
        cohort.log("infeasible", failed / len(groups))
        return out


def _reduce_memory(
    state: State, clients: Ints
) -> tuple[Ints, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Find a slot for every client of the round, in place (luo2023gradma, Algorithm 4).

    Returns:
        [S] slots, and [S] whether the slot is newly given to the client.
    """
    worker, count, age = (_ints(tree.leaf(state, k)) for k in ("worker", "count", "age"))
    slots = np.empty(len(clients), dtype=np.int64)
    new = np.zeros(len(clients), dtype=np.bool_)
    for i, client in enumerate(clients):
        places = np.flatnonzero(worker == client)
        if len(places):
            slots[i] = places[0]
        else:
            new[i] = True
            slots[i] = _free_slot(worker, count, age, clients)
            worker[slots[i]], count[slots[i]], age[slots[i]] = client, 0, age.max() + 1
        count[slots[i]] += 1
    return slots, new


def _free_slot(worker: Ints, count: Ints, age: Ints, clients: Ints) -> int:
    """Return an empty slot, else that of the stored worker that makes room."""
    empty = np.flatnonzero(worker < 0)
    if len(empty):
        return int(empty[0])
    outside = np.flatnonzero(~np.isin(worker, clients))
    order = np.lexsort((age[outside], count[outside]))
    return int(outside[order[0]])


def _ints(tensor: Tensor) -> Ints:
    """Return an array that shares the tensor's memory."""
    return np.asarray(tensor.numpy())
