"""Every method through the wire format ends where the sequential engine does, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.method.registry import REGISTRY
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import prepared, same

PAIRS = ["scaffold+momentum", "fedcurv+mime", "fedprox+gcfed"]

FAST = {
    "fedavg",
    "fedprox",
    "fednova",
    "scaffold",
    "feddyn",
    "moon",
    "gradma",
    "fedvarp",
    "mime",
    "fedgc",
    "topk",
    "quantise",
    "median",
    "fedadam",
    "fedsgd",
    "ifca",
    "scaffold+momentum",
}
"""One method of each kind of message: client state, surveys, codecs, server memory, diagnostics,
or none of them, and a pair. The other methods are slow tests of the same check."""

BY_REPLIES = ("fedasync", "fedbuff")
"""Methods whose server does not wait: the order of the replies decides their bits. They are tested
in `server/test_trainings.py`, with the order of a simulation."""

ELSEWHERE = ("fedamp", "fltrust")
"""The first sends each client a model of its own, see `papers/test_fedamp.py`; the other needs
examples at the server, see `test_data_on_nodes.py`."""

METHODS = [
    pytest.param(method, marks=[] if method in FAST else pytest.mark.slow)
    for method in [*REGISTRY, *PAIRS]
    if method not in (*BY_REPLIES, *ELSEWHERE)
]


@pytest.mark.parametrize("method", METHODS)
def test_every_method(tmp_path: Path, method: str) -> None:
    run = prepared(method, dtype="float64", per_round=4)
    remote = run_on_nodes(run, InProcessGrid(make_nodes(run, tmp_path)))
    local = start(run)
    assert [row.faults for row in remote.rows] == [{}] * 4
    for row in remote.rows:  # here each client is sent the model; a node of several gets it once
        row.bytes_down.clear()
        row.bytes_up.pop("evaluation", None)
    for row in local.rows:
        row.bytes_down.clear()
        row.bytes_up.pop("evaluation", None)
    assert same(remote, local)
