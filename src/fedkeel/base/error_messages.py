"""What pydantic finds wrong with settings, as errors that name the key and the way out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedkeel.errors import ConfigError, did_you_mean, nearest

SYNONYMS = {
    "learning_rate": "lr",
    "lr_local": "lr",
    "batch": "batch_size",
    "bs": "batch_size",
    "num_rounds": "rounds",
    "n_rounds": "rounds",
    "num_clients": "clients",
    "n_clients": "clients",
    "fraction": "participation",
    "decay": "weight_decay",
    "optimizer": "optimiser",
    "max_grad_norm": "clip_norm",
    "grad_clip": "clip_norm",
    "gradient_accumulation_steps": "accumulate",
    "warmup_rounds": "warmup",
    "dataset": "source",
    "classes": "classes_per_client",
    "k": "classes_per_client",
}
"""Other people's words for a key."""

_Words = Mapping[str, str | Callable[[re.Match[str]], str]]

_TOML: _Words = {
    r"a valid tuple": "a list",
    r"a valid dictionary( or instance of (\w+))?": "a table",
    r"Field required": "a longer list",
    r"Tuple should have": "a list should have",
    r" after validation": "",
}
"""Words of pydantic's that a writer of TOML need not know, as regular expressions."""

_PYTHON: _Words = {
    **_TOML,
    r"a valid tuple": "a list or a tuple",
    r"a valid dictionary( or instance of (\w+))?": lambda m: (
        f"fedkeel.config.{m[2]}(...)" if m[2] else "a dict"
    ),
}
"""The same for Python, where settings are classes."""


def readable(
    kind: type[BaseModel], error: ValidationError, where: str | None = None
) -> ConfigError:
    """Turn pydantic's first complaint into one that names the key and the way out.

    An unknown key comes before a missing one: it may be that one, by another name.

    Args:
        kind: the class of settings.
        error: what pydantic raised.
        where: what the values came from, in the words of TOML; None where the class was called.
    """
    problems = error.errors(include_url=False)
    first = next((e for e in problems if e["type"] == "extra_forbidden"), problems[0])
    loc = [part for part in first["loc"] if isinstance(part, str)]
    table, known = _table(kind, loc)
    at = ".".join(table)
    key = ".".join([*table, loc[len(table)]]) if len(loc) > len(table) else at
    source = kind.__name__ if where is None else where
    if first["type"] == "extra_forbidden":
        owner = f"{source}: {f'[{at}]' if at else 'the experiment'}"
        what = f"{'.'.join([source, *table])} has no" if where is None else f"{owner} has no key"
        return ConfigError(f"{what} {loc[-1]!r}.", do=meant(kind, loc[-1], known))
    if first["type"] == "missing" and first["loc"][-1] == loc[-1]:
        return ConfigError(f"{source}: {key!r} is missing.", do=f"set {key}")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return ConfigError(f"{source}: {f'[{at}] ' if at else ''}{message}.")
    shown = repr(first["input"])
    shown = shown if len(shown) < 60 else shown[:57] + "..."
    depth = len(table) + 1  # a union of types complains once for each of them
    same = [e for e in problems if e["loc"][:depth] == first["loc"][:depth]]
    words = _PYTHON if where is None else _TOML
    expected = ", or ".join(dict.fromkeys(_wanted(e["msg"], words) for e in same))
    return ConfigError(
        f"{source}: {key!r} cannot be used.", got=shown, expected=expected, do=_remedy(same)
    )


def _remedy(errors: Sequence[ErrorDetails]) -> str | None:
    """Return what to write in place of a text, None where nothing is close.

    This is the number or truth value that the text has, or the nearest of the words that it may be;
    of a share the number below 1; of no test set a small one; and of less than one epoch the steps.
    """
    for error in errors:
        kind, text = error["type"], error["input"]
        if not isinstance(text, str):
            if numbers := _remedy_for_number(error):
                return numbers
            continue
        if value := correct_value(text, kind.removesuffix("_type")):
            return f"write {value}, without quotes"
        if kind == "literal_error":
            word = nearest(text, re.findall(r"'([^']*)'", error["ctx"]["expected"]))
            return f"did you mean {word!r}?" if word else None
    return None


def _remedy_for_number(error: ErrorDetails) -> str | None:
    """Return what to write in place of a number, None where that is not known."""
    value, limits = error["input"], error.get("ctx", {})
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    is_share = 1 in (limits.get("le"), limits.get("lt"))
    if is_share and 1 < value <= 100:
        return f"write {value / 100:g} for {value:g} %: shares are numbers up to 1"
    if error["loc"][-1] == "test_fraction" and value == 0:
        return (
            "write a small share, such as 0.05: each run has a common test set. To judge models on "
            "the clients' own examples, set evaluation.model = 'personal' and partition.holdout"
        )
    if error["type"] != "int_type":
        return None
    if error["loc"][-1] == "epochs" and 0 < value < 1:
        return "for less than one pass leave epochs out, and set steps: mini-batches in a round"
    return f"write {math.ceil(value)}" if 0 < value < 1e9 else None


def correct_value(text: str, wanted: str) -> str | None:
    """Return what to write in place of a text that should be a number or a truth value.

    None where it is neither.

    Args:
        text: the text.
        wanted: ``bool``, ``int`` or ``float``; of another type, nothing is known.

    >>> correct_value("True", "bool"), correct_value("0,1", "float"), correct_value("fast", "float")
    ('true', '0.1', None)
    >>> correct_value("12,5 %", "float")
    '0.125'
    """
    text = text.strip()
    if wanted == "bool":
        small = text.lower()
        is_true, is_false = small in ("true", "yes", "on"), small in ("false", "no", "off")
        return "true" if is_true else "false" if is_false else None
    if wanted == "float" and (percent := re.fullmatch(r"([\d.,]+)\s*%", text)):
        share = correct_value(percent[1], "float")
        return None if share is None else f"{float(share) / 100:g}"
    plain = re.sub(r"^([-+]?\d+),(\d+)$", r"\1.\2", text)
    try:
        number = float(plain) if wanted == "float" else int(plain) if wanted == "int" else math.nan
    except ValueError:
        return None
    return str(number) if math.isfinite(number) else None


def _wanted(message: str, words: _Words) -> str:
    """Return pydantic's words for what it wanted, in the words of TOML or Python."""
    wanted = message.removeprefix("Input should be ")
    for theirs, ours in words.items():
        wanted = re.sub(theirs, ours, wanted)
    return wanted[0].lower() + wanted[1:]


def meant(kind: type[BaseModel], word: str, known: Sequence[str]) -> str:
    """Return what to do about an unknown key: a synonym, its own table, or the nearest word.

    The nearest word may be a synonym, and in another table: ``lerning`` is local.lr.
    """
    names = [path.rpartition(".")[2] for path in paths(kind)]
    meant = SYNONYMS.get(word, word)
    if meant in known or get_close_matches(word, known, n=1, cutoff=0.8):
        return did_you_mean(meant if meant in known else word, known, 16)
    asks = "set {}"
    if meant not in names:
        here = [other for other, name in SYNONYMS.items() if name in known]
        close = nearest(word, [*known, *here])
        if close is not None:
            return did_you_mean(SYNONYMS.get(close, close), known, 16)
        far = get_close_matches(word.lower(), [*names, *SYNONYMS], n=1, cutoff=0.65)
        meant, asks = SYNONYMS.get(far[0], far[0]) if far else "", "did you mean {}?"
    elsewhere = [path for path in paths(kind) if path.rpartition(".")[2] == meant]
    if not elsewhere:
        return did_you_mean(word, known, 16)
    return asks.format(" or ".join(elsewhere))


def table_of(kind: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the class of the settings below a key, None where the key is not a table of settings.

    A table that may be absent, such as `Privacy | None`, is one too.
    """
    field = kind.model_fields.get(name)
    annotation = None if field is None else field.annotation
    is_choice = get_origin(annotation) in (Union, UnionType)
    choices = [one for one in get_args(annotation) if one is not NoneType]
    choices = choices if is_choice else [annotation]
    if len(choices) == 1 and isinstance(choices[0], type) and issubclass(choices[0], BaseModel):
        return choices[0]
    return None


def paths(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key, depth first; a table comes before its own keys."""
    for name in kind.model_fields:
        yield prefix + name
        table = table_of(kind, name)
        if table is not None:
            yield from paths(table, f"{prefix}{name}.")


def _table(kind: type[BaseModel], loc: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the path of the table that `loc` points into, and that table's keys."""
    path: list[str] = []
    for name in loc:
        table = table_of(kind, name)
        if table is None:
            break
        path.append(name)
        kind = table
    return path, list(kind.model_fields)
