"""What is remembered of each client: a row comes to be when its client first reports, and nothing
else is touched. A file and memory hold the same bits."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import fedkeel as fk
from fedkeel.engine.client_states import CLIENTS_PREFIX
from fedkeel.engine.process.shared_memory import fork_shared_memory, private_memory, shared_segment
from fedkeel.engine.sequential import Sequential
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store import client_store
from fedkeel.engine.store.base import ClientStore
from fedkeel.engine.store.layout import RowLayout
from fedkeel.engine.store.record import ClientRecord
from fedkeel.errors import RunError
from fedkeel.method.server_round import server_message
from fedkeel.tree import walk
from toys import Net, eventually, federation, prepared

SPEC = {"scaffold/c/w": TensorSpec((5,), torch.float32), "buffers/n": TensorSpec((), torch.int64)}
ROW = 2 * 64
"""Bytes of a row in a file: each tensor starts at a multiple of 64."""


@pytest.fixture(params=["memory", "disk"])
def new(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., ClientStore]:
    """Make a store, in memory or in a file of its own."""
    names = iter(range(100))

    def make(
        clients: int,
        spec: object = SPEC,
        allocate: object = private_memory,
        most: int | None = None,
    ) -> ClientStore:
        file = None if request.param == "memory" else tmp_path / f"{next(names)}.bin"
        return client_store(spec, clients, allocate, file, most)

    return make


def stacked(*values: float) -> dict[str, object]:
    """State [K, ...] of clients, as a round gathers it."""
    rows = torch.tensor(values)
    return {
        "scaffold": {"c": {"w": rows[:, None].expand(-1, 5).clone()}},
        "buffers": {"n": rows.to(torch.int64)},
    }


def put(store: ClientStore, clients: list[int], *values: float) -> None:
    store.replace(np.array(clients), ClientRecord.of(stacked(*values)))


def values(store: ClientStore, *clients: int) -> list[float]:
    """What `put` wrote for clients, read in both ways."""
    together = store.read_rows(np.array(clients))
    alone = [store.read_state(k) for k in clients]
    for at, found in enumerate(alone):
        if found is not None:
            for path, tensor in walk(found):
                assert torch.equal(tensor, dict(walk(together))[path][at])
    assert torch.equal(together["buffers"]["n"].float(), together["scaffold"]["c"]["w"][:, 4])
    return together["buffers"]["n"].tolist()


@pytest.mark.parametrize("allocate", [private_memory, fork_shared_memory, shared_segment])
def test_a_client_has_nothing_before_it_reports(
    new: Callable[..., ClientStore], allocate: Callable[[int], torch.Tensor]
) -> None:
    store = new(6, allocate=allocate)
    assert [store.read_state(k) for k in range(6)] == [None] * 6
    put(store, [1, 4], 10.0, 40.0)
    assert [k for k in range(6) if store.read_state(k) is not None] == [1, 4]
    assert store.has_row.tolist() == [False, True, False, False, True, False]
    found = store.read_state(4)
    assert (found["scaffold"]["c"]["w"] == 40.0).all()
    assert found["buffers"]["n"] == 40
    assert values(store, 4, 0, 1, 5) == [40, 0, 10, 0]  # in the order asked for, zeros for nobody


def test_only_the_rows_that_are_kept_are_taken(new: Callable[..., ClientStore]) -> None:
    """A client whose update was left out keeps what it had."""
    store = new(6)
    put(store, [0, 2, 5], 1.0, 2.0, 5.0)
    store.reserve(np.array([2, 3, 5]))
    store.write(np.array([2]), ClientRecord.of(stacked(20.0)))
    store.write(np.array([5, 3]), ClientRecord.of(stacked(-1.0, 30.0)))
    assert values(store, 0, 2, 3, 5) == [1, 2, 0, 5]  # until the round is taken
    store.commit(np.array([2, 3]))
    assert values(store, 0, 2, 3, 5) == [1, 20, 30, 5]


def test_a_round_that_is_not_taken_leaves_nothing(new: Callable[..., ClientStore]) -> None:
    """As a measurement, or one that is made again; and its room is given out again."""
    store = new(4, most=2)
    put(store, [0, 1], 1.0, 2.0)
    for value in range(20):
        store.reserve(np.array([1, 3]))
        store.write(np.array([3, 1]), ClientRecord.of(stacked(-value, -value)))
    assert values(store, 0, 1, 3) == [1, 2, 0]
    store.write(np.array([1, 3]), ClientRecord.of(stacked(7.0, 8.0)))  # over what was written
    store.commit(np.array([1, 3]))
    put(store, [2, 0], 9.0, 10.0)
    assert values(store, 0, 1, 2, 3) == [10, 7, 9, 8]
    assert store._slot_count == 5  # those of four clients, and one that has been left


@pytest.mark.parametrize(
    ("how", "allocate"),
    [
        ("fork", fork_shared_memory),
        pytest.param("spawn", shared_segment, marks=pytest.mark.slow),
    ],
)
def test_another_process_writes(
    new: Callable[..., ClientStore], how: str, allocate: Callable[[int], torch.Tensor]
) -> None:
    store = new(6, allocate=allocate)
    put(store, [3], 3.0)
    store.reserve(np.array([2, 3]))
    process = torch.multiprocessing.get_context(how).Process(target=_write, args=(store,))
    process.start()
    process.join(60)
    assert values(store, 2, 3) == [0, 3]
    store.commit(np.array([2, 3]))
    assert values(store, 2, 3) == [-2, -3]


def test_a_row_for_which_no_room_was_made_is_refused(new: Callable[..., ClientStore]) -> None:
    """It would be written over another client's."""
    store = new(4)
    put(store, [0, 1], 1.0, 2.0)
    store.reserve(np.array([1]))
    for use in (store.write, lambda clients, _: store.commit(clients)):
        with pytest.raises(ValueError, match="no slot is reserved for client 2"):
            use(np.array([2]), ClientRecord.of(stacked(3.0)))
    store.commit(np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="client 1"):
        store.write(np.array([1]), ClientRecord.of(stacked(3.0)))
    assert values(store, 0, 1, 2) == [1, 2, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are spawned")
def test_who_outlives_the_run_writes_nothing(tmp_path: Path) -> None:
    """The run that goes on may have given the slot to another client."""
    store, said = on_disk(tmp_path / "rows"), tmp_path / "said"
    put(store, [0, 1], 1.0, 2.0)
    store.reserve(np.array([0]))
    before = (tmp_path / "rows").read_bytes()
    context = torch.multiprocessing.get_context("fork")
    process = context.Process(target=_ends_before_its_child, args=(store, said))
    process.start()
    process.join(60)
    assert eventually(said.exists, 20)
    assert said.read_text() == "The process that gave out this work is gone."
    assert (tmp_path / "rows").read_bytes() == before


def _ends_before_its_child(store: ClientStore, said: Path) -> None:
    context = torch.multiprocessing.get_context("fork")
    context.Process(target=_writes_late, args=(store, said, os.getpid())).start()
    os._exit(0)


def _writes_late(store: ClientStore, said: Path, parent: int) -> None:
    eventually(lambda: os.getppid() != parent, 20)
    try:
        store.write(np.array([0]), ClientRecord.of(stacked(-1.0)))
    except RunError as error:
        aside = said.with_suffix(".new")
        aside.write_text(str(error.what))
        aside.rename(said)


def _write(store: ClientStore) -> None:
    store.write(np.array([3, 2]), ClientRecord.of(stacked(-3.0, -2.0)))


def test_rows_are_copies(new: Callable[..., ClientStore]) -> None:
    store = new(3)
    put(store, [1], 1.0)
    store.read_rows(np.array([1]))["scaffold"]["c"]["w"].fill_(9.0)
    assert values(store, 1) == [1]


def test_nobody_reports(new: Callable[..., ClientStore]) -> None:
    store = new(3)
    store.replace(np.array([], dtype=np.int64), ClientRecord.of(stacked()))
    assert not store.has_row.any()
    assert store.read_rows(np.array([], dtype=np.int64))["scaffold"]["c"]["w"].shape == (0, 5)


def test_a_client_without_state_of_its_own_is_still_present(
    new: Callable[..., ClientStore],
) -> None:
    store = new(3, spec={})
    store.replace(np.array([1]), ClientRecord.of({}))
    assert store.read_state(1) == {}
    assert store.read_state(0) is None
    arrays = store.snapshot()
    store.replace(np.array([2]), ClientRecord.of({}))
    store.restore(arrays)
    assert store.has_row.tolist() == [False, True, False]


def test_what_is_saved_is_restored_over_whatever_is_there(
    new: Callable[..., ClientStore],
) -> None:
    store = new(6)
    put(store, [1, 4], 10.0, 40.0)
    arrays = {name: array.copy() for name, array in store.snapshot().items()}
    store.snapshot_saved()
    assert arrays["index"].tolist() == [1, 4]
    put(store, [0, 1], 7.0, 8.0)
    put(store, [0, 4], 9.0, 10.0)
    store.restore(arrays)
    assert store.read_state(0) is None
    assert values(store, 1, 4, 0) == [10, 40, 0]
    for name, array in store.snapshot().items():
        np.testing.assert_array_equal(array, arrays[name])


def test_an_empty_store_is_saved_and_restored(new: Callable[..., ClientStore]) -> None:
    store = new(3)
    arrays = store.snapshot()
    put(store, [1], 1.0)
    store.restore(arrays)
    assert not store.has_row.any()
    put(store, [2], 2.0)
    assert values(store, 2) == [2]


def test_a_row_lies_at_a_multiple_of_64_bytes_whoever_it_belongs_to(
    new: Callable[..., ClientStore],
) -> None:
    """So that sums over it are added in the same order in every store."""
    store = new(5)
    put(store, [0, 3, 4], 1.0, 2.0, 3.0)
    for client in (0, 3, 4):
        for _, tensor in walk(store.read_state(client)):
            assert tensor.data_ptr() % 64 == 0


# --- the file -------------------------------------------------------------------------------------


def on_disk(file: Path, clients: int = 100) -> ClientStore:
    return client_store(SPEC, clients, private_memory, file)


def slots(file: Path) -> float:
    return file.stat().st_size / ROW


def test_a_layout_leaves_no_tensor_out_and_lets_none_overlap() -> None:
    spec = {**SPEC, "none": TensorSpec((0, 4), torch.float32), "flag": TensorSpec((3,), torch.bool)}
    layout = RowLayout(spec)
    assert layout.nbytes == 3 * 64
    block = torch.zeros(4 * layout.nbytes, dtype=torch.uint8)
    rows = layout.rows(block, 4)
    for path, tensor in rows.items():
        assert tuple(tensor.shape) == (4, *spec[path].shape)
        tensor.fill_(len(path))
    assert (rows["scaffold/c/w"] == 12).all()
    assert (rows["buffers/n"] == 9).all()
    assert int((block != 0).sum()) == 4 * (5 * 2 + 1 + 3)  # 12.0 is two bytes, 9 and true are one


def test_the_file_is_as_large_as_those_who_took_part(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    store = on_disk(file, clients=1_000_000)
    assert not file.exists()
    for start in range(0, 50, 10):
        clients = np.arange(start, start + 10) * 20_000
        store.replace(clients, ClientRecord.of(stacked(*range(start, start + 10))))
        assert slots(file) == start + 10
    assert values(store, 0, 980_000, 7) == [0, 49, 0]


def test_slots_are_used_again(tmp_path: Path) -> None:
    """The file holds what is current, what the checkpoint refers to, and the rows of one round."""
    file = tmp_path / "rows"
    store = on_disk(file)
    everyone = list(range(10))
    put(store, everyone, *range(10))
    put(store, everyone, *range(10, 20))
    assert slots(file) == 20  # the second round was written beside the first
    for round in range(2, 12):
        put(store, everyone, *range(10 * round, 10 * round + 10))
        assert slots(file) == (20 if round <= 4 else 30)  # the checkpoint's rows too
        if round % 3 == 0:
            store.snapshot()
            store.snapshot_saved()
    assert values(store, *everyone) == list(range(110, 120))


def test_what_a_checkpoint_refers_to_is_not_written_over(tmp_path: Path) -> None:
    """Whatever is done after it, and wherever it ends, the old rows come back."""
    file = tmp_path / "rows"
    store, random = on_disk(file, 20), np.random.default_rng(0)
    saved: dict[str, np.ndarray] | None = None
    expected: dict[int, int] = {}
    current: dict[int, int] = {}
    for step in range(400):
        what = random.choice(["put", "put", "put", "save", "half", "kill"])
        if what == "put":
            clients = random.choice(20, size=random.integers(1, 8), replace=False)
            numbers = random.integers(1, 10_000, size=len(clients))
            put(store, clients.tolist(), *map(float, numbers))
            current.update(zip(clients.tolist(), numbers.tolist(), strict=True))
        elif what == "save":
            saved, expected = store.snapshot(), dict(current)
            store.snapshot_saved()
        elif what == "half":
            store.snapshot()  # and the checkpoint never becomes complete
        elif saved is not None:
            store = on_disk(file, 20)
            store.restore(saved)
            current = dict(expected)
            assert slots(file) == max(saved["slot"], default=-1) + 1
        assert values(store, *range(20)) == [current.get(k, 0) for k in range(20)], step
        assert file.exists() is False or slots(file) <= 2 * 20 + 8


def test_a_write_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk is full in the middle of a round's rows."""
    file = tmp_path / "rows"
    store = on_disk(file)
    put(store, [0, 1, 2], 1.0, 2.0, 3.0)
    before = store.snapshot()
    calls: list[int] = []

    class Full:
        """A file on a disk that is full after one row."""

        def __init__(self, file: object) -> None:
            self._file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def seek(self, at: int) -> None:
            self._file.seek(at)

        def write(self, data: bytes) -> None:
            calls.append(1)
            if len(calls) > 1:
                raise OSError(28, "No space left on device")
            self._file.write(data)

    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *a: Full(opened(*a)))
        with pytest.raises(RunError, match="cannot be written") as found:
            put(store, [1, 2, 3], 20.0, 30.0, 40.0)
    assert len(calls) == 2
    assert "No space left" in found.value.got
    assert len(found.value.lines()) <= 4
    assert values(store, 0, 1, 2, 3) == [1, 2, 3, 0]
    for name, array in store.snapshot().items():
        np.testing.assert_array_equal(array, before[name])
    put(store, [1, 2, 3], 20.0, 30.0, 40.0)
    assert values(store, 0, 1, 2, 3) == [1, 20, 30, 40]
    assert slots(file) == 6  # the slots that were not used are not lost


@pytest.mark.parametrize("harm", ["gone", "short"])
def test_a_file_that_does_not_hold_the_checkpoint_is_said(tmp_path: Path, harm: str) -> None:
    file = tmp_path / "rows"
    store = on_disk(file)
    put(store, [0, 1, 2], 1.0, 2.0, 3.0)
    arrays = store.snapshot()
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    for use in (lambda: on_disk(file).restore(arrays), lambda: store.read_state(2)):
        with pytest.raises(RunError, match="cannot be read") as found:
            use()
        assert str(file) in found.value.got
    assert file.exists() is (harm == "short")


def test_what_a_killed_run_left_is_thrown_away(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    put(on_disk(file), list(range(9)), *range(9))
    put(on_disk(file), [3], 3.0)
    assert slots(file) == 1


def test_a_checkpoint_from_memory_goes_on_in_a_file(tmp_path: Path) -> None:
    store = client_store(SPEC, 8, private_memory)
    put(store, [1, 4, 6], 10.0, 40.0, 60.0)
    moved = on_disk(tmp_path / "rows", 8)
    put(moved, [0, 1], 7.0, 7.0)
    moved.restore(store.snapshot())
    assert values(moved, *range(8)) == [0, 10, 0, 0, 40, 0, 60, 0]


def _look(store: ClientStore, pipe: object) -> None:
    """In another process: say what client 3 has, each time one asks."""
    while pipe.recv():
        pipe.send(values(store, 3)[0])


@pytest.mark.parametrize(
    ("how", "allocate"),
    [
        ("fork", fork_shared_memory),
        pytest.param("spawn", shared_segment, marks=pytest.mark.slow),
    ],
)
def test_another_process_sees_what_is_written(
    new: Callable[..., ClientStore], how: str, allocate: Callable[[int], torch.Tensor]
) -> None:
    store = new(6, allocate=allocate)
    context = torch.multiprocessing.get_context(how)
    ours, theirs = context.Pipe()
    process = context.Process(target=_look, args=(store, theirs), daemon=True)
    process.start()
    seen = []
    for value in (None, 1.0, 2.0, 3.0):
        if value is not None:
            put(store, [2, 3], -value, value)
        ours.send(True)
        seen.append(ours.recv())
    ours.send(False)
    process.join(60)
    assert seen == [0, 1, 2, 3]


def test_a_file_stays_on_disk_where_a_store_is_sent(tmp_path: Path) -> None:
    spec = {"scaffold/c": TensorSpec((1000,), torch.float32)}
    store = client_store(spec, 100, private_memory, tmp_path / "rows")
    store.replace(np.arange(100), ClientRecord({"scaffold/c": torch.ones(100, 1000)}))
    assert len(pickle.dumps(store)) < 0.1 * 100 * 4000


# --- memory ---------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process that are in memory, fork_shared_memory ones too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


ONE = 131_072
LARGE = {"p/w": TensorSpec((ONE,), torch.float32)}


@pytest.mark.parametrize("allocate", [private_memory, fork_shared_memory])
def test_ten_thousand_clients_of_half_a_megabyte_cost_what_fifty_used(
    allocate: Callable[[int], torch.Tensor],
) -> None:
    """In all it would be 5 GB."""
    clients = np.arange(0, 10_000, 200)
    update = {"p": {"w": torch.ones(len(clients), ONE)}}
    before = resident()
    store = client_store(LARGE, 10_000, allocate)
    started = resident() - before
    store.replace(clients, ClientRecord.of(update))
    used = resident() - before
    bytes_used = len(clients) * ONE * 4
    assert started < 5e6
    assert 0.9 * bytes_used < used < 3 * bytes_used + 5e6  # also what is copied on the way
    assert store.read_state(9_800)["p"]["w"].sum() == ONE
    assert store.read_state(9_801) is None


def test_in_a_file_they_cost_no_memory_at_all(tmp_path: Path) -> None:
    """Four hundred clients have taken part, and memory has not grown."""
    store = client_store(LARGE, 10_000, private_memory, tmp_path / "rows")
    before = resident()
    for start in range(0, 400, 20):
        clients = np.arange(start, start + 20)
        store.replace(clients, ClientRecord.of({"p": {"w": torch.full((20, ONE), float(start))}}))
        for client in clients:
            assert store.read_state(client)["p"]["w"][7] == start
    assert (tmp_path / "rows").stat().st_size == 400 * ONE * 4  # 210 MB
    assert resident() - before < 30e6


def test_a_run_of_many_clients_is_as_large_as_those_who_took_part() -> None:
    """10,000 clients that keep 0.5 MB each: fifty of them train, the others cost nothing."""
    ready = prepared(
        "scaffold",
        partial(Net, width=14_563),
        clients=federation(10_000),
        per_round=10,
        local=fk.Local(lr=0.01, steps=1, batch_size=4),
    )
    one = sum(s.nbytes for path, s in ready.spec.items() if path.startswith("client_state/"))
    assert 0.5e6 < one < 0.6e6
    before = resident()
    with Sequential(ready.setup, ready.spec, 10) as engine:
        message = server_message(ready.plan, ready.server, 0.01)
        for start in range(0, 50, 10):
            clients = np.arange(start, start + 10) * 200
            engine.commit(engine.train(message, clients, lambda _: None), clients)
        used = resident() - before
        state = engine.state()
    assert state[CLIENTS_PREFIX + "index"].tolist() == list(range(0, 10_000, 200))
    assert sum(array.nbytes for array in state.values()) < 50 * (one + 100)
    assert 40 * one < used < 150 * one  # fifty states, ten replies of two models, and temporaries
