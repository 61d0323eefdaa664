"""A real node with a policy: it answers until its epsilon is spent, and the run goes on without."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import call, rows
from fedkeel.config import load
from fedkeel.features.budget.accountant import Release, composed_epsilon
from fedkeel.flower.export import export
from fedkeel.flower.local.processes import FlowerProcesses
from fedkeel.records.folder import RunFolder
from toys import eventually

pytestmark = pytest.mark.processes

POLICY = "epsilon = 2.0\ndelta = 0.01\n"


def test_a_node_with_a_policy(toy: Path, patience: float, tmp_path: Path) -> None:
    words = ["method=dpsgd(sigma=2.0)", "rounds=3", "partition.clients=2", "cohort.clients=2"]
    words += ["local.epochs=1", "privacy.epsilon=9.0", "privacy.delta=0.01"]
    words += ["privacy.unit=example", "flower.quorum=0.5"]
    out, app, site = tmp_path / "run", tmp_path / "app", tmp_path / "site"
    site.mkdir()
    (site / "policy.toml").write_text(POLICY)
    export(load(toy, words), app)
    nodes = [f'partition-id={i} num-partitions=2 state="{tmp_path / str(i)}"' for i in range(2)]
    nodes[1] += f' policy="{site / "policy.toml"}"'
    folder = RunFolder(out)
    with FlowerProcesses(tmp_path / "federation", nodes) as federation:
        federation.submit(app, {"out": str(out)})
        assert eventually(lambda: rows(out) == 4, 12 * patience), federation.tail("superlink")
        first = folder.rows()
        assert [row.clients for row in first[1:]] == [[0, 1]] * 3
        spent = call("flower", "ledger", site / "policy.toml", "--json").json
        (run,) = spent["runs"]
        assert (run["count"], run["sigmas"]) == (3, [2.0])
        assert run["total"] == composed_epsilon([(Release(), 2.0, 3)], 0.01) < 2.0
        federation.submit(app, {"out": str(tmp_path / "second")})
        assert eventually(lambda: rows(tmp_path / "second") == 4, 12 * patience)
    for row in RunFolder(tmp_path / "second").rows()[1:]:
        assert row.clients == [0]
        ((reason, clients),) = row.faults.items()
        assert clients == [1]
        assert "PolicyError: The epsilon of this site is spent. got" in reason
    assert call("flower", "ledger", site / "policy.toml", "--json").json == spent
