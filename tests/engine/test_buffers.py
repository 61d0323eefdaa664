"""Named tensors in one allocation: where they lie, what they share, and that rows are rows."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import multiprocessing as torch_multiprocessing

from each import each
from fedkeel.engine.buffers import TensorBuffers
from fedkeel.engine.process.shared_memory import (
    ALIGNMENT,
    fork_shared_memory,
    private_memory,
    shared_segment,
)
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.errors import RunError
from fedkeel.tree import State, stack, unwalk

SPEC = {
    "update/w": TensorSpec((3, 5), torch.float32),
    "update/b": TensorSpec((1,), torch.float64),
    "seen": TensorSpec((), torch.int64),
    "finite": TensorSpec((), torch.bool),
    "none": TensorSpec((0, 4), torch.float32),
}
ALLOCATORS = [private_memory, fork_shared_memory, shared_segment]


def filled(value: float) -> dict[str, object]:
    return {
        "update": {
            "w": torch.full((3, 5), value),
            "b": torch.full((1,), value, dtype=torch.double),
        },
        "seen": torch.tensor(int(value)),
        "finite": torch.tensor(value > 0),
        "none": torch.zeros(0, 4),
    }


@each("allocate", ALLOCATORS)
@each("rows", [None, 1, 3])
def test_every_tensor_starts_where_torch_would_put_it(
    allocate: Callable[[int], torch.Tensor], rows: int | None
) -> None:
    buffers = TensorBuffers(SPEC, rows, allocate)
    for path, tensor in buffers.tensors.items():
        lead = () if rows is None else (rows,)
        assert tuple(tensor.shape) == (*lead, *SPEC[path].shape)
        assert tensor.dtype == SPEC[path].dtype
        assert tensor.is_contiguous()
        if tensor.numel():
            assert tensor.data_ptr() % ALIGNMENT == 0, path


def row_of(buffers: TensorBuffers, row: int) -> State:
    return unwalk({path: tensor[row] for path, tensor in buffers.tensors.items()})


def test_tensors_do_not_overlap() -> None:
    for rows in (None, 1, 4, 7):
        buffers = TensorBuffers(SPEC, rows, private_memory)
        for i, tensor in enumerate(buffers.tensors.values()):
            tensor.fill_(i)
        for i, tensor in enumerate(buffers.tensors.values()):
            assert (tensor == tensor.new_full((), i)).all()


def test_a_misaligned_allocation_is_shifted() -> None:
    buffers = TensorBuffers(SPEC, 2, lambda n: torch.empty(n + 1, dtype=torch.uint8)[1:])
    assert buffers.tensors["update/w"].data_ptr() % ALIGNMENT == 0
    buffers.write(stack([filled(2.0)]), [1])
    assert (buffers.tensors["update/w"][1] == 2.0).all()


def test_a_row_is_written_and_read_alone() -> None:
    buffers = TensorBuffers(SPEC, 3, private_memory)
    for row in (0, 1, 2):
        buffers.write(stack([filled(row)]), [row])
    buffers.write(stack([filled(7.0), filled(7.0)]), [1, 1])
    for row, value in enumerate((0.0, 7.0, 2.0)):
        state = row_of(buffers, row)
        assert (state["update"]["w"] == value).all()
        assert state["seen"] == int(value)
        assert state["finite"] == (value > 0)
    assert buffers.state(2)["update"]["w"].shape == (2, 3, 5)
    assert buffers.state(0)["update"]["w"].shape == (0, 3, 5)


def test_a_row_is_a_view() -> None:
    buffers = TensorBuffers(SPEC, 2, private_memory)
    row_of(buffers, 1)["update"]["w"].fill_(4.0)
    buffers.state(2)["update"]["b"].fill_(5.0)
    assert (buffers.tensors["update/w"][1] == 4.0).all()
    assert (buffers.tensors["update/b"] == 5.0).all()


def test_numbers_without_axes_are_kept_too() -> None:
    """A message may hold a 0-d tensor, such as the counter of a batch normalisation."""
    state = {"n": torch.tensor(3), "deep": {"er": torch.tensor(0.5)}}
    buffers = TensorBuffers(specs_of(state), None, private_memory)
    buffers.write(state)
    assert buffers.state()["n"] == 3
    assert buffers.state()["deep"]["er"] == 0.5


def test_specs_say_what_a_state_looks_like() -> None:
    assert specs_of(filled(1.0)) == SPEC
    assert SPEC["update/w"].nbytes == 60
    assert SPEC["seen"].nbytes == 8
    assert SPEC["none"].nbytes == 0


def _add(buffers: TensorBuffers, row: int) -> None:
    buffers.tensors["update/w"][row] += 1.0


@pytest.mark.parametrize(
    ("allocate", "method", "seen"),
    [
        (fork_shared_memory, "fork", True),
        (shared_segment, "fork", True),
        (private_memory, "fork", False),
    ],
)
def test_what_another_process_writes(
    allocate: Callable[[int], torch.Tensor], method: str, seen: bool
) -> None:
    buffers = TensorBuffers(SPEC, 2, allocate)
    buffers.tensors["update/w"].zero_()
    process = multiprocessing.get_context(method).Process(target=_add, args=(buffers, 1))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (buffers.tensors["update/w"][1] == (1.0 if seen else 0.0)).all()
    assert (buffers.tensors["update/w"][0] == 0.0).all()


def test_a_segment_passes_through_a_pickle() -> None:
    """As spawned processes get it: views of one storage stay views of one storage."""
    buffers = TensorBuffers(SPEC, 2, shared_segment)
    pipe, other = torch_multiprocessing.get_context("fork").Pipe()
    pipe.send(buffers)
    again = other.recv()
    again.tensors["update/w"].fill_(3.0)
    again.tensors["seen"].fill_(4)
    assert (buffers.tensors["update/w"] == 3.0).all()
    assert (buffers.tensors["seen"] == 4).all()


@pytest.mark.parametrize("allocate", [private_memory, fork_shared_memory])
def test_room_for_rows_that_nobody_writes_costs_nothing(
    allocate: Callable[[int], torch.Tensor],
) -> None:
    """Fifty thousand clients of ten megabytes, of whom a few take part."""
    buffers = TensorBuffers({"w": TensorSpec((2_500_000,), torch.float32)}, 50_000, allocate)
    buffers.tensors["w"][49_999] = 1.0
    assert buffers.tensors["w"][49_999].sum() == 2_500_000
    assert buffers.tensors["w"][0, :10].sum() == 0.0


def test_more_than_the_system_has_addresses_for() -> None:
    for allocate in ALLOCATORS:
        with pytest.raises(RunError, match="not enough memory") as found:
            allocate(2**60)
        assert len(found.value.lines()) <= 4
    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
