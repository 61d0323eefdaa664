"""Matrices kept as low-rank factors: the same numbers, with less to write and to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store import client_store
from fedkeel.engine.store.base import ClientStore
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.vectorized.low_rank import (
    RANK_MULTIPLE,
    LowRank,
    LowRankCodec,
    Matrix,
    dense,
    stack_records,
)
from fedkeel.errors import RunError
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.start import start
from toys import prepared, same

A, B = 6, 9


def drawn(*shape: int) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64)


def product(rank: int) -> LowRank:
    return LowRank(drawn(A, rank), drawn(rank, B))


# ---- values -------------------------------------------------------------------------------------


def test_a_low_rank_matrix_has_the_shape_of_the_dense_one() -> None:
    matrix = product(2)
    assert (matrix.shape, matrix.dtype, matrix.rank) == ((A, B), torch.float64, 2)
    torch.testing.assert_close(matrix.dense(), matrix.left @ matrix.right)
    several = LowRank(*(torch.stack([t, 2 * t]) for t in (matrix.left, matrix.right)))
    assert several.shape == (2, A, B)
    torch.testing.assert_close(several.dense(), torch.stack([matrix.dense(), 4 * matrix.dense()]))


def test_the_state_of_a_record_is_dense() -> None:
    record = ClientRecord({"c/b": drawn(3), "c/w": product(2), "d/u": drawn(A, B)})
    state = record.state
    assert list(state) == ["c", "d"]
    assert list(state["c"]) == ["b", "w"]
    assert torch.equal(state["c"]["w"], product(2).dense())


def records(*values: dict[str, Matrix]) -> list[ClientRecord]:
    return [ClientRecord(item) for item in values]


@pytest.mark.parametrize(("rank", "filled"), [(1, 16), (20, 24)])
def test_ranks_of_a_group_are_filled_up_with_zeros(rank: int, filled: int) -> None:
    """Zeros change no product; few ranks mean that few shapes are compiled."""
    new = torch.zeros(A, B, dtype=torch.float64)
    rows = records(
        {"w": new, "b": drawn(3)},
        {"b": drawn(3), "w": product(RANK_MULTIPLE + 1)},
        {"w": product(2), "b": drawn(3)},
    )
    stacked = stack_records(rows, len(rows), rank, {"w"})
    matrix = stacked["w"]
    assert isinstance(matrix, LowRank)
    assert (matrix.left.shape, matrix.right.shape) == ((3, A, filled), (3, filled, B))
    expected = torch.stack([dense(row.values["w"]) for row in rows])
    torch.testing.assert_close(matrix.dense(), expected)
    assert stacked["b"].shape == (3, 3)


@pytest.mark.parametrize(("rank", "low"), [(2, True), (30, False)])
def test_zeros_of_new_clients_are_low_rank_if_the_round_will_make_them_so(
    rank: int, low: bool
) -> None:
    new = ClientRecord({"w": torch.zeros(40, 50), "b": torch.zeros(3)})
    stacked = stack_records([new, new], 2, rank, {"w"})
    assert isinstance(stacked["w"], LowRank) == low
    assert torch.equal(dense(stacked["w"]), torch.zeros(2, 40, 50))
    assert torch.equal(stacked["b"], torch.zeros(2, 3))  # a vector has no rank


def test_only_matrices_of_the_named_parts_become_low_rank() -> None:
    """Not what another part keeps, such as a mask that is not set yet."""
    new = ClientRecord({"c/w": torch.zeros(40, 50), "d/w": torch.zeros(40, 50, dtype=torch.bool)})
    stacked = stack_records([new, new], 2, 2, {"c"})
    assert list(stacked) == ["c/w", "d/w"]
    assert isinstance(stacked["c/w"], LowRank)
    assert stacked["d/w"].dtype == torch.bool


def test_clients_that_keep_different_things_are_refused() -> None:
    rows = records({"w": drawn(A, B)}, {"w": drawn(A, B), "b": drawn(3)})
    with pytest.raises(ValueError, match="different things"):
        stack_records(rows, 2, 1, {"w"})


@pytest.mark.parametrize("first", [0, 1])
def test_one_dense_matrix_makes_the_group_dense(first: int) -> None:
    both = records({"w": product(2)}, {"w": drawn(A, B)})
    rows = [both[first], both[1 - first]]
    stacked = stack_records(rows, 2, 1, {"w"})
    expected = torch.stack([dense(row.values["w"]) for row in rows])
    assert isinstance(stacked["w"], torch.Tensor)
    torch.testing.assert_close(stacked["w"], expected)


# ---- the store ----------------------------------------------------------------------------------

SPEC = {"c/b": TensorSpec((3,), torch.float64), "c/w": TensorSpec((A, B), torch.float64)}
Make = Callable[[], ClientStore]


def low_rank_store(file: Path | None) -> ClientStore:
    return client_store(SPEC, 8, private_memory, file, None, LowRankCodec(["c/w"]))


@pytest.fixture(params=["memory", "disk"])
def new(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Make a store, all of them in the same place."""
    return lambda: low_rank_store(None if request.param == "memory" else tmp_path / "rows.bin")


def rows_of(rank: int, clients: int = 2) -> ClientRecord:
    """Rows of clients, with a dense matrix (rank 0) or a low-rank one."""

    def several(tensor: Tensor) -> Tensor:
        return torch.stack([(1 + i) * tensor for i in range(clients)])

    matrix = product(rank).map(several) if rank else several(drawn(A, B))
    return ClientRecord({"c/b": several(drawn(3)), "c/w": matrix})


def check(store: ClientStore, client: int, rank: int, lane: int = 0) -> None:
    """Check that a client's row is what was written, as it was written and dense."""
    expected, record, state = rows_of(rank).values, store.read(client), store.read_state(client)
    assert record is not None
    assert state is not None
    assert list(record.values) == list(expected)
    assert torch.equal(record.values["c/b"], expected["c/b"][lane])
    torch.testing.assert_close(state["c"]["w"], dense(expected["c/w"])[lane])
    matrix = record.values["c/w"]
    assert isinstance(matrix, LowRank) == (rank > 0)
    if isinstance(matrix, LowRank):
        assert torch.equal(matrix.left, expected["c/w"].left[lane])
        assert torch.equal(matrix.right, expected["c/w"].right[lane])


def test_dense_and_low_rank_rows_take_turns_in_a_slot(new: Make) -> None:
    store = new()
    for rank in (2, 0, 3, 1, 0):
        store.replace(np.array([4, 1]), rows_of(rank))
        check(store, 4, rank)
        check(store, 1, rank, lane=1)
        assert store.read(0) is None
    store.replace(np.array([4]), rows_of(2, clients=1))
    check(store, 4, 2)
    check(store, 1, 0, lane=1)


def test_rows_that_differ_in_form_are_not_read_together(new: Make) -> None:
    store = new()
    store.replace(np.array([4, 1]), rows_of(2))
    with pytest.raises(ValueError, match="differ in form"):
        store.read_rows(np.array([4, 1]))


def test_a_store_without_a_codec_keeps_low_rank_matrices_dense(tmp_path: Path) -> None:
    for file in (None, tmp_path / "rows.bin"):
        store = client_store(SPEC, 8, private_memory, file)
        store.replace(np.array([4, 1]), rows_of(2))
        state = store.read_state(1)
        assert state is not None
        torch.testing.assert_close(state["c"]["w"], 4 * product(2).dense())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_row_cut_short_is_noticed_when_it_is_read(rank: int, tmp_path: Path) -> None:
    store = low_rank_store(tmp_path / "rows.bin")
    store.replace(np.array([4, 1]), rows_of(rank))
    with (tmp_path / "rows.bin").open("r+b") as file:
        file.truncate(store._layout.nbytes + 20)
    check(store, 4, rank)
    with pytest.raises(RunError, match="cannot be read"):
        store.read(1)


def test_a_checkpoint_holds_low_rank_rows(new: Make) -> None:
    store = new()
    store.replace(np.array([4, 1]), rows_of(2))
    store.replace(np.array([6, 5]), rows_of(0))
    arrays = store.snapshot()
    store.snapshot_saved()
    restored = new()
    restored.restore(arrays)
    check(restored, 4, 2)
    check(restored, 1, 2, lane=1)
    check(restored, 6, 0)


def test_rows_in_memory_go_on_in_a_file(tmp_path: Path) -> None:
    store, other = low_rank_store(None), low_rank_store(tmp_path / "rows.bin")
    store.replace(np.array([4, 1]), rows_of(2))
    store.replace(np.array([6, 5]), rows_of(0))
    arrays = store.snapshot()
    other.restore(arrays)
    check(other, 1, 2, lane=1)
    check(other, 6, 0)
    other.restore({name.replace("header", "@sides"): rows for name, rows in arrays.items()})
    check(other, 1, 2, lane=1)  # from an earlier version


def test_rows_in_memory_go_on_with_or_without_a_codec() -> None:
    """Without one, only dense rows can be read."""
    for rank in (0, 2):
        store, plain = low_rank_store(None), client_store(SPEC, 8, private_memory)
        store.replace(np.array([4, 1]), rows_of(rank))
        if rank:
            with pytest.raises(RunError, match="cannot be read"):
                plain.restore(store.snapshot())
            continue
        plain.restore(store.snapshot())
        check(plain, 4, 0)
        store.restore(plain.snapshot())
        check(store, 1, 0, lane=1)


def test_a_file_that_lost_its_end_is_noticed(tmp_path: Path) -> None:
    """Although the last row ends with factors, which do not fill their place."""
    file = tmp_path / "rows.bin"
    store = low_rank_store(file)
    store.replace(np.array([4, 1]), rows_of(1))
    arrays = store.snapshot()
    assert file.stat().st_size == 2 * store._layout.nbytes
    with file.open("r+b") as stream:
        stream.truncate(2 * store._layout.nbytes - 1)
    with pytest.raises(RunError, match="cannot be read"):
        low_rank_store(file).restore(arrays)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    """Its rows do not begin with a header."""
    before = client_store(SPEC, 8, private_memory, tmp_path / "rows.bin")
    before.replace(np.array([4, 1, 2]), rows_of(0, clients=3))
    arrays = before.snapshot()
    for saved in (arrays, {k: v for k, v in arrays.items() if k != "bytes"}):
        with pytest.raises(RunError, match="cannot be read"):
            low_rank_store(tmp_path / "rows.bin").restore(saved)


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
    """Whether matrices come as low-rank ones, each time that rows are written."""
    found: list[bool] = []
    write = ClientStore.write

    def watched(self: ClientStore, clients: np.ndarray, record: ClientRecord) -> None:
        found.append(any(isinstance(value, LowRank) for value in record.values.values()))
        write(self, clients, record)

    monkeypatch.setattr(ClientStore, "write", watched)
    return found


@pytest.mark.parametrize("where", [pytest.param("memory", marks=pytest.mark.slow), "disk"])
@pytest.mark.parametrize(
    ("method", "momentum", "thin"),
    [
        ("scaffold", 0.0, True),
        pytest.param("scaffold", 0.9, True, marks=pytest.mark.slow),  # which begins with nothing
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
    assert not all(kinds)  # a client that trains alone keeps a matrix
    for name, one in found.params.items():
        torch.testing.assert_close(one, expected.params[name], rtol=0, atol=1e-12)


def test_what_older_rounds_have_a_share_in_is_kept_as_it_is(kinds: list[bool]) -> None:
    """FedDyn's h_k would become thicker with each round."""
    start(ready("feddyn"))
    assert kinds
    assert not any(kinds)


class StopAfter(Callback):
    """Interrupts a run after a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round == self.round:
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", [pytest.param("memory", marks=pytest.mark.slow), "disk"])
def test_a_run_that_was_ended_goes_on_with_the_same_bits(where: str, tmp_path: Path) -> None:
    expected = start(ready(state=where))
    for last in (2, 3, 5):
        with pytest.raises(KeyboardInterrupt):
            start(ready(state=where), tmp_path / "run", resume=True, callbacks=[StopAfter(last)])
    assert same(start(ready(state=where), tmp_path / "run", resume=True), expected)


@pytest.mark.parametrize("where", ["memory", pytest.param("disk", marks=pytest.mark.slow)])
def test_another_engine_may_go_on(where: str, tmp_path: Path) -> None:
    expected = start(ready(kind="sequential"))
    with pytest.raises(KeyboardInterrupt):
        start(ready(state=where), tmp_path / "run", callbacks=[StopAfter(3)])
    found = start(ready(kind="sequential", state=where), tmp_path / "run", resume=True)
    for name, one in found.params.items():
        torch.testing.assert_close(one, expected.params[name], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_workers_keep_products_too(tmp_path: Path) -> None:
    one = start(ready(workers=1, state="disk"))
    two = start(ready(workers=2, parallel_clients=3, state="disk"), tmp_path / "run")
    for name, tensor in two.params.items():
        torch.testing.assert_close(tensor, one.params[name], rtol=0, atol=1e-12)
