"""Statistics of real nodes: of a federation that is up, and of one that is started for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.config import Experiment
from fedkeel.errors import RunError
from fedkeel.flower.local.federation import data_configs
from fedkeel.flower.local.processes import NAME, FlowerProcesses
from fedkeel.flower.local.statistics import (
    configs_with_policy,
    of_federation,
    of_local_nodes,
)
from fedkeel.flower.server.statistics import collect, read_kinds
from sites import CONSENT, experiment, grid_of, write_tables

pytestmark = pytest.mark.processes

SLOW = {"deadline_seconds": 120.0}


def made(**flower: object) -> Experiment:
    return experiment(flower={**SLOW, **flower}, name="sites")


def test_a_federation_that_is_up_tells_what_its_sites_consent_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one and in a secure sum, as nodes in one process do. The third has no policy."""
    write_tables(tmp_path)
    policy = tmp_path / "policy.toml"
    policy.write_text(CONSENT)
    nodes = [
        f'{one} state="{tmp_path / f"node-{i}"}" name="site {i}"'
        for i, one in enumerate(data_configs([str(tmp_path / f"{i}.csv") for i in range(3)]))
    ]
    nodes[0] += f' policy="{policy}"'
    nodes[1] += f' policy="{policy}"'
    folder = tmp_path / "federation"
    with FlowerProcesses(folder, nodes) as federation:
        for name, value in federation.environment.items():
            monkeypatch.setenv(name, value)
        found = of_federation(made(), tmp_path / "plain", NAME, "all")
        assert [site.name for site in found.sites] == ["site 0", "site 1"]
        assert any("has not consented" in reason for reason in found.faults)
        sums = made(secure_aggregation=True)
        total = of_federation(sums, tmp_path / "sums", NAME, "labels,moments").total
    quick = experiment()
    expected = collect(
        grid_of(tmp_path, quick, site2="min_clients = 1\n"), quick, read_kinds("all")
    )
    assert found.sites == expected.sites
    assert total.labels == expected.total.labels
    assert [c.mean for c in total.columns] == [c.mean for c in expected.total.columns]


def test_nodes_that_are_started_for_statistics(tmp_path: Path) -> None:
    write_tables(tmp_path)
    policy = tmp_path / "policy.toml"
    policy.write_text('[statistics]\nkinds = ["labels"]\n')
    data = [str(tmp_path / f"{i}.csv") for i in range(3)]
    configs = configs_with_policy(made(), data, policy, None)
    found = of_local_nodes(made(), tmp_path / "out", configs, "labels")
    assert [site.examples for site in found.sites] == [60, 90, 130]
    with pytest.raises(RunError, match="No site has answered"):
        of_local_nodes(made(), tmp_path / "out", configs, "missing")
