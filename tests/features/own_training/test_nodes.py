"""Local training of one's own on the nodes of a federation and on Ray: the bits of a simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import RecordDict

import fedkeel as fk
from fedkeel import config
from fedkeel.errors import CompositionError
from fedkeel.features.secure.legality import check_sums
from fedkeel.flower.protocol import TRAIN, Agreement
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, changed, header_of, make_nodes, run_on_nodes
from toys import OWN_STEPS, prepared, same


@pytest.mark.parametrize("method", ["fedavg", "topk+momentum", "fedper"])
def test_nodes_give_the_bits_of_a_simulation(tmp_path: Path, method: str) -> None:
    run = prepared(method, local=OWN_STEPS, dtype="float64")
    remote, local = run_on_nodes(run, InProcessGrid(make_nodes(run, tmp_path))), start(run)
    assert [row.faults for row in remote.rows] == [{}] * 4
    for row in (*remote.rows, *local.rows):
        row.bytes_down.clear()  # here each client is sent the model; a node of several gets it once
        row.bytes_up.pop("evaluation", None)
    assert same(remote, local)
    assert "local_training.drawn" in remote.rows[-1].diagnostics


def test_a_node_that_claims_more_work_is_a_fault(tmp_path: Path) -> None:
    run = prepared(local=OWN_STEPS, per_round=6)
    nodes = make_nodes(run, tmp_path)

    def claims(kind: str, reply: RecordDict) -> RecordDict:
        if kind != TRAIN:
            return reply
        clients = [{**item, "examples": 10**6} for item in header_of(reply)["clients"]]
        return changed(reply, clients=clients)

    remote = run_on_nodes(run, InProcessGrid(nodes, edits={min(nodes): claims}))
    for row in remote.rows[1:]:
        assert all(fault.startswith("A reply reports other work") for fault in row.faults)
        assert sorted(k for ks in row.faults.values() for k in ks) == [0, 2, 4]


def test_server_and_nodes_agree_on_the_function() -> None:
    other = OWN_STEPS.model_copy(update={"train": "toys:other_steps"})
    plain = OWN_STEPS.model_copy(update={"train": None})
    with pytest.raises(fk.FedkeelError, match="no 'other_steps'"):
        prepared(local=other)
    one, again, none = (prepared(local=local) for local in (OWN_STEPS, OWN_STEPS, plain))
    assert Agreement.of(one) == Agreement.of(again)
    assert Agreement.of(one) != Agreement.of(none)


def test_sums_know_their_weights_before() -> None:
    for weights in ("examples", "uniform"):
        run = prepared(local=OWN_STEPS, weights=weights)
        check_sums(run.setup.training, None, 6)
    run = prepared(local=OWN_STEPS, weights="processed")
    with pytest.raises(CompositionError, match="set weights = 'examples' or 'uniform'"):
        check_sums(run.setup.training, None, 6)


def test_secure_sums_take_its_updates(tmp_path: Path) -> None:
    flower = config.Flower(secure_aggregation=True, deadline_seconds=2.0, poll_seconds=0.01)
    run = prepared(local=OWN_STEPS, per_round=6, dtype="float64", flower=flower)
    remote, local = run_on_nodes(run, InProcessGrid(make_nodes(run, tmp_path, 3))), start(run)
    assert [row.faults for row in remote.rows] == [{}] * 4
    for name, tensor in local.params.items():
        assert (remote.params[name] - tensor).abs().max() < 1e-4
