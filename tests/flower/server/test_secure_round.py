"""Rounds whose updates the server sees only in a sum: the sum, drop-outs, bounds and noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

import fedkeel as fk
from fedkeel import config
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.local import train_client
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import RunError, TrainingError
from fedkeel.features.secure.fixed_point import LARGEST, decoded, encoded
from fedkeel.features.secure.legality import refusal
from fedkeel.features.secure.primitives import SecureSumError
from fedkeel.flower.node import training
from fedkeel.flower.node.hardware import NodePlace
from fedkeel.flower.node.node import Node
from fedkeel.flower.node.secure_sums import with_noise
from fedkeel.flower.secure_protocol import VECTOR, SumRequest, VectorLayout
from fedkeel.flower.wire import pack
from fedkeel.method.context import Message
from fedkeel.method.grammar import parse
from fedkeel.method.registry import REGISTRY
from fedkeel.method.round_values import Server
from fedkeel.method.server_round import server_message
from fedkeel.records.folder import RunFolder
from fedkeel.report.runs import main_settings
from fedkeel.runner import loop
from fedkeel.runner.manifest import describe_run
from fedkeel.runner.result import Result
from in_process_grid import InProcessGrid, changed, header_of, make_nodes, run_on_nodes
from toys import MARK, NaN, Net, federation, prepared

QUICK = config.Flower(deadline_seconds=0.3, poll_seconds=0.01, quorum=0.5)
CLIENTS = 5


def run(method: str, secure: bool = True, **more: object) -> Prepared:
    """A run of five clients."""
    flower = {k: more.pop(k) for k in ("secure_minimum", "secure_norm", "quorum") if k in more}
    quick = QUICK.model_copy(update={"secure_aggregation": secure, **flower})
    values = {"dtype": "float64", "clients": federation(CLIENTS), "per_round": CLIENTS, **more}
    return prepared(method, flower=quick, **values)  # type: ignore[arg-type]


def node_of(client: int) -> int:
    return 2**63 + client


def grid_of(nodes: dict[int, Node]) -> InProcessGrid:
    """The nodes, with numbers as large as Flower's may be."""
    return InProcessGrid({node_of(k): node for k, node in enumerate(nodes.values())})


def silent(kinds: Collection[str]) -> Callable[[str, RecordDict], RecordDict | None]:
    """A node that does not reply to messages of these kinds."""
    return lambda kind, reply: None if kind in kinds else reply


def on_nodes(
    made: Prepared, root: Path, drops: dict[int, str] | None = None, out: Path | None = None
) -> Result:
    """Run it on a node for each client, of which some do not reply to messages of one kind."""
    grid = grid_of(make_nodes(made, root, nodes=CLIENTS))
    for client, kind in (drops or {}).items():
        grid.edits[node_of(client)] = silent([kind])
    return run_on_nodes(made, grid, out)


def difference(a: Result, b: Result, start: Prepared) -> float:
    """How far the models are apart, relative to how far the second has moved."""
    pairs = [(a.params[k] - b.params[k], b.params[k] - start.server.params[k]) for k in a.params]
    norms = [sum(float(t.square().sum()) for t in part) for part in zip(*pairs, strict=True)]
    return math.sqrt(norms[0] / norms[1])


def test_the_record_says_on_what_nodes_have_trained(tmp_path: Path) -> None:
    """Also after the first round, before which they describe themselves."""
    made = run("fedavg", rounds=2)
    compiled = NodePlace(("cpu",), "vectorized")
    nodes = make_nodes(made, tmp_path, nodes=CLIENTS)
    grid = grid_of({k: replace(node, place=compiled) for k, node in nodes.items()})
    run_on_nodes(made, grid, tmp_path / "run")
    warnings = RunFolder(tmp_path / "run").read_run().warnings
    (warning,) = [text for text in warnings if "bits of a simulation" in text]
    assert "clients 0, 1, 2, 3, 4: vectorized on the processor in float32" in warning
    assert "sequential" not in warning


@pytest.mark.parametrize(
    ("method", "drops"),
    [
        ("fedavg", {}),
        ("scaffold", {0: "train.shares", 3: "train.masked"}),
        pytest.param("fedavg", {0: "train.shares"}, marks=pytest.mark.slow),
        pytest.param("scaffold", {1: "train.masked"}, marks=pytest.mark.slow),
        pytest.param("scaffold", {2: "train.keys", 4: "train.unmask"}, marks=pytest.mark.slow),
        pytest.param("fedexp", {1: "train.masked", 2: "train.masked"}, marks=pytest.mark.slow),
    ],
)
def test_a_secure_sum_is_the_plain_one(tmp_path: Path, method: str, drops: dict[int, str]) -> None:
    """Clients that drop out before their vector is sent are as those that do not reply at all."""
    made, plain = run(method, rounds=2), run(method, secure=False, rounds=2)
    gone = {client: "train" for client, kind in drops.items() if kind != "train.unmask"}
    got = on_nodes(made, tmp_path / "secure", drops)
    expected = on_nodes(plain, tmp_path / "plain", gone)
    assert difference(got, expected, made) < 1e-9
    for row, other in zip(got.rows[1:], expected.rows[1:], strict=True):
        assert row.clients == other.clients == sorted(set(range(CLIENTS)) - set(gone))
        assert row.examples == other.examples
        assert row.train_loss == pytest.approx(other.train_loss, rel=1e-9)
        assert set(row.diagnostics) == set(other.diagnostics)
        assert row.bytes_up["model"] == other.bytes_up["model"]  # 8 bytes for each number
    reasons = {reason for row in got.rows for reason in row.faults}
    assert len(reasons) == bool(gone)  # enough others helped to unmask the sum


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in REGISTRY if refusal(parse(name)) is None])
def test_every_method_that_is_allowed_has_the_plain_result(tmp_path: Path, method: str) -> None:
    more = {"rounds": 2, "clients": federation(3), "per_round": 3}
    made, plain = (run(method, secure=secure, **more) for secure in (True, False))
    pair = [
        run_on_nodes(one, grid_of(make_nodes(one, tmp_path / str(i), nodes=3)))
        for i, one in enumerate((made, plain))
    ]
    assert [row.faults for row in pair[0].rows] == [{}] * 3
    for name, tensor in pair[1].params.items():
        assert torch.allclose(pair[0].params[name], tensor, rtol=1e-7, atol=1e-9)


def test_float32_keeps_its_precision(tmp_path: Path) -> None:
    made, plain = (run("fedavg", secure, rounds=1, dtype="float32") for secure in (True, False))
    expected = on_nodes(plain, tmp_path / "plain")
    assert difference(on_nodes(made, tmp_path / "secure"), expected, made) < 1e-4 / 50


def test_the_server_receives_nothing_of_a_single_client(tmp_path: Path) -> None:
    """Of two runs on the same data the vectors differ in every number; sums and headers do not."""
    made, seen = run("fedavg", rounds=1), []
    for name in "ab":
        grid = grid_of(make_nodes(made, tmp_path / name, nodes=CLIENTS))

        def keep(kind: str, reply: RecordDict) -> RecordDict:
            if kind.startswith("train"):
                seen.append((kind, reply))
            return reply

        grid.edits = dict.fromkeys(grid.nodes, keep)
        run_on_nodes(made, grid)
    assert {kind for kind, _ in seen} == {
        f"train.{k}" for k in ("keys", "shares", "masked", "unmask")
    }
    vectors = [reply["tensors"]["vector"].numpy() for kind, reply in seen if kind == "train.masked"]
    assert len(vectors) == 2 * CLIENTS
    for one, other in zip(vectors[:CLIENTS], vectors[CLIENTS:], strict=True):
        assert (one != other).all()
        assert abs(np.corrcoef(one.astype(float), other.astype(float))[0, 1]) < 0.5
    assert not [name for _, reply in seen for name in reply if name.startswith("diagnostics")]
    assert list(tmp_path.rglob("secure-sum*")) == []  # no secret outlives the sum


@pytest.mark.parametrize(
    ("drops", "step"),
    [
        ({0: "train.masked", 1: "train.masked", 2: "train.masked"}, "2 of 5"),
        pytest.param(
            {0: "train.keys", 1: "train.keys", 2: "train.shares"},
            "2 of 5 nodes",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {0: "train.unmask", 1: "train.unmask", 2: "train.unmask"}, "2", marks=pytest.mark.slow
        ),
    ],
)
def test_too_few_end_the_run_which_can_go_on(
    tmp_path: Path, drops: dict[int, str], step: str
) -> None:
    made = run("scaffold", rounds=2, quorum=0.2)
    with pytest.raises(TrainingError, match="secure sum") as error:
        on_nodes(made, tmp_path, drops, tmp_path / "run")
    assert step in str(error.value.got)
    assert len(error.value.lines()) <= 4
    nodes = grid_of(make_nodes(made, tmp_path, nodes=CLIENTS))
    rest = run_on_nodes(made, nodes, tmp_path / "run", resume=True)
    whole = on_nodes(run("scaffold", secure=False, rounds=2), tmp_path / "plain")
    assert difference(rest, whole, made) < 1e-9
    assert RunFolder(tmp_path / "run").read_run().status == "finished"


def test_the_noise_of_a_budget_is_in_the_sum_before_the_server_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on the model of one round: 5 shares of noise for 3, so sqrt(5/3) of the deviation.

    With two drop-outs it is the calibrated one, and the server adds none of its own. A node adds
    the share of a client that fails, too: the others count on it.
    """

    def fails(setup: TrainingSetup, message: Message, job: ClientJob, state: object) -> object:
        if job.client == 1:
            raise RunError("fails")
        return train_client(setup, message, job, state)  # type: ignore[arg-type]

    privacy = fk.Privacy(epsilon=8.0, delta=1e-3, clip=1e-3)
    more = {"rounds": 1, "privacy": privacy, "cohort": fk.Cohort(clients=CLIENTS)}
    made = run("fedavg", quorum=0.6, model=partial(Net, width=400), **more)
    deviation = made.plan.reduction.sum_noise() / CLIENTS
    assert deviation > 0.0
    for drops, present in (({}, 5), ({0: "train.masked", 2: "train.masked"}, 3)):
        result = on_nodes(made, tmp_path / str(present), drops)
        moved = torch.cat([(v - made.server.params[k]).flatten() for k, v in result.params.items()])
        expected = deviation * math.sqrt(present / 3)
        measured = float(moved.std())  # the clipped updates are 1e-3 / sqrt(n) at most
        assert len(moved) > 3000
        assert measured == pytest.approx(expected, rel=0.05)
        assert result.rows[1].epsilon == pytest.approx(8.0, rel=0.05)
    monkeypatch.setattr(training, "train_client", fails)
    result = run_on_nodes(made, grid_of(make_nodes(made, tmp_path / "two", nodes=2)))
    assert result.rows[1].clients == [0, 2, 3, 4]
    moved = torch.cat([(v - made.server.params[k]).flatten() for k, v in result.params.items()])
    assert float(moved.std()) == pytest.approx(deviation * math.sqrt(5 / 3), rel=0.05)
    zeros = {"w": torch.zeros(100)}
    assert (with_noise(zeros, 1.0)["w"] != with_noise(zeros, 1.0)["w"]).all()  # by no seed


def test_more_nodes_can_be_asked_for(tmp_path: Path) -> None:
    made = run("fedavg", secure_minimum=5, rounds=1)
    assert on_nodes(made, tmp_path).rows[-1].clients == [0, 1, 2, 3, 4]
    with pytest.raises(TrainingError, match="too few nodes"):
        on_nodes(made, tmp_path, {1: "train.masked"})


def test_the_record_says_that_sums_were_secure_and_a_simulation_that_they_are_not() -> None:
    made = run("fedavg", secure_minimum=4)
    record = describe_run(replace(made, on_nodes=True))
    assert "at least 4 nodes" in record.secure_sums
    assert record.secure_sums in main_settings(record).values()
    simulated = describe_run(made)
    assert simulated.secure_sums is None
    assert [text for text in simulated.warnings if "without masks" in text]
    assert not [text for text in record.warnings if "without masks" in text]
    assert [text for text in record.warnings if "nothing bounds one" in text]
    bounded = describe_run(replace(run("fedavg", secure_norm=3.0), on_nodes=True))
    assert [
        text for text in bounded.warnings if text.startswith("flower.secure_norm = 3 is checked")
    ]


def test_nodes_with_several_clients_send_one_vector(tmp_path: Path) -> None:
    made, plain = (run("scaffold", secure, rounds=1) for secure in (True, False))
    grid = grid_of(make_nodes(made, tmp_path / "secure", nodes=2))
    got = run_on_nodes(made, grid)
    expected = on_nodes(plain, tmp_path / "plain")
    assert difference(got, expected, made) < 1e-9
    up = [row.bytes_up["model"] for row in got.rows[1:]]
    assert up == [row.bytes_up["model"] * 2 // CLIENTS for row in expected.rows[1:]]


def test_a_client_without_finite_numbers_is_kept_out_by_its_node(tmp_path: Path) -> None:
    made = run("fedavg", model=NaN, clients=federation(CLIENTS, marked=1), rounds=1)
    assert MARK in made.setup.federation.data.x[:, 0]
    for row in on_nodes(made, tmp_path).rows[1:]:
        assert row.clients == [0, 2, 3, 4]
        assert row.faults == {"failed: made NaN or infinity, and sent nothing": [1]}


def test_a_client_with_a_long_update_is_kept_out_by_its_node(tmp_path: Path) -> None:
    plain = run("fedavg", secure=False, rounds=1)
    norms: list[float] = []
    grid = grid_of(make_nodes(plain, tmp_path / "plain", nodes=CLIENTS))

    def measure(kind: str, reply: RecordDict) -> RecordDict:
        if kind == "train":
            record = next(reply[name] for name in reply if name.startswith("tensors"))
            squares = [np.square(a.numpy()).sum() for k, a in record.items() if "update" in k]
            norms.append(math.sqrt(sum(squares)))
        return reply

    grid.edits = dict.fromkeys(grid.nodes, measure)
    run_on_nodes(plain, grid)
    bound = sorted(norms)[-2] * 1.0001
    row = on_nodes(run("fedavg", secure_norm=bound, rounds=1), tmp_path).rows[1]
    assert row.clients == [k for k in range(CLIENTS) if norms[k] <= bound]
    assert "secure_norm" in next(iter(row.faults))


def test_a_number_is_refused_for_its_size_and_not_for_that_of_its_share() -> None:
    """Five shares of a fifth, each small enough by itself, could add up to too much."""
    made = run("fedavg")
    message = server_message(made.plan, made.server, 0.1)
    reply = train_client(made.setup, message, ClientJob(0, 0, 0), None).reply
    request = SumRequest(node="1", shares=(), bound=(), total_weight=5.0, clients=5)
    vector = partial(VectorLayout.of(made).vector, made, weight=1.0, request=request)
    for factor, is_refused in ((1.0, False), (1.01, True)):
        update = {name: torch.full_like(t, factor * LARGEST) for name, t in reply.update.items()}
        if is_refused:
            with pytest.raises(SecureSumError, match="numbers that a secure sum cannot take"):
                vector(reply=replace(reply, update=update))
        else:
            sent = encoded(vector(reply=replace(reply, update=update)))
            assert decoded(sent * np.uint64(5)).max() == pytest.approx(LARGEST)


def test_one_loss_begins_a_method_anew(tmp_path: Path) -> None:
    made = run("scaffold", rounds=2)
    grid = grid_of(make_nodes(made, tmp_path, nodes=CLIENTS))

    def forget(kind: str, reply: RecordDict) -> RecordDict:
        if kind == "train.unmask":
            for file in tmp_path.rglob("client-00000001/*"):
                file.unlink()
        return reply

    grid.edits[node_of(4)] = forget
    rows = run_on_nodes(made, grid).rows[1:]
    assert [row.clients for row in rows] == [[0, 1, 2, 3, 4], [0, 2, 3, 4]]
    assert rows[1].faults == {"lost its client state; the method begins anew": [1]}


# ---- a round is answered once -------------------------------------------------------------------


def stopped(made: Prepared, root: Path, monkeypatch: pytest.MonkeyPatch, round: int = 0) -> None:
    """Make a run whose server is killed after a sum is unmasked, and before its checkpoint."""
    step = loop.server_round

    def kill(plan: object, server: Server, *values: object) -> object:
        if server.round == round:
            raise KeyboardInterrupt
        return step(plan, server, *values)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(loop, "server_round", kill)
        with pytest.raises(KeyboardInterrupt):
            on_nodes(made, root, out=root / "run")


def resumed(made: Prepared, root: Path, gone: Collection[int] = ()) -> Result:
    """Go on with it, without some of the nodes."""
    grid = grid_of(make_nodes(made, root, nodes=CLIENTS))
    for client in gone:
        grid.edits[node_of(client)] = silent(["train.keys", "train.unmask"])
    return run_on_nodes(made, grid, root / "run", resume=True)


@pytest.mark.parametrize("round", [0, 1])
def test_a_server_that_is_killed_after_unmasking_goes_on_with_the_same_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, round: int
) -> None:
    """Without a node that was in it, to the bit: nobody is asked for the round again."""
    made = run("scaffold", rounds=3)
    whole = on_nodes(made, tmp_path / "whole")
    stopped(made, tmp_path / "killed", monkeypatch, round)
    rest = resumed(made, tmp_path / "killed", gone=() if round == 0 else [4])
    last = rest.rows[round + 1]
    assert last.clients == [0, 1, 2, 3, 4]
    assert last.bytes_up == whole.rows[round + 1].bytes_up
    assert last.train_loss == whole.rows[round + 1].train_loss
    if round == 0:
        assert all(torch.equal(rest.params[k], whole.params[k]) for k in whole.params)
    else:
        assert rest.rows[3].clients == [0, 1, 2, 3]
    assert not (tmp_path / "killed" / "run" / "sums").exists()


def test_a_round_that_cannot_be_unmasked_any_more_is_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has lost what it kept. Two sums, one without node 4, would tell its update."""
    privacy = fk.Privacy(epsilon=8.0, delta=1e-3)
    made = run("fedavg", rounds=3, privacy=privacy, cohort=fk.Cohort(clients=CLIENTS))
    whole = on_nodes(made, tmp_path / "whole")
    stopped(made, tmp_path / "a", monkeypatch, round=1)
    for file in (tmp_path / "a" / "run" / "sums").iterdir():
        file.unlink()
    rows = resumed(made, tmp_path / "a", gone=[4]).rows
    assert [row.clients for row in rows[1:]] == [[0, 1, 2, 3, 4], [], [0, 1, 2, 3]]
    assert rows[2].dropped == [0, 1, 2, 3, 4]
    assert (
        "skipped: nodes have helped to unmask this round before, and do so once" in rows[2].faults
    )
    assert [row.epsilon for row in rows] == [row.epsilon for row in whole.rows]


def test_a_new_run_from_the_same_model_is_answered_for_the_same_nodes_only(
    tmp_path: Path,
) -> None:
    made = run("fedavg", rounds=1)
    first = on_nodes(made, tmp_path, out=tmp_path / "first")
    again = on_nodes(made, tmp_path, out=tmp_path / "again")
    assert difference(first, again, made) < 1e-12
    with pytest.raises(TrainingError, match="Too few participants help to unmask"):
        on_nodes(made, tmp_path, {4: "train.keys"}, tmp_path / "third")
    reasons = " ".join(RunFolder(tmp_path / "third").read_run().message.split())
    assert "Too few participants" in reasons
    file = tmp_path / "0" / "answered-sums.jsonl"
    file.write_text(file.read_text() + "\n{cut off")  # by a kill: nothing was sent for it
    other = replace(made, settings=made.settings.model_copy(update={"seed": 3}))
    assert on_nodes(other, tmp_path, {4: "train.keys"}).rows[1].clients == [0, 1, 2, 3]


# ---- who lies -----------------------------------------------------------------------------------


def lying(field: str, client: int = 2) -> Callable[[str, RecordDict], RecordDict]:
    """A node whose shares, or whose texts for the others, are wrong."""

    def edit(kind: str, reply: RecordDict) -> RecordDict:
        if field in header_of(reply):
            items = header_of(reply)[field]
            for item in items:
                item["data"] = item["data"][:-2] + ("00" if item["data"][-2:] != "00" else "01")
            return changed(reply, **{field: items})
        return reply

    return edit


@pytest.mark.parametrize(
    ("field", "first", "words"),
    [
        ("seeds", [0, 1, 2, 3, 4], "it reveals a wrong share"),
        ("shares", [], "it gave shares to others that they could not use"),
        ("bound", [], "it gave shares to others that they could not use"),
    ],
)
def test_a_node_that_lies_is_named_and_left_out(
    tmp_path: Path, field: str, first: list[int], words: str
) -> None:
    """Where the others can unmask the sum they do; else nobody can, and the round is skipped."""
    made = run("fedavg", rounds=2)
    grid = grid_of(make_nodes(made, tmp_path, nodes=CLIENTS))
    grid.edits[node_of(0)] = lying(field)
    rows = run_on_nodes(made, grid, tmp_path / "run").rows[1:]
    assert [row.clients for row in rows] == [first, [1, 2, 3, 4]]
    assert rows[0].faults[f"unmask: left out of this and all later rounds: {words}"] == [0]
    assert rows[1].faults == {"left out: its node has lied": [0]}
    named = {client for row in rows for reason, clients in row.faults.items()
             if not reason.startswith("skipped") for client in clients}  # fmt: skip
    assert named == {0}


@pytest.mark.parametrize("key", ["00" * 32, "ab", "cipher"])
def test_a_node_whose_public_keys_cannot_be_used_is_named_and_left_out(
    tmp_path: Path, key: str
) -> None:
    """The others would all have refused them, and been blamed for that in every round."""
    made = run("fedavg", rounds=1)
    grid = grid_of(make_nodes(made, tmp_path, nodes=CLIENTS))

    def edit(kind: str, reply: RecordDict) -> RecordDict:
        if kind != "train.keys":
            return reply
        keys = header_of(reply)["keys"]
        return changed(reply, keys={**keys, "mask": keys.get(key, key)})

    grid.edits[node_of(0)] = edit
    (row,) = run_on_nodes(made, grid, tmp_path / "run").rows[1:]
    assert row.clients == [1, 2, 3, 4]
    assert row.faults == {"sent keys that cannot be used": [0]}


def test_a_false_loss_is_left_out(tmp_path: Path) -> None:
    """From the second round on it is compared with those before; the model is not changed by it."""
    made = run("scaffold", rounds=3)
    grid = grid_of(make_nodes(made, tmp_path, nodes=CLIENTS))
    layout = VectorLayout.of(made)

    def lie(kind: str, reply: RecordDict) -> RecordDict:
        if kind != "train.masked" or header_of(reply)["round"] != 1:
            return reply
        words = reply["tensors"][VECTOR].numpy().copy().view(np.uint64)
        words[2:3] += encoded(np.array([1e5]))  # after weight and count; modulo 2^64, as masks
        tensor = torch.from_numpy(words.view(np.int64))
        return RecordDict({**reply, "tensors": pack({VECTOR: tensor})})

    grid.edits[node_of(3)] = lie
    rows = run_on_nodes(made, grid, tmp_path / "run").rows
    plain = on_nodes(made, tmp_path / "plain")
    assert layout.size == 3 + len(layout.diagnostics) + sum(layout.sizes.values())
    assert rows[2].train_loss is None or math.isnan(rows[2].train_loss)
    (reason,) = rows[2].faults
    assert reason.startswith("the clients' mean training loss, 1e+05, is left out")
    assert rows[3].train_loss == plain.rows[3].train_loss
    read = RunFolder(tmp_path / "run").rows()
    assert read[2].train_loss is None
    assert read[2].clients == plain.rows[2].clients
