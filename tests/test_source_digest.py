"""A run is taken again only while a user's code is the same, in whatever file that stands."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fedkeel.base.fingerprint.reached_values import describe_value
from fedkeel.base.fingerprint.source_digest import module_digest
from toys import forget

FILES = {
    "part.py": """
import numpy
import helper
from tools import deep
from tools.more import *
class Part: ...
def use():
    import late
    return late.n
""",
    "helper.py": "n = 1\n",
    "late.py": "n = 1\n",
    "beside.py": "n = 1\n",
    "tools/__init__.py": "",
    "tools/deep.py": "from . import deeper\n",
    "tools/deeper.py": "import part\n",
    "tools/more.py": "n = 1\n",
}
"""A file that imports others, in a circle too; nothing imports `beside`."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    forget(tmp_path)


def load(later: bool = True) -> ModuleType:
    """Import the file and, by calling its function, what it imports later."""
    importlib.invalidate_caches()
    module = importlib.import_module("part")
    if later:
        module.use()
    return module


@pytest.mark.parametrize("name", [name for name in FILES if name != "beside.py"])
def test_a_file_that_is_imported_counts(here: Path, name: str) -> None:
    first = module_digest(load().__name__)
    (here / name).write_text(FILES[name] + "# another line\n")
    assert module_digest("part") == first  # of what is loaded
    forget(here)
    assert module_digest(load().__name__) != first
    (here / name).write_text(FILES[name])
    forget(here)
    assert module_digest(load().__name__) == first


def test_a_file_that_is_not_imported_does_not(here: Path) -> None:
    first = module_digest(load().__name__)
    importlib.import_module("beside")
    (here / "beside.py").write_text("n = 2\n")
    forget(here)
    importlib.import_module("beside")
    assert module_digest(load().__name__) == first


def test_a_file_that_will_be_imported_counts_before(here: Path) -> None:
    first = module_digest(load(later=False).__name__)
    assert module_digest(load().__name__) == first
    (here / "late.py").write_text("n = 2\n")
    forget(here)
    assert module_digest(load(later=False).__name__) != first


def test_what_is_loaded_anew_is_read_anew(here: Path) -> None:
    """As in a notebook, of which only the helper is loaded again."""
    first = module_digest(load().__name__)
    (here / "helper.py").write_text("n = 2\n")
    importlib.reload(sys.modules["helper"])
    second = module_digest("part")
    (here / "part.py").write_text(FILES["part.py"] + "m = 3\n")
    importlib.reload(sys.modules["part"])
    assert len({first, second, module_digest("part")}) == 3


def test_of_a_library_its_own_file_counts_alone() -> None:
    assert module_digest("json")
    assert module_digest("numpy")
    assert module_digest("sys") == module_digest("there.is.no.such") == ""


SCRIPT = """
import math
from functools import cached_property
from torch import nn
from fedkeel.base.fingerprint.reached_values import describe_value
import helper

SCALE = 2.0
KIND = "a"
def third(x): return x
def second(x): return third(x) if KIND else x
def first(x): return second(x)
def unused(x): return x
class Layer(nn.Module):
    def forward(self, x): return SCALE * first(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Layer()
    @property
    def width(self): return helper.n + Other.n
    def forward(self, x): return self.inner(x)
class Other(Net):
    n = 4
def loss(logits, y): return first(logits)
for value in (Net, loss, Net()):
    print(describe_value(value).digest)
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ('KIND = "a"', 'KIND = "b"', (True, True, True)),
        pytest.param(
            *("def third(x): return x", "def third(x): return 2 * x", (True, True, True)),
            marks=pytest.mark.slow,
        ),
        pytest.param(*("SCALE = 2.0", "SCALE = 2.5", (True, False, True)), marks=pytest.mark.slow),
        pytest.param(*("    n = 4", "    n = 5", (True, False, True)), marks=pytest.mark.slow),
        pytest.param(
            *("import helper\n", "import beside as helper\n", (True, False, True)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("def unused(x): return x", "def unused(x): return 0", (False, False, False)),
            marks=pytest.mark.slow,
        ),
        pytest.param("print(", "print(", (False, False, False), marks=pytest.mark.slow),
    ],
)
def test_in_a_script_counts_what_a_definition_names(
    here: Path, old: str, new: str, changed: tuple[bool, ...]
) -> None:
    (here / "beside.py").write_text("n = 2\n")
    found = [said(here, text) for text in (SCRIPT, SCRIPT.replace(old, new))]
    assert tuple(a != b for a, b in zip(*found, strict=True)) == changed


def said(folder: Path, text: str) -> list[str]:
    (folder / "script.py").write_text(text)
    run = [sys.executable, str(folder / "script.py")]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()


def test_where_a_file_lies_does_not_count(here: Path) -> None:
    """It is another place on each node of a federation."""
    text = "from pathlib import Path\nHERE = str(Path(__file__).parent)\n"
    text += "def loss(logits, y): return (HERE, __file__, logits)\n"
    found = []
    for name in ("one", "two"):
        (here / name).mkdir()
        (here / name / "losses.py").write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(here / name))
            found.append(describe_value(importlib.import_module("losses").loss).text)
        forget(here)
    assert found[0] == found[1] != ""


def test_a_class_that_names_itself_is_written_once() -> None:
    class Mine:
        def other(self) -> Mine:
            return Mine()

    assert describe_value(Mine).text
