"""A text of all values and code that a user's model, loss or part can reach: what a run's key sees.

The rule: a run's key covers the code of the user's own files that a model, a loss or a part can
reach, and every value that this code can reach in memory: attributes, class attributes, defaults,
closures and the global names that it uses, also in the user's modules that it imports, but nothing
inside installed packages. Where a value in reach cannot be read in full, such as an open file, the
run is never taken for an earlier one: it is made anew, and a line says so.

What code reads from elsewhere each time it is called, a file or an environment variable, is not a
value in memory, and is not seen.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import inspect
import os
import re
import sys
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from threading import Lock, RLock
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn, strided, uint8

from fedkeel.base.fingerprint.global_names import (
    attribute_of,
    global_values,
    is_dunder,
    is_users_module,
    is_users_scope,
    is_versioned,
    library_digest,
)
from fedkeel.base.fingerprint.source_digest import digest_of, module_digest

LARGEST = 1_000_000
"""Values, at most, that are read; tensors and arrays count as one."""

SHORT = 400
"""Letters of the text of a value, at most; a longer text is replaced by its digest."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The address of an object in its repr: another one in every process."""

_SCALARS = frozenset(
    {bool, int, float, complex, bytes, type(None), type(...), type(NotImplemented), range}
)

_SAID_BY_REPR = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(types.GenericAlias, types.UnionType, typing.TypeVar),
    *(types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType),
    *(type(Lock()), type(RLock())),
)
"""Types whose objects are what their repr says, without its address: a lock holds no value."""

_PLAIN_BASES = (object, abc.ABC, typing.Generic, typing.Protocol)

_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes by which torch keeps a module's tensors, modules and hooks."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_OF_METACLASSES = frozenset({"_abc_impl", "_autograd_function_id", "_backward_cls"})
"""Attributes that metaclasses of Python and of torch give to a class, for themselves."""


@dataclass(frozen=True)
class Description:
    """A text that changes with whatever was described, the same in every process.

    Args:
        text: the text.
        unseen: where values are that could not be read in full, such as "loss.log (TextIOWrapper)".
    """

    text: str
    unseen: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A digest of the text."""
        return digest_of(self.text)


def without_addresses(text: str) -> str:
    """Return a text without the addresses of objects in memory.

    >>> without_addresses("<function relu at 0x7f1c2a>")
    '<function relu>'
    """
    return _ADDRESS.sub("", text)


def describe_value(value: object, label: str = "") -> Description:
    """Return a text of a value and of all that it can reach.

    Args:
        value: what is described.
        label: what it is called where something in it could not be read.
    """
    describer = Describer()
    text = describer.describe(value, label)
    return describer.description(text)


_Definition = type | FunctionType | ModuleType
"""What has a name, by which a text names it."""


class _TooManyError(Exception):
    """More values are in reach than are read."""


class Describer:
    """Describes values by all that they can reach.

    Objects that hold each other are followed once; sets and the attributes of an object have no
    order, dictionaries have theirs. Folders of the user's files, and the working directory, are
    left out of texts: they are others on each machine.

    Args:
        names: what to write for certain objects in place of a description, by the object's id.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self._texts: dict[int, str] = dict(names or {})
        self._definitions: list[_Definition] = []  # functions and classes, in the order of reach
        self._unseen: list[str] = []
        self._depths: dict[int, int] = {}  # of what is being described, by id
        self._kept: list[object] = []  # so that no id is used again
        self._count = 0
        self._path: list[str] = []
        self._folders = [os.getcwd()]

    def description(self, text: str) -> Description:
        """Return a text with the definitions of all that it names, and of what these name."""
        lines = []
        for number, definition in enumerate(self._definitions):  # the list grows
            lines.append(
                f"#{number} {self._guarded(definition, _label_of(definition), self._defined)}"
            )
        return Description("\n".join([text, *lines]), tuple(dict.fromkeys(self._unseen)))

    def describe(self, value: object, label: str = "") -> str:
        """Return a text of a value; a function or a class is named, see `description`.

        A tensor or an array is described by its shape, its type and a digest of its numbers,
        whatever its memory layout.

        Args:
            value: what is described.
            label: what leads to it, such as the name of an attribute.
        """
        self._count += 1
        if type(value) in _SCALARS:
            return _shortened(repr(value))
        if type(value) is str:
            return _shortened(repr(self._without_folders(value)))
        if id(value) not in self._texts:
            if id(value) in self._depths:
                return f"<{self._depths[id(value)]} above>"
            self._kept.append(value)
            self._texts[id(value)] = self._guarded(value, label, self._text)
        return self._texts[id(value)]

    def _guarded(self, value: object, label: str, describe: Callable[[Any], str]) -> str:
        """Return a text of a value; what cannot be read in full is noted."""
        depth = len(self._depths)
        self._depths[id(value)] = depth
        self._path.append(label)
        try:
            if self._count > LARGEST:
                self._not_seen(f"more than {LARGEST:,} values")
                raise _TooManyError
            return _shortened(describe(value))
        except (RecursionError, _TooManyError) as error:
            if depth:
                raise
            if isinstance(error, RecursionError):
                self._not_seen("nested too deeply")
            self._count = 0
        except Exception:  # whatever a user's object may raise
            self._not_seen(type(value).__qualname__)
        finally:
            del self._depths[id(value)], self._path[depth:]
        return ""

    def source(self, value: type | FunctionType, label: str = "") -> str:
        """Return a text of a class or function; "" of one of fedkeel, torch or Python."""
        return "" if is_versioned(value.__module__) else self.describe(value, label)

    def attributes(self, value: object, label: str = "") -> str:
        """Return a text of an object's attributes, those in slots too, but not torch's own."""
        values = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                hidden = slot.startswith("__") and not slot.endswith("__")
                name = f"_{kind.__name__.lstrip('_')}{slot}" if hidden else slot
                if name not in ("__dict__", "__weakref__"):
                    with suppress(AttributeError):
                        values[name] = getattr(value, name)
        if isinstance(value, nn.Module):
            values = {k: v for k, v in values.items() if k not in _TORCH_ATTRIBUTES}
        labels = {k: f"{label}.{k}" if label else k for k in sorted(values)}
        return "{" + ", ".join(f"{k}: {self.describe(values[k], labels[k])}" for k in labels) + "}"

    def hooks(self, module: nn.Module) -> list[str]:
        """Return a text of each hook of a module."""
        hooks = [(kind, hook) for kind in _HOOKS for hook in vars(module)[kind].values()]
        return [f"{kind}: {self.describe(hook, kind)}" for kind, hook in hooks]

    # ---- one kind of value after the other ------------------------------------------------------

    def _text(self, value: Any) -> str:  # noqa: ANN401
        kind = type(value)
        if isinstance(value, (type, FunctionType, ModuleType)):
            return self._name(value)
        if kind in (dict, types.MappingProxyType):
            return self._items(value.items())
        if kind is list:
            return self._sequence(value)
        if kind is tuple:
            return f"tuple {self._sequence(value)}"
        if kind in (set, frozenset):
            return f"set {self._sequence(sorted(value, key=_order))}"
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return f"{value.dtype} {value.item()!r}"
        if isinstance(value, Tensor) or kind in (np.ndarray, np.memmap):
            return self._array(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, _SAID_BY_REPR) or kind.__module__ == "typing":
            return without_addresses(repr(value))
        inner = _within(value)
        if inner is not None:
            return f"{kind.__qualname__} {self._sequence(inner)}"
        return self._object(value)

    def _sequence(self, values: Iterable[object]) -> str:
        return "[" + ", ".join(self.describe(v, f"[{i}]") for i, v in enumerate(values)) + "]"

    def _items(self, items: Iterable[tuple[object, object]]) -> str:
        pairs = [f"{self.describe(k)}: {self.describe(v, _label(k))}" for k, v in items]
        return "{" + ", ".join(pairs) + "}"

    def _array(self, value: Tensor | NDArray[Any]) -> str:
        text = f"{tuple(value.shape)} {value.dtype}"
        if isinstance(value, Tensor):
            if value.is_meta:
                return text
            dense = value.detach() if value.layout == strided else value.detach().to_dense()
            array = dense.cpu().resolve_conj().resolve_neg().contiguous()
            value = array.reshape(-1).view(uint8).numpy()
        if value.dtype.hasobject:
            return f"{text} {self.describe(value.tolist())}"
        numbers = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return f"{text} {hashlib.blake2b(numbers, digest_size=8).hexdigest()}"

    def _module(self, module: nn.Module) -> str:
        """Return a text of a module and those within, with the numbers of their tensors."""
        lines = []
        for path, submodule in module.named_modules():
            if submodule is not module and id(submodule) in self._texts:
                continue
            lines.append(f"{path}: {self.describe(type(submodule))} {self.attributes(submodule)}")
            for key, tensor in {**submodule._parameters, **submodule._buffers}.items():
                lines.append(f"{key}: {self.describe(tensor, key)}")
            lines += self.hooks(submodule)
        return "\n".join(lines)

    # ---- functions, classes and modules -----------------------------------------------------

    def _name(self, value: _Definition) -> str:
        """Return the name of a function, class or module, whose definition follows if it counts."""
        if isinstance(value, ModuleType):
            module, name = value.__name__, value.__name__
            counts = is_users_module(module)
        else:
            module, name = value.__module__, f"{value.__module__}.{value.__qualname__}"
            if isinstance(value, type):
                counts = any(is_users_module(base.__module__) for base in value.__mro__)
            else:  # one made by a library's function holds what that was given
                is_named = attribute_of(module, value.__qualname__) is value
                counts = is_users_scope(value.__globals__) or not is_named
        if not counts:
            return f"{name} {library_digest(module)}".rstrip()
        self._definitions.append(value)
        return f"{name} #{len(self._definitions) - 1}"

    def _defined(self, value: _Definition) -> str:
        if isinstance(value, ModuleType):
            values = {k: v for k, v in vars(value).items() if not is_dunder(k)}
            return f"{module_digest(value.__name__)} {self._items(sorted(values.items()))}"
        return self._kind(value) if isinstance(value, type) else self._function(value)

    def _kind(self, kind: type) -> str:
        texts = []
        for base in kind.__mro__:
            if base is not kind:
                texts.append(self.describe(base))
            elif is_users_module(base.__module__):
                texts.append(self._definition(base))
                for name, member in sorted(vars(base).items()):
                    is_code = isinstance(member, FunctionType) or _within(member) is not None
                    if is_code or not (is_dunder(name) or name in _OF_METACLASSES):
                        texts.append(f"{name}: {self.describe(member, name)}")
        return " ".join(texts)

    def _function(self, function: FunctionType) -> str:
        texts = []
        if is_users := is_users_scope(function.__globals__):
            texts += [self._definition(function), self._code(function.__code__)]
        for values in (function.__defaults__, function.__kwdefaults__, vars(function)):
            texts.append(self.describe(values))
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty one
                texts.append(self.describe(cell.cell_contents, name))
        if is_users:
            texts += [self.describe(value, name) for name, value in global_values(function)]
        return " ".join(texts)

    def _code(self, code: CodeType) -> str:
        constants = [self.describe(constant) for constant in code.co_consts]
        return " ".join([code.co_code.hex(), *code.co_names, *constants])

    def _definition(self, value: type | FunctionType) -> str:
        """Return the digest of the file in which something is defined, or else its own source."""
        module = value.__module__ or ""
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None:
            folder = str(Path(file).absolute().parent)
            self._folders += [] if folder in self._folders else [folder]
        if module != "__main__":
            with suppress(OSError):
                if digest := module_digest(module):
                    return digest
        with suppress(OSError, TypeError, IndentationError):
            return inspect.getsource(value)
        return ""

    def _object(self, value: object) -> str:
        """Return a text of any other object: what it is, and its state as pickle would take it."""
        kind = type(value)
        texts = [self.describe(kind)]
        is_users = is_users_module(kind.__module__)
        if is_users:
            texts.append(self.attributes(value))
            if all(k in _PLAIN_BASES or is_users_module(k.__module__) for k in kind.__mro__):
                return " ".join(texts)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reduced = value.__reduce_ex__(4)
        except Exception:  # whatever an object that cannot be copied raises
            self._not_seen(kind.__qualname__)
            return " ".join(texts)
        if isinstance(reduced, str):  # a name in its module
            return " ".join([*texts, reduced, self.describe(getattr(value, "__wrapped__", None))])
        function, arguments, *state = reduced
        texts += [self.describe(function), self.describe(arguments)]
        for part in state:
            texts.append(self.describe([*part] if isinstance(part, Iterator) else part))
        return " ".join(texts)

    def _without_folders(self, text: str) -> str:
        for folder in self._folders if "/" in text or "\\" in text else ():
            text = text.replace(folder, ".")
        return text

    def _not_seen(self, what: str) -> None:
        place = "".join(p if p.startswith("[") else f".{p}" for p in self._path if p).lstrip(".")
        self._unseen.append(f"{place} ({what})" if place else what)


def _shortened(text: str) -> str:
    return text if len(text) <= SHORT else digest_of(text)


def _label(key: object) -> str:
    return f"[{key!r}]" if isinstance(key, (str, int)) else "[...]"


def _order(value: object) -> str:
    """Return by what a set is sorted: the same in every process."""
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__qualname__} {name or without_addresses(repr(value))}"


def _within(value: object) -> tuple[object, ...] | None:
    """Return the values that an object of Python's own consists of, None of another object."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return value.func, value.args, value.keywords
    if isinstance(value, (weakref.ref, weakref.ProxyTypes)):
        return (value() if isinstance(value, weakref.ref) else None,)
    if isinstance(value, PurePath):
        return (str(value),)
    if isinstance(value, (bytearray, memoryview)):
        return (bytes(value),)
    if isinstance(value, torch.Generator):
        return str(value.device), value.get_state()
    return None


def _label_of(value: _Definition) -> str:
    return value.__name__ if isinstance(value, ModuleType) else value.__qualname__
