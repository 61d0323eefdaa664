"""Parts that are broken on purpose: each fails the check that is meant for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeel.errors import CompositionError, TrainingError
from fedkeel.method import grammar, registry, server_round
from fedkeel.method.context import Outcome, Population, Round, RoundCohort, Step
from fedkeel.method.part import Capability, Part, Stage
from fedkeel.method.registry import Recipe
from fedkeel.method.roles import (
    AggregateTransform,
    Broadcast,
    Carry,
    ClientState,
    GradientTransform,
    LossTerm,
    Reduction,
    ServerState,
    UpdateTransform,
    Upload,
)
from fedkeel.solve.span import Span
from fedkeel.study.conformance import CHECKS, ConformanceError, check_method
from fedkeel.study.conformance.checks import Check, run_checks
from fedkeel.task.batch import Output
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class Broken(Part):
    """Does what no part may do.

    Source: nobody.
    Sent: what it should not.
    State: none.
    Cost: trust.
    Laws: none.
    Deviations: all of it.

    Example:
        >>> 1
        1
    """

    name: ClassVar[str] = "broken"
    paper: ClassVar[str] = "mcmahan2017"


class Gradient(Broken, GradientTransform):
    gradient_stage: ClassVar[Stage] = Stage.CORRECT

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        return {k: self.change(g, params[k], step) for k, g in grads.items()}

    def change(self, grad: Tensor, param: Tensor, step: Step) -> Tensor:
        raise NotImplementedError


class MutatesInput(Broken, ClientState):
    def init_client(self, start: Tree) -> State:
        return {"n": torch.zeros(1)}

    def next_client(self, round: Round) -> State:
        return {"n": round.client_state["n"].add_(1.0)}


class MutatesEnd(Broken, Upload):
    def upload(self, round: Round) -> State:
        return {"x": round.end["fc1.bias"].clamp_(min=0.0)}


class MutatesCarry(Broken, Carry):
    def init_carry(self, start: Tree, client_state: State) -> State:
        return {"n": torch.zeros(1)}

    def next_carry(self, before: Tree, carry: State) -> State:
        return {"n": carry["n"].add_(1.0)}


class MutatesModel(Broken, ServerState):
    def init_server(self, params: Tree, population: Population) -> State:
        return {}

    def next_server(self, outcome: Outcome) -> State:
        outcome.end["fc1.bias"].clamp_(min=0.0)
        return {}


class KeepsNaN(Broken, ClientState):
    """Does nothing wrong."""

    def init_client(self, start: Tree) -> State:
        return {"best": torch.full((2,), float("nan"))}

    def next_client(self, round: Round) -> State:
        return {"best": round.client_state["best"] + 1.0}


class MutatesMessage(Gradient):
    """Is refused before it runs: every other check would be of other clients."""

    def change(self, grad: Tensor, param: Tensor, step: Step) -> Tensor:
        step.start["fc1.bias"].add_(1e-3)
        return grad


class GlobalRandomness(Gradient):
    def change(self, grad: Tensor, param: Tensor, step: Step) -> Tensor:
        return grad * (1.0 + np.random.rand())


class ByProcess(Gradient):
    def change(self, grad: Tensor, param: Tensor, step: Step) -> Tensor:
        return grad * (1.0 + 1e-9 * (os.getpid() % 1000))


class ByValue(Gradient):
    """Branches on data, which cannot be done for many clients at once."""

    def change(self, grad: Tensor, param: Tensor, step: Step) -> Tensor:
        return grad if grad.sum() > 0 else grad * 0.9


class CountsSteps(Gradient):
    """Keeps something outside of its state, so a step that is not real leaves a trace."""

    steps: ClassVar[list[int]] = []

    def change(self, grad: Tensor, param: Tensor, step: Step) -> Tensor:
        self.steps.append(1)
        return grad / len(self.steps)


class Uphill(Gradient):
    def change(self, grad: Tensor, param: Tensor, step: Step) -> Tensor:
        return -grad


class NoDocstring(Gradient):
    """Says nothing of what it sends, keeps and costs."""

    def change(self, grad: Tensor, param: Tensor, step: Step) -> Tensor:
        return grad


class GrowingState(Broken, ClientState, UpdateTransform):
    update_stage: ClassVar[Stage] = Stage.CORRECT

    def init_client(self, start: Tree) -> State:
        return {"seen": torch.zeros(1)}

    def next_client(self, round: Round) -> State:
        seen = round.client_state["seen"]
        return {"seen": torch.cat([seen, seen])}

    def transform_update(self, update: Tree, round: Round) -> Tree:
        return update


class OtherType(Broken, ServerState):
    def init_server(self, params: Tree, population: Population) -> State:
        return {"mean": torch.zeros(3, dtype=torch.float32)}

    def next_server(self, outcome: Outcome) -> State:
        return {"mean": torch.zeros(3, dtype=torch.float64)}


class Forgets(Broken, AggregateTransform):
    """Remembers in the object what belongs into its state, so a resumed run does not know it."""

    aggregate_stage: ClassVar[Stage] = Stage.CORRECT
    rounds: ClassVar[dict[int, int]] = {}

    def transform_aggregate(self, update: Tree, updates: Span, cohort: RoundCohort) -> Tree:
        if cohort.round == 0:
            self.rounds.clear()
        if self.rounds.get(-1) == cohort.round:  # the round that a kill took back is made again
            return {k: 2 * v for k, v in update.items()}
        self.rounds[-1] = cohort.round
        return update


class FirstReply(Broken, Reduction):
    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        return {k: v[0] for k, v in updates.materialise().items()}


class SentBytes(Broken, Upload):
    def upload(self, round: Round) -> State:
        return {"x": torch.zeros(4)}


class MoreWhenFull(Broken, Broadcast, ServerState):
    """Sends more than it said it would before the first round."""

    def init_server(self, params: Tree, population: Population) -> State:
        return {"n": torch.zeros(1)}

    def next_server(self, outcome: Outcome) -> State:
        return {"n": outcome.cohort.state["n"] + 1}

    def message(self, state: State) -> State:
        return {"n": torch.zeros(1 + int(state["n"]))}


class DefaultType(Gradient):
    """Makes a number of torch's default type, which rounds a tenth."""

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        return {k: torch.tensor(0.1) * v for k, v in grads.items()}


class BySize(Gradient, UpdateTransform):
    """Divides by all that a client knows of itself."""

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.CLASS_COUNTS})
    update_stage: ClassVar[Stage] = Stage.CORRECT

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        info = step.client_info
        share = info.class_counts / info.examples
        factor = 1.0 / info.examples + share[0]
        return {k: factor * v for k, v in grads.items()}

    def transform_update(self, update: Tree, round: Round) -> Tree:
        return {
            k: (1.0 / round.steps + 1.0 / round.client_info.examples) * v for k, v in update.items()
        }


class ReadsPath(Broken, UpdateTransform):
    """Divides by the length of the path, and does not say that it needs one."""

    update_stage: ClassVar[Stage] = Stage.CORRECT

    def transform_update(self, update: Tree, round: Round) -> Tree:
        return {k: v / round.path_length for k, v in update.items()}


class TakesMeanGradient(Broken, ClientState):
    def init_client(self, start: Tree) -> State:
        return {"g": torch.zeros_like(start["fc1.bias"])}

    def next_client(self, round: Round) -> State:
        return {"g": round.mean_grad()["fc1.bias"]}


class TakesLabels(Broken, LossTerm):
    """Looks at class labels, and does not say that it needs them."""

    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        y = step.batch.labels
        return torch.nn.functional.cross_entropy(output.logits, y, reduction="none")


def entered(monkeypatch: pytest.MonkeyPatch, kind: type[Part]) -> None:
    """Enter a part under the name ``broken``."""
    recipes = {**registry.REGISTRY, "broken": Recipe("mcmahan2017", "broken", {"": kind})}
    monkeypatch.setattr(registry, "REGISTRY", recipes)
    monkeypatch.setattr(grammar, "REGISTRY", recipes)
    kind.__doc__ = kind.__doc__ if kind is NoDocstring else Broken.__doc__


def failure(monkeypatch: pytest.MonkeyPatch, kind: type[Part], check: str) -> str:
    """Run one check on a part under the name ``broken``; return what does not hold."""
    entered(monkeypatch, kind)
    [result] = run_checks("broken", names=[check])
    return result.failure


def test_a_docstring_fails_a_part_of_ours_and_only_notes_one_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered(monkeypatch, NoDocstring)
    [check] = run_checks("broken", names=["its docstring says what it is"])
    assert check.failure == ""
    for name in ("Source", "Sent", "State", "Cost", "Laws", "Deviations", "Example"):
        assert f"'{name}'" in check.note, "all at once"
    monkeypatch.setattr(NoDocstring, "__module__", "fedkeel.method.parts.broken")
    [check] = run_checks("broken", names=["its docstring says what it is"])
    assert "has no 'Source', 'Sent', 'State'" in check.failure
    assert check.note == ""


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (MutatesEnd, "nothing is changed in place"),
        (MutatesCarry, "nothing is changed in place"),
        (MutatesModel, "nothing is changed in place"),
        (GlobalRandomness, "a seed repeats bit for bit"),
        (ByProcess, "engines agree bit for bit"),
        (ByValue, "clients run side by side as one by one"),
        (CountsSteps, "padded steps change nothing"),
        (Uphill, "loss falls on a convex problem"),
        (OtherType, "state keeps its form"),
        (Forgets, "a killed run goes on as if it had not been"),
        (MoreWhenFull, "recorded bytes are the bytes on the wire"),
        (DefaultType, "all numbers are of the run's type"),
        (ReadsPath, "it bears AdamW, clipping and accumulation, or says why not"),
        (TakesLabels, "it trains on every kind of task that it accepts"),
        (TakesMeanGradient, "it bears AdamW, clipping and accumulation, or says why not"),
    ],
)
def test_a_broken_part_is_caught(
    monkeypatch: pytest.MonkeyPatch, kind: type[Part], check: str
) -> None:
    assert failure(monkeypatch, kind, check)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (GrowingState, "What broken keeps for a client has another form"),
        (MutatesMessage, "What the server sent was changed in place"),
        (MutatesInput, "What a client keeps was changed in place"),
    ],
)
def test_what_shows_in_the_first_step_is_refused_before_any_check(
    monkeypatch: pytest.MonkeyPatch, kind: type[Part], words: str
) -> None:
    entered(monkeypatch, kind)
    with pytest.raises(TrainingError, match=words):
        check_method("broken")


def replies_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the server's sorting away."""
    monkeypatch.setattr(server_round.np, "argsort", lambda values, kind: np.arange(len(values)))


def the_weightless_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave clients that weigh nothing among the others."""
    monkeypatch.setattr(
        server_round, "raw_weights", lambda kind, examples, processed: examples + 1e-3
    )


def half_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeel.engine.message_state.nbytes", lambda state: 7)


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (replies_as_they_come, "the order of replies does not matter"),
        (the_weightless_too, "clients without weight change nothing"),
        (half_the_bytes, "recorded bytes are the bytes on the wire"),
    ],
)
def test_a_broken_server_is_caught(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None], check: str
) -> None:
    """What a part cannot do wrong by itself, because the server round does it."""
    spoil(monkeypatch)
    assert failure(monkeypatch, FirstReply, check)


def test_every_check_is_shown_to_fail() -> None:
    """The two tables above name each of them, and a test above the docstring's."""
    shown = {mark.args[1][i][1] for mark in marks() for i in range(len(mark.args[1]))}
    assert shown | {"its docstring says what it is"} == set(CHECKS)


def marks() -> list[pytest.Mark]:
    tests = (test_a_broken_part_is_caught, test_a_broken_server_is_caught)
    return [mark for test in tests for mark in test.pytestmark]


def test_a_check_that_raises_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(federation: object) -> str:
        raise LookupError("nothing there")

    monkeypatch.setitem(CHECKS, "the order of replies does not matter", breaks)
    with pytest.raises(ConformanceError, match="LookupError: nothing there") as error:
        check_method("fedavg")
    assert f"'fedavg' fails 1 of {len(CHECKS)} checks." in error.value.what


def test_nan_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    entered(monkeypatch, KeepsNaN)
    check = "nothing is changed in place"
    assert run_checks("broken", names=[check]) == [Check(check)]


def test_what_cannot_be_composed_is_not_a_failed_check() -> None:
    with pytest.raises(CompositionError, match="which takes one"):
        check_method("momentum+gradma.s")


@pytest.mark.parametrize(
    "check", ["all numbers are of the run's type", "clients run side by side as one by one"]
)
def test_what_a_client_knows_of_itself_is_of_the_run_s_type(
    monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """With one client at a time, and side by side: an inverse is rounded once, to float64."""
    assert failure(monkeypatch, BySize, check) == ""


def test_the_default_type_is_as_it_was_after_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    failure(monkeypatch, DefaultType, "all numbers are of the run's type")
    assert torch.get_default_dtype() == torch.float32
