"""One name for one thing: no public class of the package shares its name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import fedkeel
from fedkeel.method import context

SOURCE = Path(__file__).parents[1] / "src" / "fedkeel"

ONE_NAME = {
    "Metric": "what `tune.metric` can be, and what a user's metric is: both are public",
    "Cohort": "settings, and what parts of version 0.1 call `RoundCohort`",
}
"""Names of two things, and why."""


def shared(modules: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names of public classes that another class or a type has too, from (path, text)."""
    classes, types = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for path, text in modules:
        module = ast.parse(text)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(path)
        for statement in module.body:
            for target in statement.targets if isinstance(statement, ast.Assign) else ():
                if isinstance(target, ast.Name) and re.match("[A-Z][a-z]", target.id):
                    types[target.id].append(path)
    homes = {name: [*paths, *types[name]] for name, paths in classes.items()}
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_no_public_class_shares_its_name() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    found = shared((str(f.relative_to(SOURCE)), f.read_text(encoding="utf-8")) for f in files)
    assert found.keys() == ONE_NAME.keys(), found


def test_a_name_that_is_given_twice_is_found() -> None:
    first = "class A: ...\nclass _B: ...\ndef f() -> None:\n    class C: ...\nclass Dx: ...\n"
    second = "class A: ...\nclass _B: ...\nclass C: ...\nDx = int\nEx = int\n"
    both = ["x.py", "y.py"]
    assert shared([("x.py", first), ("y.py", second)]) == {"A": both, "C": both, "Dx": both}


def test_parts_of_version_0_1_find_the_cohort() -> None:
    assert context.Cohort is context.RoundCohort
    assert fedkeel.Cohort is not context.RoundCohort
