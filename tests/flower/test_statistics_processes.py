"""Statistics of real nodes: of a federation that is up, and of one that is started for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import call
from fedkeel.config import Experiment, to_toml
from fedkeel.flower.local.federation import data_configs
from fedkeel.flower.local.processes import NAME, FlowerProcesses
from fedkeel.flower.local.statistics import of_federation
from fedkeel.flower.server.statistics import collect, read_kinds
from fedkeel.records.node_statistics import FILE, NodeStatistics
from sites import CONSENT, experiment, grid_of, write_tables
from toys import living

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


def test_the_command_starts_nodes_asks_them_and_ends_them(tmp_path: Path) -> None:
    write_tables(tmp_path)
    file, policy = tmp_path / "sites.toml", tmp_path / "policy.toml"
    file.write_text(to_toml(made()))
    policy.write_text('[statistics]\nkinds = ["labels"]\n')
    words = ["flower", "stats", file, "--policy", policy, "--out", tmp_path / "out", "--json"]
    words += [word for i in range(3) for word in ("--data", tmp_path / f"{i}.csv")]
    done = call(*words, "--kinds", "labels")
    assert done.code == 0, done.err
    assert [site["examples"] for site in done.json["sites"]] == [60, 90, 130]
    found = NodeStatistics.read(tmp_path / "out" / FILE)
    assert done.json == found.to_json()
    assert living(tmp_path) == []
    refused = call(*words, "--kinds", "missing")
    assert refused.code == 2
    assert "No site has answered with statistics" in refused.err
    assert "allowed labels" in refused.err
    assert living(tmp_path) == []
