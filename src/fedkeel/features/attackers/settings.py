"""The settings of simulated attackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedkeel.base.settings import Kinds

AttackKind = Literal[
    "none",
    "label_flip",
    "sign_flip",
    "gaussian",
    "scaling",
    "alie",
    "ipm",
    "min_max",
    "min_sum",
    "mimic",
    "backdoor",
]
"""What attackers do."""

KNOWING = ("alie", "ipm", "min_max", "min_sum", "mimic")
"""Kinds of attacks that have to know the honest updates of the round."""

ALONE = ("sign_flip", "gaussian", "scaling", "backdoor")
"""Kinds of attacks that change an update without knowing another one."""

NOTHING = (("backdoor", 1.0), ("scaling", 1.0))
"""Kind and factor of attacks that leave the update as it is."""

_FACTORS: Mapping[str, float] = {
    "sign_flip": 1.0,
    "gaussian": 10.0,
    "scaling": 10.0,
    "ipm": 0.5,
    "backdoor": 1.0,
}


class Adversary(Kinds):
    """Attackers among the clients. A run has none where `kind` is ``none``.

    Args:
        kind: what attackers do to their data: ``label_flip`` trains on label Y - 1 - y in place of
            y; ``backdoor`` stamps a trigger on some of their images, which get the label `target`.
            Or to their update u: ``sign_flip`` sends -factor u; ``gaussian`` sends noise whose root
            mean square is `factor` times that of u; ``scaling`` sends factor u. Or what they send,
            all the same, when they know the updates of the other clients of the round: ``alie``
            their mean less `factor` standard deviations, entry by entry; ``ipm`` -factor times
            their mean; ``min_max`` and ``min_sum`` as far from the mean as the others are from each
            other; ``mimic`` a copy of the update of one of them.
        share: share of the clients that are attackers, in (0, 1); which ones, the seed decides.
        clients: numbers of the attackers, in place of `share`.
        factor: how strong the attack is, > 0. None takes 1 for ``sign_flip`` and ``backdoor``, 10
            for ``gaussian`` and ``scaling``, 0.5 for ``ipm``, and for ``alie`` the number that the
            paper computes from the sizes of the cohort and of the attackers. The update of a
            ``backdoor`` is multiplied by it.
        direction: of ``min_max`` and ``min_sum``: along the standard deviations (``std``), the mean
            (``unit``), or its signs (``sign``), always against it.
        target: label that a ``backdoor`` is to get from the model.
        poisoned: share of an attacker's examples that carry the trigger of a ``backdoor``, in
            (0, 1].
        trigger: side of the square in the lower right corner of an image that is the trigger of a
            ``backdoor``, in pixels. Of inputs that are not images it is the number of last columns.
    """

    kind: AttackKind = "none"
    share: float | None = Field(None, gt=0.0, lt=1.0)
    clients: tuple[int, ...] = ()
    factor: float | None = Field(None, gt=0.0)
    direction: Literal["std", "unit", "sign"] = "std"
    target: int = Field(0, ge=0)
    poisoned: float = Field(0.5, gt=0.0, le=1.0)
    trigger: int = Field(3, ge=1)

    belongs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "factor": (*_FACTORS, "alie"),
        "direction": ("min_max", "min_sum"),
        "target": ("backdoor",),
        "poisoned": ("backdoor",),
        "trigger": ("backdoor",),
    }

    @model_validator(mode="after")
    def _names_attackers(self) -> Self:
        if self.kind != "none" and (self.share is None) == (not self.clients):
            raise ValueError("give 'share' or 'clients': who the attackers are")
        if self.kind == "none" and (self.share is not None or self.clients):
            raise ValueError("'kind' is not given: what the attackers do, such as 'sign_flip'")
        if len(set(self.clients)) < len(self.clients) or min(self.clients, default=0) < 0:
            raise ValueError("'clients' are different numbers >= 0")
        return self

    @property
    def strength(self) -> float | None:
        """The factor, by default that of the kind; None where the cohort decides it."""
        return _FACTORS.get(self.kind) if self.factor is None else self.factor

    @property
    def changes_updates(self) -> bool:
        """Whether attackers send something else than what training made of their examples."""
        is_lie = self.kind in ALONE and (self.kind, self.strength) not in NOTHING
        return is_lie or self.kind in KNOWING
