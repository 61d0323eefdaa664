"""FedMD: clients share what their models say of public inputs, and no model.

Source
    Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, arXiv 1910.03581,
    2019 (key li2019fedmd). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from fedkeel.base.lazy import Tensor, torch
from fedkeel.config import Weights
from fedkeel.errors import ModelError
from fedkeel.method.context import Outcome, Population, Round, Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import Broadcast, Personal, PublicTraining, ServerState, Upload
from fedkeel.task.parameter_names import ParameterLayout
from fedkeel.tree import State, Tree

AT_ONCE = 1000
"""Public inputs in one forward pass, at most."""


@dataclass(frozen=True)
class FedMD(Personal, PublicTraining, Upload, ServerState, Broadcast):
    r"""Draws each client's scores of public inputs towards their mean over clients, the consensus.

    .. math::
        \bar s_i = \operatorname*{mean}_k f_k(x^0_i),\qquad
        \text{digest: } \min_{\theta_k} \sum_i d\bigl(f_k(x^0_i), \bar s_i\bigr),\qquad
        \text{then revisit: local training}

    where f are the scores of the classes, without softmax, of the public inputs. All parameters
    stay at the client, so each client may have a network of its own.

    Source: li2019fedmd, Algorithm 1.

    Args:
        digest: passes over the public inputs towards the consensus in each round, >= 0.
        transfer: passes over the public inputs with their labels before a client's first round,
            >= 0. 0 for public inputs whose labels mean nothing.
        distance: of scores: the mean of their absolute differences, ``absolute``, as in the
            authors' code; or of their squares, ``squared``.
    Sent: the scores of the public inputs, Y numbers for each, both ways; no model.
    State: the model of each client.
    Cost: `digest` passes over the public inputs in each round, and a forward pass at its end.
    Laws: with digest = transfer = 0 each client trains alone, as with the baseline `local`. In the
        first round there is no consensus, and nothing is digested.
    Deviations: the paper's clients train on the public inputs until they converge; here they make
        `transfer` passes. The paper draws a part of the public inputs for each round; here it is
        all of them, in their order, in batches of the size of local training. The consensus is of
        the clients of the last round, whose scores come with their replies; in the paper all
        clients take part in each round, where it is the same.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedmd(digest=2)").public_training.digest
        2
    """

    digest: int = param(1, ge=0)
    transfer: int = param(1, ge=0)
    distance: Literal["absolute", "squared"] = "absolute"

    name: ClassVar[str] = "fedmd"
    paper: ClassVar[str] = "li2019fedmd"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.CLASSES, Capability.STABLE_CLIENTS}
    )
    traits: ClassVar[Traits] = Traits(needs_only_sum=True, shares_nothing=True)

    def personal(self, layout: ParameterLayout) -> frozenset[str]:
        """Return all parameters."""
        return frozenset(layout.names)

    def public_passes(self, round: int, is_first: bool) -> tuple[int, int]:
        """Return the passes with labels at first, and those towards the consensus once it is."""
        return self.transfer if is_first else 0, self.digest if round else 0

    def public_loss(self, logits: Tensor, step: Step) -> Tensor:
        """Return the distance of each example's scores from the consensus."""
        consensus, is_known = step.broadcast["consensus"], step.broadcast["is_known"]
        gaps = logits - cast(Tensor, consensus)[cast(Tensor, step.prepared["places"])]
        gaps = gaps.abs() if self.distance == "absolute" else gaps.square()
        return cast(Tensor, is_known) * gaps.mean(1)

    def upload(self, round: Round) -> State:
        """Return the scores of the public inputs, and that there are some."""
        pieces = round.public_step().pieces(AT_ONCE)
        with torch.no_grad():
            scores = torch.cat([piece.output(round.end).logits for piece, _ in pieces])
        return {"scores": scores, "count": scores.new_ones(())}

    def init_server(self, params: Tree, population: Population) -> State:
        """Return no consensus.

        Raises:
            ModelError: the classifier has no linear layer, so the number of scores is not known.
        """
        if not population.classes:
            raise ModelError(
                "fedmd: the number of scores is not known.",
                why="the head of the model has no linear layer",
                do="name a head that ends in nn.Linear, such as Task(model, head='fc')",
            )
        sizes = (population.public, population.classes)
        return {
            "consensus": torch.zeros(sizes, dtype=population.dtype),
            "is_known": torch.zeros((), dtype=population.dtype),
        }

    def message(self, state: State) -> State:
        """Return the consensus."""
        return dict(state)

    def next_server(self, outcome: Outcome) -> State:
        """Return the mean scores of the clients of the round, the former ones without clients."""
        uploads, state = outcome.cohort.uploads, outcome.cohort.state
        scores, count = (cast(Tensor, uploads[key]).sum(0) for key in ("scores", "count"))
        is_new = count > 0
        consensus = torch.where(
            is_new, scores / count.clamp(min=1.0), cast(Tensor, state["consensus"])
        )
        is_known = torch.maximum(cast(Tensor, state["is_known"]), is_new.to(consensus.dtype))
        return {"consensus": consensus, "is_known": is_known}
