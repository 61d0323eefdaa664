"""Reads the docstring of a part field by field; a missing or misspelt field is an error.

A docstring has one line, then formulae and paragraphs, then the fields in the order of `FIELDS`,
with Args where the part has hyper-parameters. A user's part that cites no paper may leave out
Source. Continuation lines are indented.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedkeel.errors import CompositionError, nearest
from fedkeel.method.part import Part

FIELDS = ("Source", "Args", "Sent", "State", "Cost", "Laws", "Deviations", "Example")
"""Every field, in order."""

_FIELD = re.compile(r"([A-Z]\w*):(?:\s+(.*))?$")
_ARGUMENT = re.compile(r"(\w+):(?:\s+(.*))?$")


@dataclass(frozen=True)
class Maths:
    """A displayed formula, in LaTeX."""

    latex: str


@dataclass(frozen=True)
class Docstring:
    """The docstring of a part.

    Args:
        summary: the first line.
        body: formulae and paragraphs, in order.
        source: citation key, equations, algorithm; "" for none.
        args: the meaning of each hyper-parameter, in the order of declaration.
        sent: the traffic beyond the model.
        state: the state, and where it is stored.
        cost: gradients and passes over the parameters.
        laws: exact properties.
        deviations: deviations from the paper, and of the public code.
        example: a doctest.
    """

    summary: str
    body: tuple[str | Maths, ...]
    source: str
    args: Mapping[str, str]
    sent: str
    state: str
    cost: str
    laws: str
    deviations: str
    example: str


def summary(kind: type[Part]) -> str:
    """Return the first line of a part's docstring, "" where it has none."""
    text = inspect.cleandoc(kind.__doc__ or "")
    if text.startswith(f"{kind.__name__}("):  # written by the decorator `dataclass`
        return ""
    return next(iter(text.splitlines()), "")


def is_own(kind: type[Part]) -> bool:
    """Return whether a part is the user's own, and not one of fedkeel's."""
    return not kind.__module__.startswith("fedkeel.")


def read(kind: type[Part]) -> Docstring:
    """Read the docstring of a part.

    Raises:
        CompositionError: a field is missing, misspelt, empty, twice or out of order, or the
            hyper-parameters are not those that the part has.
    """
    lines = inspect.cleandoc(kind.__doc__ or "").splitlines() or [""]
    if not lines[0].endswith(".") or (len(lines) > 1 and lines[1]):
        raise _wrong(kind, "does not begin with one line that ends with a full stop")
    begin = next((i for i, line in enumerate(lines) if _is_field(line)), len(lines))
    fields = _fields(kind, lines[begin:])
    parameters = [field.name for field in dataclasses.fields(kind)]
    optional = set() if parameters else {"Args"}
    if (
        is_own(kind)
        and not kind.paper
        and "Source" not in fields
        and _close("Source", lines) is None
    ):
        optional.add("Source")
    expected = [name for name in FIELDS if name not in optional]
    if missing := [name for name in expected if not fields.get(name)]:
        names = ", ".join(f"'{name}'" for name in missing)
        raise _wrong(kind, f"has no {names}", "; ".join(_misspelt(n, lines) for n in missing))
    if list(fields) != expected:
        order = f"{', '.join(fields)}; not {', '.join(expected)}"
        raise _wrong(kind, "has its fields in another order", order)
    args = _args(kind, fields.get("Args", []))
    if list(args) != parameters or not all(args.values()):
        do = f"Args: {', '.join(parameters)}"
        raise _wrong(kind, "explains other hyper-parameters than it has", do)
    return Docstring(
        summary=lines[0],
        body=tuple(_body(lines[1:begin])),
        args=args,
        example="\n".join(fields["Example"]),
        **{n.lower(): " ".join(fields.get(n, [])) for n in FIELDS if n not in _BLOCKS},
    )


_BLOCKS = ("Args", "Example")


def _is_field(line: str) -> bool:
    match = _FIELD.match(line)
    return match is not None and match[1] in FIELDS


def _fields(kind: type[Part], lines: list[str]) -> dict[str, list[str]]:
    """Return the lines of each field."""
    fields: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        match = _FIELD.match(line)
        if match and match[1] in FIELDS:
            name = match[1]
            if name in fields:
                raise _wrong(kind, f"has '{name}' twice")
            fields[name] = [match[2]] if match[2] else []
        elif line and not line.startswith(" "):
            word = match[1] if match else ""
            close = nearest(word, FIELDS) if word else None
            raise _wrong(
                kind,
                f"has no field '{word}'" if word else f"has a line outside of fields: {line!r}",
                f"did you mean '{close}'?" if close else "indent what belongs to a field",
            )
        else:
            fields[name].append(line)
    return {key: _dedented(key, value) for key, value in fields.items()}


def _dedented(name: str, lines: list[str]) -> list[str]:
    """Return the lines of a field: dedented in a block, stripped in prose."""
    if name not in _BLOCKS:
        return [line.strip() for line in lines if line.strip()]
    return inspect.cleandoc("\n".join(["", *lines])).splitlines()


def _args(kind: type[Part], lines: list[str]) -> dict[str, str]:
    args: dict[str, str] = {}
    name = ""
    for line in lines:
        match = _ARGUMENT.match(line)
        if match and not line.startswith(" "):
            name = match[1]
            args[name] = match[2] or ""
        elif name:
            args[name] = f"{args[name]} {line.strip()}".strip()
        elif line:
            raise _wrong(kind, f"has a line in Args that names none: {line!r}")
    return args


def _body(lines: list[str]) -> Iterator[str | Maths]:
    """Yield paragraphs and formulae."""
    at = 0
    while at < len(lines):
        if not lines[at].strip():
            at += 1
            continue
        start, is_maths = at, lines[at].startswith(".. math::")
        at += 1
        while at < len(lines) and (
            lines[at].startswith(" ") or not lines[at] if is_maths else lines[at]
        ):
            at += 1
        block = [line.strip() for line in lines[start:at]]
        block[0] = block[0].removeprefix(".. math::").strip()
        yield Maths("\n".join(filter(None, block))) if is_maths else " ".join(block)


def _misspelt(name: str, lines: list[str]) -> str:
    """Return advice on a field that is missing or misspelt."""
    close = _close(name, lines)
    return f"write '{name}:' for '{close}:'" if close else f"write '{name}: ...'"


def _close(name: str, lines: list[str]) -> str | None:
    """Return the word that stands for a field where it is misspelt, None for none."""
    words = [match[1] for line in lines if (match := _FIELD.match(line)) and match[1] not in FIELDS]
    return nearest(name, words)


def _wrong(kind: type[Part], what: str, do: str | None = None) -> CompositionError:
    name = getattr(kind, "name", kind.__name__)
    return CompositionError(f"The docstring of {name} ({kind.__qualname__}) {what}.", do=do)
