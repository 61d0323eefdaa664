"""GC-Fed: centralise gradients at the clients, and the aggregate at the server.

Source
    Seo et al., GC-Fed: Gradient Centralized Federated Learning with Partial Client Participation,
    2025 (key gcfed2025). Eq. (1)-(3), Algorithm 1. The operator is from Yong et al., Gradient
    Centralization, ECCV 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkeel import tree
from fedkeel.errors import CompositionError
from fedkeel.method.context import RoundCohort, Step
from fedkeel.method.part import Capability, Stage, Traits, param
from fedkeel.method.roles import AggregateTransform, GradientTransform
from fedkeel.solve.projections import Axes, centralise
from fedkeel.solve.span import Span
from fedkeel.task.parameter_names import under
from fedkeel.tree import Tree, group_names


@dataclass(frozen=True)
class LocalGC(GradientTransform):
    r"""Centralises the gradient of the chosen tensors in every local step.

    .. math:: \Phi(W) = W - \frac{1}{d}\sum_{j} W_{\cdot j}

    with the mean over all axes but the output's.

    Source: gcfed2025, Definition 1, Algorithm 1; selection in section 4.3.2.

    Args:
        layers: ``body`` leaves out the classifier (GC-Fed); ``all`` leaves out nothing (the paper's
            row "Local GC").
        head: the classifier for ``body``, by module name; None takes the task's head.
        lam: lambda in [0, 1]: in place of `layers`, the first int(lambda * T) of the T tensors or
            layers. The paper's default where it is used is 0.9.
        count: what lambda counts: ``tensor`` (the paper counts 62 in ResNet-18) or ``layer``.
        axes: axes of the mean, of convolutions only: ``input`` is all but the output's, ``kernel``
            the receptive field, ``channels`` only the input channels; the names with two words are
            these together with the output's. The paper's Table 8 has five choices.
        vectors: whether tensors of one axis are centralised too, as the public code does: a bias
            loses its mean, a single number its gradient. The paper defines it on matrices.
    Sent: nothing beyond the model.
    State: none.
    Cost: two passes over the chosen tensors for each step.
    Laws: idempotent; lambda = 0 leaves Local GC out.
    Deviations: weight decay and momentum act after it and are not centralised, as in the public
        code. That code matches `head` as a piece of text anywhere in a tensor's name.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("gcfed(lam=0.9)").expression
        'gcfed.local(lam=0.9)+gcfed.global'
    """

    layers: Literal["body", "all"] = "body"
    head: str | None = None
    lam: float | None = param(None, ge=0.0, le=1.0)
    count: Literal["tensor", "layer"] = "tensor"
    axes: Axes = "input"
    vectors: bool = False

    name: ClassVar[str] = "gcfed.local"
    paper: ClassVar[str] = "gcfed2025"
    gradient_stage: ClassVar[Stage] = Stage.PROJECT

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        """The task's head, where nothing else says which tensors to leave out."""
        free = self.layers == "all" or self.head is not None or self.lam is not None
        return frozenset(() if free else {Capability.HEAD})

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return the gradient, centralised on the chosen tensors."""
        chosen = self.chosen(tuple(grads), step.network.head_names)
        return {
            k: centralise(g, self.axes, self.vectors) if k in chosen else g
            for k, g in grads.items()
        }

    def chosen(self, names: tuple[str, ...], head: frozenset[str]) -> frozenset[str]:
        """Return the names of the tensors that are centralised.

        Raises:
            CompositionError: no tensor belongs to the `head` given.
        """
        if self.lam is not None:
            groups = group_names(names, self.count)
            return frozenset(k for g in groups[: int(self.lam * len(groups))] for k in g)
        if self.layers == "all":
            return frozenset(names)
        if self.head is None:
            return frozenset(names) - head
        out = frozenset(k for k in names if under(k, self.head))
        if not out:
            owners = ", ".join(dict.fromkeys(k.rpartition(".")[0] for k in names))
            raise CompositionError(
                f"gcfed.local: the model has no parameters under the head {self.head!r}.",
                expected=f"one of {owners}",
            )
        return frozenset(names) - out


@dataclass(frozen=True)
class GlobalGC(AggregateTransform):
    r"""Centralises the aggregate of every tensor.

    .. math:: \theta \leftarrow \theta + \eta_g\,\Phi(\textstyle\sum_k p_k\Delta_k)

    Source: gcfed2025, Definition 2, Algorithm 1.

    Args:
        axes: axes of the mean, of convolutions only.
        vectors: whether tensors of one axis are centralised too, as the public code does.
    Sent: nothing beyond the model.
    State: none.
    Cost: two passes over the aggregate.
    Laws: idempotent; it does nothing to tensors that Local GC has centralised, without weight
        decay. Under softmax cross-entropy the classifier's bias is centralised already.
    Deviations: the public code multiplies by eta_g twice, which is harmless at its value of 1.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedavg+gcfed.global").expression
        'gcfed.global'
    """

    axes: Axes = "input"
    vectors: bool = False

    name: ClassVar[str] = "gcfed.global"
    paper: ClassVar[str] = "gcfed2025"
    aggregate_stage: ClassVar[Stage] = Stage.PROJECT
    traits: ClassVar[Traits] = Traits(takes_stale_updates=True)

    def transform_aggregate(self, update: Tree, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the centralised aggregate."""
        return tree.map(lambda v: centralise(v, self.axes, self.vectors), update)
