"""The local loop: what padding, vectorising, buffers and diagnostics may not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from each import each
from fedkeel import tree
from fedkeel.config import Local
from fedkeel.errors import CompositionError, TrainingError
from fedkeel.method.compose import compose
from fedkeel.method.context import ClientInfo, Message, Round, Step
from fedkeel.method.grammar import parse
from fedkeel.method.local_loop import (
    ClientRound,
    LocalState,
    client_finish,
    client_start,
    client_step,
)
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.part import Capability, Part, Stage
from fedkeel.method.roles import (
    GradientRule,
    GradientTransform,
    Penalty,
    Preparation,
    StepCorrection,
    UpdateTransform,
    Upload,
)
from fedkeel.method.round_values import Reply
from fedkeel.method.server_round import server_message
from fedkeel.task.batch import Batch
from fedkeel.tree import State, Tree
from harness import Federation, consecutive, toy_network
from method.players import (
    ENTRIES,
    LOCAL,
    SIZE,
    copied,
    entries_with,
    equal,
    federation,
    gap,
    normed,
    skewed,
)

MOMENTUM = Local(lr=0.1, epochs=2, batch_size=SIZE, momentum=0.9, weight_decay=0.01)
FEW = skewed((8, 6))
PREPARE = entries_with(Preparation)
MIX = [e for e in ENTRIES if Capability.EXAMPLE_LOSSES not in parse(e).needs]
"""Entries that can train a network whose examples see each other, by batch normalisation."""


def with_buffers(*policies: str) -> list[tuple[str, str]]:
    """Every entry with every policy that it can be run with; "refuse" is a network of none."""
    return [(e, p) for e in ENTRIES for p in policies if p == "refuse" or e in MIX]


FAST_AND_SLOW = pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])


def is_slow(entry: str, buffers: str) -> bool:
    """Whether a case is slow: networks with buffers are, of all but two methods."""
    return buffers != "refuse" and entry not in ("fedavg", "scaffold")


def said(reply: Reply) -> State:
    """Everything a reply holds, as one state."""
    return {
        "update": dict(reply.update),
        "buffers": dict(reply.buffers),
        "uploads": dict(reply.uploads),
        "client_state": dict(reply.client_state),
        "diagnostics": dict(reply.diagnostics),
        "loss": reply.loss,
    }


def of_steps(played: Federation, batches: Tensor) -> list[dict[str, object]]:
    """The learning rate and the phase of each step."""
    training, (lr, round) = played.training, (played.training.local.lr, played.played.server.round)
    rates = [lr * f for f in training.step_factors(round, len(batches))] or [None] * len(batches)
    phases = training.phases_of_steps(len(batches), round) or [None] * len(batches)
    return [{"lr": rate, "phase": phase} for rate, phase in zip(rates, phases, strict=True)]


def trained(local: LocalState) -> State:
    """What a step may change, but for buffers and optimisers."""
    params, loss = {**local.params, **local.personal}, local.loss
    return {"params": params, "model": dict(local.model), "carry": dict(local.carry), "loss": loss}


def begun(played: Federation, k: int) -> tuple[ClientRound, LocalState]:
    """A client at the start of its round."""
    x, y = played.data[k]
    message = played.message(range(len(played.data)))
    client_state = played.played.client_state.get(k)
    return client_start(
        played.training, message, client_state, played.client_info(k), lambda: Batch(x, y)
    )


def drawn(played: Federation, steps: int) -> Tree:
    """[K, S, ...] the random numbers of every client, none where the method takes none."""
    found = []
    for k in range(len(played.data)):
        normal = played.noise(k)
        found.append([normal() or {} for _ in range(steps)])
    return {
        name: torch.stack([torch.stack([step[name] for step in each]) for each in found])
        for name in found[0][0]
    }


def about(y: Tensor) -> ClientInfo:
    """What a client with these labels knows about itself, where clients run side by side."""
    return ClientInfo(0, len(y), (y[:, None] == torch.arange(3)).sum(dim=0))


# --- padded steps ----------------------------------------------------------------------------


@FAST_AND_SLOW
@each(("entry", "buffers"), with_buffers("refuse", "average"))
def test_padded_steps_change_nothing(entry: str, buffers: str, slow: bool) -> None:
    if slow != is_slow(entry, buffers):
        return
    network = toy_network() if buffers == "refuse" else normed()
    played = federation(entry, FEW, local=MOMENTUM, network=network, buffers=buffers)
    played.round()
    for k in range(2):
        assert equal(said(played.reply(k, padded=3)[0]), said(played.reply(k)[0]))


@each("entry", MIX)
@torch.no_grad()
def test_padded_steps_may_stand_anywhere(entry: str) -> None:
    """Between real ones too: momentum, statistics and what is carried go on as if they were not."""
    played = federation(entry, FEW, local=MOMENTUM, network=normed(), buffers="local")
    played.round()
    client, alone = begun(played, 0)
    padded = alone
    x, y = played.data[0]
    yes, no = torch.tensor(True), torch.tensor(False)
    for rows in (torch.arange(4), torch.arange(4, 8)):
        batch = Batch(x[rows], y[rows])
        padded = client_step(client, padded, batch, rows, rows, no)
        padded = client_step(client, padded, batch, rows, rows, yes)
        alone = client_step(client, alone, batch, rows, rows)
    assert equal(said(client_finish(client, padded, 2)), said(client_finish(client, alone, 2)))


# --- nothing that is given is changed --------------------------------------------------------


@pytest.mark.parametrize("buffers", ["average", pytest.param("local", marks=pytest.mark.slow)])
@each("entry", MIX)
@each("autograd", ["eager", "functional"])
@torch.no_grad()
def test_no_argument_is_changed(entry: str, autograd: str, buffers: str) -> None:
    played = federation(entry, local=MOMENTUM, network=normed(), buffers=buffers, autograd=autograd)
    played.round()
    x, y = played.data[0]
    message = played.message(range(len(played.data)))
    client_state = played.played.client_state[0]
    given: State = {
        "params": dict(message.params),
        "buffers": dict(message.buffers),
        "broadcast": dict(message.broadcast),
        "client_state": dict(client_state),
        "data": {"x": x, "y": y},
        "network": {**played.network.params, **played.network.buffers},
    }
    before = copied(given)
    client, progress = client_start(
        played.training, message, client_state, about(y), lambda: Batch(x, y)
    )
    for rows in (torch.arange(4), torch.arange(4, 8)):
        state: State = {
            "prepared": dict(client.prepared),
            "params": dict(progress.params),
            "buffers": dict(progress.buffers),
            "optimiser": dict(progress.optimiser),
            "carry": dict(progress.carry),
            "loss": progress.loss,
        }
        copy = copied(state)
        after = client_step(client, progress, Batch(x[rows], y[rows]), rows, rows)
        assert equal(state, copy)
        assert not equal(dict(after.buffers), dict(progress.buffers))
        progress = after
    client_finish(client, progress, 2)
    assert equal(given, before)


# --- two ways of taking gradients ------------------------------------------------------------


@FAST_AND_SLOW
@each(("entry", "buffers"), with_buffers("refuse", "average", "local"))
def test_the_tape_and_torch_func_agree(entry: str, buffers: str, slow: bool) -> None:
    if slow != is_slow(entry, buffers):
        return
    found = []
    for autograd in ("eager", "functional"):
        network = toy_network() if buffers == "refuse" else normed()
        played = federation(
            entry, FEW, local=MOMENTUM, network=network, buffers=buffers, autograd=autograd
        )
        played.round()
        done = played.round()
        found.append([{**played.params, **done.server.buffers}, *map(said, done.replies.values())])
    for eager, functional in zip(*found, strict=True):
        assert gap(functional, eager) < 1e-12


# --- many clients at once --------------------------------------------------------------------


def stacked(states: list[State]) -> State:
    """States of the same structure, empty parts too, on a leading axis."""
    return {
        k: torch.stack([s[k] for s in states])  # type: ignore[misc]
        if isinstance(v, Tensor)
        else stacked([s[k] for s in states])  # type: ignore[misc]
        for k, v in states[0].items()
    }


def examined(entry: str, n: int = 8) -> Federation:
    """Clients of one size, after a round; gradients that can be vectorized."""
    played = federation(entry, skewed((n, n, n)), local=MOMENTUM, autograd="functional")
    played.round()
    return played


ASK = ("fedala", "ifca")
"""FedALA and IFCA ask for all examples before they begin, so no engine puts their clients side by
side, and they may look at numbers."""

SIDE_BY_SIDE = [entry for entry in ENTRIES if entry not in (*ASK, "fedamp")]
"""With FedAMP each client receives a model of its own, and these clients have one number."""


@each("entry", SIDE_BY_SIDE)
@torch.no_grad()
def test_a_clients_round_can_be_vectorized(entry: str) -> None:
    """The axis rule: start, steps and end are written for one client, and serve for many."""
    played = examined(entry)
    batches = torch.as_tensor(np.stack(played.batches(0, 1)))
    message = played.message(range(len(played.data)))
    client_state = stacked([played.played.client_state[k] for k in range(3)])
    x, y = (torch.stack([d[i] for d in played.data]) for i in (0, 1))

    def one(client_state: State, x: Tensor, y: Tensor, noise: Tree) -> State:
        client, progress = client_start(
            played.training, message, client_state, about(y), lambda: Batch(x, y)
        )
        for s, (rows, more) in enumerate(zip(batches, of_steps(played, batches), strict=True)):
            batch, normal = Batch(x[rows], y[rows]), {k: t[s] for k, t in noise.items()}
            progress = client_step(client, progress, batch, rows, rows, noise=normal, **more)
        return said(client_finish(client, progress, len(batches)))

    together = torch.func.vmap(one)(client_state, x, y, drawn(played, len(batches)))
    for k in range(3):
        alone = said(played.reply(k, message=message)[0])
        assert gap(tree.map_tensors(lambda t, k=k: t[k], together), alone) < 1e-12


@each("entry", SIDE_BY_SIDE)
@torch.no_grad()
def test_clients_with_unequal_steps_can_be_vectorized(entry: str) -> None:
    """The shorter ones make padded steps, on whatever stands there."""
    played = examined(entry)
    batches = torch.as_tensor(np.stack(played.batches(0, 1)))
    counts = torch.tensor([len(batches), 1, len(batches) - 1])
    message = played.message(range(len(played.data)))
    client_state = stacked([played.played.client_state[k] for k in range(3)])
    x, y = (torch.stack([d[i] for d in played.data]) for i in (0, 1))

    def one(client_state: State, x: Tensor, y: Tensor, count: Tensor, noise: Tree) -> State:
        client, progress = client_start(
            played.training, message, client_state, about(y), lambda: Batch(x, y)
        )
        for s, (rows, more) in enumerate(zip(batches, of_steps(played, batches), strict=True)):
            batch, normal = Batch(x[rows], y[rows]), {k: t[s] for k, t in noise.items()}
            progress = client_step(client, progress, batch, rows, rows, s < count, normal, **more)
        return trained(progress)

    together = torch.func.vmap(one)(client_state, x, y, counts, drawn(played, len(batches)))
    for k, count in enumerate(counts.tolist()):
        client, progress = begun(played, k)
        normal = played.noise(k)
        for rows, more in list(zip(batches, of_steps(played, batches), strict=True))[:count]:
            batch = Batch(x[k][rows], y[k][rows])
            progress = client_step(client, progress, batch, rows, rows, noise=normal(), **more)
        one_alone = trained(progress)
        assert gap(tree.map_tensors(lambda t, k=k: t[k], together), one_alone) < 1e-12


@torch.no_grad()
def test_padded_examples_weigh_nothing() -> None:
    """A batch filled up to a common length with weight 0 makes the same step."""
    for entry in ENTRIES:
        played = federation(entry, autograd="functional")
        client, progress = begun(played, 1)
        x, y = played.data[1]
        rows, first = torch.tensor([0, 1, 2, 5, 5]), torch.tensor([0, 1, 2, 5, 5])
        weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
        normal = played.noise(1)()
        filled, whole = Batch(x[rows], y[rows], weight), Batch(x[:3], y[:3])
        more = of_steps(played, rows[None])[0]
        full = client_step(client, progress, filled, rows, first, noise=normal, **more)
        short = client_step(client, progress, whole, rows[:3], first[:3], noise=normal, **more)
        assert gap(trained(full), trained(short)) < 1e-13
        assert float(full.loss) == pytest.approx(float(short.loss), rel=1e-13)


# --- the local optimiser ---------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize(("rho", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_fedavgs_client_is_torchs_sgd(rho: float, nesterov: bool, decay: float) -> None:
    local = Local(
        lr=0.1, epochs=2, batch_size=SIZE, momentum=rho, nesterov=nesterov, weight_decay=decay
    )
    played = federation("fedavg", local=local)
    module = torch.nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    start = played.params
    for p, v in zip(module.parameters(), start.values(), strict=True):
        p.data.copy_(v)
    sgd = torch.optim.SGD(
        module.parameters(), lr=0.1, momentum=rho, nesterov=nesterov, weight_decay=decay
    )
    x, y = played.data[2]
    for rows in played.batches(2, 0):
        sgd.zero_grad()
        nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
        sgd.step()
    ours = tree.add(start, played.reply(2)[0].update)
    theirs = dict(zip(start, (p.data for p in module.parameters()), strict=True))
    assert gap(ours, theirs) < 1e-13


# --- loss, notes, finiteness -----------------------------------------------------------------

BY_ITSELF = {"fedmd": "fedmd(transfer=0)"}
"""Entries without their steps on public inputs, which come before those that are counted."""


@each("entry", ENTRIES)
def test_the_recorded_loss_is_that_of_the_steps(entry: str) -> None:
    """Once for each step, where the step's gradient is taken; further gradients leave no trace."""
    played = federation(BY_ITSELF.get(entry, entry), batches=lambda k, _: [np.arange(7)])
    count = 4 if entry == "perfedavg" else 7  # which takes it on the first half
    for k in range(4):
        x, y = (values[:count] for values in played.data[k])
        params = begun(played, k)[0].start if entry == "ifca" else played.network.params
        loss = played.network.loss(params, {}, Batch(x, y))
        assert float(played.reply(k)[0].loss) == pytest.approx(float(loss), rel=1e-13)


def test_the_recorded_loss_is_a_mean_over_steps() -> None:
    def after(steps: int) -> Reply:
        return federation("fedavg", batches=lambda k, _: [np.arange(7)] * steps).reply(0)[0]

    played = federation("fedavg")
    x, y = played.data[0]
    points = [played.params, *(tree.add(played.params, after(s).update) for s in (1, 2))]
    losses = [float(played.network.loss(p, {}, Batch(x[:7], y[:7]))) for p in points]
    assert float(after(3).loss) == pytest.approx(sum(losses) / 3, rel=1e-13)
    assert losses[0] > losses[1] > losses[2]


@each("entry", MIX)
@each("policy", ["average", "local"])
def test_every_step_updates_the_statistics_once(entry: str, policy: str) -> None:
    """However many forward passes a method makes for one step."""
    played = federation(BY_ITSELF.get(entry, entry), network=normed(), buffers=policy)
    for k in range(4):
        reply, steps, _ = played.reply(k)
        kept = reply.buffers if policy == "average" else tree.leaves(reply.client_state, "buffers")
        assert int(kept["norm.num_batches_tracked"]) == steps
        assert (reply.buffers == {}) == (policy == "local")


@pytest.mark.parametrize(
    ("value", "finite"),
    [(float("nan"), False), (float("inf"), False), (1.0, True)],
)
def test_what_is_sent_is_looked_at(value: float, finite: bool) -> None:
    played = federation("scaffold")
    x, _ = played.data[0]
    x[3, 2] = value
    assert bool(played.reply(0)[0].finite) == finite
    assert bool(played.reply(1)[0].finite)


@torch.no_grad()
def test_numbers_that_are_finite_one_by_one_may_be_too_large_to_add_up() -> None:
    training = ClientTraining(parse("fedavg"), toy_network(), LOCAL)
    start = {"w": torch.zeros(4)}
    client = ClientRound(training, Message(start, {}, {}, 0, 0.1), ClientInfo(0, 1), {}, {}, dict)
    for size, finite in ((1e37, True), (3e38, False)):
        end = LocalState(
            {"w": torch.full((4,), size)}, {}, {}, {}, {}, {}, carry={}, loss=torch.zeros(())
        )
        assert bool(client_finish(client, end, 1).finite) == finite


# --- preparation -----------------------------------------------------------------------------


@pytest.mark.parametrize("entry", PREPARE)
def test_a_method_that_prepares_has_to_be_given_rows(entry: str) -> None:
    played = federation(entry)
    client, progress = begun(played, 0)
    x, y = played.data[0]
    with pytest.raises(ValueError, match="the engine gave no rows"):
        client_step(client, progress, Batch(x[:4], y[:4]))


def test_only_methods_that_prepare_or_fit_their_start_ask_for_the_examples() -> None:
    def never() -> Batch:
        raise AssertionError("examples were asked for")

    for entry in ENTRIES:
        played = federation(entry)
        training, message = played.training, server_message(played.plan, played.played.server, 0.1)
        if entry in (*PREPARE, *ASK):  # which fit where they begin to their examples
            with pytest.raises(AssertionError):
                client_start(training, message, None, ClientInfo(0, 4), never)
        else:
            client_start(training, message, None, ClientInfo(0, 4), never)


def test_position_and_example_pair_rows_differently_from_the_second_pass_on() -> None:
    """FedReg's public code pairs by the place in the first pass; the paper by the examples."""
    ends = {}
    for pairing in ("example", "position"):
        played = federation(f"fedreg(pairing='{pairing}', eta_s=0.3)")
        client, progress = begun(played, 0)
        x, y = played.data[0]
        rows, first = torch.arange(4, 8), torch.arange(4)
        step = client_step(client, progress, Batch(x[rows], y[rows]), rows, rows)
        later = client_step(client, step, Batch(x[rows], y[rows]), rows, first)
        ends[pairing] = step.params, later.params
    assert equal(ends["example"][0], ends["position"][0])
    assert gap(ends["example"][1], ends["position"][1]) > 1e-6


def test_the_round_knows_its_mean_gradient() -> None:
    """Of one step without momentum it is the gradient; of more it is their mean."""
    for local in (LOCAL, replace_momentum(0.9)):
        played = federation("scaffold", local=local, batches=lambda k, _: consecutive(12, 12, 1))
        reply = played.reply(0)[0]
        x, y = played.data[0]
        grad = played.network.value_and_grad(played.params, {}, Batch(x, y), "eager")[1]
        assert gap(tree.leaves(reply.uploads["scaffold"], "c"), grad) < 1e-12


@dataclass(frozen=True)
class Forgets(Upload):
    """Sends the mean gradient, and does not say that it needs a path that has one."""

    name: ClassVar[str] = "forgets"

    def upload(self, round: Round) -> State:
        return dict(round.mean_grad())


@pytest.mark.parametrize("beside", ["fedreg", "minibatch_sgd"])
@torch.no_grad()
def test_a_mean_gradient_that_means_nothing_is_refused(beside: str) -> None:
    client, progress = begun(federation(beside, FEW), 0)
    plan = compose([*parse(beside).parts, Forgets()])
    with pytest.raises(CompositionError, match=f"'{beside}' breaks LINEAR_ACCUMULATION"):
        client_finish(replace(client, training=replace(client.training, plan=plan)), progress, 1)


def replace_momentum(rho: float) -> Local:
    return LOCAL.model_copy(update={"momentum": rho})


def test_a_client_that_comes_back_goes_on_with_what_it_kept() -> None:
    played = federation("gradma.w")
    first = played.reply(0)[0]
    end = tree.add(played.params, first.update)
    assert gap(tree.leaves(first.client_state["gradma.w"], "last"), end) < 1e-15
    played.round([0])
    client, progress = begun(played, 0)
    assert equal(
        tree.leaves(progress.carry["gradma.w"], "previous"), client.client_state["gradma.w"]["last"]
    )


# --- what parts return -----------------------------------------------------------------------


class Wrong(Part):
    """Returns what it is told to in place of a tree."""

    name: ClassVar[str] = "wrong"
    paper: ClassVar[str] = ""
    pull: ClassVar[float] = 0.0
    gradient_stage = update_stage = Stage.CORRECT
    made: ClassVar[Callable[[Tree], object]]

    def made_of(self, tree: Tree) -> object:
        return type(self).made(tree)


class WrongPenalty(Wrong, Penalty):
    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        return self.made_of(params)


class WrongRule(Wrong, GradientRule):
    def gradient(self, params: Tree, step: Step) -> Tree:
        return self.made_of(step.grad(params))


class WrongTransform(Wrong, GradientTransform):
    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        return self.made_of(grads)


class WrongCorrection(Wrong, StepCorrection):
    def correct(self, params: Tree, step: Step) -> Tree:
        return self.made_of(params)


class WrongUpdate(Wrong, UpdateTransform):
    def transform_update(self, update: Tree, round: Round) -> Tree:
        return self.made_of(update)


def first_only(given: Tree) -> Tree:
    return dict(list(given.items())[:1])


@each(
    ("kind", "made", "got"),
    [
        (WrongPenalty, first_only, "without 'fc1.bias', 'fc2.weight', 'fc2.bias'"),
        (WrongPenalty, lambda given: None, "an object of type NoneType"),
        (WrongRule, first_only, "without 'fc1.bias', 'fc2.weight', 'fc2.bias'"),
        (WrongTransform, first_only, "without 'fc1.bias', 'fc2.weight', 'fc2.bias'"),
        (WrongTransform, lambda given: {**given, "x": torch.zeros(1)}, "with 'x'"),
        (WrongTransform, lambda given: None, "an object of type NoneType"),
        (WrongCorrection, first_only, "without 'fc1.bias', 'fc2.weight', 'fc2.bias'"),
        (WrongUpdate, first_only, "without 'fc1.bias', 'fc2.weight', 'fc2.bias'"),
    ],
)
@torch.no_grad()
def test_a_part_that_leaves_out_parameters_is_named(
    kind: type[Wrong], made: Callable[[Tree], object], got: str
) -> None:
    part = dataclass(frozen=True)(type("Mine", (kind,), {"made": staticmethod(made)}))()
    played = federation("fedavg", FEW)
    client, progress = begun(played, 0)
    client = replace(client, training=replace(client.training, plan=compose([part])))
    x, y = played.data[0]
    with pytest.raises(TrainingError) as caught:
        client_finish(client, client_step(client, progress, Batch(x, y)), 1)
    assert caught.value.what.startswith("wrong (Mine) does not return a tensor for each parameter")
    assert caught.value.got == got
    assert len(caught.value.lines()) <= 4
