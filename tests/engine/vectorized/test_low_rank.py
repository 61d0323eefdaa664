"""Matrices that are kept as products: the same numbers, with less to write and to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.engine.buffers import private
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store import client_store
from fedkeel.engine.store.base import ClientStore
from fedkeel.engine.vectorized.low_rank import LEFT, RIGHT, STEP, beside, forms, whole
from fedkeel.errors import RunError
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.progress import Silent
from fedkeel.runner.start import start
from fedkeel.tree import State, walk
from toys import prepared, same

A, B = 6, 9


def drawn(*shape: int) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64)


def product(side: int, name: str = "w") -> dict[str, Tensor]:
    return {name + LEFT: drawn(A, side), name + RIGHT: drawn(side, B)}


# ---- values -------------------------------------------------------------------------------------


def test_a_state_with_every_matrix_made() -> None:
    own = product(2)
    state: State = {"c": {"b": drawn(3), **own, "u": drawn(A, B)}, "n": torch.tensor(1)}
    found = dict(walk(whole(state)))
    assert list(found) == ["c/b", "c/w", "c/u", "n"]  # in their order
    torch.testing.assert_close(found["c/w"], own["w" + LEFT] @ own["w" + RIGHT])
    lanes = whole({k: torch.stack([t, 2 * t]) for k, t in own.items()})
    torch.testing.assert_close(lanes["w"], torch.stack([found["c/w"], 4 * found["c/w"]]))
    f = torch.float64
    given = {
        "w" + LEFT: TensorSpec((A, 2), f),
        "w" + RIGHT: TensorSpec((2, B), f),
        "b": TensorSpec((3,), f),
    }
    assert forms(given) == {"w": TensorSpec((A, B), f), "b": TensorSpec((3,), f)}


@pytest.mark.parametrize(("side", "filled"), [(1, 16), (20, 24)])
def test_side_by_side_sides_are_filled_up(side: int, filled: int) -> None:
    """With nothing, which changes no product, to a multiple: so that few forms are recorded."""
    new = torch.zeros(A, B, dtype=torch.float64)
    rows = [
        {"w": new, "b": drawn(3)},
        {"b": drawn(3), **product(STEP + 1)},
        {**product(2), "b": drawn(3)},
    ]
    found = beside(rows, len(rows), side, {"w"})
    assert (found["w" + LEFT].shape, found["w" + RIGHT].shape) == ((3, A, filled), (3, filled, B))
    expected = [whole(row)["w"] for row in rows]
    torch.testing.assert_close(whole(found)["w"], torch.stack(expected))
    assert found["b"].shape == (3, 3)


@pytest.mark.parametrize(("side", "thin"), [(2, True), (30, False)])
def test_new_clients_begin_as_they_will_go_on(side: int, thin: bool) -> None:
    """With products, where a round's examples are few beside the matrix."""
    new = {"w": torch.zeros(40, 50), "b": torch.zeros(3)}
    found = beside([new, new], 2, side, {"w"})
    assert ("w" + LEFT in found) == thin
    assert torch.equal(whole(found)["w"], torch.zeros(2, 40, 50))
    assert torch.equal(found["b"], torch.zeros(2, 3))  # a vector is no matrix


def test_only_what_is_renewed_becomes_a_product() -> None:
    """Not what another part keeps, or a mask that is not set yet."""
    new = {"c/w": torch.zeros(40, 50), "d/w": torch.zeros(40, 50, dtype=torch.bool)}
    found = beside([new, new], 2, 2, {"c"})
    assert list(found) == ["c/w" + LEFT, "c/w" + RIGHT, "d/w"]
    assert found["d/w"].dtype == torch.bool


def test_clients_that_keep_different_things_are_told() -> None:
    with pytest.raises(ValueError, match="different things"):
        beside([{"w": drawn(A, B)}, {"w": drawn(A, B), "b": drawn(3)}], 2, 1, {"w"})


@pytest.mark.parametrize("first", [0, 1])
def test_beside_a_matrix_all_are_made(first: int) -> None:
    both = [product(2), {"w": drawn(A, B)}]
    rows = [both[first], both[1 - first]]
    found = beside(rows, 2, 1, {"w"})
    assert list(found) == ["w"]
    torch.testing.assert_close(found["w"], torch.stack([whole(row)["w"] for row in rows]))


# ---- the store ----------------------------------------------------------------------------------

SPEC = {"c/b": TensorSpec((3,), torch.float64), "c/w": TensorSpec((A, B), torch.float64)}
Make = Callable[[], ClientStore]


def store(file: Path | None) -> ClientStore:
    return client_store(SPEC, 8, private, file, None, ["c/w"])


@pytest.fixture(params=["memory", "disk"])
def new(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Make a store, all of them in the same place."""
    return lambda: store(None if request.param == "memory" else tmp_path / "rows.bin")


def state(side: int, clients: int = 2) -> State:
    """Rows of clients, with a matrix or a product."""
    own = product(side) if side else {"w": drawn(A, B)}
    each = {"b": drawn(3), **own}
    return {"c": {k: torch.stack([(1 + i) * t for i in range(clients)]) for k, t in each.items()}}


def check(one: ClientStore, client: int, side: int, lane: int = 0) -> None:
    """Check that a client's row is what was written, as it was written and with matrices made."""
    rows = state(side)["c"]
    assert isinstance(rows, dict)
    kept, made = one.kept(client), one.get(client)
    assert kept is not None
    assert made is not None
    assert set(kept["c"]) == set(rows)
    for name, tensor in rows.items():
        assert torch.equal(kept["c"][name], tensor[lane])
    for name, tensor in whole(rows).items():
        torch.testing.assert_close(made["c"][name], tensor[lane])


def test_rows_of_both_kinds_take_turns_in_a_slot(new: Make) -> None:
    one = new()
    for side in (2, 0, 3, 1, 0):
        one.put(np.array([4, 1]), state(side))
        check(one, 4, side)
        check(one, 1, side, lane=1)
        assert one.kept(0) is None
    one.put(np.array([4]), state(2, clients=1))
    check(one, 4, 2)
    check(one, 1, 0, lane=1)


def test_rows_that_differ_in_form_are_not_read_together(new: Make) -> None:
    one = new()
    one.put(np.array([4, 1]), state(2))
    with pytest.raises(ValueError, match="differ in form"):
        one.rows(np.array([4, 1]))


@pytest.mark.parametrize("side", [0, 2])
def test_a_row_cut_short_is_seen_where_it_is_read(side: int, tmp_path: Path) -> None:
    one = store(tmp_path / "rows.bin")
    one.put(np.array([4, 1]), state(side))
    with (tmp_path / "rows.bin").open("r+b") as opened:
        opened.truncate(one._layout.nbytes + 20)
    check(one, 4, side)
    with pytest.raises(RunError, match="cannot be read"):
        one.kept(1)


def test_a_checkpoint_holds_products(new: Make) -> None:
    one = new()
    one.put(np.array([4, 1]), state(2))
    one.put(np.array([6, 5]), state(0))
    arrays = one.snapshot()
    one.saved()
    again = new()
    again.restore(arrays)
    check(again, 4, 2)
    check(again, 1, 2, lane=1)
    check(again, 6, 0)


def test_what_was_in_memory_goes_on_in_a_file(tmp_path: Path) -> None:
    one, other = store(None), store(tmp_path / "rows.bin")
    one.put(np.array([4, 1]), state(2))
    one.put(np.array([6, 5]), state(0))
    other.restore(one.snapshot())
    check(other, 1, 2, lane=1)
    check(other, 6, 0)


def test_a_file_that_lost_its_end_is_seen(tmp_path: Path) -> None:
    """Though the last row ends with a product, which does not fill its place."""
    file = tmp_path / "rows.bin"
    one = store(file)
    one.put(np.array([4, 1]), state(1))
    arrays = one.snapshot()
    assert file.stat().st_size == 2 * one._layout.nbytes
    with file.open("r+b") as opened:
        opened.truncate(2 * one._layout.nbytes - 1)
    with pytest.raises(RunError, match="cannot be read"):
        store(file).restore(arrays)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    """Whose rows do not begin with the sides of their products."""
    before = client_store(SPEC, 8, private, tmp_path / "rows.bin")
    before.put(np.array([4, 1, 2]), state(0, clients=3))
    arrays = before.snapshot()
    for saved in (arrays, {k: v for k, v in arrays.items() if k != "bytes"}):
        with pytest.raises(RunError, match="cannot be read"):
            store(tmp_path / "rows.bin").restore(saved)


# ---- runs ---------------------------------------------------------------------------------------

WIDE = 150


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 3))


def clients() -> fk.Federation:
    """Of one and of two steps."""
    random = np.random.default_rng(0)
    sizes = [4, 8, 8, 4, 8, 8, 8, 4]
    y = random.integers(0, 3, sum(sizes))
    x = random.normal(size=(len(y), WIDE)) + y[:, None] * 0.3
    return fk.federation(
        fk.dataset(x.astype(np.float32), y, classes=3),
        np.split(np.arange(len(y)), np.cumsum(sizes)[:-1]),
    )


def ready(
    method: str = "scaffold", kind: str = "vectorized", momentum: float = 0.0, **engine: object
) -> Prepared:
    chunk = {"parallel_clients": 3, "workers": 1} if kind == "vectorized" else {}
    data = clients()
    return prepared(
        method,
        net,
        clients=data,
        test=fk.Dataset(data.data.x[:20].double(), data.data.y[:20], 3),
        local=fk.Local(lr=0.05, epochs=1, batch_size=4, momentum=momentum),
        per_round=5,
        rounds=6,
        kind=kind,
        dtype="float64",
        **{**chunk, **engine},
    )


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the layer's matrices come as products, each time that clients' rows are written."""
    found: list[bool] = []
    for kind in (type(store(None)), type(store(Path("unused")))):
        write = kind.write

        def watched(self: ClientStore, clients: np.ndarray, state: State, write=write) -> None:
            found.append(any(path.endswith(LEFT) for path, _ in walk(state)))
            write(self, clients, state)

        monkeypatch.setattr(kind, "write", watched)
    return found


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize(
    ("method", "momentum", "thin"),
    [
        ("scaffold", 0.0, True),
        ("scaffold", 0.9, True),  # which begins with nothing
        ("scaffold+fedprox(mu=0.1)", 0.0, False),  # whose pull is not thin
    ],
)
def test_it_is_the_same_run(
    method: str, momentum: float, thin: bool, where: str, kinds: list[bool]
) -> None:
    expected = start(ready(method, "sequential", momentum))
    assert not any(kinds)
    kinds.clear()
    found = start(ready(method, momentum=momentum, state=where))
    assert any(kinds) == thin
    assert not all(kinds)  # a client left alone keeps a matrix
    for name, one in found.params.items():
        torch.testing.assert_close(one, expected.params[name], rtol=0, atol=1e-12)


def test_what_older_rounds_have_a_share_in_is_kept_as_it_is(kinds: list[bool]) -> None:
    """FedDyn's h_k would become thicker with each round."""
    start(ready("feddyn"))
    assert kinds
    assert not any(kinds)


class StopAfter(Silent):
    """Interrupts a run after a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def row(self, run: str, row: RoundRecord) -> None:
        if row.round == self.round:
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_run_that_was_ended_goes_on_with_the_same_bits(where: str, tmp_path: Path) -> None:
    expected = start(ready(state=where))
    for last in (2, 3, 5):
        with pytest.raises(KeyboardInterrupt):
            start(ready(state=where), tmp_path / "run", resume=True, watcher=StopAfter(last))
    assert same(start(ready(state=where), tmp_path / "run", resume=True), expected)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_another_engine_may_go_on(where: str, tmp_path: Path) -> None:
    expected = start(ready(kind="sequential"))
    with pytest.raises(KeyboardInterrupt):
        start(ready(state=where), tmp_path / "run", watcher=StopAfter(3))
    found = start(ready(kind="sequential", state=where), tmp_path / "run", resume=True)
    for name, one in found.params.items():
        torch.testing.assert_close(one, expected.params[name], rtol=0, atol=1e-12)


def test_workers_keep_products_too(tmp_path: Path) -> None:
    one = start(ready(workers=1, state="disk"))
    two = start(ready(workers=2, parallel_clients=3, state="disk"), tmp_path / "run")
    for name, tensor in two.params.items():
        torch.testing.assert_close(tensor, one.params[name], rtol=0, atol=1e-12)
