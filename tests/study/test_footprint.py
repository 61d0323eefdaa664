"""What methods send, keep and multiply, on the one model where it is measured."""

from __future__ import annotations

import pytest

from each import each
from fedkeel.errors import CompositionError, TrainingError
from fedkeel.study import footprint as room
from fedkeel.study.footprint import CLIENTS, footprint, footprint_lines

MODEL = 4 * (64 * 64 + 64 + 64 * 10 + 10)


@each(
    ("method", "down", "up", "client", "server", "gradients"),
    [
        ("fedavg", 1, 1, 0, 0, 1),
        ("fedsgd", 1, 1, 0, 0, 1),  # for each example that it processes
        ("scaffold", 2, 2, 1, 1, 1),
        ("fedgc", 2, 1, 0, 1, 1),
        ("momentum", 1, 1, 0, 1, 1),
        ("fedsam", 1, 1, 0, 0, 2),
        ("scaffold+fedsam+momentum", 2, 2, 1, 2, 2),
        ("mime", 3, 2, 0, 1, 2 + 1 / 5),  # two for each step, and one at the start of five epochs
        ("fedvarp", 1, 1, 0, 1 + CLIENTS, 1),
    ],
)
def test_models_sent_and_kept_and_gradients_taken(
    method: str, down: float, up: float, client: float, server: float, gradients: float
) -> None:
    found = footprint(method)
    assert found.model_bytes == MODEL
    assert (found.down, found.up) == (down, up)
    assert found.estimate.client_state == client * MODEL
    assert found.server_bytes == server * MODEL
    assert found.gradients == pytest.approx(gradients, abs=1e-9)


def test_a_number_is_eight_bytes() -> None:
    found = footprint("fednova")
    assert sum(found.estimate.up.values()) == MODEL + 8
    assert dict(footprint_lines("fednova"))["up"].startswith(
        "1.00 x model (model 19.2 KB, fednova 8 bytes)"
    )


def test_what_is_told() -> None:
    assert footprint_lines("scaffold") == [
        ("down", "2.00 x model (model 19.2 KB, scaffold 19.2 KB) to each client in a round"),
        ("up", "2.00 x model (model 19.2 KB, scaffold 19.2 KB) from each client in a round"),
        ("client", "1.00 x model (19.2 KB) kept by each client"),
        ("server", "1.00 x model (19.2 KB) kept at the server"),
        ("cost", "1.00 x the multiplications of FedAvg for each example"),
        (
            "measured on",
            "the mlp of the digits preset (4,810 parameters, 19.2 KB), 20 clients, 5 in a round",
        ),
    ]
    with pytest.raises(CompositionError):
        footprint_lines("momentum+addition")


def test_what_cannot_be_trained_there_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(method: str) -> None:
        raise TrainingError(f"{method} fails.", got="KeyError: 'v'")

    monkeypatch.setattr(room, "footprint", fails)
    assert footprint_lines("fedprox") == [("not measured", "fedprox fails. Got KeyError: 'v'.")]
