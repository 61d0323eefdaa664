"""The settings of an audit: what the attacker sees, what is tried, and how hard."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, field_validator

from fedkeel.base.settings import Settings

AttackName = Literal["linear", "labels", "dlg", "cosine", "loss", "updates", "lira"]
"""The attacks by name, in the order in which they are made."""

ATTACKS: tuple[AttackName, ...] = get_args(AttackName)

InversionName = Literal["linear", "dlg", "cosine"]
"""The attacks that bring inputs back."""

View = Literal["client", "sum", "release"]
"""What the attacker sees, see `Audit`."""

Distance = Literal["cosine", "l2"]
"""How gradients are compared: by 1 minus the cosine of the angle over the whole model, or by the
squared Euclidean distance."""


class Audit(Settings):
    """What an audit attacks, and how hard it tries.

    Args:
        attacks: the attacks. ``linear`` divides the gradients of a first linear layer; ``labels``
            reads the labels off the last one; ``dlg`` and ``cosine`` look for inputs with the
            gradient that was seen, by L-BFGS and by Adam; ``loss`` and ``updates`` tell whose
            examples were trained on; ``lira`` does so with runs of the attacker's own, whose number
            is `shadows`, and is not made unless it is asked for.
        view: what the attacker sees: the update of one ``client``, as a server does that follows
            the protocol and is curious; the weighted mean of the round's updates (``sum``), as it
            does with secure aggregation; or the models before and after the round (``release``), as
            every client does.
        round: the round that is attacked, from 1.
        targets: number of clients that are attacked, each by itself, in view ``client``.
        images: the most inputs that are looked for at once.
        tries: starts of ``dlg``; the best by the gradient is kept.
        lbfgs: most iterations of each; 300 in the paper.
        iterations: steps of ``cosine``; FedReg's attack has 32,000.
        distance: what ``cosine`` compares gradients by; ``l2`` is the squared Euclidean distance.
        lr: Adam's learning rate; 1.0 in FedReg's attack.
        variation: weight of the total variation; 1e-6 and 1e-8 in FedReg's attack.
        examples: the most examples of each kind, members and others, that membership is told of.
        shadows: runs of the attacker's own for ``lira``, an even number.
        adaptive: whether the attacker makes use of the method: what FedGC's projection hides is
            looked for with the inputs; FedReg's step is made on them, where a client
            makes one.
        seed: seed of the attacker's random numbers.
    """

    attacks: tuple[AttackName, ...] = ATTACKS[:-1]
    view: View = "client"
    round: int = Field(1, ge=1)
    targets: int = Field(1, ge=1)
    images: int = Field(8, ge=1)
    tries: int = Field(2, ge=1)
    lbfgs: int = Field(300, ge=1)
    iterations: int = Field(1000, ge=8)
    distance: Distance = "cosine"
    lr: float = Field(0.1, gt=0.0)
    variation: float = Field(1e-6, ge=0.0)
    examples: int = Field(500, ge=2)
    shadows: int = Field(16, ge=4, multiple_of=2)
    adaptive: bool = True
    seed: int = Field(0, ge=0, le=2**32 - 1)

    @field_validator("attacks", mode="before")
    @classmethod
    def _split(cls, attacks: object) -> object:
        """Take names in one text, with commas between them."""
        if isinstance(attacks, str):
            return tuple(name.strip() for name in attacks.split(",") if name.strip())
        return tuple(attacks) if isinstance(attacks, list) else attacks
