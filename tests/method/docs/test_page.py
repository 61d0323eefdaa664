"""Pages: everything that is known of a method, as Markdown and for terminals."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from each import each
from fedkeel.errors import CompositionError
from fedkeel.method.docs.bibliography import entries, reference
from fedkeel.method.docs.cite import keys
from fedkeel.method.docs.describe import facts
from fedkeel.method.docs.docstring import Maths, read
from fedkeel.method.docs.page import PageBlock, exceptions, markdown, page, partners, terminal
from fedkeel.method.grammar import parse
from fedkeel.method.legality import WEIGHTS, all_pairs, verdict
from fedkeel.method.part import Part
from fedkeel.method.parts.index import ALIASES
from fedkeel.method.registry import REGISTRY
from method.test_plugins import PARTS

TRAFFIC = [("down", "two models"), ("up", "one model")]


def said(text: str) -> str:
    """A text without the line breaks of paragraphs."""
    return " ".join(text.split())


def shown(entry: str) -> tuple[Part, ...]:
    plan = parse(entry)
    return plan.parts or (plan.reduction, plan.server_optimiser)


@each("entry", REGISTRY)
def test_a_page_says_all_that_is_known(entry: str) -> None:
    blocks = page(entry, TRAFFIC)
    plan, written, plain = parse(entry), markdown(blocks), terminal(blocks)
    assert written.startswith(f"# {entry}\n\n")
    assert plain.startswith(f"{entry}: {REGISTRY[entry].title[:10]}")
    for part in shown(entry):
        doc = read(type(part))
        for text in (doc.source, doc.sent, doc.state, doc.cost, doc.laws, doc.deviations):
            assert said(text.replace("``", "`")) in said(plain)
        for name, text in doc.args.items():
            assert f"- **`{name}`**: " in written
            assert said(text.replace("``", "`")) in said(plain)
        for piece in doc.body:
            if isinstance(piece, Maths):
                assert piece.latex in written
                assert all(line in plain for line in piece.latex.splitlines())
        assert f"```python\n{doc.example}\n```" in written
    for key in keys(plan):
        assert entries()[key] in written
        assert said(reference(key)) in said(plain)
    assert "a client's round" in written
    assert "- **down**: two models\n- **up**: one model\n" in written


@each("entry", REGISTRY)
def test_every_other_method_is_a_partner_or_not(entry: str) -> None:
    written = markdown(partners(entry))
    lines = [line for line in written.splitlines() if line.startswith("- ")]
    for other in REGISTRY:
        if other in (entry, "fedavg"):
            continue
        (line,) = [line for line in lines if f"`{other}`" in line.split("**: ")[1].split(": ")[0]]
        found = verdict(entry, other)
        expected = "Combines with"
        if not found.legal:
            expected = "Given weights" if found.code == WEIGHTS else "Not with"
        assert line.startswith(f"- **{expected}**: ")


def test_every_refusal_follows_from_a_rule_of_the_two_pages() -> None:
    rules = {
        name: {block.label: set(re.findall(r"`([^`]+)`", block.text)) for block in exceptions(name)}
        for name in REGISTRY
    }

    def shared(one: str, a: str, other: str, b: str) -> set[str]:
        return rules[one].get(a, set()) & rules[other].get(b, set())

    for one, other in all_pairs():
        found = verdict(one, other)
        same = [label for label in ("Parts", "Roles") if shared(one, label, other, label)]
        broken = shared(one, "Needs", other, "Breaks") | shared(one, "Breaks", other, "Needs")
        stated = [rules[name].get("Weights", set()) for name in (one, other)]
        differ = all(stated) and stated[0] != stated[1]
        assert found.legal != bool(same or broken or differ), (one, other)
        if found.code == WEIGHTS:
            assert not same
            assert not broken


def test_the_rules_of_a_method() -> None:
    text = markdown(exceptions("momentum"))
    assert "- **Parts**: one that has `momentum` too\n" in text
    assert "- **Roles**: one that plays `server optimiser` too, which one part" in text
    (needs,) = re.findall(r"^- \*\*Needs\*\*: one that breaks (.*)$", text, re.MULTILINE)
    assert re.findall(r"`(\w+)` \(\w", needs) == ["ONE_MODEL", "SHARED_PARAMETERS"]
    assert "it has no part of its own." in markdown(exceptions("fedavg"))


@each("entry", REGISTRY)
def test_markdown_is_whole(entry: str) -> None:
    """Dollars and fences come in pairs; nothing in prose starts a tag."""
    text = markdown([*page(entry), *partners(entry), *exceptions(entry)])
    assert text.count("\n$$\n") % 2 == 0
    assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0
    prose = re.sub(r"```.*?```|\$\$.*?\$\$|`[^`\n]*`|\$[^$\n]*\$", "", text, flags=re.DOTALL)
    assert "<" not in prose
    assert not re.search(r"(?<!\\)~", prose)
    assert ":math:" not in text
    assert "``" not in re.sub(r"^```.*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "width", [60, *(pytest.param(width, marks=pytest.mark.slow) for width in (80, 100))]
)
def test_prose_on_a_terminal_is_no_wider_than_it(width: int) -> None:
    for entry in REGISTRY:
        blocks = [*page(entry), *partners(entry), *exceptions(entry)]
        prose = [b for b in blocks if b.kind not in ("code", "maths")]
        lines = terminal(prose, width).splitlines()
        assert max(map(len, lines)) <= width
        assert any(len(line) > width - 15 for line in lines)


def test_an_alias_and_an_expression() -> None:
    assert page("fedavgm") == page("momentum")
    blocks = page("fedprox(mu=0.5)+gcfed.local")
    assert blocks[0] == PageBlock("title", "", "fedprox(mu=0.5)+gcfed.local")
    text = terminal(blocks)
    assert "(`float, >= 0`; here `0.5`)" in text
    assert "- **Not with**" in markdown(partners("fedprox+gcfed"))
    assert [b.label for b in blocks if b.kind == "part"] == ["fedprox", "gcfed.local"]


def test_facts_of_a_method() -> None:
    text = markdown(page("momentum"))
    assert "- **also called**: `fedavgm`\n" in text
    assert "- **made of**: `momentum`\n" in text
    assert "- **weights**: `uniform`, as the paper states\n" in markdown(page("scaffold"))
    assert "clients that keep their index from round to round" in markdown(page("scaffold"))
    assert "defaults are `mean` and `addition`" in markdown(page("fedavg"))
    assert set(ALIASES.values()) <= set(REGISTRY)


def test_what_cannot_be_composed_has_no_page() -> None:
    with pytest.raises(CompositionError, match="which takes one"):
        page("momentum+addition")


@pytest.mark.parametrize(
    ("module", "docstring", "says"),
    [
        ("without", "", "This part has no docstring."),
        (
            "partly",
            '"""Does it."""',
            "Does it.\n  The docstring of slow (Slow) has no 'Args', 'Sent',",
        ),
        ("empty", '""', "This part has no docstring."),
    ],
)
def test_a_part_of_ones_own_without_a_whole_docstring(
    module: str, docstring: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = PARTS.replace('"""Makes updates smaller."""', docstring, 1)
    (tmp_path / f"{module}.py").write_text(own)
    plain = terminal(page(f"{module}:Slow"))
    assert f"\nslow\n  {says}" in plain
    assert "roles         update transform" in plain
    assert "rate          `float, > 0, <= 1`; here `0.5`" in plain
    assert "change the update: slow" in plain
    (part,) = parse(f"{module}:Slow").parts
    assert facts(part).summary == ("Does it." if module == "partly" else "")


def test_blocks_as_markdown() -> None:
    blocks = [
        PageBlock("title", "does this", "name"),
        PageBlock("text", "K~ times `a*b` < ``c``, :math:`x_k` and _y"),
        PageBlock("maths", "a &= b"),
        PageBlock("maths", "a = b"),
        PageBlock("item", "one", "Sent"),
        PageBlock("item", "two", "`mu`"),
        PageBlock("code", ">>> 1\n1", "python"),
    ]
    assert markdown(blocks) == (
        "# name\n\nDoes this.\n\n"
        "K\\~ times `a*b` &lt; `c`, $x_k$ and \\_y\n\n"
        "$$\n\\begin{aligned}\na &= b\n\\end{aligned}\n$$\n\n"
        "$$\na = b\n$$\n\n"
        "- **Sent**: one\n- **`mu`**: two\n\n"
        "```python\n>>> 1\n1\n```\n"
    )


# --- references ------------------------------------------------------------------------------


@each("key", entries())
def test_a_reference_has_who_what_and_when(key: str) -> None:
    text = reference(key)
    assert re.search(r"(19|20)\d\d", text)
    assert len(text.split(", ")) >= 3
    assert not re.search(r"[{}\\]", text)


def test_references_by_kind_of_entry() -> None:
    assert reference("mcmahan2017").startswith("McMahan et al., Communication-Efficient")
    assert reference("mcmahan2017").endswith("AISTATS 2017")
    assert reference("hsu2019").endswith(", arXiv:1909.06335, 2019")
    assert reference("fedgh2024").endswith(", IEEE Signal Processing Letters 2024")
