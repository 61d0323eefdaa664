"""One name for one thing: no two public classes of the package share one."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import fedkeel
from fedkeel.method import context

SOURCE = Path(__file__).parents[1] / "src" / "fedkeel"

SHARED = {"Run"}
"""The settings of a run and what runs it: one of them has yet to be renamed."""


def shared(modules: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names of public classes that several modules define, from (path, text)."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path, text in modules:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path)
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_no_two_public_classes_have_one_name() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    found = shared((str(f.relative_to(SOURCE)), f.read_text(encoding="utf-8")) for f in files)
    assert set(found) == SHARED, found


def test_a_name_that_is_given_twice_is_found() -> None:
    text = "class A: ...\nclass _B: ...\ndef f() -> None:\n    class C: ...\n"
    assert shared([("x.py", text), ("y.py", text)]) == {
        "A": ["x.py", "y.py"],
        "C": ["x.py", "y.py"],
    }


def test_parts_of_version_0_1_find_the_cohort() -> None:
    assert context.Cohort is context.RoundCohort
    assert fedkeel.Cohort is not context.RoundCohort
