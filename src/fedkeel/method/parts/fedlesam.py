"""FedLESAM: local gradients at a point back along the last global step.

Source
    Fan et al., Locally Estimated Global Perturbations are Better than Local Perturbations for
    Federated Sharpness-aware Minimization, ICML 2024 (key fan2024fedlesam). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Round, Step
from fedkeel.method.part import param
from fedkeel.method.roles import ClientState, GradientRule
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedLESAM(GradientRule, ClientState):
    r"""Takes the gradient a fixed distance from the local model, towards an older global model.

    .. math:: g \leftarrow \nabla f\Bigl(\theta + \rho\,
        \frac{\theta^{\mathrm{old}} - \theta^t}{\lVert\theta^{\mathrm{old}} - \theta^t\rVert}\Bigr)

    with theta^old the global model that the client received when it last took part. The global
    model has since gone downhill, so the way back estimates the direction of steepest ascent of the
    global loss, which FedSAM takes from the client's own loss, for a second gradient in each step.

    Source: fan2024fedlesam, Algorithm 1. FedLESAM-S is `fedlesam+scaffold`, and FedLESAM-D is
        `fedlesam+feddyn`, whose alpha is 1 / beta of the paper.

    Args:
        rho: length of the perturbation, >= 0, in units of the parameters. The authors' example has
            0.05.
    Sent: nothing beyond the model.
    State: the last received model for each client, one model.
    Cost: two passes over the parameters for each step; one gradient, as FedAvg.
    Laws: rho = 0 is FedAvg, bit for bit, and so is a client's first round. On a loss that is linear
        between the two points the gradient is the same; on a quadratic it differs by rho H u, with
        H the Hessian and u the direction, in every step of a round.
    Deviations: the norm is that of the whole model, and nothing is added to it. The authors' public
        code divides by the sum of the tensors' norms; as it was released, it moves each tensor by
        one number of its own in all entries. It takes the last step of the global model for all
        clients, which is the same where all clients take part in every round. Penalties (FedDyn's,
        FedProx's) are taken at the local model. The loss that is recorded, and the batch
        statistics, are those of the perturbed model.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedlesam(rho=0.1)+scaffold").weights
        'uniform'
    """

    rho: float = param(0.05, ge=0.0)

    name: ClassVar[str] = "fedlesam"
    paper: ClassVar[str] = "fan2024fedlesam"

    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the gradient at the perturbed point."""
        back = tree.sub(tree.leaves(step.client_state, "received"), step.start)
        uphill = tree.add(params, back, tree.factor_to(self.rho, back))
        return step.grad(uphill, penalties_at=params)

    def init_client(self, start: Tree) -> State:
        """Return the received model, from which there is no way back."""
        return {"received": dict(start)}

    def next_client(self, round: Round) -> State:
        """Return the model that the client received."""
        return {"received": dict(round.start)}
