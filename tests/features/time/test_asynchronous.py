"""Runs in virtual time: what they reduce to, where they end, and that they can be continued."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from each import each
from fedkeel.errors import CompositionError, ConfigError
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.result import Result
from harness import ORACLES

SLOW = fk.System(speed="lognormal", sigma=1.0, step_seconds=1.0)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(90, 4)).astype("float32"), RNG.integers(0, 3, 90)
SEQUENTIAL = fk.Engine(kind="sequential")


def run(method: str, clients: int = 6, **given: object) -> Result:
    settings = {
        "rounds": 12,
        "local": fk.Local(lr=0.2, steps=2, batch_size=5),
        "engine": SEQUENTIAL,
        "evaluation": fk.Evaluation(every=100),
    }
    parts = [(X[k::clients][: 20 - 2 * k], Y[k::clients][: 20 - 2 * k]) for k in range(clients)]
    return fk.run(
        method,
        task=fk.Task(lambda: nn.Linear(4, 3)),
        clients=fk.from_clients(parts),
        test=(X[:9], Y[:9]),
        progress=False,
        **{**settings, **given},
    )


def same(one: Result, other: Result) -> bool:
    return all(torch.equal(one.params[name], other.params[name]) for name in one.params)


# --- reductions ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold+momentum(beta=0.5)"])
def test_fedbuff_of_a_whole_cohort_of_equal_speed_is_fedavg(method: str, weights: str) -> None:
    given = {"clients_per_round": 4, "weights": weights, "system": fk.System(step_seconds=1.0)}
    waiting = run(method, **given)
    buffered = run(f"{method}+fedbuff(buffer=4)", **given)
    assert same(waiting, buffered)
    assert [row.clients for row in waiting.rows] == [row.clients for row in buffered.rows]
    assert [row.virtual_seconds for row in buffered.rows] == [2.0 * t for t in range(13)]
    assert buffered.rows[-1].staleness == [0] * 4


def test_fedasync_of_one_client_is_its_own_training() -> None:
    assert same(run("fedavg", clients=1), run("fedasync(alpha=1.0)", clients=1))


def test_time_changes_nothing_where_the_server_waits_for_all() -> None:
    plain, timed = run("fedavg"), run("fedavg", system=SLOW)
    assert same(plain, timed)
    assert plain.rows[3].virtual_seconds is None
    assert "virtual_seconds" not in plain.rows[3].line()
    assert timed.rows[0].virtual_seconds == 0.0
    assert RoundRecord.from_json(json.loads(timed.rows[3].line())) == timed.rows[3]


# --- one parameter ---------------------------------------------------------------------------


class Point(nn.Module):
    """One number, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.theta + 0.0 * x


def half_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.5 * (output - target).square().flatten(1).sum(1)


def test_two_clients_of_speeds_1_and_3_settle_where_the_closed_form_says(tmp_path: Path) -> None:
    """Each step goes a share r of the way to the client's own minimum.

    The fast client makes three steps in the time of the slow one. With y the model before the slow
    client's update comes, and z after it: the fast one begins at y, at which its last update was
    taken in, and then twice at what it has made; the slow one began at z, one turn before.
    """
    file = tmp_path / "devices.csv"
    file.write_text("client,speed\n0,1\n1,3.001\n")  # never both at the same time
    r, slow, fast = 0.3, -1.0, 2.0
    ones = np.ones((1, 1), dtype="float64")
    result = fk.run(
        "fedbuff(buffer=1, exponent=0.0)",
        task=fk.Task(Point, loss=half_square),
        clients=fk.from_clients([(ones, slow * ones), (ones, fast * ones)]),
        test=(ones, ones),
        rounds=160,
        local=fk.Local(lr=r, steps=1, batch_size="all"),
        system=fk.System(step_seconds=1.0, devices=str(file)),
        evaluation=fk.Evaluation(every=200),
        engine=fk.Engine(kind="sequential", dtype="float64"),
        progress=False,
    )
    q = (1.0 - r) ** 2
    y = (fast * (1 - q + q * r) + q * r * slow / (1 + r)) / (1 + q * r - q / (1 + r))
    z = (y + r * slow) / (1 + r)
    assert [row.clients[0] for row in result.rows[1:9]] == [1, 1, 1, 0, 1, 1, 1, 0]
    assert [row.staleness[0] for row in result.rows[1:9]] == [0, 0, 0, 3, 1, 0, 0, 3]
    assert result.rows[4].staleness_seconds == pytest.approx([1.0])
    assert result.rows[5].staleness_seconds == pytest.approx([1 / 3.001])
    assert result.rows[-1].clients == [0]
    assert float(result.params["theta"]) == pytest.approx(z, abs=1e-9)
    assert not np.isclose(z, (slow + fast) / 2)  # who is fast counts more


# --- the server's rules, by another code -----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("fedasync.constant", "fedasync(decay='constant')"),
        ("fedasync.polynomial", "fedasync"),
        ("fedasync.hinge", "fedasync(decay='hinge', b=1)"),
        ("fedbuff.polynomial", "fedbuff(buffer=2)"),
    ],
)
def test_appfl_makes_the_same_models(name: str, method: str, tmp_path: Path) -> None:
    saved = np.load(ORACLES / "appfl_asynchronous_a.npz")
    file = tmp_path / "devices.csv"
    rows = "".join(f"{k},{speed}\n" for k, speed in enumerate(saved["speeds"]))
    file.write_text("client,speed\n" + rows)

    def model() -> nn.Module:
        layer = nn.Linear(4, 1, bias=False, dtype=torch.float64)
        layer.weight.data = torch.from_numpy(saved["start"])[None].clone()
        return layer

    models: list[np.ndarray] = []

    class Keep(Callback):
        def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
            models.append(model.params["weight"][0].numpy().copy())

    fk.run(
        method,
        task=fk.Task(model(), loss=half_square),
        clients=fk.from_clients(list(zip(saved["x"], saved["y"][..., None], strict=True))),
        test=(saved["x"][0], saved["y"][0][:, None]),
        rounds=len(saved[name]),
        local=fk.Local(lr=float(saved["lr"]), steps=int(saved["local_steps"]), batch_size="all"),
        weights="uniform",
        system=fk.System(step_seconds=1.0, devices=str(file)),
        evaluation=fk.Evaluation(every=100),
        engine=fk.Engine(kind="sequential", dtype="float64"),
        callbacks=[Keep()],
        progress=False,
    )
    np.testing.assert_allclose(models, saved[name], rtol=0, atol=1e-12)


# --- engines, and going on -------------------------------------------------------------------


def test_engines_agree() -> None:
    method, given = "scaffold+fedbuff(buffer=2)", {"system": SLOW, "clients_per_round": 4}
    reference = run(method, **given)
    assert max(max(row.staleness, default=0) for row in reference.rows) > 1
    assert same(reference, run(method, **given, engine=fk.Engine(kind="workers", workers=2)))
    side_by_side = run(method, **given, engine=fk.Engine(kind="vectorized"))
    for name, value in reference.params.items():
        torch.testing.assert_close(side_by_side.params[name], value, rtol=0, atol=1e-5)
    times = [row.virtual_seconds for row in reference.rows]
    assert times == [row.virtual_seconds for row in side_by_side.rows]


class StoppedError(Exception):
    pass


@pytest.mark.parametrize(
    "method", ["scaffold+fedbuff(buffer=2)", "ditto+fedasync", "fednova+topk+fedbuff(buffer=3)"]
)
def test_a_run_that_goes_on_has_the_same_bits(method: str, tmp_path: Path) -> None:
    """Its clients train from models of several rounds when it is ended."""
    given = {
        "system": fk.System(speed="lognormal", step_seconds=600.0, availability="diurnal"),
        "clients_per_round": 4,
        "cohort": None,
        "engine": fk.Engine(kind="sequential", checkpoint_seconds=0.0),
    }
    whole = run(method, **given)

    class Ends(Callback):
        def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
            if row.round == 7:
                raise StoppedError

    with pytest.raises(StoppedError):
        run(method, **given, out=tmp_path / "run", callbacks=[Ends()])
    again = run(method, **given, out=tmp_path / "run")
    assert same(whole, again)
    rows = [(row.clients, row.virtual_seconds, row.staleness) for row in whole.rows]
    assert rows == [(row.clients, row.virtual_seconds, row.staleness) for row in again.rows]


def test_a_run_ends_after_hours_of_virtual_time() -> None:
    result = run("fedavg", system=fk.System(step_seconds=600.0), stop=fk.Stop(hours=1.0))
    assert [row.virtual_seconds for row in result.rows] == [0.0, 1200.0, 2400.0, 3600.0]
    assert "1 hours of virtual time" in result.record.message


# --- what is counted -------------------------------------------------------------------------


def test_work_is_counted_in_the_methods_own_steps() -> None:
    """A gradient of 4 inputs by 3 scores is 12 forward and 12 back; FedSAM takes two of them."""
    given = {"system": fk.System(multiply_adds=1.0), "clients": 1, "rounds": 1}
    assert run("fedavg", **given).rows[1].virtual_seconds == pytest.approx(2 * 5 * 24)
    assert run("fedsam", **given).rows[1].virtual_seconds == pytest.approx(2 * 5 * 48)
    slow = fk.System(step_seconds=1.0, mbit_down=8e-6, mbit_up=16e-6)  # 1 and 2 bytes a second
    model = 4 * (4 * 3 + 3)
    once = {"clients": 1, "rounds": 1, "system": slow}
    assert run("fedavg", **once).rows[1].virtual_seconds == 2 + model + model / 2
    assert run("scaffold", **once).rows[1].virtual_seconds == 2 + 2 * (model + model / 2)


# --- theory ----------------------------------------------------------------------------------


def test_scaffold_is_exact_where_fedbuff_alone_leans_to_fast_clients() -> None:
    """Quadratics with other minima and curvatures: the optimum is that of the clients' mean."""
    rng = np.random.default_rng(2)
    x = np.eye(2)[[0, 1, 0, 1, 0], None] + 0.3 * rng.normal(size=(5, 1, 2))
    y = rng.normal(size=(5, 1, 1))
    best = np.linalg.lstsq(x[:, 0], y[:, 0, 0], rcond=None)[0]

    def distance(method: str) -> float:
        layer = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(layer.weight)
        result = fk.run(
            method,
            task=fk.Task(layer, loss=half_square),
            clients=fk.from_clients(list(zip(x, y, strict=True))),
            test=(x[0], y[0]),
            rounds=300,
            local=fk.Local(lr=0.1, steps=2, batch_size="all"),
            weights="uniform",
            system=SLOW,
            evaluation=fk.Evaluation(every=1000),
            engine=fk.Engine(kind="sequential", dtype="float64"),
            progress=False,
        )
        return float(np.linalg.norm(result.params["weight"].numpy()[0] - best))

    assert distance("fedbuff(buffer=2)") > 0.2
    assert distance("scaffold+fedbuff(buffer=2)") < 1e-3
    assert distance("scaffold+fedasync(alpha=0.5)") < 0.01


# --- what is refused -------------------------------------------------------------------------


@each(
    ("given", "error", "says"),
    [
        ({"method": "feddyn+fedbuff"}, CompositionError, "FRESH_UPDATES"),
        ({"method": "median+fedbuff"}, CompositionError, "takes one"),
        ({"method": "fedadam+fedasync"}, CompositionError, "takes one"),
        ({"method": "fedbuff(buffer=7)"}, ConfigError, "more updates than there are clients"),
        ({"method": "fedasync", "diagnose": "drift"}, ConfigError, "Diagnostics do not go"),
        (
            {"method": "fedasync", "adversary": fk.Adversary(kind="sign_flip", share=0.2)},
            ConfigError,
            "Attacks on updates",
        ),
        (
            {"method": "fedasync", "privacy": fk.Privacy(epsilon=8.0, delta=1e-3)},
            ConfigError,
            "privacy budget",
        ),
        ({"method": "fedavg", "stop": fk.Stop(hours=1.0)}, ConfigError, "virtual time"),
        (
            {
                "method": "fedavg",
                "privacy": fk.Privacy(epsilon=8.0, delta=1e-3),
                "system": fk.System(enough=0.5),
            },
            ConfigError,
            "time leaves out",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    given: dict, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        run(**given)
