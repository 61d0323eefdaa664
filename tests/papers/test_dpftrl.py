"""DP-FTRL (Kairouz et al., ICML 2021): restated with a whole tree, its laws, and its account."""

from __future__ import annotations

from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import rdp

from fedkeel.base.rng import generator
from fedkeel.config import Cohort
from fedkeel.data.cohort import select
from fedkeel.errors import ConfigError
from fedkeel.features.budget.accountant import Account, Release
from fedkeel.features.budget.feature import account_of
from fedkeel.features.budget.noise_forecast import noise_forecast
from fedkeel.features.budget.settings import Privacy
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.grammar import parse
from fedkeel.method.parts.dpftrl import TreeDP, releases
from fedkeel.runner.start import start
from fedkeel.solve.span import Span, Sums
from method.players import equal, gap, play
from toys import prepared, same

ORACLE = np.load(Path(__file__).parents[1] / "oracles" / "dpftrl_tree_a.npz")
NUMBERS, CLIENTS, PER_ROUND = 5, 12, 2  # six rounds in a pass


def cohort(round: int, count: int = PER_ROUND, clients: int = CLIENTS) -> RoundCohort:
    weights = np.full(count, 1 / max(count, 1))
    people = Population(clients, PER_ROUND)
    return RoundCohort(np.arange(count), weights, 0.1, round, people, ("w",), 7, part="dpftrl")


class Tree:
    """Algorithm 1's tree over n leaves: every node's sum and noise, in an array."""

    def __init__(self, leaves: int, begin: int, deviation: float) -> None:
        self.levels = leaves.bit_length()
        self.sums = {
            (level, last): np.zeros(NUMBERS)
            for level in range(self.levels)
            for last in range(2**level, leaves + 1, 2**level)
        }
        self.noise = {
            (level, last): deviation
            * generator(7, f"dpftrl.{level}", begin + last).standard_normal((1, NUMBERS))[0]
            for level, last in self.sums
        }

    def add(self, step: int, value: np.ndarray) -> None:
        for level, last in self.sums:
            if last - 2**level < step <= last:
                self.sums[level, last] += value

    def prefix(self, step: int) -> np.ndarray:
        """The noisy sum of the first steps: of the largest node that fits, then of what is left."""
        total, at = np.zeros(NUMBERS), 0
        while at < step:
            level = max(k for k in range(self.levels) if at + 2**k <= step and at % 2**k == 0)
            at += 2**level
            total += self.sums[level, at] + self.noise[level, at]
        return total


def test_restated() -> None:
    """Three passes: after each round the model is the sum of what all passes released."""
    part, rng = TreeDP(norm=2.0, sigma=0.7), np.random.default_rng(0)
    model, told = np.zeros(NUMBERS), np.zeros(NUMBERS)
    for number in range(3):
        tree = Tree(6, 6 * number, 0.7 * 2.0)
        for step in range(1, 7):
            rows = rng.normal(size=(PER_ROUND, NUMBERS))
            sent = np.array([row * min(1.0, 2.0 / np.linalg.norm(row)) for row in rows])
            clipped = [part.transform_update({"w": torch.from_numpy(r)}, None) for r in rows]  # type: ignore[arg-type]
            np.testing.assert_allclose(torch.stack([c["w"] for c in clipped]).numpy(), sent)
            here = cohort(6 * number + step - 1)
            model = model + part.reduce(Span({"w": torch.from_numpy(sent)}), here)["w"].numpy()
            tree.add(step, sent.sum(axis=0))
            np.testing.assert_allclose(model, told + tree.prefix(step) / PER_ROUND, atol=1e-12)
        told = told + tree.prefix(6) / PER_ROUND


def test_the_noise_is_that_of_the_authors_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tree draws one node in each step, the one that ends with it; these are handed in."""
    sums, draws, std = ORACLE["sums"], ORACLE["draws"], float(ORACLE["std"])
    monkeypatch.setattr(
        "fedkeel.method.parts.dpftrl.generator",
        lambda _, purpose, last: Handed(draws[last - 1] / std),
    )
    part, total = TreeDP(norm=1.0, sigma=std), np.zeros(draws.shape[1])
    for t, told in enumerate(sums):
        rows = {"w": torch.zeros(2, draws.shape[1], dtype=torch.float64)}
        here = cohort(t, clients=2 * len(sums))
        total = total + part.reduce(Span(rows), here)["w"].numpy() * PER_ROUND
        np.testing.assert_allclose(total, told, rtol=0, atol=1e-12)


class Handed:
    """Gives the numbers of another program in place of random ones."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def standard_normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._values.reshape(shape)


@pytest.mark.parametrize("count", [0, 2])
def test_the_noise_on_the_model_is_that_of_few_nodes(count: int) -> None:
    """After t rounds it has the deviation sigma C / K times the root of t's ones."""
    part, size = TreeDP(norm=0.5, sigma=1.5), 40_000
    rows = {"w": torch.zeros(count, size, dtype=torch.float64)}
    sums = Sums({"w": torch.zeros(1, size, dtype=torch.float64)}, weights=np.ones(count))
    total = torch.zeros(size, dtype=torch.float64)
    for t in range(1, 17):
        here = cohort(t - 1, count, clients=32)  # sixteen rounds in a pass
        released = part.reduce(Span(rows) if t % 2 else sums, here)["w"]
        total = total + released
        expected = 1.5 * 0.5 / PER_ROUND * np.sqrt(t.bit_count())
        assert float(total.std()) == pytest.approx(expected, rel=4 / np.sqrt(2 * size))


def test_without_noise_it_is_fedavg() -> None:
    plain = play("fedavg", weights="uniform")
    assert gap(play("dpftrl(norm=1e9)"), plain) < 1e-14
    assert equal(play("dpftrl(norm=1e9)"), play("dpclient(norm=1e9)"))
    assert equal(play("dpftrl(norm=0.02)+momentum"), play("dpclient(norm=0.02)+momentum"))


def test_where_everybody_comes_it_is_noise_of_its_own_in_each_round() -> None:
    part = TreeDP(sigma=1.0)
    everybody = Population(PER_ROUND, PER_ROUND)
    assert part.period(everybody) == 1
    noise = []
    for round in range(2):
        here = RoundCohort(np.arange(2), np.ones(2) / 2, 0.1, round, everybody, ("w",), 0)
        rows = torch.zeros(2, 40_000, dtype=torch.float64)
        noise.append(part.reduce(Span({"w": rows}), here)["w"])
    assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 0.02
    assert float(noise[1].std()) == pytest.approx(0.5, rel=0.02)


# --- the account -----------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.8, 3.0])
@pytest.mark.parametrize("rounds", [1, 5, 16, 23, 60])
def test_the_account_is_that_of_the_library(sigma: float, rounds: int) -> None:
    """Its event of a pass in which a record is in one step, by Renyi divergences; all composed."""
    period, delta = 16, 1e-5
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    for steps in filter(None, [*[period] * (rounds // period), rounds % period]):
        accountant.compose(dp_accounting.SingleEpochTreeAggregationDpEvent(sigma, steps))
    theirs = accountant.get_epsilon(delta)
    count = releases(rounds, period)
    assert Account(Release(), sigma, "rdp").epsilon(count, delta) == pytest.approx(theirs, rel=1e-9)
    tighter = Account(Release(), sigma, "pld", count).epsilon(count, delta)
    assert tighter <= theirs * (1 + 1e-6)


def test_no_client_is_in_more_nodes_than_are_counted() -> None:
    for period in (1, 2, 3, 6, 8):
        for rounds in range(1, 2 * period + 1):
            used: dict[int, set] = {}
            for t in range(rounds):
                number, step = divmod(t, period)
                bits = [b for b in range(step.bit_length() + 1) if (step + 1) >> b & 1]
                for b in bits:
                    last = (step + 1) >> b << b
                    for leaf in range(last - 2**b, last):
                        used.setdefault(number * period + leaf, set()).add((number, b, last))
            most = [
                max((len(used[t]) for t in used if t // period == number), default=0)
                for number in range(-(-rounds // period))
            ]
            assert sum(most) == releases(rounds, period)


def test_in_turn_everybody_comes_once_in_a_pass() -> None:
    settings, sizes = Cohort(clients=3, sampling="in_turn"), np.full(10, 5)
    passes = [
        [select(settings, sizes, 0, 4 * number + place).clients for place in range(4)]
        for number in range(3)
    ]
    for one in passes:
        assert [len(clients) for clients in one] == [3, 3, 3, 1]
        assert sorted(np.concatenate(one)) == list(range(10))
    assert any(not np.array_equal(a, b) for a, b in zip(passes[0], passes[1], strict=True))
    among = np.array([0, 1, 2, 3, 4])
    reached = select(settings, sizes, 0, 0, among=among).clients
    assert reached.tolist() == np.intersect1d(passes[0][0], among).tolist()


BUDGET = Privacy(epsilon=4.0, delta=0.01, noise="tree")
TURNS = Cohort(clients=2, sampling="in_turn")


def test_a_budget_has_its_noise_calibrated_for_the_passes() -> None:
    run = prepared(privacy=BUDGET, cohort=TURNS, rounds=7)
    part, account = run.plan.reduction, account_of(run)
    assert isinstance(part, TreeDP)
    assert part.period(run.population) == 3
    assert account is not None
    assert account.schedule.releases_of_clients(7) == 2 + 2 + 1
    result = start(run)
    spent = [row.features["epsilon"] for row in result.rows]
    known = Account(Release(), part.sigma, "pld", 7)
    assert spent == [known.epsilon(n, 0.01) for n in (0, 1, 2, 2, 3, 4, 4, 5)]
    assert 0.99 * 4.0 < spent[-1] <= 4.0
    assert result.record.privacy.part == "dpftrl"
    assert "tree over 3 rounds" in result.record.privacy.says
    assert "differ by a client that sends nothing" in result.record.privacy.says
    everybody = prepared(privacy=BUDGET, rounds=7, cohort=Cohort(clients=6))
    plain = prepared(privacy=Privacy(epsilon=4.0, delta=0.01), rounds=7, cohort=Cohort(clients=6))
    assert everybody.plan.reduction.sigma == plain.plan.reduction.sigma
    assert plain.key != everybody.key
    forecast = noise_forecast(run)
    assert forecast is not None
    draws = 2 * (3).bit_count() + 1
    expected = forecast.in_a_round * np.sqrt(7 / draws)
    size = sum(t.numel() for t in run.server.params.values())
    assert expected == pytest.approx(part.sigma * np.sqrt(size) / 2)


def test_a_method_s_own_noise_ends_the_run_in_time() -> None:
    budget = Privacy(epsilon=4.0, delta=0.01)
    run = prepared("dpftrl(sigma=1.2)", privacy=budget, cohort=TURNS, rounds=30)
    known = Account(Release(), 1.2, "pld", 30)
    allowed = max(n for n in range(31) if known.epsilon(releases(n, 3), 0.01) <= 4.0)
    assert 3 < allowed < 30
    result = start(run)
    assert len(result.rows) == 1 + allowed
    assert same(start(run), result)


def test_what_the_account_cannot_count_is_refused() -> None:
    for settings, word in (
        (Cohort(clients=2), "'uniform', 2 of 6"),
        (Cohort(clients=2, sampling="poisson"), "'poisson'"),
        (Cohort(clients=2, sampling="in_turn", new_clients=1), "new_clients"),
    ):
        with pytest.raises(ConfigError, match="once in each pass") as refused:
            prepared(privacy=BUDGET, cohort=settings)
        assert word in str(refused.value)
    for wrong in ({"unit": "example"}, {"quantile": 0.5}):
        with pytest.raises(ConfigError, match="by a tree"):
            Privacy(epsilon=4.0, delta=0.01, noise="tree", **wrong)
    with pytest.raises(ConfigError, match=r"privacy\.noise"):
        prepared("dpclient(sigma=1.0)", privacy=BUDGET, cohort=TURNS)
    with pytest.raises(ConfigError, match="'in_turn' draws cohorts"):
        prepared("fedbuff(buffer=2)", cohort=TURNS)
    assert parse("dpftrl(sigma=1.0)+fedprox+fedadam").reduction.name == "dpftrl"
