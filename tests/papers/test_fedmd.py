"""FedMD across networks of different depths, restated from Li and Wang 2019, Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import fedkeel as fk
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import CompositionError, DataError, ModelError
from fedkeel.method.context import Population
from fedkeel.method.grammar import parse
from fedkeel.runner.start import start
from harness import distance, oracle
from papers.numpy_layers import Layers, Stack, gradient, layers_of, moved, outputs
from papers.numpy_net import softmax
from papers.personal import CLIENTS, NAMES, collected, tensors
from papers.personal import ROUNDS as ROUNDS_OF_FILE
from papers.test_fedproto_networks import CLASSES, DEEP, LR, batches
from toys import federation, held, plain, prepared, same

BATCH, ROUNDS = 4, 4
PUBLIC = held(18)


def run_of(method: str, **options: object) -> Prepared:
    values = {
        "others": DEEP,
        "rounds": ROUNDS,
        "local": fk.Local(lr=LR, epochs=2, batch_size=BATCH),
        "dtype": "float64",
        "client_models": "all",
        "public": PUBLIC,
        **options,
    }
    return prepared(method, partial(Stack, 5, 6, CLASSES), **values)


def digested(
    layers: Layers, x: np.ndarray, consensus: np.ndarray, passes: int, distance: str
) -> Layers:
    for rows in in_order(len(x), passes):
        gaps = outputs(layers, x[rows])[1] - consensus[rows]
        slope = np.sign(gaps) if distance == "absolute" else 2.0 * gaps
        layers = moved(layers, gradient(layers, x[rows], slope / gaps.size), LR)
    return layers


def learned(layers: Layers, x: np.ndarray, y: np.ndarray, steps: Iterator[np.ndarray]) -> Layers:
    for rows in steps:
        d_scores = (softmax(outputs(layers, x[rows])[1]) - np.eye(CLASSES)[y[rows]]) / len(rows)
        layers = moved(layers, gradient(layers, x[rows], d_scores), LR)
    return layers


def in_order(count: int, passes: int) -> Iterator[np.ndarray]:
    return (
        np.arange(start, min(start + BATCH, count))
        for _ in range(passes)
        for start in range(0, count, BATCH)
    )


@pytest.mark.parametrize("distance", ["absolute", "squared"])
def test_clients_of_two_depths_follow_the_paper(distance: str) -> None:
    digest, transfer = 2, 1
    run = run_of(f"fedmd(digest={digest}, transfer={transfer}, distance='{distance}')")
    result = start(run)
    data = run.setup.federation.data
    x, y = data.x.numpy(), data.y.numpy()
    x0, y0 = PUBLIC.x.double().numpy(), PUBLIC.y.numpy()
    models: dict[int, Layers] = {}
    consensus: np.ndarray | None = None
    for t, row in enumerate(result.rows[1:]):
        said = []
        for k in row.clients:
            if k not in models:
                models[k] = layers_of(run.setup.of(k).training.network.params)
                models[k] = learned(models[k], x0, y0, in_order(len(x0), transfer))
            if consensus is not None:
                models[k] = digested(models[k], x0, consensus, digest, distance)
            models[k] = learned(models[k], x, y, batches(run, k, t, 0))
            said.append(outputs(models[k], x0)[1])
        consensus = np.mean(said, axis=0)
    assert {len(layers) for layers in models.values()} == {2, 3}
    for k, layers in models.items():
        expected = [array for layer in layers for array in layer]
        for tensor, array in zip(result.client_model(str(k)).values(), expected, strict=True):
            np.testing.assert_allclose(tensor.numpy(), array, rtol=0, atol=1e-10)


def test_digest_and_consensus_follow_fl_bench() -> None:
    """It asks all clients before the first round, too: their first consensus is given to us."""
    o = oracle("flbench_fedmd_a")
    expression = f"fedmd(digest={int(o['hp.digest'])}, transfer=0, distance='squared')"
    public = o["public.x"], np.zeros(len(o["public.x"]), dtype=np.int64)
    played = collected(o, expression, int(o["hp.epochs"]), public=public)
    server = played.played.server
    known = {"consensus": torch.from_numpy(o["r1.consensus"]), "is_known": torch.ones(()).double()}
    memory = server.memory | {"fedmd": known}
    played.played.server = replace(server, memory=memory, round=1)
    for t in ROUNDS_OF_FILE:
        done = played.round()
        for k in CLIENTS:
            own = done.client_state[k]["personal"]
            assert distance(own, tensors(o, f"r{t}.client{k}.", NAMES)) < 1e-12, (t, k)
        if t < ROUNDS_OF_FILE[-1]:
            consensus = played.played.server.memory["fedmd"]["consensus"].numpy()
            np.testing.assert_allclose(consensus, o[f"r{t + 1}.consensus"], rtol=0, atol=1e-12)


# --- laws ------------------------------------------------------------------------------------


def test_without_passes_over_public_inputs_each_client_trains_alone() -> None:
    """As in the baseline, whose clients keep their optimiser: plain SGD has none."""
    quiet = start(run_of("fedmd(digest=0, transfer=0)", cohort=fk.Cohort()))
    alone = start(run_of("local", cohort=fk.Cohort()))
    assert [row.test for row in quiet.rows] == [row.test for row in alone.rows]
    for k in range(6):
        a, b = quiet.client_model(str(k)), alone.client_model(str(k))
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_nothing_is_digested_before_anybody_has_said_something() -> None:
    first, none = (
        start(run_of(f"fedmd(digest={n})", rounds=1, cohort=fk.Cohort())) for n in (3, 0)
    )
    assert plain(first)[-1] == plain(none)[-1]


def test_clients_come_to_say_the_same() -> None:
    """The distance of clients' scores from each other, with a digest and without."""
    spread = {}
    for digest in (0, 10):
        result = start(run_of(f"fedmd(digest={digest}, transfer=0)", cohort=fk.Cohort()))
        said = []
        for k in range(6):
            module = Stack(5, 4, 6, 3) if k in (1, 2, 5) else Stack(5, 6, 3)
            module.double().load_state_dict(result.client_model(str(k)))
            said.append(module(PUBLIC.x.double()).detach())
        spread[digest] = float(torch.stack(said).std(dim=0).mean())
    assert spread[10] < 0.8 * spread[0]


@pytest.mark.parametrize("kind", ["workers", "vectorized"])
def test_engines_give_the_same_bits(kind: str) -> None:
    one, two = start(run_of("fedmd")), start(run_of("fedmd", kind=kind, workers=2))
    assert same(one, two)
    for file, model in one.models.items():
        assert all(torch.equal(tensor, two.models[file][name]) for name, tensor in model.items())


def test_the_public_inputs_decide_the_key_where_they_are_used() -> None:
    assert run_of("fedmd").key != run_of("fedmd", public=held(17)).key
    assert run_of("fedproto").key == run_of("fedproto", public=held(17)).key


def test_what_cannot_be_digested_is_refused() -> None:
    with pytest.raises(ModelError, match="the number of scores is not known"):
        parse("fedmd").server_states[0].init_server({}, Population(4, 2))
    with pytest.raises(DataError, match="Public and training inputs differ in shape"):
        run_of("fedmd", public=fk.dataset(np.zeros((4, 6)), np.arange(4) % 3))
    with pytest.raises(CompositionError, match="fedmd needs PUBLIC_INPUTS") as caught:
        fk.run(
            "fedmd",
            task=fk.Task(partial(Stack, 5, 6, 3)),
            clients=federation(),
            test=held(),
            rounds=1,
            local=fk.Local(lr=LR, epochs=1),
        )
    assert "data.public" in str(caught.value)


def test_what_holds_parameters_still_is_refused_beside_steps_on_public_inputs() -> None:
    for other in ("fedrep", "fedbabu", "rolora"):
        with pytest.raises(CompositionError, match=f"{other} needs OWN_STEPS_ALONE, which fedmd"):
            parse(f"fedmd+{other}")
    assert parse("fedrep+fedprox").phases is not None


def test_public_inputs_can_be_given_in_python() -> None:
    x, y = PUBLIC.x.numpy(), PUBLIC.y.numpy()
    result = fk.run(
        "fedmd",
        task=fk.Task(partial(Stack, 5, 6, 3), others=DEEP),
        clients=federation(),
        test=held(),
        public=(x, y),
        rounds=2,
        local=fk.Local(lr=LR, epochs=1, batch_size=BATCH),
        engine=fk.Engine(kind="sequential", dtype="float64"),
        progress=False,
    )
    expected = start(
        run_of(
            "fedmd", rounds=2, local=fk.Local(lr=LR, epochs=1, batch_size=BATCH), cohort=fk.Cohort()
        )
    )
    for k in range(6):
        a, b = result.client_model(str(k)), expected.client_model(str(k))
        assert all(torch.allclose(a[name], b[name], atol=1e-12) for name in a)
