"""The baseline in which each client has a model of its own, as records name it."""

from __future__ import annotations

from typing import Final

LOCAL: Final = "local"
