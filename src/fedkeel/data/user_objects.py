"""Data sets of other libraries as arrays: map-style ones of torch, and those of Hugging Face.

They are told by what they can do, so that no library is imported that the user does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.errors import DataError, did_you_mean
from fedkeel.memory import format_bytes, free_memory
from fedkeel.user_code import one_line, where_raised

_TARGETS = ("label", "labels", "target", "y")
"""What a target is called where nobody says."""

_ARRAYS = ("__array__", "__array_interface__", "__array_struct__", "__array_namespace__")


@dataclass(frozen=True)
class Unpacked:
    """What a data set of another library holds. N examples.

    Args:
        x: [N, ...] inputs.
        y: [N, ...] targets.
        label_names: names of the labels where it has them, in the order of their numbers.
        warnings: what a user should know about it.
    """

    x: Any
    y: Any
    label_names: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def is_hugging_face(value: object) -> bool:
    """Return whether a value is a Hugging Face ``datasets.Dataset``."""
    return all(hasattr(value, name) for name in ("features", "column_names", "with_format"))


def is_data_set(value: object) -> bool:
    """Return whether a value is a data set of another library, or was meant to be one."""
    if isinstance(value, (Tensor, np.ndarray, list, tuple, Mapping, str, bytes, memoryview)):
        return False
    if any(hasattr(value, name) for name in _ARRAYS) or hasattr(value, "__arrow_c_stream__"):
        return False
    if any(kind.__module__.startswith("torch.utils.data") for kind in type(value).__mro__):
        return True
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def unpack(value: Any, name: str, target: str | None, drop: Sequence[str] = ()) -> Unpacked:  # noqa: ANN401
    """Read a data set once, example by example, into memory.

    Args:
        value: a map-style data set whose examples are pairs (input, target) or mappings.
        name: what to call it in messages.
        target: the key of the target where examples are mappings; None where its name says so.
        drop: keys of examples that are no inputs.

    Raises:
        DataError: an example cannot be read, which names it and where the error was raised; it is
            no pair, has another shape than the first; they do not fit into memory.
    """
    if not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        raise DataError(
            f"{name}: the examples cannot be read by their number.",
            got=f"an object of type {type(value).__name__}",
            expected="a map-style data set, with len(data) and data[i]",
            do="of a DataLoader give loader.dataset; read an IterableDataset into arrays",
        )
    tensors = getattr(value, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) == 2 and type(value).__name__ == "TensorDataset":
        return Unpacked(*tensors)
    count = len(value)
    if count == 0:
        raise DataError(f"{name}: there are no examples.", do="check the file or the split")
    label_names: tuple[str, ...] = ()
    if is_hugging_face(value):
        target = target_of(value.column_names, name, target)
        label_names = tuple(getattr(value.features[target], "names", None) or ())
    first, label = _example(value, 0, name, target, drop)
    again, _ = _example(value, 0, name, target, drop)
    x = _room(count, first, name)
    labels = [label]
    x[0] = first
    for i in range(1, count):
        one, label = _example(value, i, name, target, drop)
        if one.shape != first.shape:
            raise DataError(
                f"{name}: the inputs have several shapes.",
                got=f"{one.shape} of example {i}",
                expected=f"{first.shape}, as of example 0",
                do="pad or crop what differs",
            )
        x[i] = one
        labels.append(label)
    warnings: tuple[str, ...] = ()
    if not np.array_equal(first, again, equal_nan=first.dtype.kind == "f"):
        warnings = (
            f"{name} gives other numbers each time an example is read, and it was read once: give "
            "random changes as augment to fedkeel.run, which repeats them bit for bit",
        )
    return Unpacked(x, np.array(labels), label_names, warnings)


def target_of(keys: Sequence[str], name: str, target: str | None) -> str:
    """Return the key of the target.

    Args:
        keys: what there is.
        name: what to call the data in messages.
        target: the key that was given, None for none.

    Raises:
        DataError: there is no such key, or none was given and none is called as targets are.
    """
    if target is None:
        target = next((key for key in _TARGETS if key in keys), None)
    if target in keys and target is not None:
        return target
    raise DataError(
        f"{name}: which column is the target is not known."
        if target is None
        else f"{name} has no column {target!r}.",
        got=", ".join(map(repr, keys[:12])),
        do='name it: target="..."' if target is None else did_you_mean(target, keys),
    )


def _example(
    value: Any,  # noqa: ANN401 - a data set of any library
    index: int,
    name: str,
    target: str | None,
    drop: Sequence[str],
) -> tuple[NDArray[Any], Any]:
    """Return the input and the target of an example."""
    try:
        item = value[index]
    except Exception as error:  # a user's data set may raise anything
        raise DataError(
            f"{name}: reading example {index} raised an error.",
            got=one_line(error),
            why=f"raised in {where_raised(error)}",
            do=f"correct it until data[{index}] works",
        ) from error
    if isinstance(item, Mapping):
        label_key = target_of(list(item), name, target)
        inputs = [key for key in item if key != label_key and key not in drop]
        if len(inputs) != 1:
            raise DataError(
                f"{name}: an example has {len(inputs)} inputs.",
                got=", ".join(map(repr, inputs[:12])) or "the target alone",
                expected="one input and one target",
                do="leave out what is no input: drop=[...]",
            )
        return _as_array(item[inputs[0]], index, name), _as_plain(item[label_key])
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return _as_array(item[0], index, name), _as_plain(item[1])
    raise DataError(
        f"{name}: example {index} is no pair of input and target.",
        got=f"{len(item)} values" if isinstance(item, (tuple, list)) else type(item).__name__,
        expected="(input, target), or a mapping",
    )


def _as_array(value: Any, index: int, name: str) -> NDArray[Any]:  # noqa: ANN401
    """Return an input as an array; an image of Pillow as [C, H, W] in [0, 1]."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    is_image = hasattr(value, "getbands") and hasattr(value, "convert")
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: the input of example {index} is not numbers.",
            got=f"{type(value).__name__} of type {array.dtype}",
            expected="a tensor, an array, numbers, or an image",
            do="turn it into numbers in the data set",
        )
    if not is_image:
        return array
    array = array[:, :, None] if array.ndim == 2 else array
    scale = 255 if array.dtype == np.uint8 else 1
    return np.ascontiguousarray(array.transpose(2, 0, 1), dtype=np.float32) / np.float32(scale)


def _as_plain(value: Any) -> Any:  # noqa: ANN401 - whatever a target is
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _room(count: int, first: NDArray[Any], name: str) -> NDArray[Any]:
    """Return memory for the inputs, or refuse what does not fit."""
    needed, free = count * first.nbytes, free_memory()
    if free is not None and needed > free:
        raise DataError(
            f"{name}: the inputs do not fit into memory.",
            got=f"{count:,} inputs of shape {first.shape}, {format_bytes(needed)}",
            expected=f"at most {format_bytes(free)}, which are free",
            do="write them to a .npy file, and give numpy.load(file, mmap_mode='r')",
        )
    return np.empty((count, *first.shape), dtype=first.dtype)
