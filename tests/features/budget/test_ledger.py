"""A site's ledger counts what was spent, in all runs, and never less than what was sent."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from flwr.common.config import parse_config_args

from commands import call
from fedkeel.errors import ConfigError, RunError
from fedkeel.features.budget.accountant import Release, composed_epsilon
from fedkeel.features.budget.ledger import Ledger, Spent, epsilon_of
from fedkeel.features.budget.policy import Policy, PolicyError, read_policy
from fedkeel.flower.local import watcher
from fedkeel.records.files import sealed

POLICY = Policy(epsilon=5.0, delta=1e-5)


def spending(run: str, sigma: float = 4.0, count: int = 1, client: int = 0) -> Spent:
    return Spent(
        run=run,
        method="dpsgd",
        client=client,
        sampling="all",
        sampled=1.0,
        population=1,
        sigma=sigma,
        count=count,
    )


def test_runs_of_different_noise_and_sampling_compose_as_the_library_says() -> None:
    poisson = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    account = pld.PLDAccountant(value_discretization_interval=1e-3)
    account.compose(poisson, 100).compose(dp_accounting.GaussianDpEvent(4.0), 50)
    kinds = [(Release("poisson", 10, 100), 1.0, 60), (Release(), 4.0, 50)]
    both = [*kinds, (Release("poisson", 10, 100), 1.0, 40)]
    assert composed_epsilon(both, 1e-5) == pytest.approx(account.get_epsilon(1e-5), rel=1e-9)
    fixed = (Release("fixed_size", 10, 100), 4.0, 30)
    half = dp_accounting.SampledWithoutReplacementDpEvent(
        100, 10, dp_accounting.GaussianDpEvent(2.0)
    )
    relation = dp_accounting.NeighboringRelation
    of_fixed = rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE).compose(half, 30)
    others = rdp.RdpAccountant().compose(poisson, 100)
    others.compose(dp_accounting.GaussianDpEvent(4.0), 50)
    total, _ = rdp.compute_epsilon(of_fixed._orders, of_fixed._rdp + others._rdp, 1e-5)
    assert composed_epsilon([*both, fixed], 1e-5) == pytest.approx(total, rel=1e-9)
    assert composed_epsilon([], 1e-5) == 0.0


def test_a_ledger_adds_up_over_runs_until_the_limit_and_survives(tmp_path: Path) -> None:
    file = tmp_path / "ledger.json"
    totals = [Ledger(file).charge(spending(run), POLICY) for run in ("a", "a", "b", "b", "c")]
    assert totals == sorted(totals)
    assert totals[-1] == epsilon_of([spending("x", count=5)], POLICY)
    assert [(e.run, e.count) for e in Ledger(file).read()] == [("a", 2), ("b", 2), ("c", 1)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.read_bytes()
    with pytest.raises(PolicyError, match="epsilon of this site is spent") as caught:
        Ledger(file).charge(spending("d", sigma=0.5), POLICY)
    assert f"got {totals[-1]:.4g}, and" in str(caught.value)
    assert "5 over all runs" in str(caught.value)
    assert file.read_bytes() == before


PLAN = {"planned": 9, "count": 9, "plan": "5f1d09c2"}
SAMPLED = {"sampling": "poisson", "sampled": 1.0, "population": 10}


def planned(**more: object) -> Spent:
    return spending("a").model_copy(update={**PLAN, **more})


def answer(ledger: Ledger, rounds: Iterable[int], limit: float = 9e9, **more: object) -> float:
    policy = POLICY.model_copy(update={"epsilon": limit})
    return max(ledger.charge_run(planned(**more), r, policy) for r in rounds)


def test_planned_rounds_pay_for_one_answer_to_each(tmp_path: Path) -> None:
    """Six runs under one name cost what six runs cost; going on costs what is repeated."""
    ledger = Ledger(tmp_path / "ledger.json")
    once = composed_epsilon([(Release(), 4.0, 9)], 1e-5)
    assert answer(ledger, range(9)) == once
    assert answer(ledger, [8]) == composed_epsilon([(Release(), 4.0, 10)], 1e-5)
    assert [entry.count for entry in ledger.read()] == [10]
    for _ in range(5):
        total = answer(ledger, range(9))
    assert total == composed_epsilon([(Release(), 4.0, 10 + 5 * 9)], 1e-5) > 2 * once
    with pytest.raises(PolicyError, match="with this answer"):
        answer(ledger, [3], limit=total)
    stopped = Ledger(tmp_path / "stopped.json")
    answer(stopped, [0, 1, 2])
    assert answer(stopped, [1, 2, 3]) == composed_epsilon([(Release(), 4.0, 11)], 1e-5)
    for beyond in (-1, 9):
        with pytest.raises(PolicyError, match=f"got round {beyond + 1}; expected one of 9"):
            answer(stopped, [beyond])


def test_a_sampled_run_that_is_repeated_is_charged_by_the_cheaper_account(tmp_path: Path) -> None:
    """A single repeated answer as it is, without a gain by sampling; many as another whole run."""
    rare, single = Release("poisson", 1, 10), Release()
    ledger = Ledger(tmp_path / "ledger.json")
    first = answer(ledger, [2, 5], **SAMPLED)
    assert first == composed_epsilon([(rare, 4.0, 9)], 1e-5)
    one_more = composed_epsilon([(rare, 4.0, 9), (single, 4.0, 1)], 1e-5)
    again = composed_epsilon([(rare, 4.0, 18)], 1e-5)
    assert again < one_more
    assert answer(ledger, [2], **SAMPLED) == again
    assert answer(ledger, [5], **SAMPLED) == again  # this run's own, and paid for
    often = SAMPLED | {"sampled": 9.0, "planned": 60, "count": 60}
    other = Ledger(tmp_path / "often.json")
    answer(other, [0, 1], **often)
    kinds = [(Release("poisson", 9, 10), 4.0, 60), (single, 4.0, 1)]
    assert answer(other, [1], **often) == composed_epsilon(kinds, 1e-5)
    assert answer(other, [2], **often) == composed_epsilon(kinds, 1e-5)


def test_a_repeated_round_of_a_tree_is_charged_with_all_nodes_that_it_is_in(tmp_path: Path) -> None:
    """The tree of a pass of 16 rounds: an update is in 5 sums, so 16 rounds have 5 releases."""
    ledger = Ledger(tmp_path / "ledger.json")
    plan = planned(planned=16, count=5)
    for round, count in ((3, 5), (3, 10), (9, 10), (3, 15)):
        ledger.charge_run(plan, round, POLICY.model_copy(update={"epsilon": 9e9}), again=5)
        assert [entry.count for entry in ledger.read()] == [count]


def test_another_plan_under_the_same_name_is_charged_anew(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    answer(ledger, [0])
    others = [{"sigma": 5.0}, {"planned": 12, "count": 12}, {"method": "dpclient"}, SAMPLED]
    for number, other in enumerate([*others, {"plan": "another"}]):
        answer(ledger, [1], **other)
        assert len(ledger.read()) == number + 2
    assert answer(ledger, [1]) == epsilon_of(ledger.read(), POLICY)
    assert sum(entry.count for entry in ledger.read()) == 9 * 5 + 12


def test_a_ledger_of_before_is_read(tmp_path: Path) -> None:
    """Its whole runs had no record of what was answered, so going on with one is charged anew."""
    file = tmp_path / "ledger.json"
    keys = ("run", "method", "client", "sampling", "sampled", "population", "sigma", "at")
    old = spending("a").model_dump(include={*keys}) | {"count": 9}
    file.write_text(json.dumps(sealed({"format": 1, "spent": [old]})))
    assert [(entry.run, entry.count, entry.planned) for entry in Ledger(file).read()] == [
        ("a", 9, 0)
    ]
    assert answer(Ledger(file), [4]) == composed_epsilon([(Release(), 4.0, 18)], 1e-5)


def charge_many(file: Path, run: str) -> None:
    for _ in range(5):
        Ledger(file).charge(spending(run), POLICY.model_copy(update={"epsilon": 1e9}))


def test_two_processes_of_a_site_lose_no_spending(tmp_path: Path) -> None:
    file, context = tmp_path / "ledger.json", multiprocessing.get_context("fork")
    workers = [context.Process(target=charge_many, args=(file, "same")) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [entry.count for entry in Ledger(file).read()] == [10]


@pytest.mark.parametrize("damage", ["count", "cut", "seal", "empty"])
def test_a_damaged_ledger_is_no_new_one(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "ledger.json"
    Ledger(file).charge(spending("a"), POLICY)
    text = file.read_text()
    values = json.loads(text)
    values.pop("digest")
    damaged = {
        "count": text.replace('"count": 1', '"count": 0'),
        "cut": text[:40],
        "seal": json.dumps(values),
        "empty": "",
    }
    file.write_text(damaged[damage])
    with pytest.raises(RunError, match="cannot be used"):
        Ledger(file).charge(spending("b"), POLICY)
    assert file.read_text() == damaged[damage]


def test_the_command_prints_what_each_run_has_cost(tmp_path: Path) -> None:
    file, ledger = tmp_path / "policy.toml", Ledger(tmp_path / "ledger.json")
    file.write_text("epsilon = 5.0\ndelta = 1e-5\n")
    assert "spent 0 of 5 at delta 1e-05" in call("flower", "ledger", file).out
    for run, sigma in (("a-1", 4.0), ("a-1", 4.0), ("b-2", 8.0)):
        ledger.charge(spending(run, sigma), POLICY)
    runs = call("flower", "ledger", file, "--json").json["runs"]
    each = [[(Release(), 4.0, 2)], [(Release(), 8.0, 1)]]
    assert [run["epsilon"] for run in runs] == [composed_epsilon(items, 1e-5) for items in each]
    total = composed_epsilon([*each[0], *each[1]], 1e-5)
    assert [run["total"] for run in runs] == [runs[0]["epsilon"], total]
    text = call("flower", "ledger", file).out
    assert f"spent {total:.4g} of 5 at delta 1e-05, unit example" in text
    assert max(map(len, text.splitlines())) <= 80
    file.write_text("min_clients = 3\n")
    assert "has no limit" in call("flower", "ledger", file).err


def test_a_node_is_started_with_its_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of Flower's own command, and only with a policy that can be read."""
    started: list[list[str]] = []
    monkeypatch.setattr("os.execvp", lambda _, words: started.append(words))
    monkeypatch.setattr("fedkeel.flower.node.resident.FOLDER", tmp_path / "resident")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv(watcher.NAME, "watched")
    file = tmp_path / "policy.toml"
    file.write_text("min_clients = 3\n")
    call("flower", "node", "--insecure", "--policy", file, "--node-config", "partition-id=1")
    (words,) = started
    assert words[:3] == ["flower-supernode", "--insecure", "--node-config"]
    config = parse_config_args([words[3]])
    assert config == {"partition-id": 1, "policy": str(file)}
    file.write_text("min_client = 3\n")
    assert call("flower", "node", "--policy", file).code == 2
    assert len(started) == 1


def test_a_policy_is_read_with_its_ledger_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('epsilon = 8.0\ndelta = 1e-5\nmethods = ["fedprox"]\nledger = "spent.json"\n')
    policy = read_policy(file)
    assert policy.ledger == str(tmp_path / "spent.json")
    assert policy.methods == ("fedprox",)
    wrong = {
        "epsilon = 8.0": "both 'epsilon' and 'delta'",
        "sigma = 1.0": "'sigma' needs 'clip'",
        "epsilon = 8.0\ndelta = 1e-5\nclip = 1.0\nsigma = 2.0": "unit = 'client'",
        "epsilom = 8.0": "epsilon",
        "epsilon = ": "policy.toml",
    }
    for text, reason in wrong.items():
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_policy(file)
        assert reason in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_policy(tmp_path / "none.toml")
