"""Expressions: ``"fedprox(mu=0.1)+gcfed"`` becomes parts.

    expr = term ("+" term)*
    term = name ["." part] ["(" key=value ("," key=value)* ")"]
    name = a method, or the import path package.module:Class of one's own

``fedavg`` has no parts and may stand anywhere. A key of a method with several parts goes to every
part that has such a hyper-parameter. Errors point at the character.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from fedkeel.base.feature import baselines
from fedkeel.base.user_code import one_line, where_raised
from fedkeel.config import ChosenWeights
from fedkeel.errors import CompositionError, FedkeelError, did_you_mean
from fedkeel.method.compose import Plan, compose
from fedkeel.method.part import Capability, Part
from fedkeel.method.parts.index import ALIASES, installed_methods
from fedkeel.method.registry import REGISTRY, Recipe, find_recipe

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*:")
_KEY = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*")


@dataclass(frozen=True)
class Term:
    """One term of an expression.

    Args:
        name: name of the method, or the import path of one's own.
        part: name of one of its parts, "" for all of them.
        values: hyper-parameters given.
        at: position of the term in the expression.
    """

    name: str
    part: str
    values: dict[str, Any]
    at: int


def parse(
    expression: str,
    provides: Iterable[Capability] | None = None,
    weights: ChosenWeights | None = None,
) -> Plan:
    """Read an expression and compose its parts.

    Args:
        expression: e.g. ``"fedprox(mu=0.1)+gcfed"``.
        provides: what task and engine provide; None checks everything but this.
        weights: the run's choice of client weights; None and ``method`` for what the parts state.

    Raises:
        CompositionError: the expression cannot be read, or its parts cannot be combined.

    >>> parse("fedavg + fedgc.sgc(margin=0.0)").expression
    'fedgc.sgc(margin=0.0)'
    """
    parts = [part for term in read_terms(expression) for part in build_parts(term, expression)]
    return compose(parts, provides, weights)


def split_expressions(text: str) -> list[str]:
    """Split a list of expressions at the commas that stand outside parentheses and quotes.

    >>> split_expressions("fedavg, fedreg(gamma=0.4, mg=True), fedprox+gcfed")
    ['fedavg', 'fedreg(gamma=0.4, mg=True)', 'fedprox+gcfed']
    """
    out, depth, start = [], 0, 0
    for i, sign in _unquoted(text, 0):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            out.append(text[start:i])
            start = i + 1
    return [e.strip() for e in [*out, text[start:]] if e.strip()]


def read_terms(expression: str) -> list[Term]:
    """Read an expression into terms.

    Raises:
        CompositionError: points at the character that cannot be read.
    """
    terms, at = [], 0
    while True:
        at = _skip(expression, at)
        name, at = _method(expression, at)
        part, start = "", at - len(name)
        if expression[at : at + 1] == ".":
            part, at = _word(expression, at + 1, f"the name of a part of {name}")
        values: dict[str, Any] = {}
        at = _skip(expression, at)
        if expression[at : at + 1] == "(":
            values, at = _values(expression, at + 1)
        terms.append(Term(name, part, values, start))
        at = _skip(expression, at)
        if at == len(expression):
            return terms
        if expression[at] != "+":
            raise _unreadable(expression, at, "'+' or the end")
        at += 1


def write_terms(terms: Iterable[Term]) -> str:
    """Return the expression that is read as these terms.

    >>> write_terms(read_terms("fedprox( mu = 1e-2 ) + gcfed"))
    'fedprox(mu=0.01)+gcfed'
    """
    return "+".join(_term(term) for term in terms)


def _term(term: Term) -> str:
    values = ", ".join(f"{key}={value!r}" for key, value in term.values.items())
    return term.name + (f".{term.part}" if term.part else "") + (f"({values})" if values else "")


def accepted_hyperparameters(term: Term, expression: str) -> list[str]:
    """Return the hyper-parameters that a term takes.

    Raises:
        CompositionError: an unknown method or part.
    """
    kinds, _ = _kinds(term, expression)
    return list(dict.fromkeys(f.name for kind in kinds.values() for f in fields(kind)))


def build_parts(term: Term, expression: str) -> list[Part]:
    """Return the parts that a term stands for.

    Raises:
        CompositionError: an unknown method, part or hyper-parameter.
    """
    parts, recipe = _kinds(term, expression)
    keys = {f.name for kind in parts.values() for f in fields(kind)}
    for key in term.values:
        if key not in keys:
            raise CompositionError(
                f"{term.name}{'.' if term.part else ''}{term.part} has no hyper-parameter '{key}'.",
                do=did_you_mean(key, keys) if keys else f"{term.name} takes none",
            )
    out = []
    for short, kind in parts.items():
        known = {f.name for f in fields(kind)}
        values = {k: v for k, v in term.values.items() if k in known}
        out.append(_made(kind, {**recipe.defaults.get(short, {}), **values}))
    return out


def _made(kind: type[Part], values: dict[str, Any]) -> Part:
    """Return a part with its hyper-parameters; its class may refuse them."""
    try:
        return kind(**values)
    except FedkeelError:
        raise
    except Exception as error:  # in a `__post_init__`
        shown = ", ".join(f"{key}={value!r}" for key, value in values.items())
        raise CompositionError(
            f"{kind.name} ({kind.__name__}) cannot be made with {shown or 'its defaults'}.",
            got=one_line(error),
            why=f"raised in {where_raised(error)}",
        ) from error


def _similar_methods(name: str) -> str:
    """Return which method may be meant, and which there are; see `did_you_mean`.

    Most names begin with "fed", so that two names without a relation look alike: what comes after
    it decides.

    >>> _similar_methods("fedpox").split("?")[0], _similar_methods("hermes").split(":")[0]
    ("did you mean 'fedprox'", 'known')
    """
    names = sorted({*REGISTRY, *ALIASES, *installed_methods()})
    by_stem = {known.removeprefix("fed"): known for known in names}
    stems = difflib.get_close_matches(name.lower().removeprefix("fed"), by_stem, 1, 0.75)
    if stems:
        return f"did you mean {by_stem[stems[0]]!r}? `fedkeel methods` lists all"
    return f"known: {', '.join(names)}; `fedkeel methods` describes them"


def _kinds(term: Term, expression: str) -> tuple[dict[str, type[Part]], Recipe]:
    """Return the classes of a term's parts by short name, and the recipe they are from."""
    if term.name in baselines():
        raise CompositionError(
            f"'{term.name}' is a baseline, not a method.",
            got=expression,
            why="it is run or compared as it is, on one machine: it cannot be combined, searched "
            "for, or run on nodes",
            do=f"give '{term.name}' to `fedkeel run` or `fedkeel compare` by itself",
        )
    recipe = find_recipe(term.name)
    if recipe is None:
        raise CompositionError(
            f"There is no method '{term.name}' in '{expression}'.",
            do=_similar_methods(term.name),
        )
    parts = dict(recipe.parts)
    if term.part:
        if term.part not in parts or "" in parts:
            names = [name for name in parts if name]
            raise CompositionError(
                f"{term.name} has no part '{term.part}'.",
                expected=" or ".join(names) if names else f"only {term.name}",
            )
        parts = {term.part: parts[term.part]}
    return parts, recipe


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _method(text: str, at: int) -> tuple[str, int]:
    """Read the name of a method, or the import path of one's own."""
    place = _PLACE.match(text, at)
    if not place:
        return _word(text, at, "the name of a method")
    name, at = _word(text, place.end(), f"the name of a part in {place.group()[:-1]}")
    return place.group() + name, at


def _word(text: str, at: int, wanted: str) -> tuple[str, int]:
    match = _NAME.match(text, at)
    if not match:
        raise _unreadable(text, at, wanted)
    return match.group(), match.end()


def _values(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Read ``key=value, ...)`` from behind the opening parenthesis."""
    values: dict[str, Any] = {}
    at = _skip(text, at)
    if text[at : at + 1] == ")":
        return values, at + 1
    while True:
        match = _KEY.match(text, at)
        if not match:
            raise _unreadable(text, at, "key=value")
        start = match.end()
        at = _end_of_value(text, start)
        raw = text[start:at].strip()
        try:
            value = ast.literal_eval(raw)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            lowered = {"true": True, "false": False, "none": None}
            if raw.lower() not in lowered and not _NAME.fullmatch(raw):
                raise _unreadable(text, start, "a number, True, False, None or text") from None
            value = lowered.get(raw.lower(), raw)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _unreadable(text, start, "a whole number of 64 bits")
        if match.group(1) in values:
            raise _unreadable(text, match.start(1), f"each key once, not '{match.group(1)}' again")
        values[match.group(1)] = value
        if text[at : at + 1] == ")":
            return values, at + 1
        if text[at : at + 1] != ",":
            raise _unreadable(text, at, "',' or ')'")
        at += 1


def _end_of_value(text: str, at: int) -> int:
    """Return where the value ends: at the next comma or parenthesis outside quotes."""
    return next((i for i, sign in _unquoted(text, at) if sign in ",)"), len(text))


def _unquoted(text: str, at: int) -> Iterator[tuple[int, str]]:
    """Yield (position, character) of what stands outside quotes, from `at` on."""
    quote = ""
    while at < len(text):
        sign = text[at]
        if quote:
            at += sign == "\\"
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        else:
            yield at, sign
        at += 1


def _unreadable(text: str, at: int, wanted: str) -> CompositionError:
    shown = f"'{text[at]}'" if at < len(text) else "the end"
    return CompositionError(
        f"'{text}' cannot be read at character {at + 1}.", got=shown, expected=wanted
    )
