"""The settings of diagnostics."""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from fedkeel.base.settings import Settings

Kind = Literal[
    "forgetting",
    "global_forgetting",
    "drift",
    "conflict",
    "participation",
    "fisher",
    "cka",
    "landscape",
    "sharpness",
]
"""What can be diagnosed."""

KINDS: tuple[Kind, ...] = get_args(Kind)


class Diagnose(Settings):
    """What is measured of a round beside its scores. It changes no number of the run.

    Args:
        kinds: what is measured: ``forgetting``, the loss of local models on the examples of
            clients of the round before, and the accuracy that each class has lost;
            ``global_forgetting``, their loss on the examples of all clients; ``drift``, how far
            local models move; ``conflict``, the angles between updates; ``participation``, how far
            the mean update is from that of all clients; ``fisher``, the Fisher information in a
            client's examples and in earlier ones; ``cka``, how alike the layers of local models and
            the global model represent examples; ``landscape``, the loss along lines between models;
            ``sharpness``, the largest eigenvalue of the Hessian.
        every: diagnose every so many rounds, and the last one.
        examples: the most examples of a probe set, for ``fisher``, ``cka``, ``landscape`` and
            ``sharpness``.
    """

    kinds: tuple[Kind, ...] = ()
    every: int = Field(1, ge=1)
    examples: int = Field(500, ge=2)

    @field_validator("kinds", mode="before")
    @classmethod
    def _split(cls, kinds: object) -> object:
        """Return the kinds of a text, in which commas stand between them."""
        return tuple(map(str.strip, kinds.split(","))) if isinstance(kinds, str) else kinds

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        twice = {kind for kind in self.kinds if self.kinds.count(kind) > 1}
        if twice:
            raise ValueError(f"'kinds' has {sorted(twice)[0]!r} twice")
        return self


def diagnose_of(settings: Settings) -> Diagnose:
    """Return what the settings of a run ask to be diagnosed."""
    diagnose: Diagnose = settings.diagnose  # type: ignore[attr-defined]
    return diagnose
