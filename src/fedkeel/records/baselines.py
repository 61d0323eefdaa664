"""The baselines of a comparison, which are named as methods are, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LOCAL: Final = "local"
CENTRALISED: Final = "centralised"

BASELINES: Mapping[str, str] = {
    LOCAL: "each client trains alone; the score is of the models of all clients",
    CENTRALISED: "one model is trained on the examples of all clients in one place, by as many "
    "steps as the clients make together",
}
"""Each baseline, and what it is."""
