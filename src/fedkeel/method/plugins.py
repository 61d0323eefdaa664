"""Users' parts, in files outside the package.

They are found by import path, ``my_method:Slow`` for the class Slow in my_method.py, or by the
name under which an installed package declares them:

    [project.entry-points."fedkeel.methods"]
    slow = "my_package.slow:Slow"

The object there is a part, or a tuple of parts.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

from fedkeel.base.fingerprint.source_digest import module_digest
from fedkeel.base.named_code import ImportTarget, import_object
from fedkeel.base.user_code import one_line
from fedkeel.errors import CompositionError
from fedkeel.method.docs.bibliography import entries
from fedkeel.method.hyperparameters import hyperparameter_types, is_expressible, type_name
from fedkeel.method.part import Part
from fedkeel.method.parts.index import installed_methods
from fedkeel.method.roles import ROLES

RESERVED = frozenset({"model", "survey", "mean"})
"""Names that messages and records use themselves."""


def load_parts(path: str) -> tuple[type[Part], ...]:
    """Return the parts at ``package.module:Name``.

    Raises:
        CompositionError: there is nothing at this path, or it is not a part.
    """
    value = import_object(path, _PART)
    values = value if isinstance(value, tuple) else (value,)
    kinds = tuple(_check_part(path, value) for value in values)
    if not kinds or len({kind.name for kind in kinds}) < len(kinds):
        raise CompositionError(
            f"method {path!r} is a tuple of {len(kinds)} parts.",
            got=", ".join(kind.name for kind in kinds) or "no part",
            expected="one part or more, each with a name of its own",
        )
    return kinds


def expression_name(part: Part) -> str:
    """Return what an expression calls a part: its name, or its import path outside the package."""
    kind = type(part)
    return f"{kind.__module__}:{kind.__qualname__}" if _is_user_class(kind) else part.name


def user_modules(parts: Iterable[Part]) -> dict[str, list[type[Part]]]:
    """Return the classes of parts outside the package, by the modules in which they are written."""
    kinds = {kind for part in parts for kind in type(part).__mro__ if issubclass(kind, Part)}
    by_module: dict[str, list[type[Part]]] = {}
    for kind in sorted(filter(_is_user_class, kinds), key=lambda kind: kind.__qualname__):
        by_module.setdefault(kind.__module__, []).append(kind)
    return {module: by_module[module] for module in sorted(by_module)}


def _is_user_class(kind: type) -> bool:
    return kind.__module__.split(".")[0] != "fedkeel"


def _is_part(value: object) -> TypeGuard[type[Part]]:
    return isinstance(value, type) and issubclass(value, Part)


def _is_one_or_more(value: object) -> bool:
    return _is_part(value) or isinstance(value, tuple)


_PART = ImportTarget(
    noun="method",
    error=CompositionError,
    example="for the class Slow in my_method.py write 'my_method:Slow'",
    is_kind=_is_one_or_more,
    kind="a part: a class that inherits roles of fedkeel.method.roles, or a tuple of such",
    write="write a part there: a frozen dataclass that plays roles",
    functions=False,
    libraries=("fedkeel.method.parts",),
    declared=lambda: (path for paths in installed_methods().values() for path in paths),
)


def _check_part(path: str, kind: object) -> type[Part]:
    """Return the class if it is a part that can be used.

    Raises:
        CompositionError: says what it lacks.
    """
    if not _is_part(kind):
        got = "another class" if isinstance(kind, type) else f"an object of {type(kind).__name__}"
        raise CompositionError(
            f"method {path!r} is not a part.",
            got=got,
            expected="a class that inherits roles of fedkeel.method.roles, or a tuple of such",
        )
    flaw = _flaw(kind)
    if flaw:
        raise CompositionError(
            f"method {path!r}: {kind.__name__} {flaw}.",
            do="see docs/guides/write-a-method.md for a whole part",
        )
    file_digest_of(kind.__module__)  # of the file as it is now: it may change later
    _keep_importable(kind)
    return kind


def _flaw(kind: type[Part]) -> str:
    """Return why a class cannot be used as a part, "" where it can."""
    if not any(issubclass(kind, role) for role in ROLES):
        return "plays no role"
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        return f"lacks {', '.join(missing)}, which its roles ask for"
    unset = [n for n in ("name", "pairing") if _is_unset(kind, n)]
    if unset:
        return f"does not set {', '.join(unset)}"
    if not re.fullmatch(r"[a-z_]\w*(\.\w+)*", kind.name) or kind.name in RESERVED:
        return f"calls itself {kind.name!r}, which is not a name for a part"
    if kind.paper and kind.paper not in entries():
        return f"cites {kind.paper!r}, which is not in papers.bib; leave it out if there is none"
    if "__dataclass_fields__" not in vars(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "is not a frozen dataclass"
    missing = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    if missing:
        return f"has no default for {', '.join(missing)}"
    return _type_flaw(kind) or _signature_flaw(kind)


def _type_flaw(kind: type[Part]) -> str:
    """Return what is wrong with the types of a part's hyper-parameters, or ""."""
    try:
        types = hyperparameter_types(kind)
    except Exception as error:  # an annotation may raise anything
        return f"has a hyper-parameter of a type that cannot be read: {one_line(error)}"
    refused = [name for name, hint in types.items() if not is_expressible(hint)]
    if not refused:
        return ""
    return (
        f"declares {refused[0]!r} as {type_name(types[refused[0]])}, which no expression can give: "
        "a hyper-parameter is an int, a float, a bool, a str, a Literal of such, or None"
    )


def _signature_flaw(kind: type[Part]) -> str:
    """Return which method takes other arguments than its role passes, or ""."""
    for role in (role for role in ROLES if issubclass(kind, role)):
        for name in sorted(getattr(role, "__abstractmethods__", ())):
            declared, method = getattr(role, name), getattr(kind, name)
            if isinstance(declared, property) or not inspect.isfunction(method):
                continue
            names = list(inspect.signature(declared).parameters)
            try:
                inspect.signature(method).bind(*names)
            except TypeError:
                arguments = ", ".join(names[1:])
                signature = inspect.signature(method)
                return f"has a {name}{signature}, which is called with ({arguments})"
    return ""


def _annotated(kind: type[Part]) -> set[str]:
    return {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}


def _is_unset(kind: type[Part], name: str) -> bool:
    return name in _annotated(kind) and not hasattr(kind, name)


def file_digest_of(module: str) -> str:
    """Return the digest of a module, as it was when it was loaded.

    Raises:
        CompositionError: it is in no file.
    """
    digest = module_digest(module)
    if digest:
        return digest
    raise CompositionError(
        f"The parts of the module {module!r} are in no file.",
        why="a finished run is used again only if the code of its method is unchanged",
        do="write them into my_method.py and name them 'my_method:Slow'",
    )


def _keep_importable(kind: type[Part]) -> None:
    """Keep the folder of a part on the import path: spawned processes import the part again."""
    top = sys.modules[kind.__module__.split(".")[0]]
    file = getattr(top, "__file__", None)
    if file is None:
        return
    folder = Path(file).resolve().parent
    home = str(folder.parent if Path(file).name == "__init__.py" else folder)
    if home not in sys.path:
        sys.path.append(home)
