"""NumPy's ``.npz`` files of a user: an array of inputs, one of labels, perhaps one of clients.

A header is compared with the file before an array is made of it. Nothing is unpickled.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from fedkeel.data.dataset import MissingTargets
from fedkeel.data.read.formats import unreadable_file
from fedkeel.data.read.identifiers import encode_array
from fedkeel.data.read.limits import check_size
from fedkeel.data.read.raw_examples import RawExamples, as_floats, missing, of_file
from fedkeel.data.user_arrays import remedy_for_labels
from fedkeel.errors import DataError, FedkeelError, first_line

_NPZ = "an .npz file, as numpy.savez(x=..., label=...) makes"


def read_arrays(
    path: Path,
    label: str,
    client: str | None,
    train: RawExamples | None = None,
    is_quantity: bool = False,
    group: str | None = None,
    missing_targets: MissingTargets = "refuse",
) -> RawExamples:
    """Read an ``.npz`` file with an array ``x`` of inputs and one of labels or quantities.

    Args:
        path: the file.
        label: name of the array of labels; where it is ``label`` and not there, ``y`` is taken.
        client: name of the array of clients, None where there is none. Test data may do without.
        train: the training data, where test data is read.
        is_quantity: whether the array of labels holds quantities, [N] or [N, D], instead.
        group: name of the array of groups that are held out as wholes, as `client`.
        missing_targets: as `fedkeel.config.Data` has it.

    Returns:
        Inputs [N, ...]. Bytes with three axes or four are images: [N, H, W], or [N, H, W, C] and
        [N, C, H, W] with C of 1 or 3; they become [N, C, H, W]. All other numbers stay as they are.

    Raises:
        DataError: the file cannot be read, holds Python objects, lacks an array, or an array has
            the wrong length or type.
    """
    try:
        with path.open("rb") as file:
            read = _read(path, file, (label, client, group), train is not None)
    except FedkeelError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise nearly anything at a damaged file
        raise unreadable_file(path, first_line(error), _NPZ) from None
    (_, x), *named = ((name, array) for name, array in read.values())
    for name, array in named:
        axes = (1, 2) if is_quantity and name == named[0][0] else (1,)
        if array.ndim not in axes or x.ndim < 2 or len(x) != len(array):
            raise DataError(
                f"{path}: the arrays do not match.",
                got=f"x {x.shape}, {name} {array.shape}",
                expected=f"x [N, ...] with at least two axes, {name} [N]",
                do=remedy_for_labels(array),
            )
    if x.dtype.kind not in "biuf":
        raise DataError(f"{path}: x does not hold numbers.", got=x.dtype, expected="numbers")
    target_name, target = read["label"]
    clients, groups = (
        encode_array(path, *read[role]) if role in read else None for role in ("client", "group")
    )
    if is_quantity and target.dtype.kind not in "biuf":
        raise DataError(
            f"{path}: {target_name} does not hold numbers.", got=target.dtype, expected="numbers"
        )
    labels = as_floats(target) if is_quantity else encode_array(path, target_name, target)
    inputs = _as_images(torch.from_numpy(x if x.dtype == np.uint8 else as_floats(x)))
    return of_file(
        path, inputs, labels, clients, train, groups=groups, missing_targets=missing_targets
    )


def read_inputs(path: Path) -> torch.Tensor:
    """Read only the array ``x`` of an ``.npz`` file: inputs [N, ...] as in `read_arrays`.

    Raises:
        DataError: as in `read_arrays`; or an input is not finite.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            present = [name.removesuffix(".npy") for name in archive.namelist()]
            if "x" not in present:
                raise missing(path, "array", "x", present)
            x = _read_array(path, "x", archive)
    except FedkeelError:
        raise
    except Exception as error:  # as above
        raise unreadable_file(path, first_line(error), _NPZ) from None
    if x.dtype.kind not in "biuf" or x.ndim < 2 or not np.isfinite(x).all():
        raise DataError(
            f"{path}: x does not hold inputs.",
            got=f"{x.dtype}, shape {x.shape}",
            expected="finite numbers [N, ...] with at least two axes",
        )
    return _as_images(torch.from_numpy(x if x.dtype == np.uint8 else as_floats(x)))


def _read(
    path: Path, file: BinaryIO, keys: tuple[str, str | None, str | None], is_test: bool
) -> dict[str, tuple[str, NDArray[Any]]]:
    """Return name and array of ``x``, ``label``, and ``client`` and ``group`` where there are any.

    Args:
        path: the file, for messages.
        file: the file.
        keys: names of the arrays of labels, clients and groups.
        is_test: whether it may do without the last two.
    """
    label, client, group = keys
    if file.read(len(npy_format.MAGIC_PREFIX)) == npy_format.MAGIC_PREFIX:
        raise unreadable_file(path, "a single array", _NPZ)
    with zipfile.ZipFile(file) as archive:
        present = [name.removesuffix(".npy") for name in archive.namelist()]
        if label == "label" and label not in present and "y" in present:
            label = "y"
        if is_test:
            client = client if client in present else None
            group = group if group in present else None
        needed = {
            "x": ("x", ""),
            "label": (label, "data.label"),
            "client": (client, "data.client"),
            "group": (group, "partition.holdout_by"),
        }
        for name, setting in needed.values():
            if name is not None and name not in present:
                raise missing(path, "array", name, present, setting)
        names = {role: name for role, (name, _) in needed.items() if name is not None}
        return {role: (name, _read_array(path, name, archive)) for role, name in names.items()}


def _read_array(path: Path, name: str, archive: zipfile.ZipFile) -> NDArray[Any]:
    """Return an array whose header fits the file."""
    member = name if name in archive.namelist() else f"{name}.npy"
    info = archive.getinfo(member)
    with archive.open(member) as stream:
        shape, dtype, start = _read_header(path, name, cast(BinaryIO, stream))
        size = math.prod(shape) * dtype.itemsize
        if size != info.file_size - start:
            raise unreadable_file(
                path,
                f"an array {name!r} of {info.file_size - start:,} bytes",
                f"{size:,}, as its header says: shape {shape} of {dtype}",
            )
    do = "give fewer examples or smaller types; save sparse arrays by numpy.savez, uncompressed"
    check_size(path, f"the array {name!r}", size, info.compress_size, do)
    if 0 in shape:
        raise DataError(f"{path}: the array {name!r} is empty.", expected="at least one example")
    with archive.open(member) as stream:
        array: NDArray[Any] = npy_format.read_array(stream, allow_pickle=False)
    return array


def _read_header(
    path: Path, name: str, stream: BinaryIO
) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return (shape, type, bytes of the header)."""
    magic = stream.read(npy_format.MAGIC_LEN)
    if not magic.startswith(npy_format.MAGIC_PREFIX):
        raise unreadable_file(path, f"{name!r}, which begins with {magic[:8]!r}", "an array")
    stream.seek(0)
    is_first = npy_format.read_magic(stream) == (1, 0)
    read = npy_format.read_array_header_1_0 if is_first else npy_format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise DataError(
            f"{path}: the array {name!r} holds Python objects.",
            expected="an array of numbers, or of texts of one type such as '<U8'",
            why="objects are stored as a pickle, which can run any code when it is read",
            do=f"save it with numpy.savez(..., {name}=numpy.array({name}.tolist()))",
        )
    return shape, dtype, stream.tell()


def _as_images(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        return x.permute(0, 3, 1, 2)
    return x if x.ndim == 4 else x.to(torch.float32)
