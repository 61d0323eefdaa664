"""Client state: a row comes to be when its client first reports, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import fedkeel as fk
from fedkeel.engine.buffers import Spec, private, segment, shared
from fedkeel.engine.sequential import Sequential
from fedkeel.engine.store import PREFIX, ClientStore
from fedkeel.method.server import server_message
from toys import Net, federation, prepared

SPEC = {"scaffold/c/w": Spec((4,), torch.float32), "buffers/n": Spec((), torch.int64)}


def stacked(*values: float) -> dict[str, object]:
    """State [K, ...] of clients, as a round gathers it."""
    rows = torch.tensor(values)
    return {
        "scaffold": {"c": {"w": rows[:, None].expand(-1, 4).clone()}},
        "buffers": {"n": rows.to(torch.int64)},
    }


def put(store: ClientStore, clients: list[int], *values: float, rows: list[int] | None = None):
    at = np.array(range(len(clients)) if rows is None else rows)
    steps = np.arange(len(values)) + 1
    store.put(np.array(clients), at, stacked(*values), steps)


@pytest.mark.parametrize("allocate", [private, shared, segment])
def test_a_client_has_nothing_before_it_reports(allocate: Callable[[int], torch.Tensor]) -> None:
    store = ClientStore(SPEC, 6, allocate)
    assert [store.get(k) for k in range(6)] == [None] * 6
    assert store.done.tolist() == [0] * 6
    put(store, [1, 4], 10.0, 40.0)
    assert [k for k in range(6) if store.get(k) is not None] == [1, 4]
    assert store.present.tolist() == [False, True, False, False, True, False]
    found = store.get(4)
    assert (found["scaffold"]["c"]["w"] == 40.0).all()
    assert found["buffers"]["n"] == 40


def test_only_the_rows_that_are_kept_are_taken() -> None:
    """A client whose update was left out keeps what it had."""
    store = ClientStore(SPEC, 6, private)
    put(store, [0, 2, 5], 1.0, 2.0, 5.0)
    put(store, [2, 3], 20.0, -1.0, 30.0, rows=[0, 2])
    values = {k: store.get(k)["scaffold"]["c"]["w"][0].item() for k in (0, 2, 3, 5)}
    assert values == {0: 1.0, 2: 20.0, 3: 30.0, 5: 5.0}


def test_steps_add_up() -> None:
    store = ClientStore(SPEC, 4, private)
    put(store, [1, 3], 0.0, 0.0)
    put(store, [1, 2], 0.0, 0.0)
    assert store.done.tolist() == [0, 2, 2, 2]


def test_a_client_without_state_of_its_own_still_counts_its_steps() -> None:
    """Without state, a method still goes on through a client's examples from round to round."""
    store = ClientStore({}, 3, private)
    store.put(np.array([1]), np.array([0]), {}, np.array([7]))
    assert store.done.tolist() == [0, 7, 0]
    assert store.get(1) == {}
    again = ClientStore({}, 3, private)
    again.restore(store.arrays())
    assert again.done.tolist() == [0, 7, 0]


def test_what_is_saved_is_restored_over_whatever_is_there() -> None:
    store = ClientStore(SPEC, 6, private)
    put(store, [1, 4], 10.0, 40.0)
    arrays = {name: array.copy() for name, array in store.arrays().items()}
    assert arrays[PREFIX + "index"].tolist() == [1, 4]
    assert arrays[PREFIX + "state/scaffold/c/w"].shape == (2, 4)
    put(store, [0, 1], 7.0, 8.0)
    store.restore(arrays)
    assert store.get(0) is None
    assert (store.get(1)["scaffold"]["c"]["w"] == 10.0).all()
    for name, array in store.arrays().items():
        np.testing.assert_array_equal(array, arrays[name])


def test_an_empty_store_is_saved_and_restored() -> None:
    store = ClientStore(SPEC, 3, private)
    again = ClientStore(SPEC, 3, private)
    put(again, [1], 1.0)
    again.restore(store.arrays())
    assert not again.present.any()


def resident() -> int:
    """Bytes of this process that are in memory, shared ones too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.parametrize("allocate", [private, shared])
def test_ten_thousand_clients_of_half_a_megabyte_cost_what_fifty_used(
    allocate: Callable[[int], torch.Tensor],
) -> None:
    """In all it would be 5 GB."""
    one, clients = 131_072, np.arange(0, 10_000, 200)
    update = {"p": {"w": torch.ones(len(clients), one)}}
    before = resident()
    store = ClientStore({"p/w": Spec((one,), torch.float32)}, 10_000, allocate)
    started = resident() - before
    store.put(clients, np.arange(len(clients)), update, np.ones(len(clients), dtype=np.int64))
    used = resident() - before
    bytes_used = len(clients) * one * 4
    assert started < 5e6
    assert 0.9 * bytes_used < used < 3 * bytes_used + 5e6  # also what is copied on the way
    assert store.get(9_800)["p"]["w"].sum() == one
    assert store.get(9_801) is None


def test_a_run_of_many_clients_is_as_large_as_those_who_took_part() -> None:
    """10,000 clients that keep 0.5 MB each: fifty of them train, the others cost nothing."""
    ready = prepared(
        "scaffold",
        partial(Net, width=14_563),
        clients=federation(10_000),
        per_round=10,
        local=fk.Local(lr=0.01, steps=1, batch_size=4),
    )
    one = sum(s.nbytes for path, s in ready.spec.items() if path.startswith("mine/"))
    assert 0.5e6 < one < 0.6e6
    before = resident()
    with Sequential(ready.world, ready.spec, 10) as engine:
        message = server_message(ready.plan, ready.server, 0.01)
        for start in range(0, 50, 10):
            clients = np.arange(start, start + 10) * 200
            engine.commit(engine.train(message, clients, lambda _: None), clients)
        used = resident() - before
        state = engine.state()
    assert state[PREFIX + "index"].tolist() == list(range(0, 10_000, 200))
    assert sum(array.nbytes for array in state.values()) < 50 * (one + 100)
    assert 40 * one < used < 150 * one  # fifty states, ten replies of two models, and temporaries
