"""The generated pages of docs/ are what the code says, and say it of every method."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from fedkeel.method.legality import LEGAL, pairs, verdict
from fedkeel.method.registry import REGISTRY

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages as they would be written now."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    folder = tmp_path_factory.mktemp("docs")
    generate.write(folder)
    return folder


def pages(folder: Path) -> dict[str, str]:
    files = [*folder.glob("methods/*.md"), folder / "legality.md"]
    return {str(f.relative_to(folder)): f.read_text("utf-8") for f in files if f.exists()}


def test_the_pages_are_what_the_code_says(fresh: Path) -> None:
    now, then = pages(fresh), pages(DOCS)
    stale = sorted(path for path in now.keys() | then.keys() if now.get(path) != then.get(path))
    assert not stale, f"run `python docs/generate.py` and commit: {', '.join(stale)}"


def test_there_is_a_page_for_every_method(fresh: Path) -> None:
    names = {Path(path).stem for path in pages(fresh)} - {"README", "legality"}
    assert names == set(REGISTRY)
    table = (fresh / "methods" / "README.md").read_text("utf-8")
    for name in REGISTRY:
        assert f"| [`{name}`]({name}.md)" in table
    assert all(
        (fresh / "methods" / link).exists() for link in re.findall(r"\(([^()]+\.md)\)", table)
    )


def test_every_method_was_measured(fresh: Path) -> None:
    for path, text in pages(fresh).items():
        assert "not measured" not in text, path
    rows = (fresh / "methods" / "README.md").read_text("utf-8").splitlines()
    assert all(re.search(r"\| \d+\.\d\d \| \d+\.\d\d \|", row) for row in rows if row[:3] == "| [")


def test_the_matrix_has_every_pair_twice(fresh: Path) -> None:
    text = (fresh / "legality.md").read_text("utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| \d+ \| `", line)]
    names = [row[1].strip("`") for row in rows]
    assert names == list(REGISTRY)
    cells = [[cell.strip(" *|") for cell in row[2:]] for row in rows]
    at = {name: i for i, name in enumerate(names)}
    for one, other in pairs():
        code = verdict(one, other).code
        assert cells[at[one]][at[other]] == cells[at[other]][at[one]] == code
    assert all(cells[i][i] == "" for i in range(len(names)))
    listed = text.split("\n## ", 1)[1]
    for one, other in pairs():
        code = verdict(one, other).code
        if code != LEGAL:
            section = listed.split(f"`{code}`\n", 1)[1].split("\n## ")[0]
            assert re.search(rf"^- `{one}` with .*`{other}`", section, re.MULTILINE)
