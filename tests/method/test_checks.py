"""What parts return is looked at: errors name the part, and the form that was meant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.method import checks
from fedkeel.method.part import Part
from fedkeel.solve.span import Span, Sums
from fedkeel.tree import State, Tree
from method.players import federation

PARAMS: Tree = {"a": torch.zeros(2, 3), "b": torch.zeros(3)}
ROWS: Tree = {k: torch.zeros(4, *v.shape) for k, v in PARAMS.items()}


@dataclass(frozen=True)
class Mine(Part):
    name: ClassVar[str] = "mine"
    paper: ClassVar[str] = ""

    def raises(self) -> None:
        torch.zeros(2) + torch.zeros(3)


PART = Mine()


@pytest.mark.parametrize(
    ("found", "got", "expected"),
    [
        (None, "an object of type NoneType", "a dict with the names of the 2 parameters"),
        (PARAMS["a"], "an object of type Tensor", "a dict with the names of the 2 parameters"),
        ({"a": PARAMS["a"]}, "without 'b'", "a dict with the names of the 2 parameters"),
        ({**PARAMS, "a": torch.zeros(6)}, "'a': [6] of float32", "[2, 3] of float32"),
        ({**PARAMS, "b": torch.zeros(1)}, "'b': [1] of float32", "[3] of float32"),
        ({**PARAMS, "b": PARAMS["b"].double()}, "'b': [3] of float64", "[3] of float32"),
        ({**PARAMS, "b": 0.0}, "'b': an object of type float", "[3] of float32"),
    ],
)
def test_what_is_made_of_parameters_has_their_form(found: Tree, got: str, expected: str) -> None:
    with pytest.raises(TrainingError, match=r"mine \(Mine\) does not return a tensor for") as said:
        checks.check_tree(PART, found, PARAMS)
    assert (said.value.got, said.value.expected) == (got, expected)
    assert len(said.value.lines()) <= 4


def test_what_has_the_form_is_taken() -> None:
    other = {k: v + 1 for k, v in reversed(PARAMS.items())}
    assert checks.check_tree(PART, other, PARAMS) is other
    span, sums = Span(ROWS), Sums(ROWS, weights=np.ones(9))
    assert checks.check_span(PART, span, Span(ROWS)) is span
    assert checks.check_span(PART, sums, sums) is sums
    assert checks.check_model_and_state(PART, (PARAMS, {})) == (PARAMS, {})
    checks.check_states("keeps", {"mine": {}, "other": {"x": {"y": torch.zeros(1)}}})
    checks.check_finite_model(1, [PART], {"a": torch.full((2,), 3e38), "n": torch.tensor(3)})


@pytest.mark.parametrize(
    ("found", "got"),
    [
        (None, "an object of type NoneType"),
        (ROWS, "an object of type dict"),
        (Span({k: v[:3] for k, v in ROWS.items()}), "3 updates"),
        (Span({"a": ROWS["a"]}), "without 'b'"),
        (Span({**ROWS, "b": torch.zeros(4, 2)}), "'b': [2] of float32"),
    ],
)
def test_updates_that_are_changed_are_as_many_and_of_the_same_form(found: Span, got: str) -> None:
    with pytest.raises(TrainingError, match=r"mine \(Mine\) does not return") as said:
        checks.check_span(PART, found, Span(ROWS))
    assert said.value.got == got


@pytest.mark.parametrize(
    ("found", "got"),
    [
        (PARAMS, "an object of type dict"),
        ((PARAMS,), "a tuple of 1"),
        (None, "an object of type NoneType"),
    ],
)
def test_an_optimiser_returns_two_things(found: tuple[Tree, State], got: str) -> None:
    with pytest.raises(TrainingError, match=r"mine \(Mine\) does not return a model and") as said:
        checks.check_model_and_state(PART, found)
    assert said.value.got == got


@pytest.mark.parametrize(
    ("state", "got"),
    [
        (None, "mine is of type NoneType"),
        (torch.zeros(2), r"\[2\] of float32"),
        ({"x": 1.0}, "mine/x is of type float"),
        ({"x": {"y": [1]}}, "mine/x/y is of type list"),
    ],
)
def test_a_state_holds_tensors_and_nothing_else(state: State, got: str) -> None:
    with pytest.raises(TrainingError, match=rf"(?s)What mine keeps is not a state.*{got}"):
        checks.check_states("keeps", {"good": {}, "mine": state})


@pytest.mark.parametrize("value", [None, torch.zeros(3), torch.zeros(4, 1), 1.0])
def test_a_loss_is_one_value_for_each_example_or_one_for_all(value: Tensor) -> None:
    for good in (torch.zeros(4), torch.zeros(())):
        assert checks.check_losses(PART, good, 4) is good
    with pytest.raises(TrainingError, match=r"mine \(Mine\) does not return a value for each"):
        checks.check_losses(PART, value, 4)


def test_what_a_part_raises_names_it_and_the_line_of_its_file() -> None:
    with pytest.raises(TrainingError) as said, checks.explain_errors("It failed"):
        checks.call(PART.raises)
    assert said.value.what == "It failed, in mine."
    assert said.value.got.startswith("RuntimeError: The size of tensor a (2)")
    assert Path(__file__).name in said.value.why
    ours = FedkeelError("as it is")
    with pytest.raises(FedkeelError) as same, checks.explain_errors("It failed"):
        raise ours
    assert same.value is ours


def test_what_a_library_raises_is_told_with_the_line_that_called_it() -> None:
    with pytest.raises(TrainingError) as said, checks.explain_errors("It failed"):
        np.linalg.inv(np.zeros((2, 2)))
    assert said.value.why.endswith(str(Path(__file__)))
    assert "test_what_a_library_raises" in said.value.why


@pytest.mark.parametrize("value", [None, torch.zeros(1, 2, 3)])
def test_a_term_and_a_criterion_are_looked_at(
    value: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedkeel.method.parts.feddecorr import FedDecorr
    from fedkeel.method.parts.fedlc import FedLC

    for entry, kind, role in (
        ("feddecorr", FedDecorr, "loss_term"),
        ("fedlc", FedLC, "criterion"),
    ):
        played = federation(entry)
        monkeypatch.setattr(kind, role, lambda *given: value)
        with pytest.raises(TrainingError, match=f"{entry} .+ does not return a value for each"):
            played.round()
