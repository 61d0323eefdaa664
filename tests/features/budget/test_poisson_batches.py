"""Batches in which each example is by itself: the sampling that the account takes for granted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedkeel as fk
from fedkeel.base.rng import generator, torch_seed
from fedkeel.data import batches
from fedkeel.errors import CompositionError, ConfigError
from fedkeel.features.budget.accountant import Account, Release
from fedkeel.features.budget.feature import account_of
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import of_sizes, prepared, same

POISSON = fk.Local(lr=0.05, steps=4, batch_size=4, sampling="poisson")
FEW = fk.Local(lr=0.05, steps=12, batch_size=1, sampling="poisson")
EXAMPLE = fk.Privacy(epsilon=8.0, delta=0.01, unit="example")
ORACLE = np.load(Path(__file__).parents[2] / "oracles" / "dp_epsilon.npz")


def test_each_example_is_in_a_batch_by_itself() -> None:
    local = POISSON.model_copy(update={"steps": 4000})
    drawn = np.zeros((4000, 10))
    for step, rows in enumerate(batches.plan(local, 10, seed=1, round=2, client=3)):
        drawn[step, rows] = 1
    assert np.abs(drawn.mean(axis=0) - 0.4).max() < 4 * np.sqrt(0.24 / 4000)
    together = np.cov(drawn.T)[~np.eye(10, dtype=bool)]
    assert np.abs(together).max() < 4.5 * 0.24 / np.sqrt(4000)  # without replacement it is -0.027
    assert drawn.sum(axis=1).var() == pytest.approx(10 * 0.24, rel=0.1)
    assert [len(rows) for rows in batches.plan(POISSON, 3, 0, 0, 0)] == [3] * 4


def test_a_step_divides_by_the_expected_number_and_an_empty_one_is_noise() -> None:
    """Restated: a linear model whose gradients are written down, with the run's own draws."""
    clients = of_sizes(7)
    net = torch.nn.Linear(5, 3, bias=False)
    run = prepared(
        "dpsgd(norm=0.5, sigma=0.8)",
        lambda: net,
        clients=clients,
        per_round=1,
        rounds=1,
        local=FEW,
        dtype="float64",
    )
    x, y = clients.data.x.double().numpy(), clients.data.y.numpy()
    weight = run.server.params["weight"].double().numpy().copy()
    source = torch.Generator().manual_seed(torch_seed(run.setup.seed, "noise", 0, 0))
    random, sizes = generator(run.setup.seed, "batches", 0, 0), []
    for _ in range(12):
        rows = np.flatnonzero(random.random(7) < 1 / 7)
        sizes.append(len(rows))
        total = np.zeros_like(weight)
        for i in rows:
            scores = weight @ x[i]
            shares = np.exp(scores - scores.max())
            gradient = np.outer(shares / shares.sum() - np.eye(3)[y[i]], x[i])
            total += gradient * min(1.0, 0.5 / np.linalg.norm(gradient))
        noise = torch.randn(weight.shape, generator=source, dtype=torch.float64).numpy()
        weight -= 0.05 * (total + 0.8 * 0.5 * noise) / 1
    assert 0 in sizes
    assert max(sizes) > 1
    np.testing.assert_allclose(start(run).params["weight"].numpy(), weight, rtol=0, atol=1e-12)


def test_engines_and_nodes_have_the_same_bits(tmp_path: Path) -> None:
    more = {"rounds": 2, "local": FEW, "dtype": "float64"}
    run = prepared("scaffold+dpsgd(sigma=2.0)", **more)
    result = start(run)
    assert all(np.isfinite(row.test.values["loss"]) for row in result.rows)
    for kind, options in (("workers", {"workers": 2}), ("vectorized", {"device": "cpu"})):
        other = start(prepared("scaffold+dpsgd(sigma=2.0)", kind=kind, **options, **more))
        assert same(result, other)
    assert "Poisson" in " ".join(other.record.engine.reasons)
    remote = run_on_nodes(run, InProcessGrid(make_nodes(run, tmp_path)))
    for row in (*remote.rows, *result.rows):
        row.bytes_down.clear()
        row.bytes_up.pop("evaluation", None)
    assert same(remote, result)


def test_epsilon_is_that_of_dp_accounting_and_opacus() -> None:
    """A row's epsilon is the account's, which the oracle vector has from both libraries."""
    clients = of_sizes(8, 20)
    more = {"privacy": EXAMPLE, "per_round": 2, "rounds": 2, "local": POISSON}
    run = prepared("dpsgd(sigma=1.5)", clients=clients, **more)
    account = Account(Release("poisson", 4, 8), 1.5, "pld", 8)  # the smaller client spends more
    for row in start(run).rows:
        assert row.epsilon == pytest.approx(account.epsilon(4 * row.round, 0.01), rel=1e-12)
    assert account_of(run).kind == "pld"
    names = ("noise_multiplier", "sampling_rate", "steps", "delta")
    sigma, rate, steps, delta = (ORACLE[name][0].item() for name in names)
    local = fk.Local(lr=0.1, steps=int(steps), batch_size=round(rate * 10_000), sampling="poisson")
    release = replace(account_of(run).schedule, local=local).of_examples(10_000)
    assert release == Release("poisson", rate * 10_000, 10_000)
    rdp = Account(release, sigma, "rdp").epsilon(int(steps), delta)
    assert rdp == pytest.approx(ORACLE["eps_rdp_opacus"][0], rel=1e-3)


def test_what_divides_by_the_number_that_came_is_refused() -> None:
    for method in ("fedavg", "dpsgd(clipped='batch')", "dpsgd+fedper"):
        with pytest.raises(CompositionError, match="is for dpsgd"):
            prepared(method, local=POISSON)
    for wrong in ({"epochs": 1}, {"steps": 2, "batch_size": "all"}, {"steps": 2, "accumulate": 2}):
        with pytest.raises(ConfigError, match="poisson"):
            fk.Local(lr=0.1, sampling="poisson", **wrong)
