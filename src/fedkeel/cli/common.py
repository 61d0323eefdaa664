"""What several commands share: their options, and printing."""

from __future__ import annotations

import codecs
import functools
import gc
import inspect
import io
import json
import os
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from typer.core import TyperCommand, TyperGroup, TyperOption

from fedkeel.base.named_files import expanded
from fedkeel.errors import RunError, did_you_mean, printable

EXPERIMENT = typer.Argument(None, metavar="EXPERIMENT.toml", help="Experiment file, or run folder.")
PRESET = typer.Option(None, "--preset", help="Use an experiment that comes with fedkeel: digits.")
SET = typer.Option(
    None,
    "-s",
    "--set",
    metavar="KEY=VALUE",
    help="Change a setting, e.g. local.lr=0.1; KEY=unset takes away what the file sets.",
)
TRUST = typer.Option(
    False,
    "--trust",
    help="Import code that a run folder names, also if you did not make the folder.",
)
JSON = typer.Option(False, "--json", help="Print one JSON document on standard output.")
QUIET = typer.Option(False, "--quiet", "-q", help="Show no progress.")


@dataclass(frozen=True)
class ExperimentSource:
    """What a command is given of its experiment.

    Args:
        path: experiment file or run folder.
        preset: name of an experiment that comes with fedkeel, in place of a path.
        settings: settings that are changed, as ``KEY=VALUE``.
        trust: whether code may be imported that a run folder names which was not made here.
    """

    path: Path | None
    preset: str | None
    settings: tuple[str, ...]
    trust: bool


def takes_experiment(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of its experiment, in place of its first argument."""

    def called(
        path: Path = EXPERIMENT,
        preset: str = PRESET,
        settings: list[str] = SET,
        trust: bool = TRUST,
        **options: Any,  # noqa: ANN401 - the command's own
    ) -> None:
        command(ExperimentSource(path, preset, tuple(settings or ()), trust), **options)

    *shared, _ = inspect.signature(called, eval_str=True).parameters.values()
    _, *options = inspect.signature(command, eval_str=True).parameters.values()
    functools.update_wrapper(called, command)
    called.__signature__ = inspect.Signature([*shared, *options])  # type: ignore[attr-defined]
    called.__annotations__ = {option.name: option.annotation for option in (*shared, *options)}
    return called


def _unescaped(help_text: str) -> str:
    """Return a help text without the backslashes that typer puts before brackets."""
    return help_text.replace(r"\[", "[")


COMMA_LISTS = ("--attacks", "--columns", "--kinds", "--methods")
"""Options whose value is a list with commas. Given several times, their lists are joined."""


def values_of(option: str, words: list[str]) -> tuple[list[str], list[str]]:
    """Return the values of an option, and the other words.

    >>> values_of("--x", ["--x", "1", "--y", "2", "--x=3"])
    (['1', '3'], ['--y', '2'])
    """
    values, others, rest = list[str](), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if word == option and rest:
            values.append(rest.pop(0))
        elif word.startswith(f"{option}="):
            values.append(word.partition("=")[2])
        else:
            others.append(word)
    return values, others


class Command(TyperCommand):
    """A command with plain help, options that are given once, and paths with ``~``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the words of the command, without dropping any that are given twice."""
        words, known = list(args), {name for param in self.params for name in param.opts}
        for option in self._of_features():
            values, words = values_of(option.flag, words)
            if option.is_list:
                values = [text] if (text := ",".join(filter(None, values))) else []
            words += [f"--set={option.setting}={value}" for value in values]
        for option in known.intersection(COMMA_LISTS):
            values, others = values_of(option, words)
            if len(values) > 1:
                words = [f"{option}={','.join(values)}", *others]
        if not ctx.resilient_parsing:
            _, others, order = self.make_parser(ctx).parse_args(args=list(words))
            if self._reads_experiment and any(word.endswith(".toml") for word in others):
                then = "; `fedkeel report FOLDER FOLDER` then makes one table of all their runs"
                ctx.fail(
                    f"One experiment at a time: {others[0]} is another one. Give each by itself"
                    f"{then if ctx.info_name in ('run', 'compare') else ''}."
                )
            for param in order:
                is_list = param.multiple if isinstance(param, TyperOption) else param.nargs != 1
                if order.count(param) > 1 and not is_list:
                    ctx.fail(f"{max(param.opts, key=len)} is given twice; give it once.")
        return super().parse_args(ctx, words)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # noqa: ANN401 - click's
        """Call the command."""
        for param in self.params:  # texts, of which typer makes paths
            value = ctx.params.get(str(param.name))
            if param.type.name not in ("path", "file", "directory") or not value:
                continue
            several = isinstance(value, list | tuple)
            paths = [str(expanded(path)) for path in (value if several else [value])]
            ctx.params[str(param.name)] = paths if several else paths[0]
        return super().invoke(ctx)

    @property
    def _reads_experiment(self) -> bool:
        return any("--set" in param.opts for param in self.params)

    def _of_features(self) -> list[Any]:
        """Return the options of features, where this is a command that reads an experiment."""
        from fedkeel.base.feature import declarations

        if not self._reads_experiment:
            return []
        return [option for kind in declarations().values() for option in kind.options]

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return the options that help shows, those of features among them."""
        made = [
            TyperOption(
                param_decls=[option.flag], metavar="VALUE", help=option.help, expose_value=False
            )
            for option in self._of_features()
        ]
        *own, help_option = super().get_params(ctx)
        return [*own, *made, help_option]

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        """Return the help text."""
        return _unescaped(super().get_help(ctx))


COMMAND_GROUPS = {
    "Prepare": ("new", "data", "check", "doctor", "audit", "methods"),
    "Train": ("run", "compare", "tune", "reproduce"),
    "Use": ("report", "rank", "predict", "export"),
    "Federate": ("flower",),
}
"""Heading in the help of the whole command -> commands."""


class CommandGroup(TyperGroup):
    """A group of commands that names the nearest one for a misspelled command."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ANN401 - click's
        """Write the commands of the help under headings that say what they are for."""
        if ctx.parent is not None:  # a group within the command
            super().format_commands(ctx, formatter)
            return
        width = max(map(len, self.list_commands(ctx)))
        for heading, members in COMMAND_GROUPS.items():
            commands = [(name, self.get_command(ctx, name)) for name in members]
            limit = formatter.width - 6 - width
            rows = [(n.ljust(width), c.get_short_help_str(limit)) for n, c in commands if c]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        """Return the help text."""
        return _unescaped(super().get_help(ctx))

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]  # noqa: ANN401 - click's
        """Return the command that is called, or fail with the nearest name."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}; {did_you_mean(name, self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)


_ASCII = {
    "\u2591": ".",  # shades, from light to full
    "\u2592": ":",
    "\u2593": "+",
    "\u2588": "#",
    "\u2501": "=",
    "\u2500": "-",
    "\u00b7": ".",
    "\u00d7": "x",
    "\u00b1": "+-",
    "\u2212": "-",
    "\u2013": "-",
    "\u2020": "+",
    "\u25b2": "^",
    "\u25bc": "v",
    "\u2026": "~",
}
"""ASCII for characters that tables and bars are drawn with."""


_DEFAULT_HANDLERS = ("strict", "backslashreplace")
"""What Python does by itself on the two streams; another handler is the user's choice."""


def replace_unencodable() -> None:
    """Let the standard streams write something similar for a character their encoding has not.

    Without it, a file or a pipe on Windows, which is in cp1252 or cp437, ends the command.
    """
    codecs.register_error("fedkeel", _similar)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _DEFAULT_HANDLERS:
            stream.reconfigure(errors="fedkeel")


def _similar(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for what cannot be encoded: a letter without its accent, or a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(map(_similar_character, characters)), error.end


def _similar_character(character: str) -> str:
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return _ASCII.get(character) or plain or "?"


def stderr() -> Console:
    """Return the console for everything that is not a result."""
    return Console(stderr=True)


def document(value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Print a JSON document on standard output."""
    print(json.dumps(value, indent=1, allow_nan=False))


def show(as_json: bool, value: Any, *shown: RenderableType) -> None:  # noqa: ANN401 - as above
    """Print a result on standard output: as a JSON document, or for readers."""
    if as_json:
        document(value)
    else:
        for item in shown:
            Console().print(item)


def default_folder(name: str, command: str) -> Path:
    """Return runs/NAME for a run, runs/NAME-compare for a comparison.

    A comparison in runs/NAME, where earlier versions wrote it, goes on there; a run is then in
    runs/NAME-run.

    Args:
        name: name of the experiment.
        command: ``run`` or ``compare``.
    """
    from fedkeel.records.comparison import INDEX

    folder = Path("runs") / name
    holds_comparison = os.path.exists(folder / INDEX)
    is_own = holds_comparison == (command == "compare")
    return folder if is_own else Path("runs") / f"{name}-{command}"


@contextmanager
def many_imports() -> Iterator[None]:
    """Put off the search for garbage while many modules are imported: they leave none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def page_written(write: Callable[[], Path]) -> str:
    """Write a page beside results that are saved already; return where it is, or why it is not."""
    try:
        return str(write())
    except RunError as error:
        reason = error.what if error.got is None else f"{error.what} ({error.got})"
        return f"not written: {reason}" + ("" if error.do is None else f" Do: {error.do}")


def say(console: Console, text: str) -> None:
    """Print a line without markup and control characters; a terminal breaks it between words.

    A path is never broken by us, so that it can be copied.
    """
    shown = printable(text)
    if console.is_terminal:
        shown = textwrap.fill(shown, console.width, break_long_words=False, break_on_hyphens=False)
    console.print(shown, markup=False, highlight=False, soft_wrap=True)
