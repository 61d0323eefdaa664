"""FLoRA: the server adds the mean of the clients' adapter products to the layers themselves.

Source
    Wang et al., FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
    Adaptations, NeurIPS 2024 (key wang2024flora). The section on stacking, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.errors import CompositionError
from fedkeel.method.context import Floats, Population, Round, RoundCohort, Step
from fedkeel.method.part import Capability
from fedkeel.method.roles import Codec, GradientTransform, Phases, Reduction, ServerOptimiser
from fedkeel.solve.span import Span
from fedkeel.task.parameter_names import ParameterLayout
from fedkeel.tree import State, Tree, leaf

A, B = "lora_A", "lora_B"
"""What the names of the factors contain, as peft names them."""


@dataclass(frozen=True)
class FLoRA(Phases, GradientTransform, Codec, Reduction, ServerOptimiser):
    r"""Trains both factors of each adapter, and merges the clients' products into the layer.

    .. math:: W \leftarrow W + s\,[B_1 \cdots B_K]
        \begin{bmatrix} p_1 A_1\\ \vdots\\ p_K A_K \end{bmatrix}
        = W + s\sum_k p_k B_k A_k

    after which A is drawn anew and B is 0. The stacked factors make the mean of the products, which
    the product of the mean factors is not. s is the scale of the adapters.

    Source: wang2024flora, the section on stacking, Algorithm 1.

    Args:
        ranks: ranks of the clients' adapters, separated by commas, which clients take in turn by
            their number, e.g. ``"8,4,2"``. "" is the whole rank of the network for all.
        base: what the names of the layers' own matrices contain; ``base_layer`` is peft's name.
    Sent: the update without the matrices that adapters are merged into. They are part of the model
        that is sent to the clients.
    State: none.
    Cost: the gradient by these matrices is taken too, and is dropped. The server multiplies the
        stacked factors, and has a row of zeros of each client for each of these matrices.
    Laws: where no layer has an adapter it is FedAvg. With one client the model is the client's own,
        merged. On adapters of one layer the mean model is the mean of the clients' functions before
        the softmax. A rank as large as the network's is the same as none.
    Deviations: the server sends the merged matrices where the paper sends the stacked factors, for
        each client to merge them: the numbers are the same, the bytes are not, and a client that
        was absent misses nothing. The server draws A, the same for all clients, in peft's way. A
        client of a smaller rank has 0 in the other columns of B, and sends those too. Transforms of
        the aggregate act only on parameters outside of adapters. Adapters of embeddings are
        averaged as in FedAvg.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("flora(ranks='8,4,2')").codec.ranks
        '8,4,2'
    """

    ranks: str = ""
    base: str = "base_layer"

    name: ClassVar[str] = "flora"
    paper: ClassVar[str] = "wang2024flora"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PER_CLIENT_UPDATES, Capability.SEPARATE_UPDATES, Capability.WHOLE_UPDATES}
    )

    # ---- at the clients ----

    def phases(self, layout: ParameterLayout, personal: frozenset[str]) -> Sequence[frozenset[str]]:
        """Return one phase, which trains all but the matrices that adapters are merged into.

        Raises:
            CompositionError: there are adapters, and these matrices are constants.
        """
        self._ranks()
        if any(A in name for name in layout.names) and not any(map(self._rests, layout.names)):
            raise CompositionError(
                "flora: the layers beside the adapters are constants of the network.",
                expected=f"trained parameters with {self.base!r} in their names",
                do="set model.lora.merged = true, or let these parameters require gradients",
            )
        return [frozenset(name for name in layout.names if not self._rests(name))]

    def phase(self, step: int, steps: int, round: int) -> int:
        """Return 0."""
        return 0

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return the gradient without what rests, and without the ranks that a client lacks."""
        ranks = self._ranks()

        def kept(name: str, grad: Tensor) -> Tensor:
            if self._rests(name):
                return torch.zeros_like(grad)
            if not ranks or not (A in name or B in name):
                return grad
            client = torch.as_tensor(step.client_info.client, device=grad.device)
            rank = torch.tensor(ranks, device=grad.device)[client % len(ranks)]
            axis = 0 if A in name else 1
            is_own = torch.arange(grad.shape[axis], device=grad.device) < rank
            shape = [1] * grad.ndim
            shape[axis] = -1
            return grad * is_own.to(grad.dtype).view(shape)

        return {name: kept(name, grad) for name, grad in grads.items()}

    def encode(self, update: Tree, round: Round) -> State:
        """Return the update without what rests."""
        return {k: v for k, v in update.items() if not self._rests(k)}

    def decode(self, sent: State, like: Tree) -> Tree:
        """Return the update, 0 for what rests."""
        return {
            k: torch.zeros_like(v) if self._rests(k) else leaf(sent, k) for k, v in like.items()
        }

    def _rests(self, name: str) -> bool:
        return self.base in name

    def _ranks(self) -> list[int]:
        """Return the clients' ranks, in turn.

        Raises:
            CompositionError: they are no list of numbers.
        """
        words = [word.strip() for word in self.ranks.split(",")] if self.ranks else []
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise CompositionError(
                "`ranks` of flora must be whole numbers >= 1, separated by commas. "
                f"Got {self.ranks!r}."
            )
        return [int(word) for word in words]

    # ---- at the server ----

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the weighted mean, for the parameters outside of adapters."""
        return updates.sum(cohort.weights)

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return nothing: all is in the model."""
        return {}

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the model with the merged products and new factors."""
        model, rng = tree.add(params, update), cohort.rng()
        for adapter in cohort.population.adapters:
            if (
                not {adapter.base, adapter.a, adapter.b} <= params.keys()
            ):  # one stays at the clients
                continue
            base, a, b = (params[name] for name in (adapter.base, adapter.a, adapter.b))
            product = adapter.scale * stacked_product(
                a + _rows(updates, adapter.a), b + _rows(updates, adapter.b), cohort.weights
            )
            product = product.T if adapter.is_transposed else product
            model[adapter.base] = base + product.reshape(base.shape)
            bound = a[0].numel() ** -0.5
            drawn = torch.from_numpy(rng.uniform(-bound, bound, size=tuple(a.shape)))
            model[adapter.a] = drawn.to(a.device, a.dtype)
            model[adapter.b] = torch.zeros_like(b)
        return model, cohort.state


def _rows(updates: Span, name: str) -> Tensor:
    """Return the updates of one tensor, [K, ...]."""
    mix = None if updates.mix is None else {name: updates.mix[name]}
    return Span({name: updates.rows[name]}, mix).materialise()[name]


def stacked_product(a: Tensor, b: Tensor, weights: Floats) -> Tensor:
    """Return [out, in] the weighted sum of products of factors, as one product of stacked ones.

    Args:
        a: [K, r, in, ...].
        b: [K, out, r, ...].
        weights: [K].
    """
    shares = torch.from_numpy(weights).to(a.device, a.dtype)
    rows = (shares[:, None, None] * a.flatten(2)).flatten(0, 1)  # [K r, in]
    columns = b.flatten(2).transpose(0, 1).flatten(1)  # [out, K r]
    return columns @ rows
