"""Arrays that are opened in their files stay there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.data import arrays_in_files
from fedkeel.data.arrays_in_files import Pages, joined_in_file

X = np.random.default_rng(0).normal(size=(40, 5)).astype("f4")
Y = np.arange(40) % 2


def file_of(folder: Path, x: np.ndarray = X, name: str = "x.npy") -> Path:
    np.save(folder / name, x)
    return folder / name


def is_mapped(tensor: torch.Tensor, name: str) -> bool:
    """Whether the numbers of a tensor lie in a mapping of a file, as the system says."""
    start = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= start < high:
            return name in line and start + tensor.nbytes <= high
    return False


needs_maps = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="the system does not list its mappings"
)


@needs_maps
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("part", [slice(None), slice(7, 30)])
def test_an_array_in_a_file_is_not_copied(tmp_path: Path, mode: str, part: slice) -> None:
    x = np.load(file_of(tmp_path), mmap_mode=mode)[part]
    for made in (
        fk.dataset(x, Y[part]),
        fk.iid(x, Y[part], clients=3).data,
        fk.from_clients({"a": (x, Y[part])}).data,
        fk.dataset(x, Y[part]).to(torch.float32),
    ):
        assert is_mapped(made.x, "x.npy")
        assert torch.equal(made.x, torch.from_numpy(X[part]))
    assert not is_mapped(fk.dataset(np.array(x), Y[part]).x, "x.npy")


@needs_maps
def test_the_arrays_of_several_clients_are_joined_in_a_file(tmp_path: Path) -> None:
    halves = {}
    for name, part in (("a", slice(0, 10)), ("b", slice(10, 40))):
        path = file_of(tmp_path, X[part], f"{name}.npy")
        halves[name] = np.load(path, mmap_mode="r"), Y[part]
    clients = fk.from_clients(halves)
    assert is_mapped(clients.data.x, "(deleted)")
    assert torch.equal(clients.data.x, torch.from_numpy(X))
    tensors = [torch.ones(2, 3), torch.zeros(1, 3)]
    assert torch.equal(joined_in_file(tensors), torch.cat(tensors))


def test_a_user_s_file_is_never_written_to(tmp_path: Path) -> None:
    for mode in ("r", "r+"):
        path = file_of(tmp_path)
        data = fk.dataset(np.load(path, mmap_mode=mode), Y)
        data.x[0] = 7.0  # as a module may that works in place; the process would end here
        np.testing.assert_array_equal(np.load(path), X)


def test_a_run_on_a_file_has_the_bits_of_one_in_memory(tmp_path: Path) -> None:
    task, local = fk.Task(nn.Linear(5, 2)), fk.Local(lr=0.1, epochs=1, batch_size=4)
    opened = np.load(file_of(tmp_path), mmap_mode="r")
    for kind in ("sequential", "vectorized"):
        runs = [
            fk.run(
                "fedavg",
                task=task,
                clients=fk.iid(x, Y, clients=4),
                test=(x, Y),
                rounds=2,
                local=local,
                engine=fk.Engine(kind=kind),
            )
            for x in (X, opened)
        ]
        assert runs[0].record.key == runs[1].record.key
        for name, tensor in runs[0].state_dict().items():
            assert torch.equal(tensor, runs[1].state_dict()[name])


def test_other_types_become_numbers_in_memory(tmp_path: Path) -> None:
    pixels = (255 * np.abs(X) / np.abs(X).max()).astype(np.uint8)
    opened = np.load(file_of(tmp_path, pixels), mmap_mode="r")
    assert torch.equal(fk.dataset(opened, Y).x, torch.from_numpy(pixels).float())
    swapped = np.load(file_of(tmp_path, X.astype(">f4")), mmap_mode="r")
    assert torch.equal(fk.dataset(swapped, Y).x, torch.from_numpy(X))
    bad = X.copy()
    bad[3, 1] = np.nan
    opened = np.load(file_of(tmp_path, bad), mmap_mode="r")
    with pytest.raises(fk.FedkeelError, match="an input is NaN"):
        fk.dataset(opened, Y)


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the map of a tensor that are in this process's memory, as the system says."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        ends = line.split()[0].split("-")
        if len(ends) == 2:
            inside = int(ends[0], 16) <= tensor.data_ptr() < int(ends[1], 16)
        elif inside and line.startswith("Rss:"):
            return 1024 * int(line.split()[1])
    return 0


@needs_maps
def test_pages_that_were_read_are_given_back_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays_in_files, "BLOCK", 1 << 20)
    x = np.random.default_rng(1).normal(size=(20_000, 200)).astype("f4")
    made = fk.dataset(np.load(file_of(tmp_path, x), mmap_mode="r"), np.arange(20_000) % 2).x
    assert resident(made) < made.nbytes / 2  # the search for numbers that are not finite
    assert torch.equal(made, torch.from_numpy(x))
    assert resident(made) >= made.nbytes
    part = made[:12_000]
    pages = Pages(part.data_ptr(), part.nbytes)
    made[12_000:] = 7.0  # behind the array, in the same map
    pages.release(0, made.nbytes)
    assert resident(made) < made.nbytes
    assert torch.equal(part, torch.from_numpy(x[:12_000]))
    assert bool((made[12_000:] == 7.0).all())
    Pages(made.data_ptr(), made.nbytes).release(0, made.nbytes)  # somebody has written into it
    assert bool((made[12_000:] == 7.0).all())


def test_the_digest_of_a_large_array_does_not_depend_on_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fk.dataset(X, Y).fingerprint()
    monkeypatch.setattr(arrays_in_files, "BLOCK", 256)
    in_memory = fk.dataset(X, Y).fingerprint()
    mapped = fk.dataset(np.load(file_of(tmp_path), mmap_mode="r"), Y).fingerprint()
    assert in_memory == mapped != before
    changed = X.copy()
    changed[-1, -1] += 1
    assert fk.dataset(changed, Y).fingerprint() != in_memory
