"""Personal models: their scores in every engine, after a resumption, and which model is judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedkeel as fk
from each import each
from fedkeel.engine.base import ServerModel
from fedkeel.engine.personal import (
    measure_client,
    measure_personal,
    personal_model,
    scores_of,
)
from fedkeel.engine.prepared import Prepared
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from toys import MODELS, Net, Noisy, federation, measure, prepared, same

METHODS = ["fedper", "fedrep+scaffold", "apfl", "fedrod", "knnper", "scaffold+finetune(only='fc2')"]
MORE = ["ditto+fedper", "pfedme", "fedbabu", "perfedavg(alpha=0.05)", "fedsam+lgfedavg"]
LOCAL = fk.Local(lr=0.05, epochs=2, batch_size=4, momentum=0.5, keep_state=True)


def ready(method: str, model: str = "plain", **options: object) -> Prepared:
    """Two rounds of two of six unequal clients, which hold examples out; some never take part."""
    buffers = "refuse" if model == "plain" else "local"
    return prepared(
        method,
        MODELS[model],
        **{
            "clients": held_out_clients(),
            "rounds": 2,
            "per_round": 2,
            "buffers": buffers,
            "local": LOCAL.model_copy(update={"keep_state": "scaffold" not in method}),
            "dtype": "float64",
            **options,
        },
    )


def held_out_clients() -> fk.Federation:
    return federation().hold_out(0.3, seed=0)


def columns(result: Result) -> dict[str, np.ndarray]:
    personal = result.rows[-1].personal
    return {k: np.array(v, dtype=np.float64) for k, v in personal.items()}


def never(result: Result) -> list[int]:
    return sorted(set(range(6)) - {k for row in result.rows for k in row.clients})


@pytest.mark.parametrize(
    "method", [*METHODS, *(pytest.param(method, marks=pytest.mark.slow) for method in MORE)]
)
def test_engines_measure_the_same(method: str) -> None:
    reference = start(ready(method))
    expected = columns(reference)
    assert never(reference)
    assert expected["examples"].sum() > 0
    engines = [{"kind": "workers", "workers": 2}, {"kind": "vectorized", "workers": 1}]
    for engine in engines:
        found = columns(start(ready(method, **engine)))
        assert list(found) == list(expected)
        for name, values in expected.items():
            tolerance = 0.0 if engine["kind"] == "workers" else 1e-12
            np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", ["fedper", "ditto", "apfl", "fedrod", "pfedme"])
def test_a_client_that_never_took_part_has_the_global_model(method: str) -> None:
    """With the initial personal parameters; a personal head is the sum of two equal ones."""
    run = ready(method)
    result = start(run)
    server = ServerModel(result.params, result.buffers, 2)
    (client, *_) = never(result)
    params, _ = personal_model(run.setup, server, client, None)
    expected = {**run.setup.training.network.params, **result.params}
    if method == "fedrod":
        expected |= {k: 2 * v for k, v in expected.items() if k.startswith("fc2")}
    assert all(torch.equal(params[k], v) for k, v in expected.items())
    alone = run.setup.federation.only(client)
    x, y = alone.data.x[alone.holdout_rows], alone.data.y[alone.holdout_rows]
    rows = measure(run.setup.training.network, expected, {}, x, y)
    assert result.rows[-1].personal["accuracy"][client] == float(rows[:, 0].mean())


def of_batch(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A metric that looks at the whole batch: the share of its examples with the label 0."""
    return (y == 0).double().mean().expand(len(y))


def drawn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A metric that draws random numbers."""
    return torch.rand(len(y))


METRICS = [None, ["accuracy", "macro_f1", fk.metric(of_batch)], ["top2", fk.metric(drawn)]]


@each("model", [Net, Noisy])
@each("metrics", METRICS)
@each("loss", [None, torch.nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_a_client_has_the_same_bits_whoever_else_is_measured(
    model: type[Net], metrics: list[object] | None, loss: torch.nn.Module | None
) -> None:
    """Also where a client has several batches, and where several clients fill one of metrics."""
    evaluation = fk.Evaluation(batch_size=5)
    clients = federation()  # nothing held out: the largest clients have several batches
    run = prepared("ditto", model, evaluation=evaluation, metrics=metrics, loss=loss)
    setup, server = run.setup, ServerModel(run.server.params, {}, 0)
    moved = {name: 2.0 * value for name, value in run.server.params.items()}
    states = {0: {"local_model": moved}, 3: {"local_model": dict(run.server.params)}}
    together = measure_personal(setup, server, states.get)
    alone = [measure_client(setup, server, client, states.get(client)) for client in range(6)]
    rows, kept = torch.stack([row for row, _ in alone]), torch.cat([kept for _, kept in alone])
    assert (clients.sizes > 5).any()
    assert together == scores_of(setup.metrics, rows, clients.sizes, kept)
    assert [s.examples for s in together.per_client] == clients.sizes.tolist()
    if metrics is not None and len(metrics) == 3:  # of batches that have one client's examples
        for client, score in enumerate(together.per_client):
            share = (clients.data.y[clients.client(client)] == 0).double().mean().item()
            assert score["of_batch"] == pytest.approx(share, abs=1e-12)


def fails(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A metric that fails where all labels of several are 0."""
    if len(y) > 3 and not y.any():
        raise ZeroDivisionError("one class only")
    return y.double()


def test_an_error_of_a_users_metric_names_the_client() -> None:
    clients = federation()
    clients.data.y[clients.client(3)] = 0
    run = prepared("ditto", clients=clients, metrics=[fk.metric(fails)])
    with pytest.raises(fk.FedkeelError, match="The evaluation of client 3 failed") as caught:
        measure_personal(run.setup, ServerModel(run.server.params, {}, 0), {}.get)
    assert "one class only" in str(caught.value)


class Kill(BaseException):
    """Ends a run as a kill would."""


class StopAfter(Callback):
    def __init__(self, round: int) -> None:
        self._round = round

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round == self._round:
            raise Kill


@pytest.mark.parametrize("state", ["memory", "disk"])
@pytest.mark.parametrize(
    ("method", "model"), [("fedper", "plain"), ("ditto+fedrep", "plain"), ("apfl+fedbn", "norm")]
)
def test_a_resumed_run_has_the_same_personal_models(
    tmp_path: Path, method: str, model: str, state: str
) -> None:
    run = ready(method, model, rounds=4, state=state, dtype="float32")
    whole = start(run, tmp_path / "whole")
    for last in (1, 3):
        with pytest.raises(Kill):
            start(run, tmp_path / "run", resume=True, callbacks=[StopAfter(last)])
    result = start(run, tmp_path / "run", resume=True)
    assert same(whole, result)
    one, two = (RunFolder(tmp_path / name).load() for name in ("whole", "run"))
    assert one is not None
    assert two is not None
    kept = [k for k in one.arrays if k.startswith("clients/") and k != "clients/slot"]
    assert all(np.array_equal(one.arrays[k], two.arrays[k]) for k in kept)


@each("method", ["fedavg", "fedper", "ditto"])
@each("model", ["auto", "global", "personal"])
def test_the_model_that_is_judged(method: str, model: str) -> None:
    """Personal: all clients' own examples together. Global: the test set."""
    run = ready(method, evaluation=fk.Evaluation(batch_size=16, model=model))
    row = start(run).rows[-1]
    held_out = int(np.diff(run.setup.federation.holdout_offsets).sum())
    is_personal = model == "personal" or (model == "auto" and method == "fedper")
    assert row.test.examples == (held_out if is_personal else 60)
    assert (row.personal is None) == (method == "fedavg")
    if is_personal and row.personal is not None:
        counts, scores = (
            np.array([x or 0.0 for x in row.personal[k]]) for k in ("examples", "accuracy")
        )
        assert row.test["accuracy"] == pytest.approx((counts * scores).sum() / held_out, rel=1e-12)


@pytest.mark.parametrize(
    "local",
    [
        fk.Local(lr=0.05, epochs=2, batch_size=4, momentum=0.9),
        fk.Local(lr=0.01, epochs=2, batch_size=4, optimiser="adam"),
    ],
)
@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
def test_a_phase_moves_its_own_parameters_alone(local: fk.Local, kind: str) -> None:
    """All steps are the head's, or none is; in half of each, both move."""
    engine = {"kind": kind, "workers": 1, "local": local}
    head, base, both = (ready(f"fedrep(first={f})", **engine) for f in (1.0, 0.0, 0.5))
    first = head.setup.training.network.params
    head_run, base_run, both_run = start(head), start(base), start(both)
    for name, value in head_run.params.items():
        assert torch.equal(value, first[name])
        assert not torch.equal(base_run.params[name], value)
        assert not torch.equal(both_run.params[name], value)
    moved = columns(head_run)["loss"] != columns(base_run)["loss"]
    assert moved.any()


def test_new_clients_are_evaluated_and_never_trained() -> None:
    """What they get is the global model, fine-tuned where the method does so."""
    cohort = fk.Cohort(clients=2, new_clients=3)
    results = {m: start(ready(m, cohort=cohort)) for m in ("fedper", "finetune")}
    for result in results.values():
        new = result.record.new_clients
        assert len(new) == 3
        assert set(new) <= set(never(result))
    row = results["finetune"].rows[-1]
    assert [row.per_client["loss"][k] for k in new] != [row.personal["loss"][k] for k in new]
