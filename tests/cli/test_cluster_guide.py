"""The guide for clusters names commands, options and settings that exist, and tables that do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import cast

import click
import pytest
from typer.main import get_command

from fedkeel.cli import app
from fedkeel.config import Experiment, paths
from fedkeel.reproduce.catalogue import load

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "cluster.md").read_text("utf-8")
SCRIPTS = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)


def calls(text: str) -> list[list[str]]:
    """The words of each call of fedkeel in a text, a continued line being one."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [re.search(r"(?:^|\s)(fedkeel (?:run|reproduce|report) .*)", line) for line in lines]
    return [shlex.split(one[1], comments=True) for one in found if one]


WORDS = re.sub(r"```bash\n.*?```", "", GUIDE, flags=re.DOTALL)

COMMANDS = [*calls("\n".join(SCRIPTS)), *calls(WORDS)]


def test_each_script_is_of_slurm_and_calls_fedkeel() -> None:
    assert len(SCRIPTS) == 3
    for script in SCRIPTS:
        assert script.startswith("#!/bin/bash\n#SBATCH")
        assert len(calls(script)) == 1
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_its_commands_are_understood(words: list[str]) -> None:
    """They are parsed as the command parses them, and what it sets is a setting."""
    group = cast("click.Group", get_command(app))
    command = group.commands[words[1]]
    values = ["gradma-table1" if word.startswith("${") else word for word in words[2:]]
    values = [re.sub(r"\$\w+|\$\{.*?\}", "1", word) for word in values]
    context = command.make_context(words[1], values)
    set_here = [text.partition("=")[0] for text in context.params.get("settings", ())]
    assert set(set_here) <= {*paths(Experiment)}
    assert bool(set_here) == (words[1] == "run" and "-s" in words)


def test_its_table_has_the_columns() -> None:
    (names,) = re.findall(r"^columns=\((.*)\)$", GUIDE, re.MULTILINE)
    table = load("gradma-table1")
    assert set(names.split()) <= {column.id for column in table.columns}


def test_it_waits_for_the_exit_codes_that_the_command_has() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "command.md").read_text("utf-8")
    for code in re.findall(r"\$code -eq (\d+)", GUIDE):
        assert code in re.findall(r"\b\d+\b", text.partition("##")[0])
