"""TLS and node keys, as in the exported app: strangers stay out, and bytes are as recorded."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509

from fedkeel.errors import RunError
from fedkeel.flower.local import keys
from fedkeel.flower.local.federation import shared_configs
from fedkeel.flower.local.processes import FlowerProcesses
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from toys import eventually
from wires import Counter, counted, gate


@pytest.fixture(scope="module")
def secured(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[FlowerProcesses, Counter, list[str], int]]:
    """A SuperLink behind a gate, whose one node's bytes are counted on their way to the gate."""
    folder = tmp_path_factory.mktemp("secured")
    nodes = [f'{one} state="{folder / "state"}"' for one in shared_configs(1)] * 3
    with ExitStack() as stack:
        federation = FlowerProcesses(folder / "federation", nodes[:1], secure=True)
        stack.enter_context(federation)
        federation.nodes = nodes
        port, refused = stack.enter_context(gate(federation.port, federation.keys))
        wire = stack.enter_context(counted(port))
        federation.stop("node-0")
        federation.start_node(0, link=f"127.0.0.1:{wire.port}")
        yield federation, wire, refused, port


def made(
    federation: FlowerProcesses, app: Path, out: Path, words: str, patience: float
) -> RoundRecord:
    """The first round of a run of one client with a model of two megabytes."""
    big = "rounds=1; model.args.hidden=[20000]; partition.clients=1; cohort.clients=1; "
    big += "partition.kind=iid; "
    federation.submit(app, {"out": str(out), "settings": big + words})
    folder = RunFolder(out)
    assert eventually(
        lambda: folder.exists() and folder.read_run().status != "running", 20 * patience
    ), federation.tail("superlink")
    assert folder.read_run().status == "finished", folder.read_run().message
    assert folder.read_run().engine.workers == 1
    row = folder.rows()[1]
    assert row.faults == {}
    return row


@pytest.mark.processes
@pytest.mark.parametrize("method", ["scaffold", "quantise", "topk(fraction=0.05)"])
def test_bytes_on_the_wire_are_those_of_the_record(
    secured: tuple[FlowerProcesses, Counter, list[str], int],
    app: Path,
    patience: float,
    tmp_path: Path,
    method: str,
) -> None:
    """Through TLS, on real sockets: what comes on top is the framework's framing."""
    federation, wire, _, _ = secured
    up, down = wire.up, wire.down
    row = made(federation, app, tmp_path / "run", f"method={method}", patience)
    up, down = wire.up - up, wire.down - down
    sent, received = sum(row.bytes_down.values()), sum(row.bytes_up.values())
    model = row.bytes_down["model"]
    assert model > 1_500_000
    assert sent < down < 1.02 * sent + 100_000
    assert received < up < 1.02 * received + 100_000
    share = {"scaffold": 2.0, "quantise": 1 / 8, "topk(fraction=0.05)": 0.15}[method]
    assert received < 1.05 * share * model


@pytest.mark.processes
def test_strangers_stay_out(
    secured: tuple[FlowerProcesses, Counter, list[str], int], patience: float, tmp_path: Path
) -> None:
    """A key that is not registered, another authority, no TLS; and who comes by the nodes' way."""
    federation, _, refused, port = secured
    keys.make(tmp_path / "others", ["127.0.0.1"], 1)
    right, wrong = str(federation.keys / keys.CA), str(tmp_path / "others" / keys.CA)
    flag, link = "--auth-supernode-private-key", f"127.0.0.1:{port}"
    stranger, known = str(tmp_path / "others" / "node-0"), str(federation.keys / "node-0")
    federation.start_node(1, link, ["--root-certificates", right, flag, stranger])
    federation.start_node(2, link, ["--root-certificates", wrong, flag, known])
    logs = [federation.folder / f"node-{number}.log" for number in (1, 2)]
    assert eventually(lambda: not federation.is_alive("node-1"), 4 * patience)
    assert eventually(
        lambda: "certificate verify failed" in logs[1].read_text().lower().replace("_", " "),
        4 * patience,
    )
    federation.stop("node-2")
    federation.start_node(2, link, ["--insecure"])
    assert eventually(lambda: "retrying" in logs[1].read_text()[-3000:].lower(), 4 * patience)
    federation.stop("node-2")
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "gate"\n\n[superlink.gate]\naddress = "{link}"\n'
        f'root-certificates = "{right}"\n'
    )
    for words in (["supernode", "register", f"{stranger}.pub", "gate"], ["list", "gate"]):
        done = subprocess.run(
            ["flwr", *words],
            env={**federation.environment, "FLWR_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=4 * patience,
            check=False,
        )
        assert done.returncode != 0
    assert {path.split("/")[2] for path in refused} == {"control"}


def test_keys_are_private_and_never_written_over(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys", ["superlink.example.org", "10.0.0.1"], 2)
    names = sorted(p.name for p in (tmp_path / "keys").iterdir())
    assert names == [
        "ca.crt",
        "node-0",
        "node-0.pub",
        "node-1",
        "node-1.pub",
        "server.key",
        "server.pem",
    ]
    for name in ("server.key", "node-0", "node-1"):
        assert (tmp_path / "keys" / name).stat().st_mode & 0o077 == 0
    with pytest.raises(RunError, match="holds keys already"):
        keys.make(tmp_path / "keys", ["localhost"], 1)


@pytest.mark.parametrize(
    "host", ["", "https://localhost:8000", "localhost:8000", "two words", "über.example", "a..b"]
)
def test_a_host_that_no_node_could_reach_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(RunError, match="cannot be made for this host"):
        keys.make(tmp_path / "keys", ["localhost", host], 1)
    assert not (tmp_path / "keys").exists()


def test_keys_are_made_for_a_long_name(tmp_path: Path) -> None:
    name = "superlink-" * 6 + "0.example.org"
    keys.make(tmp_path, [name, "*.example.org", "::1"], 1)
    made = x509.load_pem_x509_certificate((tmp_path / keys.CERTIFICATE).read_bytes())
    found = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == [name, "*.example.org"]


def test_keys_are_not_written_among_others(tmp_path: Path) -> None:
    (tmp_path / "node-1").write_text("of somebody else")
    with pytest.raises(RunError, match="holds keys already"):
        keys.make(tmp_path, ["localhost"], 2)
    assert [file.name for file in tmp_path.iterdir()] == ["node-1"]
    with pytest.raises(RunError, match="cannot be written to"):
        keys.make(tmp_path / "node-1", ["localhost"], 2)
