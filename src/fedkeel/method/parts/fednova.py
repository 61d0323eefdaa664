"""FedNova: normalise each client's update by the length of its local path.

Source
    Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, NeurIPS 2020 (key wang2020fednova). Eq. (4)-(7).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Round, RoundCohort
from fedkeel.method.part import Capability, Traits
from fedkeel.method.roles import AggregateTransform, UpdateTransform, Upload
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedNova(UpdateTransform, Upload, AggregateTransform):
    r"""Averages normalised updates, then restores the mean length of the paths.

    .. math::
        \Delta = \tau_\mathrm{eff} \sum_k p_k \frac{\Delta_k}{\lVert a_k\rVert_1}, \qquad
        \tau_\mathrm{eff} = \sum_k p_k \lVert a_k\rVert_1

    Source: wang2020fednova, Eq. (4)-(7).

    Args:
        length: ``path`` divides by the norm of a_k, the displacement that a unit gradient causes
            under the client's own momentum and proximal term; ``steps`` divides by the number of
            steps, which is the same for plain SGD and also has a meaning for FedReg, whose path is
            not a sum of gradients.
        effective: what tau_eff is the mean of: what `length` divides by, the ``path``, or the
            number of ``steps`` as the public code has it with a proximal term.
    Sent: one number up.
    State: none.
    Cost: one pass over the update.
    Laws: equal paths give FedAvg, and so do equal numbers of steps with length = ``steps``. The
        path of plain SGD is its number of steps.
    Deviations: the path length is found by applying the optimiser to a unit gradient, not from a
        closed form for each optimiser. The public code has the proximal term in the momentum buffer
        too, but another normaliser for both together: in each step a <- (1 - lr mu)(a + counter)
        + 1, with momentum's counter. SGC compares the aggregate, which is multiplied by tau_eff,
        with divided updates, and CGC projects divided updates: with either of them a margin above 0
        is scaled, also for equal paths.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fednova").expression
        'fednova'
    """

    length: Literal["path", "steps"] = "path"
    effective: Literal["length", "path", "steps"] = "length"

    name: ClassVar[str] = "fednova"
    paper: ClassVar[str] = "wang2020fednova"
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.WHOLE_UPDATES})
    traits: ClassVar[Traits] = Traits(takes_stale_updates=True)

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        """Updates not yet divided; and the length of the path, but not of steps, needs a path."""
        paths = "path" in (self.length, self.effective)
        linear = {Capability.LINEAR_ACCUMULATION} if paths else set()
        return frozenset({Capability.WHOLE_UPDATES, *linear})

    def transform_update(self, update: Tree, round: Round) -> Tree:
        """Return the update for each unit of the path."""
        return tree.scale(update, 1.0 / self._length(round, self.length))

    def upload(self, round: Round) -> State:
        """Return what tau_eff is made of."""
        kind = self.length if self.effective == "length" else self.effective
        value = self._length(round, kind)
        like = next(iter(round.start.values()))
        return {"tau": torch.as_tensor(value, dtype=torch.float64, device=like.device)}

    @staticmethod
    def _length(round: Round, kind: Literal["path", "steps"]) -> float | Tensor:
        if kind == "path":
            return round.path_length
        return round.steps.double()

    def transform_aggregate(self, update: Tree, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the mean of the normalised updates, times tau_eff."""
        tau = tree.leaf(cohort.uploads, "tau")
        weights = torch.from_numpy(cohort.weights).to(tau.device)
        effective = float((weights * tau).sum())
        cohort.log("tau_eff", effective)
        return tree.scale(update, effective)
