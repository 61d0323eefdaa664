"""Checks of what parts return, and errors that name the part in which they were raised."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, ParamSpec, Protocol, TypeVar

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.base.user_code import one_line, where_raised
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.method.part import Capability, Part
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree

P = ParamSpec("P")
R = TypeVar("R")


class Named(Protocol):
    """A part, or what has the name of one."""

    name: ClassVar[str]


# ---- which part raised an exception ---------------------------------------------------------


class PartNote(str):
    """The note that `call` adds to an exception, with the name of the part that raised it."""

    __slots__ = ("part",)

    part: str


class UndeclaredNeedError(Exception):
    """A part reads a value that is there only for parts that declare a need.

    Args:
        value: the name of the value.
        need: what the part has to declare.
    """

    def __init__(self, value: str, need: Capability) -> None:
        self.value, self.need = value, need
        super().__init__(f"`{value}` is for parts that declare Capability.{need.name}")


def call(method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a method of a part; if it raises an exception, add a note with the part's name."""
    try:
        return method(*args, **kwargs)
    except FedkeelError:
        raise
    except Exception as error:
        part = getattr(method, "__self__", None)
        if isinstance(part, Part) and not _raising_part(error):
            note = PartNote(f"raised in the part {part.name!r} ({type(part).__name__})")
            note.part = part.name
            error.add_note(note)
        raise


def _raising_part(error: BaseException) -> str:
    """Return the name of the innermost part that was called when an error was raised, or ""."""
    notes = getattr(error, "__notes__", ())
    return next((note.part for note in notes if isinstance(note, PartNote)), "")


@contextmanager
def explain_errors(where: str) -> Iterator[None]:
    """Raise a `TrainingError` in place of any exception, which says where and in which part.

    Args:
        where: what went wrong, e.g. "Training failed at client 3".

    Raises:
        TrainingError: in place of what was raised; a `FedkeelError` stays what it is.
    """
    try:
        yield
    except FedkeelError:
        raise
    except Exception as error:
        raise training_error(where, error) from error


def training_error(where: str, error: Exception) -> TrainingError:
    """Return an error that says where and in which part another was raised."""
    part = _raising_part(error)
    return TrainingError(
        where + (f", in {part}." if part else "."),
        got=one_line(error),
        why=f"raised in {where_raised(error)}",
        do=_remedy(error),
    )


def _remedy(error: Exception) -> str | None:
    """Return what to do about an error that a context, or torch for want of a gradient, raised."""
    if isinstance(error, RuntimeError) and "does not require grad" in str(error):
        return (
            "let forward() and the loss depend on the parameters: take torch.no_grad(), "
            "torch.inference_mode() and detach() out of them"
        )
    if isinstance(error, UndeclaredNeedError):
        return f"add Capability.{error.need.name} to the part's `needs`, to get `{error.value}`"
    if isinstance(error, AttributeError) and _is_context(type(error.obj)):
        kind = type(error.obj)
        return f"{kind.__name__} has {', '.join(_members(kind))}: see {kind.__module__}"
    return None


INTERNAL_MEMBERS = frozenset(
    {
        "declared_class_counts",
        "declared_noise",
        "make_all_examples_step",
        "make_public_step",
        "nonlinear_part",
        "part",
        "personal",
        "recorded_losses",
        "states",
        "view",
    }
)
"""Members of contexts that parts have no use for."""


def _is_context(kind: type) -> bool:
    return kind.__module__ == "fedkeel.method.context" and dataclasses.is_dataclass(kind)


def _members(kind: type) -> list[str]:
    """Return the fields, properties and methods of a context that parts may use."""
    names = {f.name: f.name for f in dataclasses.fields(kind)}
    for name, value in vars(kind).items():
        if isinstance(value, property):
            names[name] = name
        elif inspect.isfunction(value):
            names[name] = f"{name}()"
    hidden = {name for name in names if name.startswith("_")} | INTERNAL_MEMBERS
    return [shown for name, shown in names.items() if name not in hidden]


# ---- what parts return ------------------------------------------------------------------------


def check_tree(part: Named, result: Tree, params: Tree) -> Tree:
    """Return a part's result, if it has a tensor of the same form for each parameter.

    Raises:
        TrainingError: names the part and the first tensor that is missing or differs.
    """
    if isinstance(result, dict) and result.keys() == params.keys():
        for name, param in params.items():
            tensor = result[name]
            if not _has_form(tensor, param):
                got, expected = f"{name!r}: {_form(tensor)}", _form(param)
                break
        else:
            return result
    else:
        got = _difference(result, params)
        expected = f"a dict with the names of the {len(params)} parameters"
    raise TrainingError(
        f"{part.name} ({type(part).__name__}) does not return a tensor for each parameter.",
        got=got,
        expected=expected,
        why="gradients and updates have the parameters' names, shapes and types",
        do="return a tree of the same form as the one it is given, with zeros for no change",
    )


def _difference(result: object, params: Tree) -> str:
    """Return which names are missing and which are too many, or the type of what is not a tree."""
    if not isinstance(result, dict):
        return f"an object of type {type(result).__name__}"
    lists = {
        "without": [name for name in params if name not in result],
        "with": [name for name in result if name not in params],
    }
    return ", ".join(
        f"{word} {', '.join(map(repr, names[:4]))}" + (" and more" if len(names) > 4 else "")
        for word, names in lists.items()
        if names
    )


def _has_form(value: object, like: Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.shape == like.shape and value.dtype == like.dtype
    )


def _form(value: object) -> str:
    """Return the shape and type of a tensor in words, or the type of another object."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"an object of type {type(value).__name__}"


def check_span(part: Named, result: Span, updates: Span, merges: bool = False) -> Span:
    """Return a part's result, if it has an update of the same form for each of the clients'.

    With `merges` it may have fewer.

    Raises:
        TrainingError: names the part and what it returned.
    """
    if isinstance(result, Span):
        first, expected = ({k: v[0] for k, v in s.rows.items()} for s in (result, updates))
        check_tree(part, first, expected)
        if len(result) == len(updates) or (merges and 0 < len(result) < len(updates)):
            return result
    raise TrainingError(
        f"{part.name} ({type(part).__name__}) does not return the clients' updates.",
        got=f"{len(result)} updates" if isinstance(result, Span) else _form(result),
        expected=f"a fedkeel.solve.span.Span of {len(updates)}, such as the one it is given",
    )


def check_model_and_state(part: Named, result: tuple[Tree, State]) -> tuple[Tree, State]:
    """Return a server optimiser's result, if it is a pair.

    Raises:
        TrainingError: names the part and what it returned.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TrainingError(
        f"{part.name} ({type(part).__name__}) does not return a model and a state.",
        got=f"a tuple of {len(result)}" if isinstance(result, tuple) else _form(result),
        expected="a tuple of two: the new global model, and the new state, {} for nothing",
    )


def check_losses(part: Named, result: Tensor, examples: int) -> Tensor:
    """Return a part's result, if it is a value for each example, [B], or one for all, [].

    Raises:
        TrainingError: names the part and what it returned.
    """
    if isinstance(result, torch.Tensor) and result.shape in ((examples,), ()):
        return result
    raise TrainingError(
        f"{part.name} ({type(part).__name__}) does not return a value for each example.",
        got=_form(result),
        expected=f"[{examples}], or one value for the batch, []",
    )


def check_states(verb: str, states: Mapping[str, State]) -> None:
    """Refuse states, by part, that hold something else than tensors.

    Args:
        verb: what the parts do with them, e.g. "sends to the server".
        states: the states, by part.

    Raises:
        TrainingError: names the part, the value and where it stands.
    """
    for part, state in states.items():
        got = "" if isinstance(state, dict) else _form(state)
        try:
            for _ in tree.walk({part: state}):
                pass
        except TypeError as error:
            got = str(error)
        if got:
            raise TrainingError(
                f"What {part} {verb} is not a state.",
                got=got,
                expected="a dict of named tensors, which may hold others; {} for nothing",
            )


def check_same_form(verb: str, before: Mapping[str, State], after: Mapping[str, State]) -> None:
    """Refuse states of another form than the last ones: a run that resumes could not read them.

    Args:
        verb: what the parts do with them, e.g. "remembers at the server".
        before: the last states, by part.
        after: the new ones.

    Raises:
        TrainingError: names the part and the first tensor that differs.
    """
    check_states(verb, after)
    old, new = dict(tree.walk(dict(before))), dict(tree.walk(dict(after)))
    for path in {**old, **new}:
        if path in old and path in new and _has_form(new[path], old[path]):
            continue
        raise TrainingError(
            f"What {path.split('/')[0]} {verb} has another form than before.",
            got=f"{path}: {_form(new[path]) if path in new else 'nothing'}",
            expected=_form(old[path]) if path in old else "nothing",
            why="it has the same names, shapes and types each time",
        )


# ---- what parts may not change ----------------------------------------------------------------


def tensor_versions(state: Mapping[str, Tensor | State]) -> dict[str, int]:
    """Return how often each tensor has been changed in place, by path."""
    return {path: tensor._version for path, tensor in tree.walk(state)}


def check_unchanged(
    fault: str, before: dict[str, int], state: Mapping[str, Tensor | State]
) -> None:
    """Refuse a state that has changed in place since `before`.

    Args:
        fault: what it was and by whom, e.g. "What the server sent was changed in place, in mine".
        before: `tensor_versions` of it.
        state: what parts received.

    Raises:
        TrainingError: names the first tensor that holds other numbers.
    """
    changed = [path for path, n in tensor_versions(state).items() if n != before[path]]
    if changed:
        raise TrainingError(
            f"{fault}.",
            got=f"other numbers in {changed[0]!r}",
            why="other clients start from the same tensors",
            do="make new tensors: a + b in place of a.add_(b), and a[0] = 1 only on a.clone()",
        )


@contextmanager
def check_models_unchanged(part: Named, **models: Tree) -> Iterator[None]:
    """Refuse a part that changes models in place that it receives, by their names."""
    trees: State = {name: dict(model) for name, model in models.items()}
    before = tensor_versions(trees)
    yield
    check_unchanged(f"{part.name} ({type(part).__name__}) changes a model in place", before, trees)


def check_finite_model(round: int, makers: Iterable[Named], model: Tree) -> None:
    """Refuse a global model with NaN or infinity, made of clients' updates that had none.

    The sum of a tensor takes no memory; it may overflow where every entry is finite, so entries
    are looked at only where the sum is not finite.

    Args:
        round: rounds completed with this one.
        makers: the parts that made it.
        model: parameters and buffers.

    Raises:
        TrainingError: names these parts.
    """
    sums = {name: t.sum() for name, t in model.items() if t.is_floating_point()}
    if _are_finite(sums.values()):
        return
    for name in sums:
        if not torch.isfinite(model[name]).all():
            raise TrainingError(
                f"Training diverged in round {round}: the server's step left a model that is not "
                "finite.",
                got=f"NaN or infinity in {name!r}",
                why="every update that counted was finite; this was made of them by "
                + ", ".join(dict.fromkeys(part.name for part in makers)),
                do="lower the server's learning rate, or look at what these parts do",
            )


def _are_finite(values: Iterable[Tensor]) -> bool:
    """Return whether 0-d tensors are finite; of each device and type they are read at once."""
    alike: dict[object, list[Tensor]] = {}
    for value in values:
        alike.setdefault((value.device, value.dtype), []).append(value)
    return all(bool(torch.stack(group).isfinite().all()) for group in alike.values())
