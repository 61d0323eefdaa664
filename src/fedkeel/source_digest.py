"""Digests of a user's source: a run is reused only while the code that it uses is the same."""

from __future__ import annotations

import abc
import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn, strided, uint8

from fedkeel.user_code import is_user_file, working_directory_first

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The address of an object in its repr: another one in every process."""

_VERSIONED = frozenset({"fedkeel", "torch", "builtins", "collections", "typing", "abc"})
"""Packages whose version counts, and not their files."""

_VALUES = (int, float, np.generic, np.ndarray, Tensor, nn.Module)
"""Global values that count where a function names them. In a session texts count too; in a file a
text may be where the file lies."""

_PLAIN_BASES = (object, abc.ABC, Generic, nn.Module)

_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes by which torch keeps a module's tensors, modules and hooks."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_Seen = tuple[object, ...]
"""Objects whose description led here. They are left out, as they may refer to each other."""


def without_addresses(text: str) -> str:
    """Return a text without the addresses of objects in memory.

    >>> without_addresses("<function relu at 0x7f1c2a>")
    '<function relu>'
    """
    return _ADDRESS.sub("", text)


def source_digest(value: object) -> str:
    """Return a digest of the source of a function, a class or an object; "" of fedkeel's own.

    For what is defined in a file it is that of the file and of the user's files which that imports
    (`module_digest`). In a script or an interactive session, where much else changes, it is that of
    the definition (its source, or its byte code where there is no source) and of the user's
    functions and classes that the definition names. Also counted are values in a closure that
    cannot grow, numbers and tensors that a function names, an object's attributes, and a module's
    parameters and buffers.
    """
    text = _source_text(value)
    return _digest(text) if text else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _is_among(value: object, others: Iterable[object]) -> bool:
    return any(value is other for other in others)


def _source_text(value: object, seen: _Seen = ()) -> str:
    """Return a text that changes with the source of a value."""
    if _is_among(value, seen):
        return ""
    seen = (*seen, value)
    if isinstance(value, functools.partial):
        arguments = [*value.args, *sorted(value.keywords.items())]
        return f"{_source_text(value.func, seen)} {describe_value(arguments, seen)}"
    if isinstance(value, MethodType):
        return _source_text(value.__func__, seen) + _source_text(value.__self__, seen)
    if isinstance(value, FunctionType):
        return "" if _is_versioned(value) else _function_text(value, seen)
    if isinstance(value, type):
        kinds = [kind for kind in value.__mro__ if not _is_versioned(kind)]
        return "".join("".join([_definition(kind), *_named_text(kind, seen)]) for kind in kinds)
    if isinstance(value, nn.Module):
        return _module_text(value, seen)
    if hasattr(value, "__dict__"):
        return _source_text(type(value), seen) + describe_attributes(value, seen)
    return ""


def _function_text(function: FunctionType, seen: _Seen) -> str:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    inner = [function.__defaults__, function.__kwdefaults__, *cells]
    values = [() if isinstance(item, (list, dict, set)) else item for item in inner]
    values += [item for item in _global_values(function) if isinstance(item, _VALUES)]
    lines = [
        (_source_text(item, seen) if callable(item) else "") or describe_value(item, seen)
        for item in values
        if not _is_among(item, seen)
    ]
    lines += _named_text(function, seen)
    return " ".join([_definition(function), _code_text(function.__code__), *lines])


def _module_text(module: nn.Module, seen: _Seen) -> str:
    """Return a text that changes with the source of a module and those in it, and their numbers."""
    lines = []
    for name, submodule in module.named_modules():
        kind = type(submodule)
        source = f"{_source_text(kind, seen)}{describe_attributes(submodule, seen)}"
        lines.append(f"{name}: {kind.__module__}.{kind.__qualname__} {source}")
        for key, tensor in {**submodule._parameters, **submodule._buffers}.items():
            lines.append(f"{key}: {describe_value(tensor, seen)}")
        lines += describe_hooks(submodule, seen)
    return "\n".join(lines)


def describe_hooks(module: nn.Module, seen: _Seen = ()) -> list[str]:
    """Return a description of each hook of a module; what is among `seen` is left out."""
    hooks = [(kind, hook) for kind in _HOOKS for hook in vars(module)[kind].values()]
    return [f"{kind}: {describe_value(hook, (*seen, module))}" for kind, hook in hooks]


def describe_attributes(value: object, seen: _Seen = ()) -> str:
    """Return a description of an object's attributes; those among `seen` are left out.

    Private ones count where a user wrote the class: those of a library are its inner workings.
    """
    counts_private = all(kind in _PLAIN_BASES or _is_users(kind) for kind in type(value).__mro__)
    attributes = {
        k: v
        for k, v in vars(value).items()
        if not k.startswith("_") or (counts_private and k not in _TORCH_ATTRIBUTES)
    }
    return describe_value(attributes, seen)


def describe_value(value: object, seen: _Seen = ()) -> str:
    """Return numbers, texts and collections of these as text; of other things what they are.

    A tensor or an array is described by its shape, its type and a digest of its numbers, whatever
    its memory layout. One that is among `seen` is left out.
    """
    if isinstance(value, dict):
        by_name = {str(k): v for k, v in value.items()}
        items = [f"{k}: {describe_value(by_name[k], seen)}" for k in sorted(by_name)]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [describe_value(item, seen) for item in value]
        return "[" + ", ".join(items if isinstance(value, (list, tuple)) else sorted(items)) + "]"
    if isinstance(value, np.generic):
        return repr(value.item())
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return "" if _is_among(value, seen) else _describe_array(value)
    kind = value if hasattr(value, "__qualname__") else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, FunctionType) and not _is_versioned(value):
        return f"{value.__qualname__} {_source_text(value, seen)}"
    is_object = callable(value) and not isinstance(value, type) and hasattr(value, "__dict__")
    if isinstance(value, (functools.partial, MethodType, nn.Module)) or is_object:
        return f"{name} {_source_text(value, seen)}"
    return name


def _describe_array(value: Tensor | NDArray[Any]) -> str:
    """Return the shape, the type and a digest of the numbers of a tensor or an array."""
    text = f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, Tensor):
        if value.is_meta:
            return text
        dense = value.detach() if value.layout == strided else value.detach().to_dense()
        array = dense.cpu().resolve_conj().resolve_neg().contiguous()
        value = array.reshape(-1).view(uint8).numpy()
    if value.dtype.hasobject:
        return f"{text} {describe_value(value.tolist())}"
    numbers = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return f"{text} {hashlib.blake2b(numbers, digest_size=8).hexdigest()}"


def _global_values(function: FunctionType) -> list[object]:
    """Return the values of all global names in a function, and in those within it."""
    names: list[str] = []
    codes = [function.__code__]
    for code in codes:  # the list grows
        names += code.co_names
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    scope = function.__globals__
    unique = [name for name in dict.fromkeys(names) if not name.startswith("__")]
    return [scope[name] for name in unique if name in scope]


def _named_text(value: type | FunctionType, seen: _Seen) -> list[str]:
    """Return texts of what a definition in a session names, and what these name in turn."""
    lines, definitions = [], [value]
    for definition in definitions:  # the list grows
        if definition.__module__ != "__main__":
            continue
        for named in [n for function in _functions(definition) for n in _global_values(function)]:
            if isinstance(named, ModuleType):
                file = getattr(named, "__file__", None)
                is_users = file is not None and is_user_file(file)
                lines.append(module_digest(named.__name__) if is_users else "")
            elif isinstance(named, (FunctionType, type)):
                is_known = _is_versioned(named) or _is_among(named, (*definitions, *seen))
                definitions += [] if is_known or not _is_users(named) else [named]
            elif isinstance(named, (*_VALUES, str, tuple)):
                lines.append(describe_value(named, seen))
    return [*lines, *map(_definition, definitions[1:])]


def _functions(value: type | FunctionType) -> list[FunctionType]:
    """Return a function by itself, or the functions of a class."""
    if isinstance(value, FunctionType):
        return [value]
    functions = []
    for member in vars(value).values():
        inner = [getattr(member, name, None) for name in ("__func__", "fget", "fset", "func")]
        functions += [f for f in (member, *inner) if isinstance(f, FunctionType)]
    return functions


def _is_users(value: type | FunctionType) -> bool:
    """Return whether a class or a function is defined in a user's file or in a session."""
    file = getattr(sys.modules.get(value.__module__), "__file__", None)
    return value.__module__ == "__main__" or (file is not None and is_user_file(file))


def _is_versioned(value: type | FunctionType) -> bool:
    return str(value.__module__).split(".")[0] in _VERSIONED


def _is_filled(cell: object) -> bool:
    with suppress(ValueError):
        _ = cell.cell_contents  # type: ignore[attr-defined]
        return True
    return False


def _definition(value: type | FunctionType) -> str:
    """Return the digest of the file in which something is defined, or else its own source."""
    if value.__module__ != "__main__":
        with suppress(OSError):
            if digest := module_digest(value.__module__):
                return digest
    with suppress(OSError, TypeError, IndentationError):
        return inspect.getsource(value)
    functions = [value] if isinstance(value, FunctionType) else vars(value).values()
    return " ".join(_code_text(f.__code__) for f in functions if isinstance(f, FunctionType))


def _code_text(code: CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *constants])


# ---- files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModuleFile:
    """A module's file, as it was when the module was loaded.

    Args:
        loaded: the module's specification, another object whenever it is loaded anew; before it is
            loaded, the time at which the file was changed.
        path: where the file is.
        digest: digest of the file.
        imports: names of the modules that it may import; () of a library's.
    """

    loaded: object
    path: str
    digest: str
    imports: tuple[str, ...] = ()


_known_files: dict[str, _ModuleFile] = {}


def module_digest(name: str) -> str:
    """Return the digest of a module's file and of the user's files that it imports.

    The files count as they were when the modules were loaded, or first asked for. What a library
    imports does not count: its version does. It is "" for a module that is in no file.
    """
    module_file = _module_file(name)
    if module_file is None:
        return ""
    digests: dict[str, str] = {}
    imports = list(module_file.imports)
    for imported in imports:  # the list grows
        file = None if imported in digests or imported == name else _module_file(imported)
        if file is not None and is_user_file(file.path):
            digests[imported] = file.digest
            imports += file.imports
    return _digest(" ".join([module_file.digest, *(f"{k} {digests[k]}" for k in sorted(digests))]))


def _module_file(name: str) -> _ModuleFile | None:
    """Return a module's file, None where there is no such file."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None) if module else _path_of_module(name)
    if path is None or not Path(path).is_file():
        return None
    changed = Path(path).stat().st_mtime_ns
    loaded = getattr(module, "__spec__", None) if module else changed
    known = _known_files.get(name)
    if known is None or known.loaded is not loaded:
        package = getattr(module, "__package__", None) or ""
        imports = imported_modules(Path(path), package) if is_user_file(path) else []
        known = _ModuleFile(loaded, path, file_digest(path, changed), tuple(imports))
        _known_files[name] = known
    return known


def _path_of_module(name: str) -> str | None:
    """Return the file of a module that is not loaded, None for one in a package."""
    with suppress(Exception), working_directory_first():  # entries of sys.path may raise anything
        spec = None if "." in name else PathFinder.find_spec(name)
        return spec.origin if spec is not None and spec.has_location else None
    return None


def imported_modules(file: Path, package: str = "") -> list[str]:
    """Return the names of the modules that a file may import, anywhere in it.

    Args:
        file: the file of a module.
        package: the module's package, from which names that begin with a dot are looked up.
    """
    try:
        statements = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # no source
        return []
    names: list[str] = []
    for statement in statements:
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            relative = "." * statement.level + (statement.module or "")
            with suppress(ImportError):  # beyond the top of its package
                parent = importlib.util.resolve_name(relative, package)
                names += [parent, *(f"{parent}.{alias.name}" for alias in statement.names)]
    parts = [name.split(".") for name in names]
    return list(dict.fromkeys(".".join(p[:n]) for p in parts for n in range(1, len(p) + 1)))


@functools.lru_cache(maxsize=256)
def file_digest(path: str, state: object) -> str:
    """Return the digest of a file, read once for each state: when it was loaded or changed."""
    with Path(path).open("rb") as file:  # which may be data, larger than memory
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
