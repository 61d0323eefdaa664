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

from fedkeel.base.memory import format_bytes, free_memory
from fedkeel.base.user_code import one_line, where_raised
from fedkeel.data.read.image_files import image_pixels
from fedkeel.errors import DataError, did_you_mean

TARGETS = ("label", "labels", "target", "y")
"""What a target is called where nobody says."""

TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""What a tokenizer of Hugging Face makes of a text; models take these inputs by name."""

_ARRAYS = ("__array__", "__array_interface__", "__array_struct__", "__array_namespace__")


@dataclass(frozen=True)
class Unpacked:
    """What a data set of another library holds. N examples.

    Args:
        x: [N, ...] inputs; several by name where it holds tokens.
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
        drop: keys of examples that are not inputs.

    Raises:
        DataError: an example cannot be read, which names it and where the error was raised; it is
            not a pair, has another shape than the first, or is an image of a kind that is not read;
            they do not fit into memory; chained data sets number their classes in several ways.
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
    label_names = _class_names(value, name)
    if is_hugging_face(value):
        target = target_of(value.column_names, name, target)
        label_names = tuple(getattr(value.features[target], "names", None) or ())
    first, label = _example(value, 0, name, target, drop)
    again, _ = _example(value, 0, name, target, drop)
    columns = {key: _Column(array, count, name) for key, array in first.items()}
    labels = [label]
    for i in range(1, count):
        one, label = _example(value, i, name, target, drop)
        if one.keys() != first.keys():
            raise DataError(
                f"{name}: example {i} has other inputs than example 0.",
                got=", ".join(map(repr, one)),
                expected=", ".join(map(repr, first)),
            )
        for key, column in columns.items():
            column.put(i, one[key])
        labels.append(label)
    warnings: tuple[str, ...] = ()
    if not all(_is_same(first[key].array, again[key].array) for key in first):
        warnings = (
            f"{name} gives other numbers each time an example is read, and it was read once: give "
            "random changes as augment to fedkeel.run, which repeats them bit for bit",
        )
    x = {key: column.values for key, column in columns.items()}
    y = np.array(labels)
    return Unpacked(x.get("", x), y, _fitting_names(label_names, y), warnings)


@dataclass(frozen=True)
class _Input:
    """One input of an example, and whether it is an image."""

    array: NDArray[Any]
    is_image: bool = False


class _Column:
    """Room for an input of all examples [N, ...], of which the first one is there.

    A grey image among coloured ones becomes coloured, as in a folder.
    """

    def __init__(self, first: _Input, count: int, name: str) -> None:
        self._name = name
        self.values = _room(count, first.array, name)
        self.values[0] = first.array

    def put(self, row: int, one: _Input) -> None:
        """Take the input of an example, or refuse one of another shape."""
        array = one.array
        if one.is_image and array.shape[1:] == self.values.shape[2:]:
            if len(array) > self.values.shape[1]:
                self.values = np.repeat(self.values, len(array), axis=1)
            elif len(array) < self.values.shape[1]:
                array = np.repeat(array, self.values.shape[1], axis=0)
        if array.shape != self.values.shape[1:]:
            raise DataError(
                f"{self._name}: the inputs have several shapes.",
                got=f"{array.shape} of example {row}",
                expected=f"{self.values.shape[1:]}, as of example 0",
                do="pad or crop what differs",
            )
        self.values[row] = array


def _is_same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def has_images(value: Any) -> bool:  # noqa: ANN401 - a data set of any library that can be read
    """Return whether the inputs of a data set are images of Pillow."""
    item = value[0]
    inputs = item.values() if isinstance(item, Mapping) else item[:1]
    return any(map(_is_image, inputs))


def _is_image(value: object) -> bool:
    return hasattr(value, "getbands") and hasattr(value, "convert")


def _class_names(value: Any, name: str) -> tuple[str, ...]:  # noqa: ANN401
    """Return the names of the labels of a data set as those of torchvision have them.

    Their ``classes`` are the names in the order of their numbers. A subset has those of its whole.
    """
    if getattr(value, "target_transform", None) is not None:  # numbers are others than of `classes`
        return ()
    parts = getattr(value, "datasets", None)
    if isinstance(parts, (list, tuple)) and parts:
        names = {_class_names(part, name) for part in parts}
        if len(names) > 1:
            raise DataError(
                f"{name}: data sets that are chained number their classes in several ways.",
                got="; ".join(", ".join(map(repr, each[:6])) or "no names" for each in names),
                why="the same number would be another class",
                do="give each data set as a client of its own, which aligns them by name; or make "
                "the classes of all the same",
            )
        return names.pop()
    if hasattr(value, "indices") and hasattr(value, "dataset"):
        return _class_names(value.dataset, name)
    names_of = getattr(value, "classes", None)
    if not isinstance(names_of, (list, tuple)) or not all(isinstance(n, str) for n in names_of):
        return ()
    numbers = getattr(value, "class_to_idx", None)
    ordered = tuple(names_of)
    if isinstance(numbers, Mapping) and set(numbers) == set(ordered):
        ordered = tuple(sorted(ordered, key=lambda one: numbers[one]))
        if sorted(numbers.values()) != list(range(len(ordered))):
            return ()
    return ordered if len(set(ordered)) == len(ordered) else ()


def _fitting_names(names: tuple[str, ...], y: NDArray[Any]) -> tuple[str, ...]:
    """Return the names of labels, none where the targets are other than numbers of these."""
    is_labels = y.ndim == 1 and y.dtype.kind in "iu" and len(y) > 0
    return names if is_labels and y.min() >= 0 and y.max() < len(names) else ()


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
        target = next((key for key in TARGETS if key in keys), None)
    if target in keys and target is not None:
        return target
    raise DataError(
        f"{name}: it is not known which column is the target."
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
) -> tuple[dict[str, _Input], Any]:
    """Return the input of an example, under "", or several by name, and its target."""
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
        others = [key for key in inputs if key not in TOKENS]
        if len(inputs) > 1 and not others:
            arrays = {key: _as_input(item[key], index, f"{name}: {key}") for key in inputs}
            return arrays, _as_plain(item[label_key])
        if len(inputs) != 1:
            surplus = others if len(others) < len(inputs) else []
            raise DataError(
                f"{name}: an example has {len(inputs)} inputs.",
                got=", ".join(map(repr, inputs[:12])) or "only the target",
                expected="one input and one target, or what a tokenizer makes, by name: "
                + ", ".join(TOKENS),
                do=f"leave out what is not an input: drop={surplus or '[...]'}; several inputs can "
                "be given as arrays: ({name: x, ...}, y)",
            )
        return {"": _as_input(item[inputs[0]], index, name)}, _as_plain(item[label_key])
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return {"": _as_input(item[0], index, name)}, _as_plain(item[1])
    raise DataError(
        f"{name}: example {index} is not a pair of input and target.",
        got=f"{len(item)} values" if isinstance(item, (tuple, list)) else type(item).__name__,
        expected="(input, target), or a mapping",
    )


def _as_input(value: Any, index: int, name: str) -> _Input:  # noqa: ANN401
    """Return an input; an image of Pillow as [C, H, W] in [0, 1], as the images of a folder."""
    if isinstance(value, Tensor):
        return _Input(value.detach().cpu().numpy())
    if _is_image(value):
        what = f"{name}: the image of example {index}"
        try:
            pixels = image_pixels(value, what)
        except (OSError, SyntaxError, ValueError) as error:  # Pillow at a damaged file
            raise DataError(f"{what} cannot be read.", got=one_line(error)) from error
        return _Input(np.ascontiguousarray(pixels, dtype=np.float32) / np.float32(255), True)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: the input of example {index} is not numbers.",
            got=f"{type(value).__name__} of type {array.dtype}",
            expected="a tensor, an array, numbers, or an image",
            do="turn it into numbers in the data set",
        )
    return _Input(array)


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
