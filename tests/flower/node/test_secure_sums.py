"""What a node refuses in secure sums, whatever a server asks: it is asked here as by a liar."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from flwr.app import Context, Message, RecordDict
from flwr.common.config import parse_config_args

import fedkeel as fk
from commands import call
from fedkeel import config
from fedkeel.config import load
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError, TrainingError
from fedkeel.features.secure.primitives import SecureSumError, new_key, public_key
from fedkeel.flower.apps import read_experiment
from fedkeel.flower.export import export
from fedkeel.flower.local import watcher
from fedkeel.flower.local.keys import make as make_keys
from fedkeel.flower.node import training
from fedkeel.flower.node.answer import answer
from fedkeel.flower.node.answered_sums import AnsweredSums
from fedkeel.flower.node.node import Node
from fedkeel.flower.node.signing import Signing, read_signing
from fedkeel.flower.node.sums_only import app_name
from fedkeel.flower.protocol import Agreement
from fedkeel.flower.secure_protocol import SECURE, NodeKeys
from fedkeel.flower.wire import HEADER, WireError
from in_process_grid import InProcessGrid, header_of, make_nodes, run_on_nodes, with_header
from toys import federation, prepared

CLIENTS = 4
FIRST = 10**9
"""Number of the first node; they are `make_nodes`'s."""


def run(method: str = "fedavg", **more: object) -> Prepared:
    """A run of four clients, each on a node of its own, in secure sums."""
    flower = {"quorum": more.pop("quorum", 0.5)}
    values = {"clients": federation(CLIENTS), "per_round": CLIENTS, "rounds": 1, **more}
    made = prepared(method, dtype="float64", **values)  # type: ignore[arg-type]
    quick = config.Flower(
        deadline_seconds=0.3, poll_seconds=0.01, secure_aggregation=True, **flower
    )
    return replace(made, settings=made.settings.model_copy(update={"flower": quick}))


def grid_of(made: Prepared, root: Path) -> InProcessGrid:
    return InProcessGrid(make_nodes(made, root, nodes=CLIENTS))


def of_sum(content: RecordDict, **values: object) -> RecordDict:
    """A request for training with other values in what it says of the sum."""
    inner = with_header(RecordDict(), {**json.loads(str(content[SECURE]["values"])), **values})
    return RecordDict({**content, SECURE: inner[HEADER]})


# ---- the app that was joined --------------------------------------------------------------------

KINDS = (
    "query.describe", "train", "train.survey", "train.keys", "train.shares", "train.masked",
    "train.unmask", "evaluate", "evaluate.personal", "evaluate.pictures",
)  # fmt: skip


def asked(app: Path, state: Path, settings: str = "", kind: str = "query.describe") -> str:
    """Ask a node of an app, as a run with such settings; return why it refuses, "" for a reply."""
    InProcessGrid({})  # gives this process an identity
    file, config = app / "federation" / "experiment.toml", {"settings": settings}
    node = {"partition-id": 0, "num-partitions": 2, "state": str(state)}
    content = with_header(RecordDict(), {"run": "", "round": 0})
    message = Message(content, 1, kind)
    context = Context(1, 1, node, RecordDict(), config)  # type: ignore[arg-type]
    reply = answer(file, lambda: (load(file), read_experiment(file, context)), message, context)
    return str(reply.error.reason) if reply.has_error() else ""


@pytest.fixture(scope="module")
def apps(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same app with sums of three, with a budget as well, and without sums."""
    sums = ["flower.secure_aggregation=true", "flower.secure_minimum=3"]
    budget = [*sums, "privacy.epsilon=2.0", "privacy.delta=0.01"]
    out = {}
    for name, words in (("sums", sums), ("budget", budget), ("plain", [])):
        out[name] = tmp_path_factory.mktemp(name) / "app"
        export(load(toy, words), out[name])
    return out


def test_a_node_that_has_joined_for_sums_sends_nothing_else(
    apps: dict[str, Path], tmp_path: Path
) -> None:
    """Not with other settings, for another message, by a new version of the app, or later."""
    none, less = "flower.secure_aggregation=false", "flower.secure_minimum=2"
    none += "; flower.secure_minimum=unset"
    for settings in (none, less):  # the app's own file promises sums, before any run
        assert "for secure sums, and sends nothing else" in asked(
            apps["sums"], tmp_path / "new", settings
        )
    assert list((tmp_path / "new").rglob("sums-only*")) == []
    state = tmp_path / "state"
    assert asked(apps["sums"], state) == ""
    for kind in KINDS:
        assert asked(apps["sums"], state, none, kind).startswith("PolicyError: This node takes"), (
            kind
        )
        assert asked(apps["plain"], state, "", kind).startswith("PolicyError: This node takes"), (
            kind
        )
    assert asked(apps["sums"], state, "flower.secure_minimum=4") == ""
    assert "sums of 4 nodes at least" in asked(apps["sums"], state)  # it has joined for more
    assert "more nodes than there are" in asked(apps["sums"], state, "flower.secure_minimum=40")
    assert (
        asked(apps["sums"], state, "flower.secure_minimum=4") == ""
    )  # who was refused binds nobody
    (file,) = state.glob("sums-only*")
    assert file.stat().st_mode & 0o077 == 0
    file.write_text(file.read_text().replace("4", "0"))
    assert asked(apps["plain"], state).startswith("RunError: What this node has promised")
    file.unlink()  # what the operator may do
    assert asked(apps["plain"], state) == ""


def test_an_app_without_sums_is_held_to_those_of_a_run(
    apps: dict[str, Path], tmp_path: Path
) -> None:
    assert asked(apps["plain"], tmp_path) == ""
    assert asked(apps["plain"], tmp_path, "flower.secure_aggregation=true") == ""
    assert "sends nothing else" in asked(apps["plain"], tmp_path)


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ("privacy=unset", True),
        ("privacy.epsilon=3.0", True),
        ("privacy.delta=0.1", True),
        ("privacy.epsilon=1.0", False),
        pytest.param("rounds=3", False, marks=pytest.mark.slow),
    ],
)
def test_settings_do_not_take_away_the_noise_of_the_file(
    apps: dict[str, Path], tmp_path: Path, settings: str, is_refused: bool
) -> None:
    reason = asked(apps["budget"], tmp_path, settings)
    assert ("take away privacy" in reason) == is_refused
    assert is_refused or reason == ""


def test_an_app_is_known_by_its_name(apps: dict[str, Path], tmp_path: Path) -> None:
    file = apps["sums"] / "federation" / "experiment.toml"
    assert app_name(file) == app_name(apps["plain"] / "federation" / "experiment.toml")
    assert app_name(file).startswith("fedkeel/")
    assert app_name(tmp_path / "alone.toml") == str(tmp_path / "alone.toml")


def test_single_answers_are_refused_in_a_run_of_sums(tmp_path: Path) -> None:
    node = next(iter(make_nodes(run(), tmp_path, nodes=CLIENTS).values()))
    for kind in ("train", "train.survey"):
        with pytest.raises(WireError, match="asks for single updates"):
            node.reply(kind, RecordDict())


# ---- one request for each step ------------------------------------------------------------------


def test_two_sums_at_the_same_time_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server asks for two sums of other nodes from one model at once."""
    sums, lines, refused = AnsweredSums(tmp_path), AnsweredSums._lines, list[str]()

    def slow(self: AnsweredSums) -> list[dict[str, str]]:
        found = list(lines(self))
        time.sleep(0.2)
        return found

    def add(run: str, nodes: list[int]) -> None:
        try:
            sums.add(run, 0, [1], "model", nodes)
        except SecureSumError as error:
            refused.append(error.what)

    monkeypatch.setattr(AnsweredSums, "_lines", slow)
    threads = [Thread(target=add, args=(f"run {n}", list(range(n)))) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1
    assert "a sum of other nodes from the same model" in refused[0]
    assert sums.has("run 2", 0, [1]) != sums.has("run 3", 0, [1])


def test_a_second_request_at_the_same_time_finds_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for other weights, so two vectors with the same masks would have told the update."""
    made, found = run(), list[str]()
    grid, requests = grid_of(made, tmp_path), list[tuple[Node, RecordDict]]()
    train = training.train_client

    def keep(number: int, kind: str, content: RecordDict) -> RecordDict:
        if kind == "train.masked":
            requests.append((grid.nodes[number], content))
        return content

    def slow(*values: object) -> object:
        node, content = requests[-1]
        try:
            node.reply("train.masked", of_sum(content, total_weight=2.0))
        except SecureSumError as error:
            found.append(error.what)
        return train(*values)  # type: ignore[arg-type]

    grid.ask = keep
    monkeypatch.setattr(training, "train_client", slow)
    assert run_on_nodes(made, grid).rows[1].clients == [0, 1, 2, 3]
    assert found == ["The node has no part in this secure sum, or has left it."] * CLIENTS


@pytest.mark.parametrize(
    ("kind", "claim", "reason"),
    [
        ("train.masked", 10**6, "more clients than the experiment has"),
        ("train.masked", 4, "too little noise"),
        ("train.unmask", 2, "too little noise"),
    ],
)
def test_no_more_clients_share_the_noise_than_have_shown_their_keys(
    tmp_path: Path, kind: str, claim: int, reason: str
) -> None:
    """Three of four are asked, and all three have to share the noise of their sum."""
    privacy = fk.Privacy(epsilon=8.0, delta=1e-3)
    made = run(quorum=1.0, per_round=3, privacy=privacy, cohort=fk.Cohort(clients=3))
    grid = grid_of(made, tmp_path)

    def lie(node: int, asked: str, content: RecordDict) -> RecordDict:
        if asked != kind:
            return content
        if kind == "train.masked":
            return of_sum(content, clients=claim)
        header = header_of(content)
        survivors, (last,) = header["survivors"][:claim], header["survivors"][claim:]
        return with_header(content, {**header, "survivors": survivors, "dropped": [last]})

    grid.ask = lie
    with pytest.raises(TrainingError):
        run_on_nodes(made, grid, tmp_path / "run")
    assert [text for text in grid.refused if reason in text], grid.refused


def test_a_request_for_other_clients_than_shown_is_refused(tmp_path: Path) -> None:
    """Fewer that train would add less noise, and more would be more than were counted."""
    made = run()
    grid = grid_of(made, tmp_path)

    def lie(node: int, kind: str, content: RecordDict) -> RecordDict:
        if kind != "train.masked":
            return content
        return with_header(content, {**header_of(content), "clients": []})

    grid.ask = lie
    with pytest.raises(TrainingError):
        run_on_nodes(made, grid)
    assert "other clients than it was asked for" in " ".join(grid.refused)


# ---- signed keys --------------------------------------------------------------------------------


def signing_nodes(made: Prepared, root: Path, trusted: int = CLIENTS) -> InProcessGrid:
    """Nodes that sign their keys, and trust those of the first ones."""
    grid = grid_of(made, root)
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in grid.nodes]
    peers = tuple(key.public_key() for key in keys[:trusted])
    for (number, node), key in zip(list(grid.nodes.items()), keys, strict=True):
        grid.nodes[number] = replace(node, signing=Signing(key, peers))
    return grid


def test_signed_keys_make_the_same_sum(tmp_path: Path) -> None:
    made = run()
    signed = run_on_nodes(made, signing_nodes(made, tmp_path / "signed"))
    plain = run_on_nodes(made, grid_of(made, tmp_path / "plain"))
    assert signed.rows[1].clients == [0, 1, 2, 3]
    assert all(np.array_equal(signed.params[k], plain.params[k]) for k in plain.params)


@pytest.mark.parametrize("way", ["own", "unsigned", "twice", "clients", "session", "stranger"])
def test_a_server_cannot_answer_in_the_place_of_a_trusted_node(tmp_path: Path, way: str) -> None:
    """It puts in keys of its own, says that more clients answer for a node, or asks a stranger."""
    made = run()
    grid = signing_nodes(made, tmp_path, trusted=CLIENTS - (way == "stranger"))
    requests = dict[int, RecordDict]()

    def lie(node: int, kind: str, content: RecordDict) -> RecordDict:
        header = header_of(content)
        if kind == "train.keys":
            requests[node] = content
        if kind != "train.shares":
            return content
        for item in header["keys"]:
            if node == FIRST + 7 or item["node"] != str(FIRST + 7):
                continue
            if way == "own":
                item["mask"] = public_key(new_key()).hex()
            elif way == "unsigned":
                item["signature"] = ""
            elif way == "clients":
                item["clients"] = 100
            elif way == "session":
                old = with_header(
                    requests[FIRST + 7], {**header_of(requests[FIRST + 7]), "round": 7}
                )
                reply = grid.nodes[FIRST + 7].reply("train.keys", old)
                item.update(header_of(reply)["keys"])
            elif way == "twice":
                other = next(one for one in header["keys"] if one["node"] == str(FIRST + 14))
                item.update(other, node=item["node"])
        return with_header(content, header)

    grid.ask = lie
    with pytest.raises(TrainingError, match="too few nodes"):
        run_on_nodes(made, grid)
    number = FIRST + (21 if way == "stranger" else 7)
    assert f"keys of node {number} are not signed" in " ".join(grid.refused)


def test_nodes_of_one_sum_agree_on_what_they_add_to_it() -> None:
    """Its digest is in what they sign: each counts on the others' noise, and on their number."""
    budget = {"privacy": fk.Privacy(epsilon=8.0, delta=1e-3), "cohort": fk.Cohort(clients=CLIENTS)}
    less = {**budget, "privacy": fk.Privacy(epsilon=9.0, delta=1e-3)}
    runs = [run(), run(quorum=1.0), run(**budget), run(**less), run(**budget, rounds=2)]
    digests = [Agreement.of(made).experiment for made in runs]
    assert len(set(digests)) == len(runs)
    keys = NodeKeys(node="1", cipher="00", mask="11", clients=1)
    texts = {keys.signed_text("run 0", digest) for digest in digests}
    assert len(texts | {keys.signed_text("run 1", digests[0])}) == len(runs) + 1


def test_keys_are_read_as_ssh_keygen_writes_them(tmp_path: Path) -> None:
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(2)]
    private, peers = tmp_path / "node-0", tmp_path / "peers"
    private.write_bytes(keys[0].private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    lines = [
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        for key in keys
    ]
    peers.write_text(f"# the three hospitals\n{lines[0]} north\n\n{lines[1]}\n{lines[1]} again\n")
    signing = read_signing(private, peers)
    assert len(signing.peers or ()) == 2
    text = b"text"
    signing.check({1: (text, Signing(keys[1]).sign(text))})
    with pytest.raises(SecureSumError, match="node 1 are not signed"):
        signing.check({1: (text, signing.sign(text))})  # its key belongs to no other node
    assert read_signing(private, None).peers is None
    peers.write_text("# nobody\nssh-rsa AAAA\n")
    with pytest.raises(ConfigError, match="cannot be used") as error:
        read_signing(private, peers)
    assert "line 2 is not a public key" in str(error.value.got)
    peers.write_text(lines[1])
    with pytest.raises(ConfigError, match="has to sign its own"):
        read_signing(None, peers)
    with pytest.raises(ConfigError, match="private key of this node"):
        read_signing(tmp_path / "absent", None)


def test_a_node_is_started_with_its_key_and_its_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is the one by which it authenticates, and is given once."""
    started: list[list[str]] = []
    monkeypatch.setattr("os.execvp", lambda _, words: started.append(words))
    monkeypatch.setattr("fedkeel.flower.node.resident.FOLDER", tmp_path / "resident")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv(watcher.NAME, "watched")
    make_keys(tmp_path / "keys", ["localhost"], 2)
    key, peers = tmp_path / "keys" / "node-0", tmp_path / "peers"
    peers.write_text((tmp_path / "keys" / "node-1.pub").read_text())
    auth = ("--auth-supernode-private-key", key)
    call("flower", "node", *auth, "--peers", peers, "--node-config", "partition-id=1")
    (words,) = started
    assert words[:3] == ["flower-supernode", *map(str, auth)]
    config = parse_config_args([words[4]])
    assert config == {"partition-id": 1, "key": str(key), "peers": str(peers)}
    assert "has to sign its own" in call("flower", "node", "--peers", peers).err
    call("flower", "node", f"--auth-supernode-private-key={key}")
    assert parse_config_args([started[-1][-1]]) == {"key": str(key)}
    assert len(started) == 2
