"""The footprint of a method: bytes sent and stored, and multiplications, on one named model.

It is measured without a run, for a row in a table of methods. `footprints.json` has those of all
listed methods, so that a page of one is printed without torch; `docs/generate.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fedkeel.base.memory import format_bytes
from fedkeel.errors import FedkeelError
from fedkeel.method.grammar import parse
from fedkeel.method.parts.index import ALIASES
from fedkeel.records.run_record import Estimate

CLIENTS, PER_ROUND = 20, 5
MODEL = "mlp"

FILE = Path(__file__).with_name("footprints.json")
BYTES = ("down", "up", "client_state", "table", "server_state")
"""What the file has of an estimate."""


@dataclass(frozen=True)
class Footprint:
    """What a method sends, stores and computes.

    Args:
        estimate: bytes by part.
        gradients: multiplications in matrix products for each example that a client processes, in
            gradients of the loss, of which FedAvg takes one.
        parameters: entries of the model.
        model_bytes: bytes of the model.
    """

    estimate: Estimate
    gradients: float
    parameters: int
    model_bytes: int

    @property
    def setting(self) -> str:
        """The model and the federation of the measurement."""
        return (
            f"the {MODEL} of the digits preset ({self.parameters:,} parameters, "
            f"{format_bytes(self.model_bytes)}), {CLIENTS} clients, {PER_ROUND} in a round"
        )

    @property
    def down(self) -> float:
        """Models sent to a client in a round."""
        return sum(self.estimate.down.values()) / self.model_bytes

    @property
    def up(self) -> float:
        """Models sent by a client in a round."""
        return sum(self.estimate.up.values()) / self.model_bytes

    @property
    def server_bytes(self) -> int:
        """Bytes that the server keeps when every client has taken part."""
        return self.estimate.server_state + self.estimate.table * CLIENTS

    def lines(self) -> list[tuple[str, str]]:
        """Return (quantity, amount) as text."""
        down, up = (
            ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
            for parts in (self.estimate.down, self.estimate.up)
        )
        stored = self._stored
        return [
            ("down", f"{self.down:.2f} x model ({down}) to each client in a round"),
            ("up", f"{self.up:.2f} x model ({up}) from each client in a round"),
            ("client", f"{stored(self.estimate.client_state)} kept by each client"),
            ("server", f"{stored(self.server_bytes)} kept at the server"),
            ("cost", f"{self.gradients:.2f} x the multiplications of FedAvg for each example"),
            ("measured on", self.setting),
        ]

    def _stored(self, count: int) -> str:
        return (
            f"{count / self.model_bytes:.2f} x model ({format_bytes(count)})"
            if count
            else "nothing"
        )


@lru_cache(maxsize=256)
def footprint(method: str) -> Footprint:
    """Return the footprint of a method; one that is not in the file is measured.

    Raises:
        FedkeelError: the method cannot be composed, or cannot be trained on this model.

    >>> footprint("scaffold").up
    2.0
    """
    values = _of_listed_methods().get(ALIASES.get(method, method))
    if values is None:
        from fedkeel.study.measured_footprint import measure

        return measure(method)
    sizes = Estimate(**{name: values[name] for name in BYTES})
    return Footprint(sizes, values["gradients"], values["parameters"], values["model_bytes"])


@cache
def _of_listed_methods() -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return values


def file_text(footprints: Mapping[str, Footprint]) -> str:
    """Return the text of the file with these footprints, a line for each method."""
    lines = []
    for name, item in footprints.items():
        values = {key: getattr(item.estimate, key) for key in BYTES}
        values |= {"gradients": item.gradients, "parameters": item.parameters}
        values["model_bytes"] = item.model_bytes
        lines.append(f"{json.dumps(name)}: {json.dumps(values)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def footprint_lines(method: str) -> list[tuple[str, str]]:
    """Return the footprint of a method as text, or why it cannot be measured.

    Raises:
        CompositionError: the method cannot be composed.
    """
    parse(method)
    try:
        return footprint(method).lines()
    except FedkeelError as error:
        got = "" if error.got is None else f" Got {error.got}."
        return [("not measured", error.what + got)]
