"""Runs with a privacy budget: what they spend, when they end, and what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedkeel as fk
from fedkeel import tree
from fedkeel.errors import CompositionError, ConfigError
from fedkeel.features.budget.accountant import Account, Release
from fedkeel.features.budget.budget_account import ReleaseSchedule, described, make_budget
from fedkeel.features.budget.feature import account_of
from fedkeel.features.budget.noise_forecast import QUIET, NoiseForecast, noise_forecast
from fedkeel.features.budget.report import PrivacyReport
from fedkeel.records.rows import RoundRecord
from fedkeel.report.page import write_report
from fedkeel.report.runs import load_runs
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.start import start
from fedkeel.runner.warnings import find_warnings
from toys import Net, of_sizes, prepared, same

BUDGET = fk.Privacy(epsilon=4.0, delta=0.01)
POISSON = fk.Cohort(clients=3, sampling="poisson")
ALL = fk.Cohort(clients=6)
LOCAL = fk.Local(lr=0.05, epochs=2, batch_size=4)


def epsilons(rows: list[RoundRecord]) -> list[float]:
    return [-1.0 if row.epsilon is None else row.epsilon for row in rows]


def test_the_rows_have_what_is_spent_and_the_last_one_the_budget() -> None:
    run = prepared(privacy=BUDGET, cohort=POISSON, rounds=5)
    sigma = run.plan.reduction.sigma
    result = start(run)
    account = Account(Release("poisson", 3, 6), sigma, "pld", 5)
    spent = epsilons(result.rows)
    assert spent == [account.epsilon(n, 0.01) for n in range(6)]
    assert spent[0] == 0.0
    assert 0.99 * 4.0 < spent[5] <= 4.0
    assert result.record.message == ""
    assert result.record.privacy is not None
    assert result.record.privacy.sigma == sigma
    assert "3 of 6 clients" in result.record.privacy.says
    assert [row.epsilon for row in start(prepared()).rows] == [None] * 4


def test_the_record_of_a_private_run_has_no_value_of_one_example() -> None:
    assert start(prepared(rounds=1)).record.data.ranges
    assert start(prepared(privacy=BUDGET, cohort=ALL, rounds=1)).record.data.ranges == {}


def test_cohorts_are_accounted_as_what_they_are() -> None:
    samplings = ("fixed", "in_turn", "poisson", "uniform")
    half = {name: fk.Cohort(clients=3, sampling=name) for name in samplings}
    noisy, stateful = "dpclient(sigma=20.0)", "feddyn+dpclient(sigma=20.0)"
    runs = {
        "all": prepared(noisy, privacy=BUDGET, cohort=ALL),
        **{name: prepared(noisy, privacy=BUDGET, cohort=cohort) for name, cohort in half.items()},
        "with state": prepared(stateful, privacy=BUDGET, cohort=half["uniform"]),
        "poisson, state": prepared(stateful, privacy=BUDGET, cohort=half["poisson"]),
    }
    kinds = {name: account_of(run).schedule.of_clients for name, run in runs.items()}
    assert kinds == {
        "all": Release(),
        "fixed": Release(),
        "in_turn": Release(),
        "poisson": Release("poisson", 3, 6),
        "uniform": Release("fixed_size", 3, 6),
        "with state": Release(),
        "poisson, state": Release("poisson", 3, 6),
    }
    says = {name: described(account_of(run)) for name, run in runs.items()}
    silent = {
        name for name, said in says.items() if "differ by a client that sends nothing" in said
    }
    assert silent == {"all", "fixed", "in_turn", "with state"}
    assert says["in_turn"].startswith("a release for each pass of 2 rounds")
    assert all("add or remove one" in says[name] for name in ("poisson", "poisson, state"))
    assert "replace one" in says["uniform"]
    with pytest.raises(ConfigError, match="'examples' has no account"):
        prepared(privacy=BUDGET, cohort=fk.Cohort(clients=3, sampling="examples"))


def test_cohorts_in_turn_spend_what_a_client_s_sure_releases_do() -> None:
    schedule = ReleaseSchedule(
        privacy=fk.Privacy(epsilon=8.0, delta=1e-5),
        cohort=fk.Cohort(clients=10, sampling="in_turn"),
        local=LOCAL,
        sizes=np.full(1000, 5),
        seed=0,
        rounds=250,
        is_stateful=False,
    )
    budget, trained = make_budget(schedule, 2.0), np.zeros(1000, dtype=np.int64)
    known = Account(Release(), 2.0, "pld", 250)
    for rounds in (1, 100, 101, 200, 250):
        sure = int(schedule.selections(0, rounds).max())
        assert sure == -(-rounds // 100)
        assert budget.spent(rounds, trained) == known.epsilon(sure, 1e-5)
    assert budget.spent(100, trained) > 1.9
    fewer = replace(schedule, cohort=fk.Cohort(clients=10, sampling="in_turn", new_clients=500))
    assert fewer.releases_of_clients(51) == int(fewer.selections(0, 51).max()) == 2


def test_a_method_with_its_own_noise_ends_before_the_budget_is_overrun() -> None:
    run = prepared("dpclient(sigma=2.0)", privacy=BUDGET, cohort=ALL, rounds=9)
    account = Account(Release(), 2.0, "pld", 9)
    allowed = max(n for n in range(10) if account.epsilon(n, 0.01) <= 4.0)
    assert 0 < allowed < 9
    (warning,) = find_warnings(run)
    assert f"ends the run after round {allowed} of 9" in warning
    result = start(run)
    assert len(result.rows) == 1 + allowed
    assert result.record.status == "finished"
    assert "beyond privacy.epsilon 4" in result.record.message
    with pytest.raises(ConfigError, match="does not allow a single round"):
        prepared("dpclient(sigma=0.2)", privacy=BUDGET, cohort=ALL)
    with pytest.raises(ConfigError, match="does not allow a single round"):
        prepared("dpclient", privacy=BUDGET, cohort=ALL)  # without noise


class WithBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


class Kill(Callback):
    def on_round_end(self, row: RoundRecord, model: object) -> None:
        if row.round == 2:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("method", "budget"),
    [
        ("dpclient(sigma=2.0)", BUDGET),
        ("fedavg", BUDGET.model_copy(update={"quantile": 0.5})),
        ("dpsgd(sigma=1.5)", BUDGET.model_copy(update={"unit": "example"})),
    ],
)
def test_a_resumed_run_remembers_what_it_has_spent(
    tmp_path: Path, method: str, budget: fk.Privacy
) -> None:
    run = prepared(method, privacy=budget, cohort=POISSON, rounds=4, local=LOCAL)
    with pytest.raises(ZeroDivisionError):
        start(run, tmp_path / "run", callbacks=[Kill()])
    assert same(start(run, tmp_path / "run", resume=True), start(run))


def test_an_experiment_that_names_its_noise_is_written_and_read_again() -> None:
    """A written experiment, as in a run folder or an exported app, has every default in it."""
    written = fk.Privacy(**BUDGET.model_dump())
    assert "clip" in written.model_fields_set
    run = prepared("dpclient(norm=0.5, sigma=9.0)", privacy=written)
    assert run.plan.reduction.norm == 0.5
    with pytest.raises(ConfigError, match="says otherwise"):
        prepared("dpclient(norm=0.5, sigma=9.0)", privacy=BUDGET.model_copy(update={"clip": 2.0}))


def test_an_early_end_spends_less() -> None:
    run = prepared(privacy=BUDGET, cohort=ALL, rounds=9, stop=fk.Stop(target=0.01))
    result = start(run)
    assert len(result.rows) < 10
    assert 0.0 < epsilons(result.rows)[-1] < 3.0


def test_engines_agree_and_an_empty_round_has_noise() -> None:
    """Of 8 rounds with one client expected some have none; the model moves in them by noise."""
    cohort = fk.Cohort(clients=1, sampling="poisson")
    runs = {
        kind: start(
            prepared(
                "dpclient(sigma=2.0)",
                privacy=BUDGET,
                cohort=cohort,
                rounds=8,
                dtype="float64",
                **more,
            )
        )
        for kind, more in {
            "sequential": {},
            "workers": {"kind": "workers", "workers": 2},
            "vectorized": {"kind": "vectorized", "device": "cpu"},
        }.items()
    }
    assert same(runs["sequential"], runs["workers"])
    pair = runs["sequential"].params, runs["vectorized"].params
    assert max(float((pair[0][k] - pair[1][k]).abs().max()) for k in pair[0]) < 1e-12
    rows = runs["sequential"].rows
    assert any(not row.clients for row in rows[1:])
    scores = [row.test.values["loss"] for row in rows if row.test is not None]
    assert len(set(scores)) == len(scores)
    assert max(len(row.clients) for row in rows) > 1  # more than are expected


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("scaffold", "further message"),
        ("fedexp", "further message"),
        ("fednova", "PER_CLIENT_UPDATES"),
        ("mime", "second message before training"),
        ("quantise", "longer than the bound"),
        ("fedgh", "PER_CLIENT_UPDATES"),
        ("median", "slot 'reduction'"),
        ("local", "no privacy budget"),
    ],
)
def test_a_method_that_lets_more_out_than_a_sum_is_refused(method: str, reason: str) -> None:
    with pytest.raises((CompositionError, ConfigError)) as caught:
        prepared(method, privacy=BUDGET)  # before any noise is calibrated
    assert reason in str(caught.value)


@pytest.mark.parametrize("method", ["fedper", "ditto", "feddyn", "fedadam+fedprox", "moon+gcfed"])
def test_what_stays_at_the_client_is_legal(method: str) -> None:
    method += "+dpclient(sigma=2.0)"
    result = start(prepared(method, privacy=BUDGET, rounds=1, cohort=POISSON))
    assert epsilons(result.rows)[-1] <= 4.0


def test_other_weights_and_averaged_buffers_are_refused() -> None:
    with pytest.raises(CompositionError, match="needs equal weights"):
        prepared(privacy=BUDGET, weights="examples")
    with pytest.raises(CompositionError, match="averaged buffers"):
        prepared("dpclient(sigma=9.0)", WithBuffers, privacy=BUDGET, buffers="average")


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("mime", "sends a gradient without noise"),
        ("fedlc", "examples of each class"),
        ("fedper", "neither clipped nor noisy"),
        ("fedcurv", "beside their clipped gradients"),
        ("dpsgd(sigma=1.0, clipped='batch')", "not of an example"),
        ("dpclient(sigma=1.0)", "says otherwise"),
    ],
)
def test_a_method_that_uses_examples_beside_their_gradients_is_refused(
    method: str, reason: str
) -> None:
    with pytest.raises((CompositionError, ConfigError)) as caught:
        prepared(method, privacy=fk.Privacy(epsilon=4.0, delta=0.01, unit="example"))
    assert reason in str(caught.value)


def test_examples_are_accounted_for_each_client() -> None:
    """Passes in shuffled batches count once; drawn batches count by step, from their share."""
    budget = fk.Privacy(epsilon=8.0, delta=0.01, unit="example")
    clients = of_sizes(8, 20)
    run = prepared("scaffold", clients=clients, privacy=budget, per_round=2, local=LOCAL)
    sigma = run.plan.gradient_rule.sigma
    passes = Account(Release(), sigma, "pld", 6)  # 3 rounds of 2 epochs, whatever the size
    assert epsilons(start(run).rows) == [passes.epsilon(2 * n, 0.01) for n in range(4)]

    drawn = fk.Local(lr=0.05, steps=2, batch_size=4, sampling="random")
    noisy = "dpsgd(sigma=9.0)"
    run = prepared(noisy, clients=clients, privacy=budget, per_round=1, local=drawn, rounds=3)
    accounts = {k: Account(Release("fixed_size", 4, n), 9.0, "rdp") for k, n in ((0, 8), (1, 20))}
    counts = {0: 0, 1: 0}
    for row in start(run).rows[1:]:
        counts[row.clients[0]] += 1
        each = [account.epsilon(2 * counts[k], 0.01) for k, account in accounts.items()]
        assert row.epsilon == pytest.approx(max(each), rel=1e-12)
    assert account_of(run).kind == "rdp"


def test_the_page_the_table_and_the_record_show_it(tmp_path: Path) -> None:
    start(prepared(privacy=BUDGET, cohort=ALL), tmp_path / "run")
    (method,) = load_runs([tmp_path / "run"])
    assert 3.9 < method.summary.stat("epsilon").mean <= 4.0
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "Epsilon spent" in page
    assert "of 4; client level, delta 0.01" in page
    assert method.record.privacy.text == "epsilon 4, delta 0.01, client level"
    sigma = method.record.privacy.sigma
    (told,) = PrivacyReport.notes([method])
    spent = f"{method.summary.stat('epsilon').mean:.3g}"
    assert told == (
        f"Privacy of `fedavg`: epsilon {spent} of 4 is spent at delta 0.01; it protects a client "
        "with all its examples (client level). Mechanism: `dpclient` clips, and adds Gaussian "
        f"noise of {sigma:.4g} times the bound; PLD accounting."
    )
    assert "Mechanism: " in page
    start(prepared(), tmp_path / "plain")
    assert PrivacyReport.notes(load_runs([tmp_path / "plain"])) == []


def test_a_key_at_the_server_decides_noise_and_cohorts(tmp_path: Path) -> None:
    """The same key repeats the bits, and another one, or only another seed, gives others."""
    results = {}
    for name, content in (("a", b"a" * 32), ("b", b"a" * 32), ("c", b"c" * 32)):
        (tmp_path / name).write_bytes(content)
        budget = BUDGET.model_copy(update={"key_file": str(tmp_path / name)})
        run = prepared("dpclient(sigma=2.0)", privacy=budget, cohort=POISSON)
        results[name] = start(run), run.key
    without = start(prepared("dpclient(sigma=2.0)", privacy=BUDGET, cohort=POISSON))
    assert same(results["a"][0], results["b"][0])
    assert results["a"][1] == results["b"][1] != results["c"][1]
    cohorts = [[row.clients for row in r.rows] for r in (results["a"][0], results["c"][0], without)]
    assert cohorts[0] != cohorts[1] != cohorts[2] != cohorts[0]
    short = BUDGET.model_copy(update={"key_file": str(tmp_path / "short")})
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(ConfigError, match="key is too short"):
        prepared("dpclient(sigma=2.0)", privacy=short)
    missing = BUDGET.model_copy(update={"key_file": str(tmp_path / "none")})
    on_node = prepared("dpclient(sigma=2.0)", privacy=missing, cohort=POISSON)  # needs no key
    with pytest.raises(ConfigError, match="cannot be read"):
        start(on_node)


@pytest.mark.parametrize(("unit", "epsilon"), [("client", 1.0), ("example", 0.1)])
def test_noise_that_drowns_the_model_is_told_of_before_the_first_round(
    unit: Any, epsilon: float
) -> None:
    """A budget for four clients, and the same one for as many clients as the warning names."""

    def told(clients: int) -> tuple[NoiseForecast, list[str]]:
        run = prepared(
            clients=of_sizes(*[8] * clients),
            privacy=fk.Privacy(epsilon=epsilon, delta=1e-4, unit=unit),
            cohort=fk.Cohort(clients=clients),
            local=fk.Local(lr=0.05, epochs=1, batch_size=4)
            if unit == "client"
            else fk.Local(lr=0.05, steps=2, batch_size=4, sampling="poisson"),
            rounds=3,
        )
        forecast = noise_forecast(run)
        assert forecast is not None
        return forecast, [text for text in find_warnings(run) if "the noise of a round" in text]

    forecast, texts = told(4)
    assert len(texts) == 1
    assert "better than chance" in texts[0]
    needed = int(re.findall(r"about ([\d,]+) clients", texts[0])[0].replace(",", ""))
    assert needed > 4
    if unit == "client":  # as many are tried
        forecast, texts = told(needed)
        assert forecast.in_all <= QUIET
        assert texts == []


@pytest.mark.parametrize(
    ("method", "way"),
    [
        ("dpclient(norm=0.3, sigma=700.0)", 9 * 0.3),
        ("dpquantile(norm=0.3, sigma=700.0, lr=1e-9)", 9 * 0.3),
        ("dpsgd(norm=0.3, sigma=700.0)", 9 * 4 * 0.05 * 0.3),
    ],
)
def test_the_forecast_is_the_length_of_the_noise(method: str, way: float) -> None:
    """The noise is made so long that the model moves by nothing else."""
    local = fk.Local(lr=0.05, epochs=2, batch_size=4)
    clients = of_sizes(8, 8, 8, 8, 8, 8)
    run = prepared(method, clients=clients, cohort=ALL, rounds=9, local=local)
    forecast = noise_forecast(run)
    assert forecast is not None
    moved = tree.sub(start(run).params, run.server.params)
    length = float(tree.dot(moved, moved).sqrt())
    assert length == pytest.approx(forecast.in_all * way, rel=0.2)
    assert any("the noise of a round" in text for text in find_warnings(run))
    plain = prepared(cohort=ALL)
    assert noise_forecast(plain) is None
