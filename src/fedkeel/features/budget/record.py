"""The record of a budget in run.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SERVER_EXAMPLES = "the server's own examples (root.file) are not protected"
"""What a record says of a method that trains at the server."""


@dataclass(frozen=True)
class PrivacyRecord:
    """The budget of differential privacy.

    Args:
        unit: whom the guarantee is for: a ``client`` with all its examples, or an ``example``.
        epsilon: the largest epsilon; the rows have what has been spent.
        delta: its delta.
        part: name of the part that clips and adds noise.
        sigma: deviation of the noise on a sum, in units of the bound on what is summed.
        is_calibrated: whether sigma is calibrated for all rounds, or named by the method.
        accountant: ``pld`` or ``rdp``, of dp-accounting.
        says: what is counted, and under which assumptions.
    """

    unit: Literal["client", "example"]
    epsilon: float
    delta: float
    part: str = ""
    sigma: float = 0.0
    is_calibrated: bool = True
    accountant: str = ""
    says: str = ""

    @property
    def text(self) -> str:
        """The budget in a few words."""
        return f"epsilon {self.epsilon:g}, delta {self.delta:g}, {self.unit} level"
