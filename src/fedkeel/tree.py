"""Arithmetic on named tensors.

A `Tree` maps the names of a module's parameters to tensors. A `State` may nest: it is what a part
keeps or sends. Nothing here mutates its arguments unless its name says so.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedkeel.base.lazy import Tensor, torch

Tree = dict[str, Tensor]
"""Parameter name -> tensor, in the module's own order."""

State = dict[str, Tensor | dict[str, Any]]
"""Named tensors, and states in turn: they can be stacked, masked, saved, sent and counted."""

Groups = Literal["tensor", "layer", "model"]
"""What a projection treats as one vector: each tensor, each module's tensors, or the model."""


def map(f: Callable[..., Tensor], a: Mapping[str, Tensor], *others: Mapping[str, Tensor]) -> Tree:
    """Return f(a, *others) for each name of `a`, in its order.

    >>> map(lambda x, y: 2 * x - y, {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])})
    {'w': tensor([5.])}
    """
    rest = [[other[k] for k in a] for other in others]
    return dict(zip(a, builtins.map(f, a.values(), *rest), strict=True))


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float | Tensor = 1.0) -> Tree:
    """Return a + scale * b.

    >>> add({"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}, scale=0.5)
    {'w': tensor([2.])}
    """
    return {k: plus(v, b[k], scale) for k, v in a.items()}


def plus(a: Tensor, b: Tensor, scale: float | Tensor) -> Tensor:
    """Return a + scale * b of two tensors, in one operation where the scale is a number."""
    return a + scale * b if isinstance(scale, torch.Tensor) else torch.add(a, b, alpha=scale)


def sub(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """Return a - b."""
    return {k: v - b[k] for k, v in a.items()}


def scale(a: Mapping[str, Tensor], factor: float | Tensor) -> Tree:
    """Return factor * a."""
    if isinstance(factor, torch.Tensor):
        return {k: v * factor.to(v.dtype) for k, v in a.items()}
    return {k: v * factor for k, v in a.items()}


def blend(a: Mapping[str, Tensor], b: Mapping[str, Tensor], share: float) -> Tree:
    """Return share * a + (1 - share) * b."""
    return {k: share * v + (1.0 - share) * b[k] for k, v in a.items()}


def sum_rows(rows: Mapping[str, Tensor]) -> Tree:
    """Return the sums over the leading axis."""
    return {k: v.sum(dim=0) for k, v in rows.items()}


def pick(a: Mapping[str, Tensor], names: Iterable[str]) -> Tree:
    """Return the tensors of these names, in their order."""
    return {k: a[k] for k in names}


def zeros_like(a: Mapping[str, Tensor]) -> Tree:
    """Return zeros of the same names, shapes and types."""
    return {k: torch.zeros_like(v) for k, v in a.items()}


def full_like(a: Mapping[str, Tensor], value: float) -> Tree:
    """Return a value in the same names, shapes and types."""
    return {k: torch.full_like(v, value) for k, v in a.items()}


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros that take memory only where they are written to, on the CPU."""
    return torch.from_numpy(np.zeros(tuple(shape), dtype=torch.empty(0, dtype=dtype).numpy().dtype))


def clone(a: Mapping[str, Tensor]) -> Tree:
    """Return a copy that shares no memory with `a`."""
    return {k: v.clone() for k, v in a.items()}


def copy_if_shared(*others: Mapping[str, Tensor | State]) -> Callable[[Tensor], Tensor]:
    """Return what copies a tensor that lies in memory of the others, and gives back any other."""
    theirs = {t.untyped_storage().data_ptr() for other in others for _, t in walk(other)}
    return lambda t: t.clone() if t.untyped_storage().data_ptr() in theirs else t


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return the inner product over all tensors, as a 0-d tensor.

    >>> dot({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])})
    tensor(11.)
    """
    return torch.stack([torch.dot(v.reshape(-1), b[k].reshape(-1)) for k, v in a.items()]).sum()


def norm(a: Mapping[str, Tensor]) -> Tensor:
    """Return the length over all tensors, as a 0-d tensor.

    >>> norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    return dot(a, a).sqrt()


def factor_to(length: float, a: Mapping[str, Tensor]) -> Tensor:
    """Return the factor that brings `a` to a length, 0 where `a` is zero."""
    size = norm(a)
    return torch.where(size > 0.0, length / size, torch.zeros_like(size))


def clip(a: Mapping[str, Tensor], bound: float | Tensor) -> Tree:
    """Return `a`, shortened to the length `bound` where it is longer.

    >>> clip({"w": torch.tensor([3.0, 4.0])}, 1.0)
    {'w': tensor([0.6000, 0.8000])}
    """
    return scale(a, (bound / norm(a)).clamp(max=1.0))


def where(mask: Tensor, a: State, b: State) -> State:
    """Return `a` where the 0-d `mask` is true and `b` elsewhere, through nested states.

    Raises:
        TypeError: the two do not have the same structure.
    """
    out: State = {}
    for k, v in a.items():
        w = b.get(k)
        if isinstance(v, torch.Tensor) and isinstance(w, torch.Tensor):
            out[k] = torch.where(mask, v, w)
        elif isinstance(v, dict) and isinstance(w, dict):
            out[k] = where(mask, v, w)
        else:
            raise TypeError(f"{k!r} is a {type(v).__name__} here and a {type(w).__name__} there")
    return out


def map_tensors(f: Callable[[Tensor], Tensor], state: Mapping[str, Tensor | State]) -> State:
    """Return `state` with `f` applied to every tensor."""
    return {k: f(v) if isinstance(v, torch.Tensor) else map_tensors(f, v) for k, v in state.items()}


def walk(state: Mapping[str, Tensor | State], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for every tensor, with the path's parts joined by '/'.

    Raises:
        TypeError: something else than a tensor or a state stands there.

    >>> [path for path, _ in walk({"a": {"w": torch.zeros(1)}, "n": torch.zeros(())})]
    ['a/w', 'n']
    """
    for k, v in state.items():
        if isinstance(v, torch.Tensor):
            yield prefix + k, v
        elif isinstance(v, Mapping):
            yield from walk(v, f"{prefix}{k}/")
        else:
            kind = type(v).__name__
            raise TypeError(f"{prefix}{k} is of type {kind}, no tensor and no dict of tensors")


def unwalk(flat: Mapping[str, Tensor]) -> State:
    """Return the nested state whose `walk` is `flat`; an empty sub-state is not restored."""
    out: State = {}
    for path, tensor in flat.items():
        *parents, leaf = path.split("/")
        here = out
        for name in parents:
            below = here.setdefault(name, {})
            if not isinstance(below, dict):
                raise ValueError(f"{path!r} stands below a tensor")
            here = below
        if leaf in here:
            raise ValueError(f"{path!r} stands above other tensors")
        here[leaf] = tensor
    return out


def stack(states: Sequence[Mapping[str, Tensor | State]]) -> State:
    """Return states of one form on a new leading axis, empty where there are none.

    >>> stack([{"a": {"n": torch.tensor(1)}}, {"a": {"n": torch.tensor(2)}}])
    {'a': {'n': tensor([1, 2])}}
    """
    flat = [dict(walk(state)) for state in states]
    return unwalk({path: torch.stack([one[path] for one in flat]) for path in (flat or [{}])[0]})


def tensors(state: Mapping[str, Tensor | State]) -> Tree:
    """Return the tensors of a state, without its nested states."""
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}


def substates(state: Mapping[str, Tensor | State]) -> dict[str, State]:
    """Return the nested states of a state, without its tensors."""
    return {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}


def substate(state: Mapping[str, Tensor | State], name: str) -> State:
    """Return the nested state under `name`, empty where there is none."""
    value = state.get(name, {})
    return {} if isinstance(value, torch.Tensor) else value


def leaves(state: Mapping[str, Tensor | State], name: str) -> Tree:
    """Return the tree that a state holds under `name`.

    Raises:
        TypeError: it holds a tensor or a nested state there, or nothing.
    """
    below = state.get(name)
    if not isinstance(below, Mapping):
        raise TypeError(f"the state holds no tree {name!r}, but {list(state)}")
    out = {k: v for k, v in below.items() if isinstance(v, torch.Tensor)}
    if len(out) < len(below):
        raise TypeError(f"{name!r} is not a tree of tensors")
    return out


def leaf(state: Mapping[str, Tensor | State], name: str) -> Tensor:
    """Return the tensor that a state holds under `name`.

    Raises:
        TypeError: it holds no tensor there.
    """
    value = state.get(name)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the state holds no tensor {name!r}, but {list(state)}")
    return value


def nbytes(state: Mapping[str, Tensor | State]) -> int:
    """Return the number of bytes of all tensors.

    >>> nbytes({"w": torch.zeros(3), "n": {"c": torch.zeros((), dtype=torch.int64)}})
    20
    """
    return sum(t.numel() * t.element_size() for _, t in walk(state))


def numel(a: Mapping[str, Tensor]) -> int:
    """Return the number of entries of all tensors."""
    return sum(v.numel() for v in a.values())


def group_names(names: Sequence[str], groups: Groups) -> list[list[str]]:
    """Split parameter names into the vectors that a projection treats as one.

    >>> group_names(["fc1.weight", "fc1.bias", "fc2.weight"], "layer")
    [['fc1.weight', 'fc1.bias'], ['fc2.weight']]
    >>> group_names(["fc1.weight", "fc1.bias"], "tensor")
    [['fc1.weight'], ['fc1.bias']]
    """
    if groups == "model":
        return [list(names)]
    if groups == "tensor":
        return [[name] for name in names]
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())
