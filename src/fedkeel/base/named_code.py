"""The one place that turns a name of code, ``package.module:Name``, into a class or a function.

A name may come from a file, or from a server, so two things are settled before anything is called:

- **Where the module is**, before it is imported. It is one of the user's own (in the working
  directory, in the folder of a Flower app, on a path that the user has added, or installed in
  editable form), one of a short list of model libraries, one that an installed package declares, or
  one that the user names in the environment variable `FEDKEEL_MODULES`. It is never one of Python's
  standard library.
- **What the name stands for**, after it is imported: a class or a plain function that is defined in
  that package, of the kind that is asked for. What a module only imports has no name there.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Literal

from fedkeel.base.user_code import (
    app_folders,
    is_import_path,
    is_user_file,
    one_line,
    where_raised,
    working_directory_first,
)
from fedkeel.errors import FedkeelError, counted, did_you_mean

VARIABLE = "FEDKEEL_MODULES"
"""Environment variable with names of installed packages or modules, between commas, that may be
named like the user's own. No file can set it."""


@dataclass(frozen=True)
class ImportTarget:
    """The kind of object that is named.

    Args:
        noun: what a user calls it, e.g. "model".
        error: class of the errors that are raised.
        example: an import path as it should be written.
        is_kind: whether a value that is not a function, such as a class, is of this kind.
        kind: what is asked for, for messages, e.g. "a class of torch.nn.Module".
        write: what to do where the module has nothing of this kind.
        functions: whether a function is of this kind.
        arguments: with how many values a function is called, one after the other; None where the
            caller looks at its arguments.
        libraries: modules of libraries, with those below them, whose classes may be named.
        function_libraries: the same for functions.
        declared: returns the modules that installed packages declare for this kind.
    """

    noun: str
    error: type[FedkeelError]
    example: str
    is_kind: Callable[[object], bool]
    kind: str
    write: str
    functions: bool = True
    arguments: int | None = None
    libraries: tuple[str, ...] = ()
    function_libraries: tuple[str, ...] = ()
    declared: Callable[[], Iterable[str]] = tuple


@dataclass(frozen=True)
class Place:
    """Where a module would be imported from.

    Args:
        whose: ``own``; of an installed ``package``; of Python's ``standard`` library; or ``nobody``
            where there is no such module.
        file: the file or folder of its package, "" where it has none.
    """

    whose: Literal["own", "package", "standard", "nobody"]
    file: str = ""


def place_of(module: str) -> Place:
    """Return where a module would be imported from. Nothing is imported."""
    top, *below = module.split(".")
    with working_directory_first():
        importlib.invalidate_caches()
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:  # a module that was made in memory, or the script that runs
            return _place_of_loaded(top)
        except Exception:  # the entries of sys.path may raise anything
            spec = None
    if spec is None:
        return Place("standard" if top in sys.stdlib_module_names else "nobody")
    files = _files(spec)
    if not files:
        return Place("standard" if top in sys.stdlib_module_names else "package")
    inside = [str(Path(folder, *below)) for folder in spec.submodule_search_locations or ()]
    is_own = all(map(is_user_file, [*files, *inside]))
    if top in sys.stdlib_module_names and not (is_own and _roots(files) <= _own_roots()):
        return Place("standard", files[0])
    return Place("own" if is_own else "package", files[0])


def _place_of_loaded(top: str) -> Place:
    """Return where a module is from that does not say how it was found."""
    module = sys.modules.get(top)
    if module is None:
        return Place("nobody")
    if top in sys.stdlib_module_names:
        return Place("standard")
    file = getattr(module, "__file__", None) or ""
    return Place("own" if not file or is_user_file(file) else "package", file)


def is_named(module: str, names: Iterable[str]) -> bool:
    """Return whether a module is one of these, or below one.

    >>> is_named("torch.nn.modules", ["torch.nn"]), is_named("torch.nnx", ["torch.nn"])
    (True, False)
    """
    return any(f"{module}.".startswith(f"{name}.") for name in names)


def import_object(path: str, target: ImportTarget) -> object:
    """Return the object with the import path ``package.module:Name``.

    Modules are looked for in the current working directory first, then wherever Python looks; where
    a Flower app runs, in the app's folder before: it is the same at the server and on every node.

    Raises:
        FedkeelError: of the target's class: the path cannot be read, the module may not be named or
            cannot be imported, or the name is not there or stands for nothing of this kind.
    """
    module_name, _, name = path.partition(":")
    if not is_import_path(path) or module_name.endswith(".py"):
        raise target.error(
            f"{target.noun} {path!r} is not an import path",
            expected="package.module:Class",
            do=target.example,
        )
    _check_place(path, module_name, target)
    module = _import_module(path, module_name, target)
    values = getattr(module, "__dict__", {})  # a module may put any object into its place
    allowed = partial(_may_be_named, module_name=module_name, target=target)
    if name not in values:
        candidates = [key for key, value in values.items() if allowed(value)]
        raise target.error(
            f"{target.noun} {path!r}: the module {module_name!r} has no {name!r}",
            why=f"the module was found at {getattr(module, '__file__', 'no file')}",
            do=did_you_mean(name, candidates) if candidates else target.write,
        )
    result: object = values[name]
    if not _is_of_kind(result, module_name, target):
        raise target.error(
            f"{target.noun} {path!r} is not {target.kind}", got=_described(result), do=target.write
        )
    if not _takes(result, target.arguments):
        raise target.error(
            f"{target.noun} {path!r} is not {target.kind}",
            got=f"a function of {inspect.signature(result)}",  # type: ignore[arg-type]
            expected=counted(target.arguments or 0, "argument"),
        )
    if not allowed(result):
        home = _home(result)
        there = f"{home}:{getattr(result, '__name__', name)}"
        can_be = home != module_name and _is_allowed(home, target)
        raise target.error(
            f"{target.noun} {path!r}: {module_name!r} only imports {name!r}",
            why=f"it is defined in {home!r}, and a name counts only where it is defined",
            do=f"write {there!r}" if can_be else target.write,
        )
    return result


def _check_place(path: str, module: str, target: ImportTarget) -> None:
    """Refuse a module that may not be named, before it is imported."""
    place, top = place_of(module), module.partition(".")[0]
    if place.whose == "nobody" or _is_allowed(module, target):
        return
    libraries = sorted({*target.libraries, *target.function_libraries})
    listed = f", or of {', '.join(libraries)}" if libraries else ""
    if place.whose == "standard":
        raise target.error(
            f"{target.noun} {path!r}: {top!r} is a module of Python's own",
            expected=f"a module of yours{listed}",
            why="what a setting names is called, so nothing of Python's own may be named",
            do=f"give your file another name than {top}.py"
            if os.path.exists(f"{top}.py")
            else target.example,
        )
    raise target.error(
        f"{target.noun} {path!r}: {top!r} is an installed package, and not a module of yours",
        got=place.file or top,
        expected=f"a module of yours{listed}",
        why="what a setting names is called",
        do=f"if this package is to be named, set the environment variable {VARIABLE}={top}",
    )


def _is_allowed(module: str, target: ImportTarget) -> bool:
    """Return whether a module may be named for a kind of object."""
    place = place_of(module)
    if place.whose != "package":
        return place.whose == "own"
    return is_named(module, (*target.libraries, *target.function_libraries, *_listed(target)))


def _listed(target: ImportTarget) -> list[str]:
    """Return the packages that count as the user's own."""
    named = os.environ.get(VARIABLE, "").replace(",", " ").split()
    return [*named, *(module.partition(".")[0] for module in target.declared())]


def _is_of_kind(value: object, module: str, target: ImportTarget) -> bool:
    inner = _innermost(value)
    if isinstance(inner, FunctionType):
        return target.functions
    if isinstance(inner, type) or not callable(inner):
        return target.is_kind(inner)
    return target.is_kind(inner) or (target.functions and _is_defined_in(called(inner), module))


def _takes(value: object, arguments: int | None) -> bool:
    """Return whether a function can be called with so many values."""
    if arguments is None or not callable(value):
        return True
    try:
        inspect.signature(value).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # it does not say what it takes
        pass
    return True


def _may_be_named(value: object, module_name: str, target: ImportTarget) -> bool:
    """Return whether a value of a module is of the kind, and is defined where it is named."""
    if not _is_of_kind(value, module_name, target):
        return False
    inner, home = _innermost(value), _home(value)
    if not isinstance(inner, type | FunctionType):
        return True  # an object of the kind, or of a class of the user's, was made there
    libraries = target.libraries if isinstance(inner, type) else target.function_libraries
    if _top(home) == _top(module_name) and not _is_library(module_name, target):
        return True
    is_made_here = inner is not value  # a partial of a library's function, for instance
    return is_named(home, libraries) and (is_made_here or _is_library(module_name, target))


def _is_library(module: str, target: ImportTarget) -> bool:
    return is_named(module, (*target.libraries, *target.function_libraries)) and not is_named(
        module, _listed(target)
    )


def called(value: object) -> object:
    """Return the class, or the function, that runs when a value is called."""
    inner = _innermost(value)
    if isinstance(inner, type | FunctionType):
        return inner
    return _innermost(inspect.getattr_static(type(inner), "__call__", None))


def _is_defined_in(value: object, module: str) -> bool:
    """Return whether a value is a function of a module's package."""
    return isinstance(value, FunctionType) and _top(_home(value)) == _top(module)


def _innermost(value: object) -> object:
    """Return the function of a partial or of a bound method, and any other value itself."""
    while isinstance(value, partial | MethodType):
        value = value.func if isinstance(value, partial) else value.__func__
    return value


def _home(value: object) -> str:
    """Return the module in which a class or a function is defined."""
    return str(getattr(_innermost(value), "__module__", None) or "")


def _top(module: object) -> str:
    return str(module).partition(".")[0]


def _described(value: object) -> str:
    inner = _innermost(value)
    if isinstance(inner, type):
        return "another class"
    if isinstance(inner, FunctionType):
        return "a function"
    return f"an object of {type(inner).__name__}"


def _files(spec: ModuleSpec) -> list[str]:
    """Return the file of a module, the folders of a package without one, [] where it has none."""
    if spec.has_location and spec.origin:
        return [str(Path(spec.origin).absolute())]
    return [str(Path(folder).absolute()) for folder in spec.submodule_search_locations or ()]


def _roots(files: Iterable[str]) -> set[Path]:
    """Return the folders in which modules lie, by the files of the modules or of their packages."""
    folders = set()
    for file in map(Path, files):
        is_package = file.name.startswith("__init__.")
        folders.add(file.parent.parent if is_package else file.parent)
    return folders


def _own_roots() -> set[Path]:
    """Return the folders that are certainly the user's."""
    return {Path(os.getcwd()), *map(Path, app_folders())}


def _import_module(path: str, module_name: str, target: ImportTarget) -> ModuleType:
    noun = target.noun
    try:
        with working_directory_first():
            importlib.invalidate_caches()
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if f"{module_name}.".startswith(f"{missing}."):
            raise target.error(
                f"{noun} {path!r}: there is no module {missing!r}",
                why=f"neither in {os.getcwd()} nor among the installed packages",
                do="run where the file is, or install its package",
            ) from error
        raise target.error(
            f"{noun} {path!r}: the module {module_name!r} imports {missing!r}, "
            "which is not installed",
            do=f"install {missing!r} in the environment of fedkeel",
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise target.error(
            f"{noun} {path!r}: the module {module_name!r} cannot be imported",
            got=one_line(error),
            why=f"raised in {where_raised(error)}",
            do=f"correct it until 'python -c \"import {module_name}\"' works",
        ) from error
