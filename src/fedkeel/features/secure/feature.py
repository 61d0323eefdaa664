"""Secure sums as a feature of a run: a method that needs single updates is refused.

The sums themselves are made in a federation of nodes; a simulation adds updates up as they are.
"""

from __future__ import annotations

from typing import Any, Self

from fedkeel import config
from fedkeel.config import Flower
from fedkeel.engine.prepared import Prepared
from fedkeel.features.secure.legality import check_sums, refuse_single_updates
from fedkeel.method.grammar import parse
from fedkeel.runner.feature import Feature


class SecureAggregation(Feature):
    """Sums in place of single updates, which ``flower.secure_aggregation`` asks for."""

    settings: Flower

    @classmethod
    def of(cls, settings: config.Run, table: str) -> Self | None:
        """Return the feature where the server is to see sums only."""
        return cls(settings.flower) if settings.flower.secure_aggregation else None

    def check(self, prepared: Prepared) -> None:
        """Refuse a run that cannot do with sums; a baseline sums nothing."""
        if not prepared.is_baseline:
            clients = len(prepared.setup.federation)
            check_sums(prepared.setup.training, self.settings.secure_minimum, clients)

    def check_nodes(self, settings: config.Run) -> None:
        """Refuse a method that cannot do with sums, before a server waits for nodes."""
        refuse_single_updates(parse(settings.method, weights=settings.weights))

    def identity(self, values: Any) -> dict[str, str]:  # noqa: ANN401 - JSON
        """Return that sums are secure: they are rounded, and clients add noise."""
        return {"sums": "secure"}

    @classmethod
    def warnings(cls, prepared: Prepared) -> list[str]:
        """Return what bounds a single node, and in a simulation what it does in place of sums."""
        feature = prepared.feature(cls)
        if feature is None or prepared.is_baseline:
            return []
        return [_bound(feature.settings) if prepared.on_nodes else _simulated(prepared)]

    def record(self, prepared: Prepared) -> str | None:
        """Return of how many nodes each sum was; None in a simulation, which makes none."""
        if not prepared.on_nodes:
            return None
        minimum = self.settings.secure_minimum
        least = f"at least {minimum} nodes and over" if minimum else "over"
        text = f"the server saw only sums of updates, each of {least} half of the nodes"
        if prepared.plan.reduction.sum_noise() > 0.0:
            text += "; clients added the noise of the privacy budget"
        return text


def _bound(flower: Flower) -> str:
    """Return how far a single node of a federation can move a secure sum."""
    if flower.secure_norm is None:
        return (
            "flower.secure_aggregation without flower.secure_norm: nobody sees a single update, so "
            "nothing bounds one. A broken or malicious node can move each number of the model by "
            "up to 2^20 in a round; set secure_norm to have updates bounded at the nodes, and the "
            "sum at the server"
        )
    return (
        f"flower.secure_norm = {flower.secure_norm:g} is checked by each node for itself, and of "
        "the sum by the server: a malicious node that does not keep to it can use up what the "
        "others leave of the sum's bound"
    )


def _simulated(prepared: Prepared) -> str:
    """Return what a simulation does in place of secure sums."""
    text = (
        "flower.secure_aggregation: a simulation adds updates up without masks; in a federation "
        "the same sums are rounded to multiples of 2^-42"
    )
    if prepared.plan.reduction.sum_noise() > 0.0:
        text += (
            ", and each client adds noise for the smallest cohort that flower.quorum allows, so "
            "with more clients there is more noise than here"
        )
    return text
