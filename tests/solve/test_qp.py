"""Quadratic programmes: by their optimality conditions, and by vectors of public solvers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import linprog

from each import each
from fedkeel.solve import qp
from harness import oracle
from solve.programmes import KINDS, SCALES, departure, draw, lengths, project, single

SEEDS = range(12)
C = 1e-3


def answer(M: np.ndarray, p: np.ndarray, solution: qp.Solution) -> np.ndarray:
    return p + M.T @ solution.multipliers


# --- any number of constraints ---------------------------------------------------------------


@each("scale", SCALES)
@each("kind", KINDS)
def test_a_cone_always_has_an_answer_that_meets_the_optimality_conditions(
    kind: str, scale: float
) -> None:
    for seed in SEEDS:
        M, p = draw(kind, seed, scale)
        solution = project(M, p)
        assert solution.feasible
        assert departure(M, p, 0.0, solution.multipliers) < 1e-9


@each("scale", [1.0, 1e-4, 1e4])
@each("kind", KINDS)
def test_a_margin_is_met_or_refused_as_a_linear_programme_says(kind: str, scale: float) -> None:
    for seed in SEEDS:
        M, p = draw(kind, seed, scale)
        b = np.full(len(M), 0.1 * scale**2)
        solution = project(M, p, b)
        assert solution.feasible == reachable(M, b)
        if solution.feasible:
            assert departure(M, p, b, solution.multipliers) < 1e-9
        else:
            assert not solution.multipliers.any()


def reachable(M: np.ndarray, b: np.ndarray) -> bool:
    """Whether some u has Mu >= b, by another solver on rows of length 1."""
    length = lengths(M)
    unit, lower = M / length[:, None], b / length
    size = np.abs(lower).max() or 1.0
    found = linprog(
        np.zeros(M.shape[1]), A_ub=-unit, b_ub=-lower / size, bounds=(None, None), method="highs"
    )
    return bool(found.status == 0)


@st.composite
def programmes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, point and bounds of small whole numbers: equal, opposite and zero rows are common."""
    m, d = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    numbers = hnp.arrays(np.float64, (m + 1, d), elements=st.integers(-3, 3).map(float))
    both = draw(numbers)
    bounds = draw(hnp.arrays(np.float64, m, elements=st.sampled_from([-1.0, 0.0, 0.5])))
    return both[:m], both[m], bounds


@settings(max_examples=300)
@given(programmes(), st.sampled_from(["", "_block_pivoting"]))
def test_an_answer_meets_the_optimality_conditions_or_there_is_none(
    programme: tuple[np.ndarray, np.ndarray, np.ndarray], without: str
) -> None:
    """Each constraint may have a bound of its own; both ways to solve have to do."""
    M, p, b = programme
    with pytest.MonkeyPatch.context() as patch:
        if without:
            patch.setattr(qp, without, lambda *given: None)
        cone, bounded = project(M, p), project(M, p, b)
    assert cone.feasible
    assert departure(M, p, 0.0, cone.multipliers) < 1e-9
    assert bounded.feasible == reachable(M, b)
    if bounded.feasible:
        assert departure(M, p, b, bounded.multipliers) < 1e-9


def test_the_last_resort_meets_the_optimality_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cone whose multipliers only rounding would let grow: a ridge bounds them."""
    violation = qp._violation

    def first_is_refused(*given: object) -> float:
        calls.append(given)
        return np.inf if len(calls) == 3 else violation(*given)  # two of `_polish`, then the answer

    for kind in KINDS:
        for seed in SEEDS:
            M, p = draw(kind, seed)
            length = lengths(M)
            unit, calls = M / length[:, None], []
            if not length.all() or not (unit @ p < 0.0).any():
                continue
            with monkeypatch.context() as only:
                only.setattr(qp, "_violation", first_is_refused)
                found = qp._nearest_in_cone(unit @ unit.T, -(unit @ p), 1e-13)
            assert len(calls) == 5
            assert departure(unit, p, 0.0, found) < 1e-5


@pytest.mark.parametrize("bound", [0.0, 0.1])
@pytest.mark.parametrize("rows", [3, 30, 150])
def test_pivoting_and_least_squares_have_one_answer(
    rows: int, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that lean to one side, as updates do; no second way is needed for them."""
    rng = np.random.default_rng(rows)
    M = rng.normal(size=(rows, 200)) + 0.1
    p = rng.normal(size=200)
    with monkeypatch.context() as only:
        only.setattr(qp, "_nearest_in_cone", None)
        only.setattr(qp, "_least_distance", None)
        one = project(M, p, np.full(rows, bound))
    monkeypatch.setattr(qp, "_block_pivoting", lambda *given: None)
    other = project(M, p, np.full(rows, bound))
    assert one.feasible
    assert other.feasible
    np.testing.assert_allclose(one.multipliers, other.multipliers, rtol=1e-9, atol=1e-12)


@each("kind", KINDS)
def test_a_projection_is_idempotent(kind: str) -> None:
    for seed in SEEDS:
        M, p = draw(kind, seed)
        u = answer(M, p, project(M, p))
        again = answer(M, u, project(M, u))
        assert np.linalg.norm(again - u) < 1e-8 * np.linalg.norm(p)


@each("kind", KINDS)
def test_the_answer_does_not_depend_on_the_length_or_order_of_rows(kind: str) -> None:
    for seed in SEEDS:
        M, p = draw(kind, seed)
        u = answer(M, p, project(M, p))
        rng = np.random.default_rng(seed)
        other = (M * 10.0 ** rng.uniform(-4, 4, size=(len(M), 1)))[rng.permutation(len(M))]
        v = answer(other, p, project(other, p))
        assert np.linalg.norm(u - v) < 1e-7 * np.linalg.norm(p)


def test_what_meets_the_constraints_is_left_exactly_as_it_is() -> None:
    M, p = draw("random", 0)
    M = M * np.sign(M @ p)[:, None]
    assert not project(M, p).multipliers.any()
    b = 0.5 * (M @ p)
    assert not project(M, p, b).multipliers.any()


def test_a_row_of_zeros_binds_nothing_without_a_margin_and_cannot_be_met_with_one() -> None:
    M, p = np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([-1.0, 2.0])
    np.testing.assert_allclose(answer(M, p, project(M, p)), [0.0, 2.0], atol=1e-15)
    assert not project(M, p, C).feasible
    assert project(np.zeros((3, 2)), p).feasible


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_products_that_are_not_finite_have_no_answer(value: float) -> None:
    M, p = draw("random", 0)
    gram, inner = M @ M.T, M @ p
    for at in ((0, 0), (0, 1)):
        broken = gram.copy()
        broken[at] = broken[at[::-1]] = value
        assert not qp.project(broken, inner).feasible
        assert qp.singular(broken)
    inner[0] = value
    found = qp.project(gram, inner)
    assert not found.feasible
    assert not found.multipliers.any()


@each("angle", [1e-2, 1e-3, 1e-4, 1e-5])
@each("seed", range(10))
def test_rows_that_are_almost_opposite_leave_almost_nothing(angle: float, seed: int) -> None:
    """Two half-spaces that meet in a thin wedge: the answer is near, the multipliers are large."""
    rng = np.random.default_rng(seed)
    a, side = np.linalg.qr(rng.normal(size=(6, 2)))[0].T
    M = np.stack([a + angle * side, -a + angle * side])
    p = 0.1 * a - side
    solution = project(M, p)
    assert solution.feasible
    assert np.linalg.norm(answer(M, p, solution)) < 1e-3  # exactly: the wedge's edge, which is 0
    assert departure(M, p, 0.0, solution.multipliers) < 1e-6


@pytest.mark.parametrize("angle", [0.5, 1e-1, 1e-2, 1e-3])
def test_a_margin_in_a_thin_wedge_is_met_far_out(angle: float) -> None:
    """Where both are met at once is at b / sin(angle) from the edge; the zero is nearest to it."""
    a, side = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 2)))[0].T
    M = np.stack([np.cos(angle) * a, -np.cos(angle) * a]) + np.sin(angle) * side
    solution = project(M, np.zeros(6), 0.5)
    assert solution.feasible
    expected = 0.5 / np.sin(angle) * side
    error = answer(M, np.zeros(6), solution) - expected
    assert np.linalg.norm(error) < 1e-15 / angle**2 * np.linalg.norm(expected) + 1e-14


# --- float32 ---------------------------------------------------------------------------------


@each("kind", KINDS)
def test_a_cone_has_an_answer_in_float32_too(kind: str) -> None:
    """Small tensors, where rounding decides whether rows are dependent."""
    for seed in SEEDS:
        rows, point, gram, inner, noise = single(*draw(kind, seed, 1e-2))
        solution = qp.project(gram, inner, 0.0, noise)
        assert solution.feasible
        assert departure(rows, point, 0.0, solution.multipliers) < 1e-6


def test_numbers_of_both_signs_leave_zero_in_float32() -> None:
    """A scalar parameter and clients that disagree: u >= 0 and u <= 0."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        M = rng.normal(size=(100, 1)) * 10.0 ** rng.integers(-4, 1, size=(100, 1))
        rows, point, gram, inner, noise = single(M, np.array([1.0]))
        solution = qp.project(gram, inner, 0.0, noise)
        assert solution.feasible
        assert abs(answer(rows, point, solution)[0]) < 1e-6


def test_long_float32_vectors_with_dependent_rows() -> None:
    """Products that were added up in float32, whose noise the solver is told of."""
    rng = np.random.default_rng(0)
    M = rng.normal(size=(6, 60_000))
    M[4], M[5] = M[0] + M[1], -0.5 * M[2]
    p = rng.normal(size=60_000) - 0.1 * M[0] + 0.2 * M[2]
    rows, point, gram, inner, noise = single(M, p)
    assert noise > 1e-8
    solution = qp.project(gram, inner, 0.0, noise)
    assert solution.feasible
    assert departure(rows, point, 0.0, solution.multipliers) < 1e-4
    exact = project(rows, point)
    near = answer(rows, point, solution) - answer(rows, point, exact)
    assert np.linalg.norm(near) < 1e-4 * np.linalg.norm(point)


@pytest.mark.parametrize("kind", ["random", "duplicate", "opposite", "tall", "deficient"])
def test_noise_of_a_known_size_does_not_decide(kind: str) -> None:
    """Symmetric errors of 1e-7 in the Gram matrix move the answer by no more than their root."""
    for seed in SEEDS:
        M, p = draw(kind, seed)
        rng, length = np.random.default_rng(seed), lengths(M)
        error = 1e-7 * rng.uniform(-1, 1, size=(len(M), len(M)))
        gram = M @ M.T + (error + error.T) / 2 * np.outer(length, length)
        inner = M @ p + 1e-7 * rng.uniform(-1, 1, size=len(M)) * length * np.linalg.norm(p)
        solution = qp.project(gram, inner, 0.0, noise=1e-7)
        assert solution.feasible
        assert departure(M, p, 0.0, solution.multipliers) < 5e-3


# --- vectors of public solvers ---------------------------------------------------------------


@each("case", range(30))
def test_gradmas_projection(case: int) -> None:
    """`out_tight`, not `out`: the solver's tolerance is absolute. In 23 and 24 even that is off."""
    o = oracle("gradma_qp")
    M, p = o[f"case{case}.M"], o[f"case{case}.p"]
    solution = project(M, p)
    assert departure(M, p, 0.0, solution.multipliers) < 1e-10
    if case not in (23, 24):
        size = np.linalg.norm(p) or 1.0
        u = answer(M, p, solution)
        assert np.linalg.norm(u - o[f"case{case}.out_tight"]) < 1e-9 * size


@each("case", range(20))
def test_fedgcs_server_programme(case: int) -> None:
    o = oracle("fedgc_sgc_qp")
    G, mean = o[f"case{case}.G"], o[f"case{case}.gbar"]
    np.testing.assert_allclose(o[f"case{case}.weights"] @ G, mean, atol=1e-12)
    solution = project(G, mean, float(o["C"]))
    assert solution.feasible == bool(o["feasible"][case])
    if solution.feasible:
        z, theirs = answer(G, mean, solution), o[f"case{case}.z"]
        assert np.linalg.norm(z - theirs) < 1e-9 * np.linalg.norm(theirs)
        assert (G @ z).min() >= float(o["C"]) - 1e-9
    else:
        assert not solution.multipliers.any()


# --- one constraint --------------------------------------------------------------------------


@each("seed", range(20))
def test_a_half_space_is_the_programme_of_one_row(seed: int) -> None:
    M, p = draw("random", seed)
    z = M[:1]
    for b in (0.0, C, 1.0):
        inner, norm2 = torch.tensor(z @ p)[0], torch.tensor(z @ z.T)[0, 0]
        v = float(qp.halfspace(inner, norm2, b))
        assert v == pytest.approx(max(0.0, (b - float(inner)) / float(norm2)), rel=1e-15)
        assert v == pytest.approx(float(project(z, p, b).multipliers[0]), rel=1e-9, abs=1e-12)


def test_a_half_space_keeps_its_type_and_leaves_zero_alone() -> None:
    for dtype in (torch.float32, torch.float64):
        zero = torch.zeros((), dtype=dtype)
        assert float(qp.halfspace(zero, zero, bound=1.0)) == 0.0
        found = qp.halfspace(zero - 3.0, zero + 2.0, bound=1.0)
        assert (float(found), found.dtype) == (2.0, dtype)


def test_a_half_space_can_be_vectorized() -> None:
    inner, norm2 = torch.tensor([-3.0, 5.0, -1.0]), torch.tensor([2.0, 2.0, 0.0])
    found = torch.func.vmap(lambda i, n: qp.halfspace(i, n, 1.0))(inner, norm2)
    assert found.tolist() == [2.0, 0.0, 0.0]


# --- a few constraints, by trying all sets ---------------------------------------------------


@each("scale", SCALES)
@each("kind", [k for k in KINDS if k != "tall"])
def test_trying_all_sets_meets_the_optimality_conditions(kind: str, scale: float) -> None:
    for seed in SEEDS:
        M, p = draw(kind, seed, scale, rows=4)
        found = qp.enumerate_cone(torch.from_numpy(M @ M.T), torch.from_numpy(M @ p)).numpy()
        assert departure(M, p, 0.0, found) < 1e-9


@each("seed", range(20))
def test_trying_all_sets_takes_a_margin_off_the_inner_products(seed: int) -> None:
    M, p = draw("random", seed, rows=4)
    b = np.full(len(M), 0.2)
    solution = project(M, p, b)
    found = qp.enumerate_cone(torch.from_numpy(M @ M.T), torch.from_numpy(M @ p - b)).numpy()
    if solution.feasible:
        assert departure(M, p, b, found) < 1e-9
    else:
        assert not found.any()


@pytest.mark.parametrize("scale", SCALES)
def test_trying_all_sets_gives_nothing_where_there_is_no_answer(scale: float) -> None:
    """Three directions that span the plane, all of them wanted: of no set is it true."""
    turn = 2 * np.pi / 3 * np.arange(3)
    M = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    wanting = scale * torch.tensor([-1.0, -0.1, -0.1], dtype=torch.float64)
    assert not qp.enumerate_cone(torch.from_numpy(M @ M.T), wanting).any()


def test_trying_all_sets_can_be_vectorized() -> None:
    rng = np.random.default_rng(0)
    M = torch.from_numpy(rng.normal(size=(50, 3, 4)))
    M[::5, 1] = -M[::5, 0]
    M[1::5, 2] = 0.0
    p = torch.from_numpy(rng.normal(size=(50, 4)))
    gram, inner = M @ M.mT, (M @ p[:, :, None])[:, :, 0]
    one_by_one = torch.stack([qp.enumerate_cone(g, c) for g, c in zip(gram, inner, strict=True)])
    at_once = torch.func.vmap(qp.enumerate_cone)(gram, inner)
    push = torch.einsum("kr,krd->kd", at_once - one_by_one, M)
    assert push.abs().max() < 1e-12
    assert one_by_one.count_nonzero() > 50


def test_trying_all_sets_works_in_float64_on_float32() -> None:
    """GradMA's worker after a step: the third row is the first, turned round and rounded."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        g = rng.normal(size=2000)
        M = np.stack([g, g + 1e-3 * rng.normal(size=2000), -0.05 * g])
        rows, point = torch.from_numpy(M).float(), torch.from_numpy(g).float()
        found = qp.enumerate_cone(rows @ rows.T, rows @ point)
        assert found.dtype == torch.float64
        wide, p = rows.double().numpy(), point.double().numpy()
        assert departure(wide, p, 0.0, found.numpy()) < 1e-4


def test_rounding_of_products_does_not_leave_a_vector_as_it_is() -> None:
    """Products of two opposite rows, one of which is wrong by what float32 may make of it."""
    gram, inner = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([-1.0, 1.0 - 5e-5])
    assert not qp.enumerate_cone(gram, inner).any()
    assert qp.enumerate_cone(gram, inner, solvable=True).tolist() == pytest.approx([1.0, 0.0])
