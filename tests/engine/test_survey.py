"""Answers before training have one form, and a mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedkeel.engine.sequential import Sequential
from fedkeel.errors import CompositionError, TrainingError
from fedkeel.method.parts.mime import Mime
from fedkeel.method.server_round import server_message
from fedkeel.method.survey import add_mean_answers
from toys import prepared


def test_a_client_that_answers_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepared(method="mime")
    plain = Mime.survey

    def survey(self: Mime, step: object) -> dict[str, object]:
        found = dict(plain(self, step))
        if step.client_info.client % 2:
            found.popitem()
        return found

    monkeypatch.setattr(Mime, "survey", survey)
    message = server_message(ready.plan, ready.server, 0.1)
    with (
        Sequential(ready.setup, ready.spec, 4) as engine,
        pytest.raises(TrainingError, match="client 1 has another form"),
    ):
        engine.survey(message, np.array([0, 1]))


@pytest.mark.parametrize("answer", [{}, {"n": torch.ones(2, dtype=torch.int64)}])
def test_what_has_no_mean_is_refused(answer: dict[str, torch.Tensor]) -> None:
    ready = prepared(method="mime")
    message = server_message(ready.plan, ready.server, 0.1)
    with pytest.raises(CompositionError, match="no mean"):
        add_mean_answers(message, {"mime": dict(answer)}, np.ones(2))


def test_numbers_have_a_mean_and_clients_without_one_are_left_out() -> None:
    ready = prepared(method="mime")
    message = server_message(ready.plan, ready.server, 0.1)
    given = {"mime": {"n": torch.tensor([1.0, 4.0, torch.nan])}}
    found = add_mean_answers(message, given, np.array([1.0, 2.0, 5.0]))
    assert float(found.broadcast["mime"]["survey"]["n"]) == pytest.approx(3.0)
    with pytest.raises(TrainingError, match="no client's answer"):
        add_mean_answers(message, given, np.array([0.0, 0.0, 1.0]))
