"""Your own method in one file: `fedkeel run experiment.toml -s method=own_method:Agreement`."""

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.method.context import RoundCohort
from fedkeel.method.roles import AggregateTransform, Capability, Stage, param
from fedkeel.solve.span import Span, combine
from fedkeel.tree import Tree


@dataclass(frozen=True)
class Agreement(AggregateTransform):
    r"""Moves each parameter by as much as the clients agree on the direction.

    .. math::
        \Delta_j \leftarrow \Bigl|\sum_k p_k\,\mathrm{sign}(\Delta_k)_j\Bigr|^{\kappa} \Delta_j

    Source: this file. Where clients see other classes they pull a parameter both ways, and a mean
        of such pulls says more about who took part than about the loss.

    Args:
        power: kappa >= 0, how much disagreement counts.
    Sent: nothing beyond the model.
    State: none.
    Cost: two passes over the K updates.
    Laws: power = 0 is FedAvg, bit for bit, and so is a round of one client.
    Deviations: none.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedprox+own_method:Agreement(power=2.0)").parts[1].power
        2.0
    """

    power: float = param(1.0, ge=0.0)

    name: ClassVar[str] = "agreement"
    paper: ClassVar[str] = ""  # a key of fedkeel's papers.bib, or nothing
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})
    aggregate_stage: ClassVar[Stage] = Stage.LIMIT

    def transform_aggregate(self, update: Tree, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the aggregate, each entry scaled by the clients' agreement on its sign."""
        signs = {k: rows.sign() for k, rows in updates.materialise().items()}
        votes = {k: combine(cohort.weights[None], rows)[0] for k, rows in signs.items()}
        return {k: v * votes[k].abs() ** self.power for k, v in update.items()}
