"""What parts return is looked at, and what goes wrong in them is told with their name."""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.method.roles import Part
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree
from fedkeel.user_code import one_line, where_raised

_SEEN = "fedkeel.method.context"
"""Where the classes are written that parts see: it imports this module."""


def tree_of(part: Part, found: Tree, params: Tree) -> Tree:
    """Return what a part made of the parameters, a tensor of the same form for each of them.

    Raises:
        TrainingError: names the part, and what it leaves out, adds or gives another form.
    """
    if isinstance(found, dict) and found.keys() == params.keys():
        odd = (k for k, v in params.items() if not _alike(found[k], v))
        name = next(odd, None)
        if name is None:
            return found
        got, expected = f"{name!r}: {_form(found[name])}", _form(params[name])
    else:
        got = _difference(found, params)
        expected = f"a dict with the names of the {len(params)} parameters"
    raise TrainingError(
        f"{part.name} ({type(part).__name__}) does not return a tensor for each parameter.",
        got=got,
        expected=expected,
        why="what is made of parameters has their names, shapes and types",
        do="return a tree of the same form as the one it is given, zeros where nothing is meant",
    )


def _difference(found: object, params: Tree) -> str:
    """Return which names are missing and which are too many, or what is no tree at all."""
    if not isinstance(found, dict):
        return f"an object of type {type(found).__name__}"
    odd = {"without": [k for k in params if k not in found]}
    odd["with"] = [k for k in found if k not in params]
    return ", ".join(
        f"{word} {', '.join(map(repr, names[:4]))}" + (" and more" if len(names) > 4 else "")
        for word, names in odd.items()
        if names
    )


def _alike(found: object, like: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == like.shape and found.dtype == like.dtype


def _form(found: object) -> str:
    """Return the shape and type of a tensor in words, or what else it is."""
    if isinstance(found, Tensor):
        return _words(found.shape, found.dtype)
    return f"an object of type {type(found).__name__}"


def _words(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} of {str(dtype).removeprefix('torch.')}"


def _shown(forms: Mapping[str, tuple[torch.Size, torch.dtype]], path: str) -> str:
    """Return the form of what stands at a path in words."""
    return _words(*forms[path]) if path in forms else "nothing"


def span(part: Part, found: Span, updates: Span) -> Span:
    """Return what a part made of the clients' updates, one for each of them.

    Raises:
        TrainingError: names the part, and what it returned.
    """
    if isinstance(found, Span):
        tree_of(part, _first(found), _first(updates))
        if len(found) == len(updates):
            return found
    raise TrainingError(
        f"{part.name} ({type(part).__name__}) does not return the clients' updates.",
        got=f"{len(found)} updates" if isinstance(found, Span) else _form(found),
        expected=f"a fedkeel.solve.span.Span of {len(updates)}, such as the one it is given",
    )


def _first(updates: Span) -> Tree:
    return {k: v[0] for k, v in updates.rows.items()}


def pair(part: Part, found: tuple[Tree, State]) -> tuple[Tree, State]:
    """Return the model and the state that a server optimiser made.

    Raises:
        TrainingError: names the part, and what it returned.
    """
    if isinstance(found, tuple) and len(found) == 2:
        return found
    raise TrainingError(
        f"{part.name} ({type(part).__name__}) does not return a model and a state.",
        got=f"a tuple of {len(found)}" if isinstance(found, tuple) else _form(found),
        expected="a tuple of two: the new global model, and the new state, {} for nothing",
    )


def losses(part: Part, found: Tensor, examples: int) -> Tensor:
    """Return what a part made of a batch: a value for each example, [B], or one for all, [].

    Raises:
        TrainingError: names the part, and what it returned.
    """
    if isinstance(found, Tensor) and found.shape in ((examples,), ()):
        return found
    raise TrainingError(
        f"{part.name} ({type(part).__name__}) does not return a value for each example.",
        got=_form(found),
        expected=f"[{examples}], or one value for the batch, []",
    )


def states(told: str, found: Mapping[str, State]) -> None:
    """Refuse states of parts, by part, that hold something else than tensors.

    Args:
        told: what they do with it, e.g. "sends".
        found: what is looked at.

    Raises:
        TrainingError: names the part, and what stands where.
    """
    for part, state in found.items():
        try:
            for _ in tree.walk({part: state}):
                pass
            if isinstance(state, dict):
                continue
            got = _form(state)
        except TypeError as error:
            got = str(error)
        raise TrainingError(
            f"What {part} {told} is no state.",
            got=got,
            expected="a dict of named tensors, which may hold others; {} for nothing",
        )


def same_form(told: str, before: Mapping[str, State], after: Mapping[str, State]) -> None:
    """Refuse states of another form than the last: a run that goes on could not take them up.

    Args:
        told: what parts do with them, e.g. "remembers at the server".
        before: the last, by part.
        after: what is to take their place.

    Raises:
        TrainingError: names the part, and the first tensor that differs.
    """
    states(told, after)
    old, new = (
        {path: (t.shape, t.dtype) for path, t in tree.walk(dict(found))}
        for found in (before, after)
    )
    if old == new:
        return
    path = next(p for p in {**old, **new} if old.get(p) != new.get(p))
    raise TrainingError(
        f"What {path.split('/')[0]} {told} has another form than before.",
        got=f"{path}: {_shown(new, path)}",
        expected=_shown(old, path),
        why="it has the same names, shapes and types each time",
    )


def versions(given: Mapping[str, Tensor | State]) -> dict[str, int]:
    """Return how often each tensor has been changed in place, by path."""
    return {path: t._version for path, t in tree.walk(given)}


def unchanged(told: str, before: dict[str, int], given: Mapping[str, Tensor | State]) -> None:
    """Refuse what has changed in place since `before`.

    Args:
        told: what it was and by whom, e.g. "What the server sent was changed in place, in mine".
        before: `versions` of it.
        given: what was given to parts.

    Raises:
        TrainingError: names the first tensor that holds other numbers.
    """
    changed = [path for path, n in versions(given).items() if n != before[path]]
    if changed:
        raise TrainingError(
            f"{told}.",
            got=f"other numbers in {changed[0]!r}",
            why="others begin from it too, and measure from it",
            do="make new tensors: a + b in place of a.add_(b), and a[0] = 1 on a.clone() alone",
        )


@contextmanager
def unchanged_models(part: Part, **given: Tree) -> Iterator[None]:
    """Refuse a part that changes models in place that it is given, by what they are called."""
    trees: State = {name: dict(one) for name, one in given.items()}
    before = versions(trees)
    yield
    unchanged(f"{part.name} ({type(part).__name__}) changes a model in place", before, trees)


def finite(round: int, makers: Iterable[Part], model: Tree) -> None:
    """Refuse a global model with NaN or infinity, made of clients' updates that had none.

    A sum is one pass and takes no memory; it may overflow where every entry is finite.

    Args:
        round: rounds completed with this one.
        makers: the parts that made it.
        model: parameters and buffers.

    Raises:
        TrainingError: names these parts.
    """
    for name, t in model.items():
        if t.is_floating_point() and not t.sum().isfinite() and not t.isfinite().all():
            raise TrainingError(
                f"Training diverged in round {round}: the server's step left a model that is not "
                "finite.",
                got=f"NaN or infinity in {name!r}",
                why="every update that counted was finite; this was made of them by "
                + ", ".join(dict.fromkeys(part.name for part in makers)),
                do="lower the server's learning rate, or look at what these parts do",
            )


@contextmanager
def raised_in(where: str) -> Iterator[None]:
    """Say where it was, and in which part, that something of a user's own raised.

    Args:
        where: what went wrong, e.g. "Training failed at client 3".

    Raises:
        TrainingError: in place of what was raised; an error of ours stays what it is.
    """
    try:
        yield
    except FedkeelError:
        raise
    except Exception as error:
        raise training_error(where, error) from error


def training_error(where: str, error: Exception) -> TrainingError:
    """Return an error that says where and in which part another was raised."""
    part = _part_of(error.__traceback__)
    return TrainingError(
        where + (f", in {part}." if part else "."),
        got=one_line(error),
        why=f"raised in {where_raised(error)}",
        do=_has(error) or _undeclared(error),
    )


_ASKED = {".noise": "NOISE", ".class_counts": "CLASS_COUNTS"}
"""What a part sees only where it declares that it needs it."""


def _undeclared(error: Exception) -> str | None:
    """Return which need a part does not declare, where it found None in place of what it is for."""
    if "NoneType" not in str(error):
        return None
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    for word, need in _ASKED.items():
        if word in line:
            return f"{word[1:]} is there for parts that need it: Capability.{need} in `needs`"
    return None


def _has(error: Exception) -> str | None:
    """Return what there is of a `Step`, `Round`, `Cohort` or `Outcome` that was asked for more."""
    kind = type(error.obj) if isinstance(error, AttributeError) else None
    if kind is None or kind.__module__ != _SEEN or not dataclasses.is_dataclass(kind):
        return None
    fields = [f.name for f in dataclasses.fields(kind) if f.name not in ("seen", "states")]
    more = [f"{name}()" for name, value in vars(kind).items() if inspect.isfunction(value)]
    public = [name for name in [*fields, *more] if not name.startswith("_")]
    return f"{kind.__name__} has {', '.join(public)}: see {_SEEN}"


def _part_of(trace: TracebackType | None) -> str:
    """Return the name of the innermost part that was running."""
    name = ""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Part):
            name = owner.name
        trace = trace.tb_next
    return name
