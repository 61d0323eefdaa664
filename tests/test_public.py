"""The public names: each is found, and nothing slow is loaded before one is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedkeel


def test_what_a_checker_sees_is_what_there_is() -> None:
    tree = ast.parse(Path(str(fedkeel.__file__)).read_text(encoding="utf-8"))
    seen = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }
    assert set(seen) == set(fedkeel.__all__) <= set(dir(fedkeel))
    for name, home in seen.items():
        module = __import__(str(home), fromlist=[name])
        assert getattr(fedkeel, name) is getattr(module, name)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'federate'"):
        fedkeel.federate  # type: ignore[attr-defined]  # noqa: B018


def test_torch_is_not_loaded_by_the_command_or_a_report() -> None:
    names = "fedkeel.cli, fedkeel.report.page, fedkeel.records.comparison"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    listing = [sys.executable, "-X", "importtime", "-m", "fedkeel", "methods"]
    imports = subprocess.run(listing, check=True, capture_output=True, text=True).stderr
    assert "fedkeel.cli" in imports
    assert "numpy" not in imports  # a third of the start
