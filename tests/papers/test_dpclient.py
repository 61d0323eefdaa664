"""DP-FedAvg (McMahan et al. 2018) and adaptive clipping (Andrew et al. 2021, opacus's vectors)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeel.errors import CompositionError
from fedkeel.method.context import ClientInfo, Outcome, Population, Round, RoundCohort
from fedkeel.method.parts.dpclient import AdaptiveClientDP, ClientDP
from fedkeel.solve.span import Span, Sums
from fedkeel.tree import Tree

ORACLE = np.load(Path(__file__).parents[1] / "oracles" / "adaclip_a.npz")
NAMES = ("w1", "b1", "w2")


def cohort(count: int, expected: int, seed: int = 0, **more: object) -> RoundCohort:
    return RoundCohort(
        clients=np.arange(count),
        weights=np.full(count, 1 / max(count, 1)),
        lr=0.1,
        round=0,
        population=Population(100, expected),
        names=NAMES,
        seed=seed,
        part="dpclient",
        **more,
    )


def updates(count: int, size: float, numbers: int = 50) -> Tree:
    random = np.random.default_rng(3)
    return {"w1": torch.from_numpy(size * random.normal(size=(count, numbers)))}


def any_round(model: Tree, **more: object) -> Round:
    one = torch.tensor(1.0)
    info = ClientInfo(torch.tensor(0), one)
    return Round(model, model, info, one, 1.0, 0.1, lambda: pytest.fail("not asked"), **more)


def shortened(rows: Tree, part: ClientDP) -> Tree:
    each = [
        part.transform_update({k: t[i] for k, t in rows.items()}, None)
        for i in range(len(rows["w1"]))
    ]  # type: ignore[arg-type]
    return {name: torch.stack([one[name] for one in each]) for name in rows}


def test_one_client_more_changes_the_aggregate_by_the_bound_over_the_expected_number() -> None:
    part = ClientDP(norm=0.7)
    rows = shortened(updates(6, 5.0), part)
    assert torch.allclose(rows["w1"].norm(dim=1), torch.full((6,), 0.7, dtype=torch.float64))
    with_all = part.reduce(Span(rows), cohort(6, 10))["w1"]
    without = part.reduce(Span({"w1": rows["w1"][:5]}), cohort(5, 10))["w1"]
    assert float((with_all - without).norm()) == pytest.approx(0.7 / 10, rel=1e-9)
    assert torch.allclose(with_all, rows["w1"].sum(0) / 10)  # not over the 6 that came
    short = updates(6, 1e-3)
    assert torch.equal(shortened(short, part)["w1"], short["w1"])


@pytest.mark.parametrize("count", [0, 3])
def test_the_noise_has_the_deviation_that_is_accounted_for_whoever_comes(count: int) -> None:
    """sigma C / K for each number; 40,000 numbers give it within 2 % at four deviations."""
    part = ClientDP(norm=0.5, sigma=1.5)
    rows = {"w1": torch.zeros(count, 40_000, dtype=torch.float64)}
    for given in (Span(rows), Sums({"w1": rows["w1"][:1]}, weights=np.ones(count))):
        noise = part.reduce(given, cohort(count, 8))["w1"]
        expected = 1.5 * 0.5 / 8
        assert float(noise.std()) == pytest.approx(expected, rel=4 / np.sqrt(2 * 40_000))
        assert abs(float(noise.mean())) < 4 * expected / np.sqrt(40_000)
    again = part.reduce(Span(rows), cohort(count, 8))["w1"]
    assert torch.equal(again, part.reduce(Span(rows), cohort(count, 8))["w1"])
    assert not torch.equal(again, part.reduce(Span(rows), cohort(count, 8, seed=1))["w1"])


def told(name: str) -> np.ndarray:
    return ORACLE[name]


def test_adaptive_clipping_is_that_of_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rounds of its AdaClip optimiser, a sample being a client's update, its noise handed in.

    It adds 1e-6 to norms before it divides by them.
    """
    clients, rounds = told("hp.n_clients").item(), told("hp.n_rounds").item()
    part = AdaptiveClientDP(
        norm=told("hp.initial_clip").item(),
        sigma=told("hp.noise_multiplier").item(),
        quantile=told("hp.target_quantile").item(),
        lr=told("hp.clip_lr").item(),
        count_sigma=told("hp.count_std").item(),
    )
    population = Population(clients, clients)
    state = part.init_server({}, population)
    for t in range(1, rounds + 1):
        assert float(state["norm"]) == pytest.approx(told(f"r{t}.clip_used").item(), rel=1e-12)
        deviation = part.update_sigma(population) * float(state["norm"])
        assert deviation == pytest.approx(told(f"r{t}.noise_std").item(), rel=1e-12)
        rows, bits = [], []
        for k in range(clients):
            update = {n: torch.from_numpy(told(f"r{t}.client{k}.update.{n}")) for n in NAMES}
            message = part.message(state)
            sent = part.transform_update(update, any_round(update, broadcast=message))
            rows.append(sent)
            bits.append(part.upload(any_round(update, broadcast=message, update=sent))["short"])
        stacked = {n: torch.stack([row[n] for row in rows]) for n in NAMES}
        uploads = {"short": torch.stack(bits)}
        count = float((uploads["short"] + 0.5).sum())
        assert count == told(f"r{t}.unclipped_count").item()
        draws = iter([told(f"r{t}.noise.{n}") / deviation for n in NAMES])
        here = cohort(clients, clients, state=state, uploads=uploads)
        monkeypatch.setattr(RoundCohort, "rng", lambda _, d=draws: Fixed(d))
        mean = part.reduce(Span(stacked), here)
        for n in NAMES:
            total = sum(row[n] for row in rows) + torch.from_numpy(told(f"r{t}.noise.{n}"))
            assert torch.allclose(mean[n] * clients, total, rtol=0, atol=1e-12)
        factor = np.minimum(1, told(f"r{t}.clip_used") / (norm_of(t, 0) + 1e-6))
        w1 = told(f"r{t}.client0.update.w1") * factor
        assert np.allclose(rows[0]["w1"].numpy(), w1, rtol=2e-5, atol=0)
        noise = told(f"r{t}.count_noise").item() / told("hp.count_std").item()
        monkeypatch.setattr(
            "fedkeel.method.parts.dpclient.generator", lambda *_, n=noise: Fixed(iter([n]))
        )
        state = part.next_server(Outcome({}, {}, Span(stacked), here))
        assert float(state["norm"]) == pytest.approx(told(f"r{t}.clip_next").item(), rel=1e-12)


def norm_of(t: int, client: int) -> float:
    parts = [told(f"r{t}.client{client}.update.{n}").ravel() for n in NAMES]
    return float(np.linalg.norm(np.concatenate(parts)))


class Fixed:
    """Gives the numbers of another program in place of random ones."""

    def __init__(self, values: object) -> None:
        self._values = values

    def standard_normal(self, shape: object = None) -> object:
        value = next(self._values)
        return value if shape is None else np.asarray(value).reshape(shape)


def test_the_bound_becomes_the_quantile() -> None:
    """Without noise it goes to the median of norms 1..9, up for those that are longer."""
    part = AdaptiveClientDP(norm=0.1, quantile=0.5, lr=0.2)
    state = part.init_server({}, Population(9, 9))
    norms = torch.arange(1.0, 10.0, dtype=torch.float64)
    for _ in range(200):
        bits = (norms <= float(state["norm"])).double() - 0.5
        here = cohort(9, 9, state=state, uploads={"short": bits})
        state = part.next_server(Outcome({}, {}, Span({}), here))
    assert 4.5 < float(state["norm"]) < 5.6


def test_too_little_noise_on_the_count_is_refused() -> None:
    part = AdaptiveClientDP(sigma=2.0, count_sigma=1.0)
    with pytest.raises(CompositionError, match="too little noise on its count"):
        part.init_server({}, Population(9, 9))
    z, b = 0.9, 1.1
    split = AdaptiveClientDP(sigma=z, count_sigma=b).update_sigma(Population(9, 9))
    assert split**-2 + (2 * b) ** -2 == pytest.approx(z**-2, rel=1e-12)  # two releases are one
