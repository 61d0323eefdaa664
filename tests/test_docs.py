"""The generated pages of docs/ are what the code says, and say it of every method."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from html import escape
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
import yaml

from fedkeel.config import Experiment, build, paths
from fedkeel.method.legality import all_pairs, verdict
from fedkeel.method.part import Capability
from fedkeel.method.parts.fedavgm import ServerMomentum
from fedkeel.method.registry import REGISTRY, Recipe
from fedkeel.method.roles import ROLES
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.study.footprint import FILE

DOCS = Path(__file__).parents[1] / "docs"
REFERENCE = ("command.md", "configuration.md", "modules.md", "roles.md", "run-folder.md")
SOURCE = DOCS.parent / "src" / "fedkeel"


def script(path: Path) -> ModuleType:
    """A file of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return script(DOCS / "generate.py")


@pytest.fixture(scope="module")
def fresh(generate: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages as they would be written now."""
    folder = tmp_path_factory.mktemp("docs")
    generate.write(folder)
    return folder


def pages(folder: Path) -> dict[str, str]:
    files = [*folder.glob("methods/*.md"), *(folder / "reference" / name for name in REFERENCE)]
    return {str(f.relative_to(folder)): f.read_text("utf-8") for f in files if f.exists()}


def test_every_module_is_listed_with_its_first_line(fresh: Path) -> None:
    text = (fresh / "reference" / "modules.md").read_text("utf-8")
    files = [
        file for file in SOURCE.rglob("*.py") if file.name not in ("__init__.py", "__main__.py")
    ]
    assert len(files) > 150
    for file in files:
        section = text.split(f"## `{file.parent.relative_to(SOURCE.parent)}`\n")[1].split("\n## ")[
            0
        ]
        assert re.search(rf"^\| `{file.name}` \| .{{15,}}\|$", section, re.MULTILINE), file


def test_the_architecture_names_every_room() -> None:
    text = (DOCS / "architecture.md").read_text("utf-8")
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert {room for room in rooms if f"| `{room}/` |" not in text} == set()


def test_the_pages_are_what_the_code_says(fresh: Path) -> None:
    now, then = pages(fresh), pages(DOCS)
    stale = sorted(path for path in now.keys() | then.keys() if now.get(path) != then.get(path))
    assert not stale, f"run `python docs/generate.py` and commit: {', '.join(stale)}"


def test_make_docs_does_not_write_the_pages_that_are_compared() -> None:
    """`make test-all` makes the site first: pages out of date would be gone before the test."""
    recipe = (DOCS.parent / "Makefile").read_text("utf-8").split("\ndocs:")[1].split("\n\n")[0]
    assert "mkdocs build --strict" in recipe
    assert "generate.py" not in recipe


def test_the_footprints_are_what_is_measured(generate: ModuleType) -> None:
    stale = generate.footprints() != FILE.read_text("utf-8")
    assert not stale, "run `python docs/generate.py` and commit src/fedkeel/study/footprints.json"


def test_there_is_a_page_for_every_method(fresh: Path) -> None:
    names = {Path(path).stem for path in pages(fresh) if path.startswith("methods/")}
    assert names - {"index", "legality"} == set(REGISTRY)
    table = (fresh / "methods" / "index.md").read_text("utf-8")
    for name in REGISTRY:
        assert f"| [`{name}`]({name}.md)" in table
    assert all(
        (fresh / "methods" / link).exists() for link in re.findall(r"\(([^()]+\.md)\)", table)
    )


class Demanding(ServerMomentum):
    __doc__ = ServerMomentum.__doc__
    name = "demanding"
    weights = "processed"
    breaks = frozenset(Capability)


def test_a_new_method_changes_its_own_page_and_the_lists(
    generate: ModuleType, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that cannot be combined with most others."""
    recipe = Recipe("hsu2019", "asks for much", {"": Demanding})
    monkeypatch.setitem(cast("dict[str, Recipe]", REGISTRY), "demanding", recipe)
    written = generate.pages()
    changed = {path for path, text in written.items() if text != text_of(fresh / path)}
    assert changed == {f"methods/{name}.md" for name in ("demanding", "index", "legality")}
    (row,) = re.findall(r"^\| \[`demanding`\].*", written["methods/legality.md"], re.MULTILINE)
    assert row.count("`") > 2 * 80


def text_of(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


def test_every_method_was_measured(fresh: Path) -> None:
    for path, text in pages(fresh).items():
        assert "not measured" not in text, path
    rows = (fresh / "methods" / "index.md").read_text("utf-8").splitlines()
    assert all(re.search(r"\| \d+\.\d\d \| \d+\.\d\d \|", row) for row in rows if row[:3] == "| [")


def test_every_pair_that_is_refused_is_listed(fresh: Path) -> None:
    text = (fresh / "methods" / "legality.md").read_text("utf-8")
    refused = [(one, other) for one, other in all_pairs() if not verdict(one, other).legal]
    assert len(refused) > 50
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(\w+\.md\) \| (.*) \|$", text, re.MULTILINE))
    for one, other in refused:
        assert re.search(rf"^- `{one}` with .*`{other}`", text, re.MULTILINE), (one, other)
        assert f"`{other}`" in rows[one]
        assert f"`{one}`" in rows[other]
    assert sum(row.count("`") // 2 for row in rows.values()) == 2 * len(refused)
    listed = re.findall(r"^- `(\w+)` with ([^:\n]*)", text, re.MULTILINE)
    assert sum(names.count("`") // 2 for _, names in listed) == len(refused)


def sections(path: Path) -> dict[str, list[str]]:
    """The names in the first column of each section's table, by its heading."""
    parts = re.split(r"^##+ (.*)$", path.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {
        title.strip("`[]"): re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_setting_is_in_the_section_of_its_table(fresh: Path) -> None:
    found = sections(fresh / "reference" / "configuration.md")
    for path in paths(Experiment):
        table, _, key = path.rpartition(".")
        assert key in found[table or "The file itself"], path
    tables = {path.rpartition(".")[0] for path in paths(Experiment)} - {""}
    assert set(found) == {"The file itself", "A range", *tables}


def test_the_example_has_every_table_and_is_accepted(fresh: Path) -> None:
    text = (fresh / "reference" / "configuration.md").read_text("utf-8")
    found = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert found is not None
    values = tomllib.loads(found[1])
    build(Experiment, values, "the example")
    tables = {path.partition(".")[0] for path in paths(Experiment) if "." in path}
    assert {key for key, value in values.items() if isinstance(value, dict)} == tables


def test_every_field_of_a_record_is_explained(fresh: Path) -> None:
    found = sections(fresh / "reference" / "run-folder.md")
    assert found["A row of `rounds.jsonl"] == [f.name for f in fields(RoundRecord)]
    assert found["run.json"] == [f.name for f in fields(RunRecord)]


def test_every_role_is_in_the_guide_and_in_the_picture() -> None:
    roles = {kind.__name__ for kind in ROLES}
    guide = (DOCS / "guides" / "write-a-method.md").read_text("utf-8")
    assert set(re.findall(r"^\| [^|]+ \| `([A-Z]\w+)` \|", guide, re.MULTILINE)) == roles
    text = (DOCS / "concepts" / "round.md").read_text("utf-8")
    assert {role for role in roles if f"`{role}`" not in text} == set()
    drawn = script(DOCS / "images" / "round.py").draw()
    assert (DOCS / "images" / "round.svg").read_text("utf-8") == drawn
    words = " ".join(re.findall(r"<text [^>]*>([^<]*)</text>", drawn))
    assert {role for role in roles if not re.search(rf"\b{role}\b", words)} == set()


def test_what_was_tuned_is_shown_on_other_seeds() -> None:
    for page in (DOCS / "guides" / "tune.md", DOCS / "guides" / "which-method.md"):
        shown = re.findall(
            r"^ +(fedkeel compare \S*/best/.*)$", page.read_text("utf-8"), re.MULTILINE
        )
        assert len(shown) > 1
        assert all(" -s seed=" in command for command in shown)


def messages() -> set[str]:
    """Every text of the source, with "..." for what is filled in."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    one.value if isinstance(one, ast.Constant) else "..." for one in node.values
                ]
                found.add(re.sub(r"(\.\.\.)+", "...", "".join(map(str, parts))))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_every_message_of_troubleshooting_is_one_of_the_source() -> None:
    page = (DOCS / "guides" / "troubleshooting.md").read_text("utf-8")
    rows = re.findall(r"^\| (.*) \| .* \|$", page, re.MULTILINE)
    quoted = [row[1:].split("`")[0] for row in rows if row.startswith("`")]
    assert len(quoted) > 40
    known = messages()
    missing = [
        one for one in quoted if not any(text.startswith(one.removesuffix("...")) for text in known)
    ]
    assert missing == []
    assert all(re.search(r"[a-z]{3}.*[a-z]{3}", one) for one in quoted)  # none is only dots


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    root = DOCS.parent
    for page in (root / "README.md", root / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^()\s]+)\)", text):
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                assert anchor in anchors(target), f"{page.name}: {link}"


def test_included_files_are_there() -> None:
    """A formatter of code in Markdown once turned the sign for it into another."""
    found = 0
    for page in DOCS.rglob("*.md"):
        for line in page.read_text("utf-8").splitlines():
            if re.match(r"\s*-+ *8 *< *-+", line):
                name = re.fullmatch(r'--8<-- "(\S+)"', line)
                assert name, f"{page.name}: {line}"
                assert (DOCS.parent / name[1]).is_file(), line
                found += 1
    assert found == 6


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text("utf-8"))
    listed = [text for text in texts(site["nav"]) if text.endswith((".md", ".ipynb"))]
    assert len(listed) == len(set(listed))
    pages = {str(f.relative_to(DOCS)) for kind in ("md", "ipynb") for f in DOCS.rglob(f"*.{kind}")}
    unlisted = {page for page in pages if page.startswith(("methods/", "results/"))}
    assert pages - unlisted <= set(listed) <= pages
    parts = {title: inside for part in site["nav"] for title, inside in part.items()}
    assert [next(iter(group)) for group in parts["Guides"]] == [
        "Data",
        "Methods",
        "Trust",
        "Scale",
        "Understand",
    ]
    assert "reference/modules.md" in list(texts(parts["Contributors"]))
    gallery = (DOCS / "getting-started" / "notebooks.md").read_text("utf-8")
    notebooks = {file.name for file in (DOCS / "getting-started").glob("*.ipynb")}
    assert set(re.findall(r"\((\S+\.ipynb)\)", gallery)) == notebooks


@pytest.fixture(scope="module")
def offline() -> ModuleType:
    return script(DOCS / "offline.py")


def texts(value: object) -> Iterator[str]:
    """Every text of a value read from YAML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from texts(inside)


def test_the_site_loads_nothing_from_another_host(offline: ModuleType) -> None:
    """`docs/offline.py` also reads every built page, and ends a build that would."""
    site = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text("utf-8"))
    assert site["theme"]["font"] is False
    assert site["hooks"] == ["docs/offline.py"]
    assert [text for text in texts(site) if re.match(r"(\w+:)?//", text)] == []
    for page in DOCS.rglob("*.md"):
        text = page.read_text("utf-8")
        assert not re.search(r"!\[[^\]]*\]\(\w+:", text), page.name
        assert offline.loaded_from_hosts(text) == [], page.name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<script async src="https://a.org/b.js"></script>', True),
        ('<script type="module">await import("https://a.org/b.mjs")</script>', True),
        ('<link rel="stylesheet" href="//a.org/b.css">', True),
        ('<link href="https://a.org" rel="preconnect">', True),
        ('<img alt="" src=https://a.org/b.png>', True),
        ("@font-face { src: url('https://a.org/b.woff2') }", True),
        ('@import "https://a.org/b.css";', True),
        ('<a href="https://a.org">a</a> <script src="b.js"></script>', False),
        ('<link rel="canonical" href="https://a.org/">', False),
        ("src: url(b.woff2)", False),
    ],
)
def test_what_is_loaded_from_another_host_is_found(
    offline: ModuleType, text: str, found: bool
) -> None:
    assert bool(offline.loaded_from_hosts(text)) == found


def test_loaders_of_nbconvert_are_left_out(offline: ModuleType) -> None:
    own = "<script>let own = 1</script>"
    loader = '<script src="https://a.org/libs/mathjax/2.7.7/latest.js"> </script>'
    module = '<script type="module">\nimport("https://a.org/mermaid/11/m.mjs")\n</script>'
    assert offline.on_page_content(f"{own}{loader}<p>{module}{own}") == f"{own}<p>{own}"


def test_every_formula_has_mathml(offline: ModuleType) -> None:
    pytest.importorskip("latex2mathml")
    found = 0
    for page in (DOCS / "methods").glob("*.md"):
        for latex in re.findall(r"^\$\$\n(.*?)\n\$\$$", page.read_text("utf-8"), re.M | re.S):
            marked = f'<div class="arithmatex">\\[{escape(latex)}\\]</div>'
            assert offline.on_page_content(marked).startswith("<math"), latex
            found += 1
    assert found > 80


def test_every_promise_names_a_test_that_is_there() -> None:
    page = (DOCS / "guides" / "security.md").read_text("utf-8")
    tests = "".join(file.read_text("utf-8") for file in (DOCS.parent / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 40
    assert {name for name in named if f"def {name}(" not in tests} == set()
    for line in page.split("## What is promised")[1].splitlines():
        if line.startswith("| **"):
            assert "test_" in line or "#secure-sums" in line, line
