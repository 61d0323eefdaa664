"""FedProto: clients share the mean features of their classes, and no model.

Source
    Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022 (key
    tan2022fedproto). Eq. (3), (6) and (7), Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from fedkeel.base.lazy import Tensor, torch
from fedkeel.config import Weights
from fedkeel.errors import ModelError
from fedkeel.method.context import Outcome, Population, Round, Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import Broadcast, LossTerm, Personal, ServerState, Upload
from fedkeel.task.batch import Output
from fedkeel.task.parameter_names import ParameterLayout
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedProto(Personal, LossTerm, Upload, ServerState, Broadcast):
    r"""Pulls the features of each class towards their mean over all clients, the prototype.

    .. math::
        \min_{\theta_k}\; \ell(x, y) + \frac\lambda F\lVert f_k(x) - \bar c_y\rVert^2,\qquad
        c_{k,y} = \frac1{n_{k,y}}\sum_{i:\,y_i = y} f_k(x_i),\qquad
        \bar c_y = \operatorname*{mean}_{k:\,n_{k,y} > 0} c_{k,y}

    where f are the F features of an example: the inputs of the classifier. All parameters stay at
    the client.

    Source: tan2022fedproto, Eq. (3), (6) and (7).

    Args:
        lam: weight of the term, >= 0. 1 in the paper.
    Sent: the prototypes, Y vectors of F numbers, both ways; no model. A prototype of a class with
        one example is the features of that example.
    State: the model of each client.
    Cost: a forward pass over all examples of a client at the end of its round.
    Laws: with lam = 0 each client trains alone, as with the baseline `local`. In the first round
        there are no prototypes, and it is the same.
    Deviations: prototypes are those of the model after the last step, Eq. (3); the public codes
        take the mean of the features that the steps of the round have seen. Classes that no client
        of the round has keep their prototype. Clients with a class count equally, as in the public
        code; Eq. (6) weights them by their examples of it and divides twice. The distance is that
        of each example from the prototype, as in the public code; Eq. (7) takes the distance
        between prototypes. Examples are classified by the client's classifier and not by the
        nearest prototype. Networks may differ from client to client (`model.others`) where their
        features have one width F.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedproto(lam=0.5)").personals[0].lam
        0.5
    """

    lam: float = param(1.0, ge=0.0)

    name: ClassVar[str] = "fedproto"
    paper: ClassVar[str] = "tan2022fedproto"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.FEATURES, Capability.CLASSES, Capability.STABLE_CLIENTS}
    )
    traits: ClassVar[Traits] = Traits(needs_only_sum=True, shares_nothing=True)

    def personal(self, layout: ParameterLayout) -> frozenset[str]:
        """Return all parameters."""
        return frozenset(layout.names)

    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        """Return the weighted distance of each example's features from its prototype."""
        labels = step.batch.labels
        prototypes, is_known = step.broadcast["prototypes"], step.broadcast["is_known"]
        distances = (_features(output) - cast(Tensor, prototypes)[labels]).square().mean(1)
        return self.lam * cast(Tensor, is_known)[labels] * distances

    def upload(self, round: Round) -> State:
        """Return the client's prototypes, zeros where it has none, and which it has."""
        step = round.all_examples_step()
        with torch.no_grad():
            features = _features(step.output(round.end))
        like = cast(Tensor, step.broadcast["prototypes"])
        classes = torch.arange(len(like), device=like.device)
        is_of_class = (step.batch.labels[:, None] == classes).to(like.dtype)
        is_of_class = is_of_class * step.batch.real(like.dtype)[:, None]
        counts = is_of_class.sum(0)
        prototypes = torch.einsum("ny,nf->yf", is_of_class, features)
        return {
            "prototypes": prototypes / counts.clamp(min=1.0)[:, None],
            "is_known": (counts > 0).to(like.dtype),
        }

    def init_server(self, params: Tree, population: Population) -> State:
        """Return no prototypes.

        Raises:
            ModelError: the classifier has no linear layer, so the size of features is not known.
        """
        if not population.features:
            raise ModelError(
                "fedproto: the number of features is not known.",
                why="the head of the model has no linear layer",
                do="name a head that ends in nn.Linear, such as Task(model, head='fc')",
            )
        sizes = (population.classes, population.features)
        return {
            "prototypes": torch.zeros(sizes, dtype=population.dtype),
            "is_known": torch.zeros(population.classes, dtype=population.dtype),
        }

    def message(self, state: State) -> State:
        """Return the prototypes."""
        return dict(state)

    def next_server(self, outcome: Outcome) -> State:
        """Return the mean prototypes of the clients that have them, former ones where none has."""
        state, uploads = outcome.cohort.state, outcome.cohort.uploads
        sums, counts = (cast(Tensor, uploads[key]).sum(0) for key in ("prototypes", "is_known"))
        is_new = counts > 0
        means = sums / counts.clamp(min=1.0)[:, None]
        old = cast(Tensor, state["prototypes"])
        return {
            "prototypes": torch.where(is_new[:, None], means, old),
            "is_known": torch.maximum(cast(Tensor, state["is_known"]), is_new.to(means.dtype)),
        }


def _features(output: Output) -> Tensor:
    return cast(Tensor, output.features)  # FEATURES
