"""Clients with different networks: whose they are, what is kept, who trains, what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from commands import EXPERIMENT, call, experiment
from fedkeel.engine.choose.engine_rule import choose_engine
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import FedkeelError
from fedkeel.records.folder import RunFolder
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.start import start
from fedkeel.task.client_network import ClientNetwork, networks_of_clients
from papers.numpy_layers import Stack
from toys import Net, federation, plain, prepared, same

LARGE = {"large": ClientNetwork(partial(Stack, 5, 40, 6, 3), clients=[1, 2, 5])}


def ready(method: str = "fedproto", **options: object) -> Prepared:
    values = {"others": LARGE, "clients": federation().hold_out(0.3, seed=0), **options}
    return prepared(method, **{"client_models": "all", **values})


# ---- who has which -----------------------------------------------------------------------------


def test_lists_count_first_and_shares_are_drawn_among_the_others() -> None:
    others = {
        "half": ClientNetwork(nn.Identity, share=0.5),
        "named": ClientNetwork(nn.Identity, clients=["c1", 7]),
        "few": ClientNetwork(nn.Identity, share=0.2),
    }
    names = tuple(f"c{k}" for k in range(10))
    found = networks_of_clients(others, names, 10, seed=0)
    assert np.bincount(found).tolist() == [1, 5, 2, 2]
    assert found[[1, 7]].tolist() == [2, 2]
    assert found.tolist() == networks_of_clients(others, names, 10, seed=0).tolist()
    assert any(
        found.tolist() != networks_of_clients(others, names, 10, seed).tolist() for seed in (1, 2)
    )


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"a": ["c1"], "b": [1]}, "named twice"),
        ({"a": ["c11"]}, "names a client 'c11' that does not exist"),
        ({"a": [10]}, "names a client 10 that does not exist"),
        ({"a": 0.6, "b": 0.6}, "Too few clients are left"),
    ],
)
def test_what_cannot_be_assigned_is_refused(others: dict[str, object], message: str) -> None:
    made = {
        name: ClientNetwork(nn.Identity, **{"share" if isinstance(v, float) else "clients": v})
        for name, v in others.items()
    }
    with pytest.raises(FedkeelError, match=message):
        networks_of_clients(made, tuple(f"c{k}" for k in range(10)), 10, seed=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs the clients that have it"),
        ({"clients": [0], "share": 0.5}, "needs the clients that have it"),
        ({"share": 1.0}, "is not a share"),
        ({"clients": "north"}, "are not a list"),
    ],
)
def test_a_network_needs_its_clients(given: dict[str, object], message: str) -> None:
    with pytest.raises(FedkeelError, match=message):
        ClientNetwork(Net, **given)


# ---- numbers -----------------------------------------------------------------------------------


def test_equal_networks_are_one_network() -> None:
    """To the bit: scores, models, and the key apart."""
    one = start(ready(others={}, dtype="float64"))
    two = start(ready(others={"same": ClientNetwork(Net, clients=[1, 4])}, dtype="float64"))
    assert plain(one) == plain(two)
    assert one.record.key != two.record.key
    for k in {k for row in one.rows for k in row.clients}:
        a, b = one.client_model(str(k)), two.client_model(str(k))
        assert list(a) == list(b)
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["workers", "vectorized"])
def test_other_engines_have_the_bits_of_the_sequential_one(kind: str) -> None:
    one, two = start(ready()), start(ready(kind=kind, workers=2))
    assert same(one, two)
    assert one.models.keys() == two.models.keys()
    for file, model in one.models.items():
        assert all(torch.equal(tensor, two.models[file][name]) for name, tensor in model.items())


class EndsAfter(Callback):
    """Ends a run in the middle, as an error does."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round_end(self, row: object, model: object) -> None:
        if row.round == self.rounds:
            raise KeyError("the end")


@pytest.mark.parametrize("state", ["memory", "disk"])
@pytest.mark.parametrize("kind", ["sequential", "workers"])
def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path: Path, state: str, kind: str) -> None:
    options = {"state": state, "rounds": 4, "kind": kind, "workers": 2}
    whole = start(ready(**options))
    with pytest.raises(KeyError):
        start(ready(**options), tmp_path, callbacks=[EndsAfter(2)])
    resumed = start(ready(**options), tmp_path, resume=True)
    assert same(whole, resumed)
    for k in {k for row in whole.rows for k in row.clients}:
        a, b = whole.client_model(str(k)), resumed.client_model(str(k))
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_baseline_local_trains_each_clients_own_network() -> None:
    """It is FedProto without weight, whose clients keep their momentum."""
    keeps = fk.Local(lr=0.05, epochs=2, batch_size=4, momentum=0.5, keep_state=True)
    alone = start(ready("local", cohort=fk.Cohort()))
    proto = start(ready("fedproto(lam=0.0)", local=keeps, cohort=fk.Cohort()))
    assert alone.record.judges == proto.record.judges == "personal"
    for a, b in zip(alone.rows, proto.rows, strict=True):
        assert a.test == b.test
    for k in range(6):
        a, b = alone.client_model(str(k)), proto.client_model(str(k))
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert "layers.0.weight" in alone.client_model("1")
    assert "fc1.weight" in alone.client_model("0")


def test_a_clients_score_is_that_of_its_own_network() -> None:
    run = ready()
    result = start(run)
    clients = run.setup.federation
    scores = result.rows[-1].personal["accuracy"]
    taken = {k for row in result.rows for k in row.clients}
    assert {run.setup.others.of_client[k] for k in taken} == {0, 1}
    for k in taken:
        module = Stack(5, 40, 6, 3) if k in (1, 2, 5) else Net()
        module.load_state_dict(result.client_model(str(k)))
        rows = clients.own_rows(k)
        if len(rows):
            right = module.eval()(clients.data.x[rows]).argmax(1) == clients.data.y[rows]
            assert scores[k] == pytest.approx(right.double().mean().item(), abs=1e-6)


def test_all_examples_in_one_place_train_the_tasks_own_network() -> None:
    alike = {"evaluation": fk.Evaluation(batch_size=16)}
    assert same(
        start(ready("centralised", **alike)), start(ready("centralised", others={}, **alike))
    )


def test_statistics_of_batch_normalisation_stay_with_their_network() -> None:
    others = {"normed": ClientNetwork(partial(Net, norm=True), clients=[0, 3])}
    local = fk.Local(lr=0.05, epochs=2, batch_size=4, drop_last="single")
    result = start(ready(others=others, buffers="local", local=local, cohort=fk.Cohort()))
    assert "norm.running_mean" in result.client_model("0")
    assert "norm.running_mean" not in result.client_model("1")
    assert float(result.client_model("0")["norm.running_mean"].abs().max()) > 0


# ---- what is kept ------------------------------------------------------------------------------


def test_a_client_keeps_only_its_own_network(tmp_path: Path) -> None:
    run = ready(rounds=2, cohort=fk.Cohort())
    small = sum(p.numel() for p in Net().parameters()) * 4
    large = sum(p.numel() for p in Stack(5, 40, 6, 3).parameters()) * 4
    assert estimate_run(run).client_state == (small + large) // 2
    result = start(run, tmp_path)
    arrays = RunFolder(tmp_path).load().arrays
    sizes = {
        number: sum(a.nbytes for path, a in arrays.items() if f"clients/{number}/state/" in path)
        for number in (0, 1)
    }
    assert sizes == {0: 3 * small, 1: 3 * large}
    (other,) = result.record.networks.others
    assert (other.name, other.parameters, other.clients) == ("large", large // 4, [1, 2, 5])
    assert json.loads((tmp_path / "run.json").read_text())["networks"]["others"][0]["head"]


def test_the_key_has_the_networks_and_whose_they_are() -> None:
    keys = [
        ready(others={"large": ClientNetwork(partial(Stack, 5, *widths, 3), clients=clients)}).key
        for widths, clients in [([40, 6], [1]), ([40, 6], [2]), ([30, 6], [1]), ([40, 6], [1])]
    ]
    assert len(set(keys)) == 3
    assert keys[0] == keys[3]


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("fedavg", {}, "shares parameters, and clients have different networks"),
        ("fedper", {}, "shares parameters"),
        ("fedproto", {"kind": "ray"}, "cannot train clients with different networks"),
        ("fedproto", {"evaluation": fk.Evaluation(model="global")}, "There is no global model"),
        (
            "fedproto",
            {"others": {"wide": ClientNetwork(partial(Net, width=7), clients=[0])}},
            "features of another width",
        ),
        (
            "fedproto",
            {"others": {"more": ClientNetwork(partial(Stack, 5, 6, 4), clients=[0])}},
            "answers in another form",
        ),
        (
            "local",
            {"others": {"normed": ClientNetwork(partial(Net, norm=True), clients=[0])}},
            "has buffers",
        ),
    ],
)
def test_what_needs_one_network_is_refused(
    method: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(FedkeelError, match=message):
        ready(method, **options)


def test_the_engine_is_chosen_among_those_that_can() -> None:
    choice = choose_engine(ready(kind="auto"))
    assert choice.kind in ("sequential", "workers")
    assert choice.parallel_clients == 1


# ---- from a file to an answer ------------------------------------------------------------------

FILE = EXPERIMENT.replace(
    "[local]",
    """\
[model.others.deep]
name = "mlp"
args = { hidden = [16, 8] }
share = 0.4

[local]""",
).replace('method = "fedavg"', 'method = "fedproto"')


def test_an_experiment_file_gives_each_client_its_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = experiment(tmp_path, FILE.replace("alpha = 0.3", "alpha = 0.3\nholdout = 0.3"))
    done = call("run", file, "--out", "run", "-s", "engine.client_models=all")
    assert done.code == 0, done.err
    record = RunFolder(tmp_path / "run").read_run()
    (deep,) = record.networks.others
    assert len(deep.clients) == 5
    with_deep = next(k for k in deep.clients if f"models/{k}.safetensors" in record.digests)
    with_own = next(
        k
        for k in range(12)
        if k not in deep.clients and f"models/{k}.safetensors" in record.digests
    )
    layers = {
        k: sum(isinstance(m, nn.Linear) for m in fk.load("run", client=str(k)).module.modules())
        for k in (with_deep, with_own)
    }
    assert layers == {with_deep: 3, with_own: 2}
    x = np.load(tmp_path / "toy.npz")["x"]
    assert len(fk.load("run", client=str(with_deep)).predict(x).values) == 400
    for words in ("fedavg", "scaffold"):
        refused = call("check", file, "-s", f"method={words}")
        assert refused.code != 0
        assert "clients have different networks" in refused.err


def test_a_file_that_gives_nobody_a_network_is_refused(tmp_path: Path) -> None:
    file = experiment(tmp_path, FILE.replace("share = 0.4", ""))
    refused = call("check", file)
    assert refused.code != 0
    assert "share" in refused.err


def test_the_class_of_another_network_needs_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of [model]: a run folder that was made elsewhere names it."""
    from fedkeel.config import load
    from fedkeel.config.code_names import code_names

    monkeypatch.chdir(tmp_path)
    file = experiment(
        tmp_path, FILE.replace('name = "mlp"\nargs = { hidden = [16, 8] }', 'name = "mine:Net"')
    )
    assert code_names(load(file)) == {("model.name", "mine:Net")}
