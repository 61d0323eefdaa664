"""Your own method at the clients: `fedkeel run experiment.toml -s method=my_method:Slow`."""

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Round, Step
from fedkeel.method.roles import Capability, ClientState, GradientTransform, param
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class Slow(GradientTransform, ClientState):
    """Mixes each gradient with the client's mean gradient of its last round.

    Source: this file. What drifts is what a client repeats in every round.

    Args:
        rate: share of the last round, in [0, 1).
    Sent: nothing beyond the model.
    State: the mean gradient of the last round for each client, one model.
    Cost: one pass over the parameters for each step.
    Laws: rate = 0 is FedAvg, bit for bit.
    Deviations: none.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("my_method:Slow(rate=0.5)").parts[0].rate
        0.5
    """

    rate: float = param(0.3, ge=0.0, lt=1.0)

    name: ClassVar[str] = "slow"  # its namespace of state and messages
    paper: ClassVar[str] = ""
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return the mixture."""
        return tree.blend(tree.leaves(step.client_state, "last"), grads, self.rate)

    def init_client(self, start: Tree) -> State:
        """Return no gradient, for a first round."""
        return {"last": tree.zeros_like(start)}

    def next_client(self, round: Round) -> State:
        """Return the mean gradient of this round."""
        return {"last": round.mean_grad()}
