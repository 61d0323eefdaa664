"""Digests of the files of modules, and of the user's files that they import."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from fedkeel.base.user_code import is_user_file, working_directory_first


def digest_of(text: str) -> str:
    """Return a digest of a text, of 16 letters.

    >>> digest_of("a") == digest_of("a") != digest_of("b")
    True
    """
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


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
    return digest_of(
        " ".join([module_file.digest, *(f"{k} {digests[k]}" for k in sorted(digests))])
    )


def _module_file(name: str) -> _ModuleFile | None:
    """Return a module's file, None where there is no such file."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None) if module else path_of_module(name)
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


def path_of_module(name: str) -> str | None:
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
