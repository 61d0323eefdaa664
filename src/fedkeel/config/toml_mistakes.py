"""What is wrong in a TOML file: the line, a mark below the place, and what to write instead."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from fedkeel.base.error_messages import table_of
from fedkeel.config.data import CONTROL_CHARACTERS
from fedkeel.config.settings import Experiment
from fedkeel.errors import ConfigError

_SHOWN = 100
"""Characters of a line that are shown around a mark, at most."""

_LONGEST_LINE = 1000
"""Characters of a line for which a correction is looked for, at most."""

_KEY = r"^(\s*[\w.\"'-]+\s*=\s*)"
_END = r"(\s*(?:#.*)?)$"

_CORRECTIONS: tuple[tuple[str, str, str], ...] = (
    ("[\u201c\u201d\u201e\u201f\u00ab\u00bb]", '"', "quotes are straight"),
    ("[\u2018\u2019\u201a\u201b]", "'", "quotes are straight"),
    ("[\u00a0\u2007\u202f\u200b\ufeff]", " ", "spaces are plain"),
    (r'"([^"\']*\\[^"\']*)"', r"'\1'", r"a text with \ is in single quotes; a path may have /"),
    (r"(?i)(?<![\w'\"])true(?![\w'\"])", "true", "true is written small"),
    (r"(?i)(?<![\w'\"])false(?![\w'\"])", "false", "false is written small"),
    (rf"{_KEY}(?:None|none|null|NULL|nil){_END}", "", "a setting without a value is not in a file"),
    (rf"{_KEY}(?:[Yy]es|[Oo]n){_END}", r"\1true\2", "the truth values are true and false"),
    (rf"{_KEY}(?:[Nn]o|[Oo]ff){_END}", r"\1false\2", "the truth values are true and false"),
    (r"(=\s*[-+]?\d+),(\d+)(?=\s*(?:[,}#]|$))", r"\1.\2", "decimals have a point"),
    (r"(?<![\w.'\"])\.(\d)", r"0.\1", "a digit stands before the point"),
    (r"(\d)\.(?![\d\w])", r"\1.0", "a digit stands after the point"),
    (r"(\d)\.([eE][-+]?\d)", r"\1.0\2", "a digit stands after the point"),
    (rf"{_KEY}0+([1-9]\d*){_END}", r"\1\2\3", "a whole number begins with another digit than 0"),
    (r"\s*[;,]\s*$", "", "nothing stands after a value"),
    (r"\s+(?://|;)(.*)$", r"  #\1", "a comment begins with #"),
    (
        r"((?:^|[{,])\s*[\w.\"'-]+)\s*(?::=|==|:)\s*(?=\S)",
        r"\1 = ",
        "a key and = go before a value",
    ),
    (r"^(\s*\[[\w.\"'-]+)\s*$", r"\1]", "the name of a table is in brackets"),
    (rf'{_KEY}"([^"]*)$', r'\1"\2"', "text is in quotes"),
    (rf"{_KEY}([A-Za-z_./~][^\"'#]*?\\[^\"'#]*?){_END}", r"\1'\2'\3", "text is in quotes"),
    (rf"{_KEY}([A-Za-z_./~][^\"'#\\]*?){_END}", r'\1"\2"\3', "text is in quotes"),
)
"""(mistake, what is right, rule): what people write out of habit, as regular expressions."""

_REPEATED = {
    "Cannot overwrite a value": "it is set twice: drop one of the two lines",
    "Cannot declare": "the table stands in the file twice: put its keys below one of the two",
}
"""What to do, by how the complaint of Python's TOML reader begins."""


def explained(path: object, text: str, error: tomllib.TOMLDecodeError) -> ConfigError:
    """Return the error for a file that is not TOML, with the line and what to write.

    Args:
        path: the file.
        text: what it holds.
        error: the complaint of Python's TOML reader.
    """
    complaint, number, column = _place(error)
    if number is None:
        return ConfigError(f"{path} is not valid TOML: {complaint}.")
    repeated = (do for start, do in _REPEATED.items() if complaint.startswith(start))
    return _marked(
        f"{path} is not valid TOML, line {number}: {complaint}.",
        _lines(text)[number - 1],
        column - 1,
        next(repeated, None) or _corrected(text, number),
    )


def too_many_digits(path: object, text: str) -> ConfigError:
    """Return the error for a file with a whole number that is longer than Python reads."""
    what, expected = "a whole number is too long", "at most 64 bits"
    for number, line in enumerate(_lines(text), 1):
        if digits := re.search(r"[\d_]{1000,}", line):
            return _marked(f"{path}, line {number}: {what}.", line, digits.start(), None, expected)
    return ConfigError(f"{path}: {what}.", expected=expected)


def check_meaning(path: object, text: str, values: Mapping[str, Any]) -> None:
    r"""Refuse what is valid TOML and means something else than its writer thinks.

    This is a path in double quotes in which ``\n`` or ``\t`` has become another character, and a
    key of the experiment that stands below a table.

    Args:
        path: the file.
        text: what it holds.
        values: the same, read.

    Raises:
        ConfigError: with the line and what to write.
    """
    lines = _lines(text)
    for value in _misread_paths(values):
        for number, line in enumerate(lines, 1):
            for written in re.finditer(r'"([^"]*)"', line):
                if _read(written[0]) == value:
                    raise _marked(
                        f"{path}, line {number}: in double quotes, \\ and a letter are one "
                        "character.",
                        line,
                        written.start(),
                        f"write '{written[1]}' in single quotes, or with / in place of \\",
                    )
    for table, key in _misplaced(values, Experiment):
        place = _line_of(lines, table, key)
        if place is not None:
            raise _marked(
                f"{path}, line {place}: {key!r} stands below [{table}], which has no such key.",
                lines[place - 1],
                0,
                "move the line above the first [table]: it is a setting of the whole experiment",
            )


def _lines(text: str) -> list[str]:
    return text.split("\n")


def _place(error: tomllib.TOMLDecodeError) -> tuple[str, int | None, int]:
    """Return the complaint, and the line and column that it is about, both from 1."""
    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error), re.DOTALL)
    return (match[1], int(match[2]), int(match[3])) if match else (str(error), None, 0)


def _marked(
    what: str, line: str, column: int, do: str | None, expected: str | None = None
) -> ConfigError:
    """Return an error that shows a line with a mark below `column`, which counts from 0."""
    left = max(len(line) - len(line.lstrip()), column - _SHOWN * 3 // 4)
    shown = line[left : left + _SHOWN].rstrip().replace("\t", " ")
    return ConfigError(what, got=shown, expected=expected, do=do, mark=max(0, column - left))


def _corrected(text: str, number: int) -> str | None:
    """Return what to write in a line, None where no correction makes it TOML."""
    lines = _lines(text)

    def is_right(line: str) -> bool:
        """Return whether the file is TOML as far as this line, with `line` in its place."""
        try:
            tomllib.loads("\n".join([*lines[: number - 1], line, *lines[number:]]))
        except tomllib.TOMLDecodeError as error:
            later = _place(error)[1]
            return later is None or later > number
        except (ValueError, RecursionError):
            return False
        return True

    line = lines[number - 1].rstrip("\r")
    if len(line) > _LONGEST_LINE:
        return None
    every, rules = line, []
    for mistake, right, rule in _CORRECTIONS:
        alone = re.sub(mistake, right, line)
        if alone != line and is_right(alone):
            return _advice(alone, [rule])
        before, every = every, re.sub(mistake, right, every)
        if every != before:
            rules.append(rule)
            if is_right(every):
                return _advice(every, rules)
    return None


def _advice(line: str, rules: list[str]) -> str:
    reason = " and ".join(dict.fromkeys(rules))
    return f"write {line.strip()}   ({reason})" if line.strip() else f"drop the line: {reason}"


def _read(text: str) -> object:
    """Return the value that TOML gives a text, None where it is not TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return None


def _misread_paths(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths in which a backslash and a letter have become another character."""
    data = values.get("data")
    for value in (data.get("source"), data.get("test")) if isinstance(data, Mapping) else ():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and not CONTROL_CHARACTERS.keys().isdisjoint(path):
                yield path


def _misplaced(
    values: Mapping[str, Any], kind: type[BaseModel], path: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield (table, key) of the keys of an experiment that stand below a table without them."""
    for name, value in values.items():
        table = table_of(kind, name)
        if table is not None and isinstance(value, Mapping):
            known = {*table.model_fields, *getattr(table, "renamed", {})}
            for key in value.keys() - known:
                if key in Experiment.model_fields and table_of(Experiment, key) is None:
                    yield f"{path}{name}", key
            yield from _misplaced(value, table, f"{path}{name}.")


def _line_of(lines: list[str], table: str, key: str) -> int | None:
    """Return the number, from 1, of the line that sets a key below a table's heading."""
    heading = ""
    for number, line in enumerate(lines, 1):
        if match := re.match(r"\s*\[\s*([\w. \"'-]+?)\s*\]", line):
            heading = re.sub(r"[\s\"']", "", match[1])
        elif heading == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return None
