"""Settings from TOML and back, with errors that name the key and the way out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from fedkeel.config.base import Settings
from fedkeel.config.settings import Experiment
from fedkeel.errors import ConfigError, did_you_mean

_SYNONYMS = {
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
    "dataset": "source",
    "classes": "classes_per_client",
    "k": "classes_per_client",
}

_WORDS = {
    r"a valid tuple": "a list",
    r"a valid dictionary( or instance of \w+)?": "a table",
    r"Field required": "a longer list",
    r"Tuple should have": "a list should have",
    r" after validation": "",
}
"""Words of pydantic's that a writer of TOML need not know, as regular expressions."""


_S = TypeVar("_S", bound=Settings)


def build(kind: type[_S], values: Mapping[str, Any], where: str) -> _S:
    """Make settings of plain values, as from TOML.

    Args:
        kind: the class of settings.
        values: nested dictionaries.
        where: what the values came from, for messages.

    Raises:
        ConfigError: names the key, what was given and what is accepted.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise _readable(kind, error, where) from None


def load(path: Path | str, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment from a TOML file.

    Args:
        path: the file.
        overrides: ``key=value`` with dotted keys, e.g. ``local.lr=0.1``; values are TOML, and text
            that is not TOML is taken as it stands.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or holds a setting that cannot be used.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            "There is no such experiment file.",
            got=str(path),
            do="check the path, or start from a preset: fedkeel run --preset digits",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read.", got=error) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML.", got=error) from None
    return build(Experiment, override(values, overrides), str(path))


def override(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `values` with ``key=value`` settings laid over them.

    >>> override({"local": {"lr": 0.1}}, ["local.lr=0.5", "name=try"])
    {'local': {'lr': 0.5}, 'name': 'try'}
    """
    out = _copy(values)
    for text in overrides:
        key, sign, raw = text.partition("=")
        if not sign or not key.strip():
            raise ConfigError(
                "A setting on the command line has the form key=value.",
                got=repr(text),
                expected="for instance -s local.lr=0.1",
            )
        try:
            value = tomllib.loads(f"v = {raw}")["v"]
        except tomllib.TOMLDecodeError:
            value = raw.strip()
        *parents, leaf = key.strip().split(".")
        here = out
        for name in parents:
            below = here.setdefault(name, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{key!r} cannot be set: {name!r} is not a table.", got=below)
            here = below
        here[leaf] = value
    return out


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def _readable(kind: type[Settings], error: ValidationError, where: str) -> ConfigError:
    """Turn pydantic's first complaint into one that names the key and the way out.

    An unknown key comes before a missing one: it may be that one, by another name.
    """
    found = error.errors(include_url=False)
    first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
    loc = [part for part in first["loc"] if isinstance(part, str)]
    table, known = _table(kind, loc)
    at = ".".join(table)
    key = ".".join([*table, loc[len(table)]]) if len(loc) > len(table) else at
    if first["type"] == "extra_forbidden":
        what = f"{where}: {f'[{at}]' if at else 'the experiment'} has no key {loc[-1]!r}."
        return ConfigError(what, do=meant(kind, loc[-1], known))
    if first["type"] == "missing" and first["loc"][-1] == loc[-1]:
        return ConfigError(f"{where}: {key!r} is missing.", do=f"set {key}")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return ConfigError(f"{where}: {f'[{at}] ' if at else ''}{message}.")
    given = first["input"]
    shown = repr(given) if len(repr(given)) < 60 else repr(given)[:57] + "..."
    depth = len(table) + 1  # a union of types complains once for each of them
    same = [e for e in found if e["loc"][:depth] == first["loc"][:depth]]
    expected = ", or ".join(dict.fromkeys(_wanted(e["msg"]) for e in same))
    return ConfigError(f"{where}: {key!r} cannot be used.", got=shown, expected=expected)


def _wanted(message: str) -> str:
    """Return pydantic's words for what it wanted, in the words of TOML."""
    wanted = message.removeprefix("Input should be ")
    for theirs, ours in _WORDS.items():
        wanted = re.sub(theirs, ours, wanted)
    return wanted[0].lower() + wanted[1:]


def meant(kind: type[Settings], word: str, known: Sequence[str]) -> str:
    """Return what to do about an unknown key: a synonym, its own table, or the nearest word."""
    meant = _SYNONYMS.get(word, word)
    if meant not in known:
        elsewhere = [path for path in paths(kind) if path.rpartition(".")[2] == meant]
        if elsewhere:
            return f"set {' or '.join(elsewhere)}"
    return did_you_mean(meant if meant in known else word, known, 16)


def paths(kind: type[Settings], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key, depth first; a table comes before its own keys."""
    for name, field in kind.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from paths(field.annotation, f"{prefix}{name}.")


def _table(kind: type[Settings], loc: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the path of the table that `loc` points into, and that table's keys."""
    path: list[str] = []
    here: type[Settings] = kind
    for part in loc:
        below = here.model_fields.get(part)
        annotation = None if below is None else below.annotation
        if not (isinstance(annotation, type) and issubclass(annotation, Settings)):
            break
        path.append(part)
        here = annotation
    return path, list(here.model_fields)


def to_toml(settings: Settings) -> str:
    """Return the settings as TOML, without the keys that are None."""
    return tomli_w.dumps(settings.model_dump(exclude_none=True))
