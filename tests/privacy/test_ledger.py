"""A site's ledger counts what was spent, in all runs, and never less than what was sent."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from flwr.common.config import parse_config_args

from commands import call
from fedkeel.errors import ConfigError, RunError
from fedkeel.privacy.accountant import Release, composed_epsilon
from fedkeel.privacy.ledger import Ledger, Spent, epsilon_of
from fedkeel.privacy.policy import Policy, PolicyError, read_policy

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


def test_a_whole_run_is_charged_once_however_often_its_server_goes_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    charges = [ledger.charge(spending("a", count=9), POLICY, is_once=True) for _ in range(3)]
    assert len(set(charges)) == 1
    assert [entry.count for entry in ledger.read()] == [9]
    for planned, charged in ((12, 12), (10, 12)):  # it plans more rounds, and fewer
        total = ledger.charge(spending("a", count=planned), POLICY, is_once=True)
        assert total == epsilon_of([spending("x", count=charged)], POLICY)


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
