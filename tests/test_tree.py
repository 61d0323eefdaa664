"""Arithmetic on named tensors, against the same on numbers."""

from __future__ import annotations

import pytest
import torch

from each import each
from fedkeel import tree

A = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0]), "s": torch.tensor(6.0)}
B = {"s": torch.tensor(-1.0), "w": torch.full((2, 2), 10.0), "b": torch.tensor([0.5])}
"""The same names in another order: arithmetic goes by name, and answers in the order of A."""
STATE = {"a": {"w": torch.ones(2), "deep": {"n": torch.tensor(3)}}, "c": torch.zeros(1)}


def values(found: dict) -> dict:
    assert list(found) == list(A)
    return {k: v.tolist() for k, v in found.items()}


@each(
    ("found", "w", "b", "s"),
    [
        (tree.add(A, B), [[11.0, 12.0], [13.0, 14.0]], [5.5], 5.0),
        (tree.add(A, B, -0.5), [[-4.0, -3.0], [-2.0, -1.0]], [4.75], 6.5),
        (tree.add(A, B, torch.tensor(2.0)), [[21.0, 22.0], [23.0, 24.0]], [6.0], 4.0),
        (tree.sub(A, B), [[-9.0, -8.0], [-7.0, -6.0]], [4.5], 7.0),
        (tree.scale(A, 2.0), [[2.0, 4.0], [6.0, 8.0]], [10.0], 12.0),
        (tree.scale(A, torch.tensor(0.5)), [[0.5, 1.0], [1.5, 2.0]], [2.5], 3.0),
        (tree.map(lambda a, b: 2.0 * a - b, A, B), [[-8.0, -6.0], [-4.0, -2.0]], [9.5], 13.0),
        (tree.map(torch.neg, A), [[-1.0, -2.0], [-3.0, -4.0]], [-5.0], -6.0),
        (tree.full_like(A, 7.0), [[7.0, 7.0], [7.0, 7.0]], [7.0], 7.0),
        (tree.pick(B, A), [[10.0, 10.0], [10.0, 10.0]], [0.5], -1.0),
        (tree.blend(A, B, 0.25), [[7.75, 8.0], [8.25, 8.5]], [1.625], 0.75),
        (tree.zeros_like(A), [[0.0, 0.0], [0.0, 0.0]], [0.0], 0.0),
        (tree.clone(A), A["w"].tolist(), [5.0], 6.0),
    ],
)
def test_arithmetic(found: dict, w: list, b: list, s: float) -> None:
    assert values(found) == {"w": w, "b": b, "s": s}


def test_the_inner_product_is_over_all_entries() -> None:
    assert float(tree.dot(A, B)) == 10.0 * (1 + 2 + 3 + 4) + 5 * 0.5 - 6
    assert tree.dot(A, B).shape == ()
    assert tree.dot(A, B) == tree.dot(B, A)


def test_nothing_shares_memory_with_what_was_given() -> None:
    for found in (tree.clone(A), tree.add(A, B), tree.scale(A, 1.0), tree.blend(A, B, 1.0)):
        for k, v in found.items():
            assert v.data_ptr() != A[k].data_ptr()


def test_types_are_kept() -> None:
    wide = {k: v.double() for k, v in A.items()}
    for found in (tree.add(wide, wide, 0.1), tree.scale(wide, 0.1), tree.zeros_like(wide)):
        assert {v.dtype for v in found.values()} == {torch.float64}


def test_a_mask_chooses_through_nested_states() -> None:
    other = tree.map_tensors(lambda t: t + 10, STATE)
    for mask, expected in ((True, STATE), (False, other)):
        found = tree.where(torch.tensor(mask), STATE, other)
        assert dict(tree.walk(found)).keys() == dict(tree.walk(STATE)).keys()
        for (_, a), (_, b) in zip(tree.walk(found), tree.walk(expected), strict=True):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype


@pytest.mark.parametrize(
    "other",
    [{"a": torch.zeros(2)}, {"a": {"w": {"x": torch.zeros(2)}}}, {"a": {}}, {}],
)
def test_a_mask_between_unlike_states_is_an_error(other: dict) -> None:
    """A name that one side lacks must not get lost."""
    with pytest.raises(TypeError, match=r"is a \w+ here and a \w+ there"):
        tree.where(torch.tensor(True), {"a": {"w": torch.zeros(2)}}, other)


def test_walking_and_back() -> None:
    flat = dict(tree.walk(STATE))
    assert list(flat) == ["a/w", "a/deep/n", "c"]
    assert dict(tree.walk(tree.unwalk(flat))) == flat
    assert tree.unwalk({}) == {}
    assert tree.unwalk(dict(tree.walk({"empty": {}}))) == {}


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b", "a"), ("a/b/c", "a/b")])
def test_a_path_cannot_be_tensor_and_state(paths: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"stands (below|above)"):
        tree.unwalk({path: torch.zeros(1) for path in paths})


def test_taking_what_a_state_holds() -> None:
    assert tree.leaves(STATE["a"], "deep") == {"n": torch.tensor(3)}
    assert tree.leaf(STATE, "c") is STATE["c"]
    for name in ("c", "none"):
        with pytest.raises(TypeError, match=r"holds no tree"):
            tree.leaves(STATE, name)
    with pytest.raises(TypeError, match="not a tree of tensors"):
        tree.leaves(STATE, "a")
    for name in ("a", "none"):
        with pytest.raises(TypeError, match="holds no tensor"):
            tree.leaf(STATE, name)


def test_sums_over_rows_leave_the_other_axes() -> None:
    rows = {"w": torch.arange(12.0).reshape(3, 2, 2), "n": torch.tensor([1.0, 2.0, 4.0])}
    found = tree.sum_rows(rows)
    assert found["w"].tolist() == [[12.0, 15.0], [18.0, 21.0]]
    assert float(found["n"]) == 7.0


def test_lengths() -> None:
    assert float(tree.norm({"w": torch.tensor([[2.0, 3.0]]), "b": torch.tensor(6.0)})) == 7.0
    a = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
    assert float(tree.factor_to(2.5, a)) == 0.5
    assert float(tree.factor_to(2.5, tree.zeros_like(a))) == 0.0
    assert tree.clip(a, 2.5)["w"].tolist() == [1.5, 0.0]
    assert tree.clip(a, torch.tensor(2.5))["b"].item() == 2.0
    for bound in (5.0, 9.0):
        assert all(torch.equal(v, a[k]) for k, v in tree.clip(a, bound).items())
    zeros = tree.clip(tree.zeros_like(a), 1.0)
    assert all(torch.equal(v, torch.zeros_like(v)) for v in zeros.values())


def test_a_map_asks_for_every_name_of_the_first_tree() -> None:
    with pytest.raises(KeyError, match="s"):
        tree.map(torch.add, A, {"w": A["w"], "b": A["b"]})


def test_sizes() -> None:
    assert tree.numel(A) == 6
    assert tree.nbytes(A) == 24
    assert tree.nbytes(STATE) == 2 * 4 + 8 + 4
    assert tree.nbytes({"mask": torch.zeros(5, dtype=torch.bool)}) == 5


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("tensor", [["body.0.w"], ["body.0.b"], ["scale"], ["head.w"], ["body.1.w"]]),
        ("layer", [["body.0.w", "body.0.b"], ["scale"], ["head.w"], ["body.1.w"]]),
        ("model", [["body.0.w", "body.0.b", "scale", "head.w", "body.1.w"]]),
    ],
)
def test_groups_of_names(groups: str, expected: list[list[str]]) -> None:
    names = ["body.0.w", "body.0.b", "scale", "head.w", "body.1.w"]
    assert tree.group_names(names, groups) == expected
    assert tree.group_names([], groups) == ([[]] if groups == "model" else [])


def test_all_of_it_can_be_vectorized() -> None:
    rows = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.ones(3)}
    one = {"w": torch.tensor([1.0, -1.0]), "b": torch.tensor(2.0)}

    def f(row: dict, keep: torch.Tensor) -> dict:
        moved = tree.add(row, one, tree.dot(row, one))
        return tree.where(keep, moved, row)

    found = torch.func.vmap(f)(rows, torch.tensor([True, False, True]))
    for k in range(3):
        row = {n: v[k] for n, v in rows.items()}
        factor = float(row["w"][0] - row["w"][1] + 2.0) if k != 1 else 0.0
        assert torch.equal(found["w"][k], row["w"] + factor * one["w"])
        assert torch.equal(found["b"][k], row["b"] + factor * one["b"])
