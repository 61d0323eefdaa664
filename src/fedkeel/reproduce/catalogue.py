"""The list of tables that come with the package, and the reading of table files."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

from fedkeel.config import build
from fedkeel.errors import ConfigError, did_you_mean
from fedkeel.reproduce.table import PaperTable


def names() -> list[str]:
    """Return the ids of the tables, by paper and number."""
    paths = files("fedkeel.reproduce").joinpath("tables").iterdir()
    ids = (path.name.removesuffix(".toml") for path in paths if path.name.endswith(".toml"))
    return sorted(ids, key=_order)


def _order(name: str) -> tuple[str, str, int, str]:
    """Sort table 10 after table 2."""
    paper, _, rest = name.partition("-")
    kind = rest.rstrip("0123456789.abcdefghij")
    number = "".join(character for character in rest if character.isdigit())
    return paper, kind, int(number or 0), rest


def load(name: str) -> PaperTable:
    """Read a table.

    Args:
        name: an id of `names`, or the path of a user's file, which ends in ``.toml``.

    Raises:
        ConfigError: there is no such table, or it is not valid.
    """
    if name.endswith(".toml"):
        return read(Path(name))
    known = names()
    if name not in known:
        raise ConfigError(
            f"There is no table {name!r}.",
            do=f"{did_you_mean(name, known, limit=8)}; fedkeel reproduce lists them",
        )
    table = read(Path(str(files("fedkeel.reproduce").joinpath("tables", f"{name}.toml"))))
    if table.id != name:
        raise ConfigError(f"{name}.toml has another id.", got=table.id, expected=name)
    return table


def read(path: Path) -> PaperTable:
    """Read a table from a file.

    Raises:
        ConfigError: it cannot be read, or is not valid.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("There is no such table file.", got=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read.", got=error) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML.", got=error) from None
    return build(PaperTable, values, path.name)
