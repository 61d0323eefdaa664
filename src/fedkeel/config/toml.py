"""Settings from TOML and back, with errors that name the key and the way out."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from fedkeel.base.error_messages import readable
from fedkeel.base.named_files import read_within
from fedkeel.base.settings import DEEPEST, Settings, check_bounds, with_current_names
from fedkeel.config.settings import Experiment
from fedkeel.config.toml_mistakes import check_meaning, explained, too_many_digits
from fedkeel.errors import ConfigError, did_you_mean

_S = TypeVar("_S", bound=Settings)

UNSET = "unset"
"""A setting that is laid over another with this word for a value takes it away."""


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
        raise readable(kind, error, where) from None


def load(path: Path | str, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment from a TOML file.

    Args:
        path: the file.
        overrides: ``key=value`` with dotted keys, e.g. ``local.lr=0.1``; values are TOML, and text
            that is not TOML is taken as it stands, and ``unset`` takes away what the file sets.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or holds a setting that cannot be used.
    """
    path = Path(os.path.expanduser(path))
    _check_suffix(path)
    try:
        text = read_within(path).decode("utf-8-sig")  # with a byte order mark or without
    except FileNotFoundError:
        raise ConfigError(
            "There is no such experiment file.",
            got=str(path),
            do="check the path, or start from a preset: fedkeel run --preset digits",
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read.", got=error) from None
    except UnicodeDecodeError as error:
        do = "save it as text in the encoding UTF-8"
        raise ConfigError(f"{path} cannot be read.", got=error, do=do) from None
    values = parse(text, str(path))
    check_meaning(path, text, values)
    return build(Experiment, override(values, overrides), str(path))


def _check_suffix(path: Path) -> None:
    """Refuse data and Python files, which would be read as TOML."""
    advice = {
        ".py": "give the experiment file that names this module, such as model.name",
        **dict.fromkeys(
            (".csv", ".parquet", ".npz", ".tsv", ".xlsx", ".json"),
            f"write one for these data: fedkeel new NAME --data {path} --label COLUMN",
        ),
    }
    if do := advice.get(path.suffix.lower()):
        raise ConfigError(
            "An experiment is a TOML file.", got=str(path), expected="NAME.toml", do=do
        )


def parse(text: str, where: str) -> dict[str, Any]:
    """Read TOML, within the bounds of settings.

    Args:
        text: what a file holds.
        where: the file, for messages.

    Raises:
        ConfigError: it is not TOML, with the line and what to write; or its tables are nested too
            deeply, or a whole number is too long.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise explained(where, text, error) from None
    except RecursionError:
        expected = f"at most {DEEPEST} tables and lists in each other"
        raise ConfigError(f"{where} is nested too deeply.", expected=expected) from None
    except ValueError:  # of Python's reader of numbers
        raise too_many_digits(where, text) from None
    try:
        check_bounds(values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from None
    return values


def override(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `values` with ``key=value`` settings laid over them.

    >>> override({"local": {"lr": 0.1}}, ["local.lr=0.5", "name=try"])
    {'local': {'lr': 0.5}, 'name': 'try'}
    >>> override({}, ['tune.space."local.lr"=[0.1, 0.2]'])
    {'tune': {'space': {'local.lr': [0.1, 0.2]}}}
    >>> override({"local": {"lr": 0.1, "epochs": 1}}, ["local.epochs=unset", "local.steps=5"])
    {'local': {'lr': 0.1, 'steps': 5}}
    """
    result, changed = with_current_names(Experiment, _copy(values)), set[tuple[str, ...]]()
    for text in overrides:
        key, sign, raw = text.partition("=")
        key = key.strip()
        if not sign or not key:
            raise ConfigError(
                "A setting on the command line has the form key=value.",
                got=repr(text),
                expected="for instance -s local.lr=0.1",
            )
        value = _value(key, raw)
        (*tables, name), value = _with_current_name(_names(key), value)
        if (*tables, name) in changed:
            raise ConfigError(
                f"The setting {key!r} is given twice on the command line.",
                got=repr(text),
                do="give it once; the values of a list stand in brackets, with commas between them",
            )
        changed.add((*tables, name))
        table = result
        for parent in tables:
            below = table.setdefault(parent, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{key!r} cannot be set: {parent!r} is not a table.", got=below)
            table = below
        if value != UNSET or raw.strip() != UNSET:  # in quotes it is a text
            table[name] = value
        elif name in table:
            del table[name]
        else:
            raise ConfigError(
                f"{key!r} is not set, so that it cannot be unset.", do=did_you_mean(name, table)
            )
    return result


def _value(key: str, raw: str) -> object:
    """Return the value of a setting on the command line: as in TOML, or as text."""
    try:
        values = tomllib.loads(f"v = {raw}")
    except tomllib.TOMLDecodeError:
        return raw.strip()
    except (ValueError, RecursionError):  # too many digits, or lists in lists
        raise ConfigError(
            f"{key!r} cannot be set.",
            got=raw,
            expected=f"whole numbers of 64 bits, and at most {DEEPEST} lists in each other",
        ) from None
    return values["v"] if len(values) == 1 else raw.strip()


def _names(key: str) -> list[str]:
    """Return the names in a dotted key, which may be quoted as in a file."""
    try:
        nested: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return key.split(".")
    names = []
    while isinstance(nested, dict):
        ((name, nested),) = nested.items()
        names.append(name)
    return names


def _with_current_name(names: Sequence[str], value: object) -> tuple[list[str], object]:
    """Return the names of a key and its value, old ones replaced by the current ones."""
    nested: Any = value
    for name in reversed(names):
        nested = {name: nested}
    nested, current = with_current_names(Experiment, nested), []
    for _ in names:
        ((name, nested),) = nested.items()
        current.append(name)
    return current, nested


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def to_toml(settings: Settings) -> str:
    """Return the settings as TOML, without the keys that are None.

    Raises:
        ConfigError: a text cannot be written, such as the name of a file that is not in UTF-8.
    """
    text = tomli_w.dumps(settings.model_dump(exclude_none=True))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.end].splitlines()[-1]
        raise ConfigError(
            "A setting has a character that cannot be written to config.toml.",
            got=ascii(line),
            do="rename the file or folder that it names",
        ) from None
    return text
