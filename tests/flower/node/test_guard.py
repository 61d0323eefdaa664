"""What a site's policy does not allow is refused, logged and seen by the server, and costs nothing.

What is allowed is written into the ledger before it is sent.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

import fedkeel as fk
from fedkeel import config
from fedkeel.data.cohort import select
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import RunError
from fedkeel.features.budget.accountant import Release, composed_epsilon
from fedkeel.features.budget.feature import account_of
from fedkeel.features.budget.ledger import Ledger
from fedkeel.features.budget.policy import Policy, PolicyError
from fedkeel.flower.node import training
from fedkeel.flower.node.guard import Guard
from fedkeel.flower.protocol import DESCRIBE, ClientRequest, Request
from fedkeel.flower.server import requests
from fedkeel.runner.result import Result
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import federation, prepared

EXAMPLE = fk.Privacy(epsilon=4.0, delta=0.01, unit="example")
CLIENT = fk.Privacy(epsilon=4.0, delta=0.01)
POISSON = fk.Cohort(clients=2, sampling="poisson")
NOISY = "dpsgd(sigma=2.0)"
"""Noise that is named needs no calibration; three rounds of two passes spend 3.05."""

NEW = {"steps_done": 0, "state_round": 0, "state_digest": "", "checkpoint_round": 0}
"""What a client is asked for in its first round."""

NODE = 10**9 + 7
"""The node of client 1."""


def run(method: str = "fedavg", **more: object) -> Prepared:
    made = prepared(method, clients=federation(3), **{"per_round": 3, **more})
    quick = config.Flower(deadline_seconds=0.3, poll_seconds=0.01, quorum=0.5)
    return replace(made, settings=made.settings.model_copy(update={"flower": quick}))


def guarded(made: Prepared, root: Path, policy: Policy) -> InProcessGrid:
    """A node for each client, of which client 1 is at a site with a policy."""
    nodes = make_nodes(made, root, nodes=3)
    policy = policy.model_copy(update={"ledger": str(root / "ledger.json")})
    nodes[NODE] = replace(nodes[NODE], guard=Guard(policy, made))
    return InProcessGrid(nodes)


def charged(root: Path) -> list[tuple[Release, float, int]]:
    return [(e.release, e.sigma, e.count) for e in Ledger(root / "ledger.json").read()]


@pytest.mark.parametrize(
    ("policy", "method", "more", "reason"),
    [
        ({"methods": ("fedprox",)}, "scaffold", {}, "does not allow scaffold. got method"),
        ({"methods": ()}, "fedgc", {}, "does not allow fedgc.cgc"),
        ({"messages": ("scores",)}, "scaffold", {}, "let 'scaffold' out. allowed scores"),
        ({"messages": ()}, "mime", {}, "let 'mime' out. allowed only the update"),
        ({"min_clients": 3}, "fedavg", {}, "too few clients .* got 2; allowed 3 at least"),
        (
            {"secure_sums": True},
            "fedavg",
            {},
            "asks for secure sums. .* secure_minimum = 2",
        ),
        ({"min_clients": 2}, "fedgh", {}, "uses single clients' updates"),
        ({"min_clients": 2}, "dpclient", {"cohort": POISSON}, "too few clients"),
        ({"epsilon": 8.0, "delta": 0.01}, "fedavg", {}, "no noise .* got no .privacy."),
        (
            {"epsilon": 8.0, "delta": 0.01},
            "dpclient(sigma=2.0)",
            {"privacy": CLIENT},
            "unit = 'client'",
        ),
        (
            {"epsilon": 3.0, "delta": 0.01},
            NOISY,
            {"privacy": EXAMPLE},
            "got 3.047 .* allowed 3 over all",
        ),
        (
            {"epsilon": 8.0, "delta": 0.01, "unit": "client", "clip": 1.0, "sigma": 9.0},
            "scaffold",
            {},
            "sends other things",
        ),
        ({"clip": 1.0}, "topk", {}, "sends other things"),
    ],
)
def test_a_run_beyond_the_policy_is_refused_with_the_reason(
    tmp_path: Path, policy: dict[str, object], method: str, more: dict[str, object], reason: str
) -> None:
    """The node does not say what it plays, so that the server waits, and says why."""
    grid = guarded(run(method, **more), tmp_path, Policy(**policy))
    with pytest.raises(PolicyError) as caught:
        grid.nodes[NODE].reply(DESCRIBE, RecordDict())
    assert re.search(reason, caught.value.short())
    assert charged(tmp_path) == []


def test_the_server_sees_why_a_site_does_not_take_part(tmp_path: Path) -> None:
    made = run("scaffold")
    grid = guarded(made, tmp_path, Policy(methods=("fedprox",)))
    with pytest.raises(RunError) as caught:
        run_on_nodes(made, grid)
    assert "2 of 3 clients, without 1" in str(caught.value)
    assert "PolicyError: The policy of this site does not allow scaffold." in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "method", "more"),
    [
        (
            {"methods": ("fedprox", "fedgc"), "messages": ("fedgc.cgc", "diagnostics")},
            "fedgc+fedprox",
            {},
        ),
        ({"methods": (), "min_clients": 2, "messages": ()}, "fedavg", {}),
        (
            {"methods": ("scaffold",), "epsilon": 4.0, "delta": 0.01},
            "scaffold",
            {"privacy": EXAMPLE},
        ),
    ],
)
def test_what_a_policy_allows_is_not_refused(
    tmp_path: Path, policy: dict[str, object], method: str, more: dict[str, object]
) -> None:
    grid = guarded(run(method, **more), tmp_path, Policy(**policy))
    grid.nodes[NODE].reply(DESCRIBE, RecordDict())


def test_secure_sums_of_enough_nodes_are_allowed(tmp_path: Path) -> None:
    """The smallest number of nodes in a sum has to be that of the policy."""
    made = run(cohort=fk.Cohort(clients=3))
    for minimum, is_allowed in ((2, False), (3, True)):
        flower = config.Flower(secure_aggregation=True, secure_minimum=minimum, quorum=1.0)
        secure = replace(made, settings=made.settings.model_copy(update={"flower": flower}))
        guard = Guard(Policy(secure_sums=True, min_clients=3), secure)
        if is_allowed:
            guard.check_run()
        else:
            with pytest.raises(PolicyError, match="asks for secure sums"):
                guard.check_run()


def test_the_plan_of_all_clients_of_a_node_counts(tmp_path: Path) -> None:
    """As the ledger does: one spends 3.05 in this run, and two spend more."""
    guard = Guard(Policy(epsilon=4.0, delta=0.01), run(NOISY, privacy=EXAMPLE))
    guard.check_plan([1])
    with pytest.raises(PolicyError, match="plans to spend more"):
        guard.check_plan([0, 1])


def faults(result: Result) -> list[dict[str, list[int]]]:
    return [row.faults for row in result.rows[1:]]


def test_a_site_stops_sending_before_its_epsilon_is_overrun(tmp_path: Path) -> None:
    """Over two runs; the runs go on without it, and their rows say why."""
    policy = Policy(epsilon=4.0, delta=0.01)
    first, second = run(NOISY, privacy=EXAMPLE), run(f"scaffold+{NOISY}", privacy=EXAMPLE)
    assert faults(run_on_nodes(first, guarded(first, tmp_path, policy))) == [{}, {}, {}]
    assert charged(tmp_path) == [(Release(), 2.0, 6)]  # 3 rounds of 2 epochs
    result = run_on_nodes(second, guarded(second, tmp_path, policy))
    assert charged(tmp_path) == [(Release(), 2.0, 6), (Release(), 2.0, 2)]
    spent = [composed_epsilon([(Release(), 2.0, count)], 0.01) for count in (8, 10)]
    assert spent[0] <= 4.0 < spent[1]
    refused = [
        reason for row in faults(result) for reason, clients in row.items() if clients == [1]
    ]
    assert len(refused) == 2
    assert all("The epsilon of this site is spent. got 3.708, and 4.322" in r for r in refused)
    assert [row.clients for row in result.rows[1:]][-1] == [0, 2]
    assert "do   raise 'epsilon'" in (tmp_path / "1" / "node.log").read_text()


def test_a_client_level_run_is_charged_as_a_whole(tmp_path: Path) -> None:
    """A server that samples has its gain only over all of its rounds."""
    made = run("dpclient(sigma=2.0)", privacy=CLIENT, cohort=POISSON, rounds=4)
    policy = Policy(epsilon=2.0, delta=0.01, unit="client")
    result = run_on_nodes(made, guarded(made, tmp_path, policy))
    assert sum(1 in row.clients for row in result.rows) > 1
    assert charged(tmp_path) == [(Release("poisson", 2, 3), 2.0, 4)]
    again = run_on_nodes(made, guarded(made, tmp_path, policy))  # another run of the same settings
    reasons = {reason for row in faults(again) for reason in row}
    assert len(reasons) == 1
    assert "is spent" in reasons.pop()


def test_a_repeated_answer_in_a_tree_is_charged_as_one_pass(tmp_path: Path) -> None:
    """Passes of 3 rounds: a client is in 2 sums of each tree. All 9 rounds are answered."""
    privacy = fk.Privacy(epsilon=4.0, delta=0.01, noise="tree")
    cohort = fk.Cohort(clients=1, sampling="in_turn")
    made = run("fedavg", privacy=privacy, cohort=cohort, rounds=9)
    grid = guarded(made, tmp_path, Policy(epsilon=1e9, delta=0.01, unit="client"))
    guard = grid.nodes[NODE].guard
    assert guard is not None
    rounds = [r for r in range(9) if 1 in select(cohort, np.ones(3), made.settings.seed, r).clients]
    assert len(rounds) == 3
    counts = []
    for number in (*rounds, rounds[-1]):
        request = Request(
            run="a",
            round=number,
            agreement=grid.nodes[NODE].agreement,
            data_digest="",
            lr=0.1,
            clients=(ClientRequest(client=1, **NEW),),
        )
        guard.admit(made.setup, request, request.clients[0])
        counts.append(charged(tmp_path)[0][2])
    assert counts == [6, 6, 6, 8]


def test_runs_under_one_name_cost_what_runs_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server chooses the name. One that takes it again gains nothing."""
    monkeypatch.setattr(requests.secrets, "randbits", lambda _: 7)
    made = run("dpclient(sigma=2.0)", privacy=CLIENT, rounds=2)
    policy = Policy(epsilon=4.5, delta=0.01, unit="client")
    refused = [
        reason
        for _ in range(6)
        for row in faults(run_on_nodes(made, guarded(made, tmp_path, policy)))
        for reason in row
    ]
    spent = [composed_epsilon([(Release(), 2.0, n)], 0.01) for n in (10, 11)]
    assert spent[0] <= 4.5 < spent[1]
    assert charged(tmp_path) == [(Release(), 2.0, 10)]
    assert len(refused) == 6 * 2 - 10


def test_a_client_that_is_not_drawn_does_not_answer(tmp_path: Path) -> None:
    """What sampling saves is counted, and a server that asks it all the same would not sample."""
    rare = fk.Cohort(clients=1, sampling="poisson")
    made = run("dpclient(sigma=2.0)", privacy=CLIENT, cohort=rare, rounds=6)
    grid = guarded(made, tmp_path, Policy(epsilon=9.0, delta=0.01, unit="client"))
    guard = grid.nodes[NODE].guard
    assert guard is not None
    drawn = [select(rare, np.ones(3), made.settings.seed, r).clients.tolist() for r in range(6)]
    assert any(1 in clients for clients in drawn)
    assert any(1 not in clients for clients in drawn)
    for number, clients in enumerate(drawn):
        request = Request(
            run="a",
            round=number,
            agreement=grid.nodes[NODE].agreement,
            data_digest="",
            lr=0.1,
            clients=(ClientRequest(client=1, **NEW),),
        )
        if 1 in clients:
            guard.admit(made.setup, request, request.clients[0])
            continue
        with pytest.raises(PolicyError, match="not drawn in this round"):
            guard.admit(made.setup, request, request.clients[0])
    assert charged(tmp_path) == [(Release("poisson", 1, 3), 2.0, 6)]


class Answers:
    """Trains client 1 in round 0 of a run, again and again."""

    def __init__(self, made: Prepared, root: Path, policy: Policy) -> None:
        grid = guarded(made, root, policy)
        self.node, self.sent = grid.nodes[NODE], []
        grid.edits[NODE] = lambda kind, reply: reply
        reply = self.node.reply

        def keep(kind: str, content):  # type: ignore[no-untyped-def]
            if kind == "train":
                self.sent.append(content)
            return reply(kind, content)

        object.__setattr__(self.node, "reply", keep)
        run_on_nodes(made, grid)

    def update(self) -> torch.Tensor:
        content = self.node.train(self.sent[0])
        record = content["tensors-1"]
        return torch.cat([torch.from_numpy(a.numpy().copy()).flatten() for a in record.values()])


def test_noise_of_examples_is_drawn_anew_and_unknown_to_the_server(tmp_path: Path) -> None:
    made = run(NOISY, privacy=EXAMPLE, rounds=1)
    answers = Answers(made, tmp_path, Policy(epsilon=90.0, delta=0.01))
    one, other = answers.update(), answers.update()
    assert not torch.equal(one, other)
    assert charged(tmp_path)[0][2] == 2 * 3  # the run's own, and two more


def test_a_site_clips_and_adds_noise_of_its_own(tmp_path: Path) -> None:
    made = run(rounds=1, dtype="float64")
    norm = float(Answers(made, tmp_path / "a", Policy()).update().norm())
    loose = Answers(made, tmp_path / "b", Policy(clip=2 * norm)).update()
    assert float(loose.norm()) == norm
    short = Answers(made, tmp_path / "c", Policy(clip=norm / 2)).update()
    assert torch.allclose(short, loose / 2, atol=1e-12)
    noisy = Policy(clip=norm / 2, sigma=3.0)
    answers = Answers(made, tmp_path / "d", noisy)
    noise = torch.cat([answers.update() - short for _ in range(40)])
    assert len(noise) > 2000
    assert float(noise.std()) == pytest.approx(3.0 * norm / 2, rel=0.06)
    assert abs(float(noise.mean())) < 4 * 3.0 * norm / 2 / len(noise) ** 0.5
    limit = {"epsilon": 90.0, "delta": 0.01, "unit": "client"}
    Answers(made, tmp_path / "e", noisy.model_copy(update=limit)).update()
    assert charged(tmp_path / "e") == [(Release(), 3.0, 2)]


def test_a_node_that_is_killed_before_it_replies_has_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(NOISY, privacy=EXAMPLE, rounds=1)
    answers = Answers(made, tmp_path, Policy(epsilon=90.0, delta=0.01))
    assert charged(tmp_path)[0][2] == 2
    monkeypatch.setattr(training, "train_client", lambda *_: os.kill(os.getpid(), 9))
    child = os.fork()
    if child == 0:
        answers.update()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -9
    assert charged(tmp_path)[0][2] == 4


def test_a_ledger_that_cannot_be_used_lets_nothing_out(tmp_path: Path) -> None:
    made = run(NOISY, privacy=EXAMPLE, rounds=1)
    (tmp_path / "ledger.json").write_text("{}")
    result = run_on_nodes(made, guarded(made, tmp_path, Policy(epsilon=90.0, delta=0.01)))
    (fault,) = faults(result)
    assert fault == {"failed: RunError: The ledger of this site cannot be used.": [1]}
    assert result.rows[1].clients == [0, 2]


def test_releases_of_a_round_count_every_pass_that_it_touches() -> None:
    for local, n, done, count in [
        (fk.Local(lr=0.1, epochs=2, batch_size=4), 10, 6, 2),
        (fk.Local(lr=0.1, steps=2, batch_size=4), 10, 0, 1),
        (fk.Local(lr=0.1, steps=2, batch_size=4), 10, 2, 2),
        (fk.Local(lr=0.1, steps=2, batch_size="all"), 10, 4, 2),
        (fk.Local(lr=0.1, steps=5, batch_size=4, sampling="random"), 10, 0, 5),
    ]:
        schedule = account_of(run(NOISY, privacy=EXAMPLE)).schedule
        assert replace(schedule, local=local).releases_of_round(n, done) == count
