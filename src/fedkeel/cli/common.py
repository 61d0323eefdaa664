"""What several commands share: reading an experiment, printing."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from fedkeel.config import Experiment, load
from fedkeel.errors import ConfigError, did_you_mean

EXPERIMENT = typer.Argument(None, metavar="EXPERIMENT.toml", help="Experiment file, or run folder.")
PRESET = typer.Option(None, "--preset", help="Use an experiment that comes with fedkeel: digits.")
SET = typer.Option(
    None,
    "-s",
    "--set",
    metavar="KEY=VALUE",
    help="Change a setting, e.g. local.lr=0.1; KEY=unset takes away what the file sets.",
)
JSON = typer.Option(False, "--json", help="Print one JSON document on standard output.")
QUIET = typer.Option(False, "--quiet", "-q", help="Show no progress.")


class Group(TyperGroup):
    """Commands; of a misspelled one the nearest is named, whichever click typer comes with."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]  # noqa: ANN401 - click's
        """Return the command that is called."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}; {did_you_mean(name, self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)


def experiment(path: Path | None, preset: str | None, overrides: list[str] | None) -> Experiment:
    """Read the experiment that a command was given.

    Raises:
        ConfigError: none was given, or two, or it cannot be read.
    """
    if (path is None) == (preset is None):
        raise ConfigError(
            "Give an experiment file or a preset.",
            got="neither" if path is None else "both",
            expected="one of the two",
            do="fedkeel run EXPERIMENT.toml, or fedkeel run --preset digits",
        )
    if path is not None:
        return load(path / "config.toml" if path.is_dir() else path, overrides or ())
    folder = files("fedkeel").joinpath("presets")
    known = sorted(
        f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")
    )
    if preset not in known:
        raise ConfigError(f"There is no preset {preset!r}.", do=did_you_mean(str(preset), known))
    return load(Path(str(folder.joinpath(f"{preset}.toml"))), overrides or ())


def stderr() -> Console:
    """Return the console for everything that is not a result."""
    return Console(stderr=True)


def document(value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Print a JSON document on standard output."""
    print(json.dumps(value, indent=1, allow_nan=False))


def say(console: Console, text: str) -> None:
    """Print a line as it stands."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
