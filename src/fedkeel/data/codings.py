"""Whether clients write one thing in several ways: other names of classes, categories or columns.

Clients that have a value in common use one coding. Where they fall into groups without a value in
common, the groups may mean the same by other names, such as M and F at one hospital, and male and
female at the others. A client that only lacks a rare class has the others in common with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from fedkeel.base.values import only_tensor
from fedkeel.data.dataset import Dataset, Ints
from fedkeel.data.read.identifiers import is_number
from fedkeel.errors import counted, enumeration

_MOST_VALUES = 100
"""Values of a label or column up to which they are compared with one another."""

_MOST_CODINGS = 3
"""Groups without a value in common from which they are taken for clients with different data."""

_SHOWN = 4
"""Clients, or values, that a message names."""


def coding_warnings(data: Dataset) -> Iterator[str]:
    """Yield a warning for the labels, and for each column of categories, of several codings."""
    names, client = data.clients, data.client
    if client is None:
        names, client = data.sources, data.source
    if client is None or len(names) < 2:
        return
    if data.has_labels and data.label_names:
        yield from _warnings_of("the labels", data.label_names, names, _held(client, data.labels))
    if data.schema is None:
        return
    start, x = 0, only_tensor(data.x, "a table")
    for column in data.schema.columns:
        values = column.categories or ()
        if values:
            part = x[:, start : start + len(values)].numpy()
            rows, numbers = np.nonzero(part == 1)  # a gap is a share of each
            held = _held(client[rows], numbers)
            yield from _warnings_of(f"the column {column.name!r}", values, names, held)
        start += len(column.inputs)


def _held(client: Ints, number: Ints) -> dict[int, frozenset[int]]:
    """Return the clients that have each value, by its number."""
    if not len(client):
        return {}
    count = int(client.max()) + 1
    numbers, clients = np.divmod(np.unique(number * count + client), count)
    return {int(n): frozenset(clients[numbers == n].tolist()) for n in np.unique(numbers)}


def _warnings_of(
    what: str,
    values: Sequence[str],
    names: Sequence[str],
    held: Mapping[int, frozenset[int]],
) -> Iterator[str]:
    """Yield the warning about one label or column, if there is one.

    Args:
        what: what has the values.
        values: their names.
        names: of the clients.
        held: the clients that have each value.
    """
    if not 2 <= len(held) <= _MOST_VALUES:
        return
    of_value = {values[number]: clients for number, clients in held.items()}
    main, *others = _groups(of_value)
    for clients, own in others if len(others) < _MOST_CODINGS else ():
        if _is_another_coding(own, main[1], main[0]):
            yield _message(what, _values(own), clients, _values(main[1]), main[0], names)
    if others:
        return
    alike = [pair for pair in _near(list(of_value)) if not of_value[pair[0]] & of_value[pair[1]]]
    same = [pair for pair in alike if _plain(pair[0]) == _plain(pair[1])]
    pairs = alike if len({a for a, _ in alike}) > 1 and len({b for _, b in alike}) > 1 else same
    if pairs:
        few, many = zip(*(sorted(p, key=lambda v: len(of_value[v])) for p in pairs), strict=True)
        rare = frozenset[int]().union(*(of_value[value] for value in few))
        rest = frozenset[int]().union(*(of_value[value] for value in many))
        yield _message(what, _values(few), rare, _values(many), rest, names)


Group = tuple[frozenset[int], tuple[str, ...]]
"""Clients and the values that they have."""


def _groups(held: Mapping[str, frozenset[int]]) -> list[Group]:
    """Return the groups without a value in common, the one of most clients first.

    >>> _groups({"M": frozenset({0}), "male": frozenset({1, 2}), "female": frozenset({2})})
    [(frozenset({1, 2}), ('male', 'female')), (frozenset({0}), ('M',))]
    """
    groups: list[Group] = []
    for value, clients in held.items():
        apart: list[Group] = []
        names: tuple[str, ...] = (value,)
        for other, its in groups:
            if other & clients:
                clients, names = clients | other, (*its, *names)
            else:
                apart.append((other, its))
        groups = [*apart, (clients, names)]
    return sorted(groups, key=lambda group: -len(group[0]))


def _is_another_coding(
    own: Sequence[str], others: Sequence[str], of_others: frozenset[int]
) -> bool:
    """Return whether values may be those of others by other names.

    That clients have nothing in common can also be how the data are: each ward is in one hospital.
    """
    numbers, other_numbers = set(map(is_number, own)), set(map(is_number, others))
    if len(numbers) == len(other_numbers) == 1 and numbers != other_numbers:
        return True
    if any(_near([a, b]) for a in own for b in others):
        return True
    if len(own) < 2 or len(others) < 2:
        return False
    if numbers == {True} == other_numbers:
        return len(of_others) > 1 and len(own) == len(others)
    return len(of_others) > 1 or len(own) == len(others)


def _near(values: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of values that look like one: they differ in case, or one begins the other.

    >>> _near(["F", "M", "female", "male", "no", "No "])
    [('F', 'female'), ('M', 'male'), ('no', 'No ')]
    """
    pairs = []
    for a, b in combinations(values, 2):
        short, long = sorted((_plain(a), _plain(b)), key=len)
        is_begun = bool(short) and short.isalpha() and len(short) <= 3 and long.startswith(short)
        if short == long != "" or (is_begun and long.isalpha()):
            pairs.append((a, b))
    return pairs


def _plain(value: str) -> str:
    """Return a name without case, spaces and marks; a number as it is."""
    if is_number(value):
        return value
    return "".join(c for c in value.casefold() if c.isalnum())


def _message(
    what: str,
    own: str,
    clients: frozenset[int],
    others: str,
    of_others: frozenset[int],
    names: Sequence[str],
) -> str:
    """Return the warning."""
    who, rest = _who(clients, names), _who(of_others, names)
    return (
        f"{what}: only {who} {'has' if len(clients) == 1 else 'have'} {own}, and {rest} "
        f"{'has' if len(of_others) == 1 else 'have'} {others} instead. If these are the same by "
        "other names, write them in one way in all data: now they count as different ones"
    )


def _who(clients: frozenset[int], names: Sequence[str]) -> str:
    """Return the names of clients, or how many they are."""
    if len(clients) > _SHOWN:
        return counted(len(clients), "client")
    return enumeration([names[k] for k in sorted(clients)], _SHOWN)


def _values(values: Sequence[str]) -> str:
    """Return values as texts, the first of many."""
    return enumeration([repr(value) for value in values], _SHOWN)
