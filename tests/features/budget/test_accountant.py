"""The account equals what dp-accounting and opacus gave, and the noise keeps the budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld_of

from fedkeel.errors import ConfigError
from fedkeel.features.budget import kept_noise
from fedkeel.features.budget.accountant import Account, Release, calibrated_sigma, composed_epsilon

ORACLES = Path(__file__).parents[2] / "oracles"
POISSON = np.load(ORACLES / "dp_epsilon.npz")
FIXED = np.load(ORACLES / "dp_epsilon_wor_a.npz")


def poisson(rate: float) -> Release:
    return Release() if rate == 1.0 else Release("poisson", rate * 10**6, 10**6)


@pytest.mark.parametrize("case", range(6))
def test_poisson_sampling(case: int) -> None:
    """PLD with a coarse grid is an upper bound on that with the library's, and close to it."""
    names = ("noise_multiplier", "sampling_rate", "steps", "delta")
    sigma, rate, steps, delta = (POISSON[name][case].item() for name in names)
    release = poisson(rate)
    pld = Account(release, sigma, "pld", steps).epsilon(steps, delta)
    assert pld == pytest.approx(POISSON["eps_pld_dp_accounting"][case], rel=1e-3)
    # processors differ in the rounding of the Fourier transforms
    assert pld >= POISSON["eps_pld_dp_accounting"][case] * (1 - 1e-7)
    rdp = Account(release, sigma, "rdp").epsilon(steps, delta)
    assert rdp == pytest.approx(POISSON["eps_rdp_dp_accounting"][case], rel=1e-9)
    assert rdp == pytest.approx(POISSON["eps_rdp_opacus"][case], rel=1e-3)


@pytest.mark.parametrize(
    ("sigma", "rate", "count"),
    [
        (20.0, 0.01, 2000),
        (5.0, 0.01, 1000),
        (100.0, 0.001, 2000),
        (10, 1.0, 100),
    ],
)
def test_the_points_are_close_enough_for_what_they_hold(
    sigma: float, rate: float, count: int
) -> None:
    """Epsilon was 32 % too large where the loss of a release is less than the distance of them."""
    account = Account(poisson(rate), sigma, "pld", count)
    loss = pld_of.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=account._grid / 8
    )
    finer = loss.self_compose(count).get_epsilon_for_delta(1e-5)
    found = account.epsilon(count, 1e-5)
    assert found == pytest.approx(finer, rel=1e-3)
    release = {(poisson(rate), sigma, count): finer}
    assert composed_epsilon(release, 1e-5) == pytest.approx(finer, rel=1e-3)


def test_noise_that_is_calibrated_is_no_larger_than_it_has_to_be() -> None:
    sigma = calibrated_sigma(Release("poisson", 1, 100), "pld", 2000, 0.0665, 1e-5)
    assert sigma == pytest.approx(20.0, rel=5e-3)


def test_an_account_of_very_many_releases_needs_little_memory() -> None:
    """It took 8 GB: the library keeps the loss at so many points as the distance asks for."""
    account = Account(Release(), 1.0, "pld", 10**6)
    total = account._loss.self_compose(10**6)
    assert len(total._pmf_remove._probs) < 2**22
    closed_form = 10**6 / 2 + 1000 * 4.27  # of N(T / 2, T), at delta 1e-5
    assert total.get_epsilon_for_delta(1e-5) == pytest.approx(closed_form, rel=1e-4)


@pytest.mark.parametrize("case", [0, 3, 4])
def test_draws_of_a_fixed_size_are_counted_at_twice_the_bound(case: int) -> None:
    """One client replaced changes a sum by 2C, so the library is given half the noise."""
    names = ("num_clients", "sampled", "noise_multiplier", "rounds", "delta")
    clients, sampled, sigma, rounds, delta = (FIXED[name][case].item() for name in names)
    account = Account(Release("fixed_size", sampled, clients), sigma, "rdp")
    found = account.epsilon(rounds, delta)
    assert found == pytest.approx(FIXED["eps_wor_half_noise_rdp"][case], rel=1e-9)
    assert found > 2 * FIXED["eps_wor_replace_one_rdp"][case]


@pytest.mark.parametrize(
    ("release", "kind"),
    [(Release(), "pld"), (Release("poisson", 10, 100), "pld"), (Release("poisson", 5, 50), "rdp")],
)
def test_the_noise_keeps_the_budget_and_no_more(release: Release, kind: str) -> None:
    sigma = calibrated_sigma(release, kind, 60, 2.0, 1e-5)
    spent = [Account(release, s, kind).epsilon(60, 1e-5) for s in (sigma, 0.995 * sigma)]
    assert spent[0] <= 2.0 < spent[1]


def test_epsilon_of_a_gaussian_mechanism_is_the_closed_form() -> None:
    """Balle and Wang 2018, Theorem 8: delta of one release at epsilon 1."""
    from scipy.stats import norm

    epsilon = Account(Release(), 2.0, "pld").epsilon(1, 1e-5)
    delta = norm.cdf(0.25 - 2 * epsilon) - np.exp(epsilon) * norm.cdf(-0.25 - 2 * epsilon)
    assert delta == pytest.approx(1e-5, rel=1e-2)


def test_epsilon_grows_by_the_same_numbers_in_whatever_order_it_is_asked_for() -> None:
    one, other = (Account(Release("poisson", 10, 100), 1.5, "pld") for _ in range(2))
    grown = [one.epsilon(n, 1e-5) for n in range(40)]
    assert grown == sorted(grown)
    assert grown[0] == 0.0
    assert [other.epsilon(n, 1e-5) for n in (39, 17, 16, 3)] == [grown[n] for n in (39, 17, 16, 3)]
    assert one.largest_count(grown[20], 1e-5, 100) == 20


def test_the_tighter_account_knows_no_draws_of_a_fixed_size() -> None:
    with pytest.raises(ConfigError, match="cannot count these releases"):
        Release("fixed_size", 10, 100).kind("pld")
    assert Release("fixed_size", 10, 100).kind("auto") == "rdp"


def test_kept_noise_is_calibrated_once_and_only_for_what_it_was_kept_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def count(release: Release, kind: str, count: int, epsilon: float, delta: float) -> float:
        calls.append(count)
        return 1.25 * count

    monkeypatch.setattr(kept_noise, "calibrated_sigma", count)
    values = Release("poisson", 3, 6), "pld", 5, 4.0, 0.01
    with kept_noise.noise_kept_in(tmp_path):
        assert [kept_noise.kept_sigma(*values) for _ in range(3)] == [6.25] * 3
        assert calls == [5]
        for place, other in enumerate((Release("poisson", 2, 6), "rdp", 6, 4.5, 0.02)):
            kept_noise.kept_sigma(*values[:place], other, *values[place + 1 :])
        assert len(calls) == 6
        file = tmp_path / kept_noise.FILE
        file.write_text(file.read_text().replace("6.25", "0.25"))
        assert kept_noise.kept_sigma(*values) == 6.25
        assert len(calls) == 7
    kept_noise.kept_sigma(*values)
    assert len(calls) == 8
