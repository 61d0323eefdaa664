"""Krum, Multi-Krum, Bulyan, geometric median, centred clipping, norm bounding, NNM and bucketing.

Restated in NumPy on vectors, and compared with ByzFL's and Flower's aggregates.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from each import each
from fedkeel.errors import CompositionError
from fedkeel.method.context import Outcome, Population, RoundCohort
from fedkeel.method.grammar import parse
from fedkeel.method.parts.mixing import bucket_means
from fedkeel.solve.span import Span
from fedkeel.tree import Tree
from method.players import equal, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend

ORACLE = np.load(Path(__file__).parents[1] / "oracles" / "byzfl_aggregation_a.npz")
CASES = range(int(ORACLE["n_cases"]))
LR = 0.3
COHORTS = [[0, 1, 2, 3, 4, 5, 6], [1, 3, 4], [0, 2, 3, 4, 6]]


def reduce(expression: str, rows: np.ndarray, state: dict | None = None) -> Vector:
    """What a method's cohort transforms and reduction make of rows [K, D] in two tensors."""
    plan = parse(expression, weights="uniform")
    half = rows.shape[1] // 2
    tensors: Tree = {"b": torch.from_numpy(rows[:, :half]), "w": torch.from_numpy(rows[:, half:])}
    count = len(rows)
    cohort = RoundCohort(
        *(np.arange(count), np.ones(count) / count, 0.1, 0, Population(count, count)),
        *(("b", "w"), 0),
        state=state or {},
    )
    span = Span(tensors)
    for part in plan.cohort_transforms:
        span = part.transform_cohort(span, cohort)
    found = plan.reduction.reduce(span, cohort)
    return np.concatenate([found["b"].numpy(), found["w"].numpy()])


def case(number: int, name: str) -> np.ndarray:
    return ORACLE[f"case{number}.{name}"]


def beta(number: int) -> float:
    return int(case(number, "f")) / len(case(number, "vectors"))


def near(found: Vector, expected: Vector) -> None:
    np.testing.assert_allclose(
        found, expected, rtol=0.0, atol=1e-10 * max(1, np.abs(expected).max())
    )


@pytest.mark.parametrize("number", CASES)
def test_byzfl(number: int) -> None:
    rows, share = case(number, "vectors"), beta(number)
    krum = f"krum(beta={share}, neighbours='n-f-1')"
    proved = 2 * int(case(number, "f")) + 3 <= len(rows)  # else ours counts on fewer
    if proved and not case(number, "krum_tie"):
        near(reduce(krum, rows), case(number, "krum"))
        near(reduce(f"krum(beta={share})", rows), rows[int(case(number, "krum_index_n_f_2"))])
    if proved and not case(number, "multikrum_tie"):
        near(reduce(f"multi{krum}", rows), case(number, "multikrum"))
    near(reduce("geomedian(nu=0.1, steps=3)", rows), case(number, "geometric_median"))
    near(reduce("geomedian(nu=0.1, steps=60)", rows), case(number, "geometric_median_long"))
    if not case(number, "nnm_tie").any():
        near(reduce(f"nnm(beta={share})+median", rows), case(number, "nnm_then_median"))
        trimmed = f"nnm(beta={share})+trimmed_mean(beta={share})"
        near(reduce(trimmed, rows), case(number, "nnm_then_trimmed_mean"))
    near(bucket_means(case(number, "bucketing_permutation"), 2) @ rows, case(number, "bucketing"))


@each("number", CASES)
@each(("steps", "name"), [(1, ""), (4, "_long")])
def test_byzfl_clips_around_its_last_aggregate(number: int, steps: int, name: str) -> None:
    part = parse(f"cclip(tau=1.5, steps={steps})").reduction
    rows = case(number, "vectors")
    state = {"center": {"w": torch.zeros(rows.shape[1], dtype=torch.float64)}}
    for call in range(3):
        count = len(rows)
        cohort = RoundCohort(
            *(np.arange(count), np.ones(count) / count, 0.1, call, Population(count, count)),
            *(("w",), 0),
            state=state,
        )
        span = Span({"w": torch.from_numpy(rows + 0.1 * call)})
        found = part.reduce(span, cohort)
        near(found["w"].numpy(), case(number, f"centered_clipping{name}.call{call}"))
        state = part.next_server(Outcome({}, {}, span, cohort))  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(4))
def test_flower(seed: int) -> None:
    flower = pytest.importorskip("flwr.server.strategy.aggregate")
    rows = np.random.default_rng(seed).normal(size=(11, 6))
    rows[:2] += 5.0
    share = 2 / 11

    def sent() -> list:
        return [([row[:3], row[3:]], 1) for row in rows]

    krum = flower.aggregate_krum(sent(), 2, 0)
    near(reduce(f"krum(beta={share})", rows), np.concatenate(krum))
    multi = flower.aggregate_krum(sent(), 2, 5)
    near(reduce(f"multikrum(beta={share}, keep=5)", rows), np.concatenate(multi))
    bulyan = flower.aggregate_bulyan(sent(), 2, flower.aggregate_krum, to_keep=0)
    near(reduce(f"bulyan(beta={share})", rows), np.concatenate(bulyan))


# --- restatements --------------------------------------------------------------------------------


def krum_order(rows: list[Vector], f: int) -> list[int]:
    """Section 4: the sum of the squared distances to the n - f - 2 nearest others."""
    scores = []
    for i, a in enumerate(rows):
        others = sorted(float((a - b) @ (a - b)) for j, b in enumerate(rows) if j != i)
        scores.append(sum(others[: max(1, len(rows) - f - 2)]))
    return sorted(range(len(rows)), key=lambda i: (scores[i], i))


def multikrum(rows: list[Vector], f: int) -> Vector:
    f = max(0, min(f, (len(rows) - 3) // 2))
    return np.mean([rows[i] for i in krum_order(rows, f)[: len(rows) - f]], axis=0)


def krum(rows: list[Vector], f: int) -> Vector:
    return rows[krum_order(rows, max(0, min(f, (len(rows) - 3) // 2)))[0]]


def bulyan(rows: list[Vector], f: int) -> Vector:
    """Krum one after the other, then the values nearest to the median of each entry."""
    f, chosen, left = max(0, min(f, (len(rows) - 3) // 4)), [], list(rows)
    for _ in range(len(rows) - 2 * f):
        chosen.append(left.pop(krum_order(left, f)[0]) if len(left) > 1 else left.pop())
    out = []
    for values in np.array(chosen).T:
        nearest = sorted(values, key=lambda v: abs(v - np.median(values)))
        out.append(np.mean(nearest[: len(rows) - 4 * f]))
    return np.array(out)


def weiszfeld(rows: list[Vector], f: int) -> Vector:
    z = np.zeros_like(rows[0])
    for _ in range(8):
        pull = [1.0 / max(0.05, float(np.linalg.norm(z - row))) for row in rows]
        z = sum(p * row for p, row in zip(pull, rows, strict=True)) / sum(pull)
    return z


def bounded(rows: list[Vector], f: int) -> Vector:
    return np.mean([row * min(1.0, 0.4 / np.linalg.norm(row)) for row in rows], axis=0)


def mixed(rows: list[Vector], f: int) -> Vector:
    """Algorithm 2: the mean of the n - f nearest, itself among them; then Krum."""
    out = []
    for a in rows:
        order = sorted(range(len(rows)), key=lambda j: float(np.linalg.norm(a - rows[j])))
        out.append(np.mean([rows[j] for j in order[: len(rows) - f]], axis=0))
    return multikrum(out, f)


RULES = {
    "krum(beta=0.3)": krum,
    "multikrum(beta=0.3)": multikrum,
    "bulyan(beta=0.2)": bulyan,
    "geomedian(nu=0.05, steps=8)": weiszfeld,
    "normbound(norm=0.4)": bounded,
    "nnm(beta=0.3)+multikrum(beta=0.3)": mixed,
}


@pytest.mark.parametrize("expression", [*RULES, "cclip(tau=0.3, steps=2)"])
def test_restated(expression: str) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6, 8, 10), epochs=1)

    def told() -> Iterator[Told]:
        x, v = setup.start, np.zeros_like(setup.start)
        for t, clients in enumerate(COHORTS):
            sent = {}
            for i in clients:
                steps = [lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t)]
                sent[i] = descend(x, iter(steps), LR) - x
            rows = [sent[i] for i in clients]
            if expression in RULES:
                share = 0.2 if "0.2" in expression else 0.3
                x = x + RULES[expression](rows, int(share * len(rows) + 1e-9))
            else:  # Algorithm 2 of Karimireddy et al.
                for _ in range(2):
                    pulls = [(r - v) * min(1.0, 0.3 / np.linalg.norm(r - v)) for r in rows]
                    v = v + np.mean(pulls, axis=0)
                x = x + v
            yield Told(x, sent)

    agree(setup.ours(expression, LR, weights="uniform"), told(), COHORTS)


# --- laws ----------------------------------------------------------------------------------------


def test_without_broken_clients_they_are_the_unweighted_mean_bit_for_bit() -> None:
    plain = play("fedavg", weights="uniform")
    for expression in (
        *("multikrum(beta=0.0)", "bulyan(beta=0.0)", "cclip(tau=1e9)", "bucketing(size=1)"),
        *("normbound(norm=1e9)", "geomedian(nu=1e9)"),
    ):
        assert equal(play(expression, weights="uniform"), plain), expression
    assert gap(play("nnm(beta=0.0)+krum", weights="uniform"), plain) < 1e-14
    assert gap(play("bucketing(size=2)", weights="uniform"), plain) < 1e-14  # 4 clients
    assert gap(play("bucketing(size=2)+geomedian", weights="uniform"), plain) > 1e-4
    assert equal(play("multikrum(keep=1)"), play("krum"))


@pytest.mark.parametrize(
    "expression",
    ["krum", "multikrum", "bulyan", "geomedian", "nnm+median", "bucketing+trimmed_mean(beta=0.4)"],
)
def test_a_few_far_updates_do_not_move_it_far(expression: str) -> None:
    rng = np.random.default_rng(0)
    honest = rng.normal(size=(12, 5))
    for size in (1e2, 1e5):
        wild = size * (1.0 + 1e-6 * rng.normal(size=(2, 5)))
        found = reduce(expression, np.concatenate([wild, honest]))
        assert np.linalg.norm(found) < 6.0
        assert np.linalg.norm(reduce("fedavg", np.concatenate([wild, honest]))) > 10.0


def test_equal_updates_stay() -> None:
    rows = np.tile([1.0, -2.0, 0.5, 3.0], (7, 1))
    for expression in ("krum", "multikrum", "bulyan", "geomedian", "nnm+krum", "bucketing+krum"):
        np.testing.assert_allclose(reduce(expression, rows), rows[0], rtol=1e-14)


def test_one_client_moves_a_bounded_aggregate_by_a_bounded_length() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(8, 6))
    state = {"center": {"b": torch.zeros(3).double(), "w": torch.zeros(3).double()}}
    for expression in ("cclip(tau=0.7)", "normbound(norm=0.35)"):
        before = reduce(expression, rows, state)
        other = rows.copy()
        other[3] = 1e6
        moved = np.linalg.norm(reduce(expression, other, state) - before)
        assert 0.0 < moved <= 2 * 0.7 / 8


@pytest.mark.parametrize("other", ["qfedavg", "feddisco", "mifa", "fedvarp", "feddyn", "fedawa"])
def test_buckets_do_not_go_with_what_knows_each_client(other: str) -> None:
    with pytest.raises(CompositionError, match="SEPARATE_UPDATES"):
        parse(f"bucketing+{other}", weights="uniform")
    assert parse("bucketing+nnm+fedgh+scaffold+momentum", weights="uniform")
