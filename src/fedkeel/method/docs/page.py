"""A method on a page: formula, source, what is sent and kept, order, partners, citation.

`page` says it in blocks; `markdown` and `terminal` write blocks down.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedkeel.errors import CompositionError
from fedkeel.method.compose import Plan, roles_of
from fedkeel.method.docs.bibliography import bibtex, reference
from fedkeel.method.docs.cite import keys
from fedkeel.method.docs.describe import describe, parameters
from fedkeel.method.docs.docstring import Maths, read, summary
from fedkeel.method.grammar import parse
from fedkeel.method.legality import BREAKS, LEGAL, REASONS, WEIGHTS, verdict
from fedkeel.method.part import Part
from fedkeel.method.registry import ALIASES, REGISTRY

Kind = Literal["title", "section", "part", "text", "maths", "code", "item"]


@dataclass(frozen=True)
class Block:
    """A piece of a page.

    Args:
        kind: what it is.
        text: what it says: prose with `code` in backticks, LaTeX, or code.
        label: the word that an item explains, or the language of code.
    """

    kind: Kind
    text: str
    label: str = ""


def page(expression: str, traffic: Iterable[tuple[str, str]] = ()) -> list[Block]:
    """Return the page of a method.

    Args:
        expression: a method's name, or any expression.
        traffic: what is sent and kept, as (what, how much).

    Raises:
        CompositionError: the method cannot be composed.
    """
    plan = parse(expression)
    name = ALIASES.get(expression, expression)
    recipe = REGISTRY.get(name)
    blocks = [Block("title", recipe.title if recipe else "", name if recipe else expression)]
    blocks += [Block("text", f"{reference(key)} (`{key}`).") for key in keys(plan)]
    blocks += [Block("item", text, label) for label, text in _facts(plan, name)]
    for part in plan.parts or (plan.reduction, plan.server_optimiser):
        blocks += _part(part)
    blocks += [Block("section", "The order of a round"), Block("code", describe(plan), "text")]
    measured = [Block("item", text, label) for label, text in traffic]
    if measured:
        blocks += [Block("section", "Sent and kept"), *measured]
    blocks += [Block("section", "Partners"), *_partners(expression, name)]
    if keys(plan):
        blocks += [Block("section", "Citation"), Block("code", bibtex(keys(plan)), "bibtex")]
    return blocks


def _facts(plan: Plan, name: str) -> list[tuple[str, str]]:
    also = [alias for alias, entry in ALIASES.items() if entry == name]
    needs = sorted({need.value for part in plan.parts for need in part.needs})
    weights = {part.weights for part in plan.parts if part.weights}
    found = [
        ("also called", ", ".join(f"`{alias}`" for alias in also)),
        (
            "made of",
            " + ".join(f"`{part.name}`" for part in plan.parts)
            or "no part: it is what happens where no part says otherwise, by `mean` and `addition`",
        ),
        ("weights", f"`{plan.weights}`" + (", as the paper states" if weights else "")),
        ("needs", "; ".join(needs)),
    ]
    return [(label, text) for label, text in found if text]


def _part(part: Part) -> list[Block]:
    try:
        doc = read(type(part))
    except CompositionError as error:  # a part of one's own may run without
        return _undocumented(part, error)
    blocks = [Block("part", doc.summary, part.name)]
    for piece in doc.body:
        if isinstance(piece, Maths):
            blocks.append(Block("maths", piece.latex))
        else:
            blocks.append(Block("text", piece))
    blocks += [
        Block("item", doc.source, "Source"),
        Block("item", ", ".join(roles_of(part)), "Roles"),
    ]
    for one in parameters(part):
        meaning = f"{doc.args[one['name']]} ({_typed(one)})"
        blocks.append(Block("item", meaning, f"`{one['name']}`"))
    for label in ("Sent", "State", "Cost", "Laws", "Deviations"):
        blocks.append(Block("item", getattr(doc, label.lower()), label))
    return [*blocks, Block("code", doc.example, "python")]


def _undocumented(part: Part, error: CompositionError) -> list[Block]:
    """Return what can be said of a part whose docstring is not whole, and what it lacks."""
    lacks = error.what if summary(type(part)) else "This part has no docstring."
    return [
        Block("part", summary(type(part)) or lacks, part.name),
        *([Block("text", lacks)] if summary(type(part)) else []),
        Block("item", ", ".join(roles_of(part)), "Roles"),
        *(Block("item", _typed(one), f"`{one['name']}`") for one in parameters(part)),
    ]


def _typed(parameter: Mapping[str, Any]) -> str:
    """Return type, range and value of a hyper-parameter."""
    limits = [f"{_SIGNS[sign]} {bound:g}" for sign, bound in parameter["range"].items()]
    typed = ", ".join([parameter["type"].removeprefix("Literal[").removesuffix("]"), *limits])
    return f"`{typed}`; here `{parameter['value']!r}`"


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _partners(expression: str, name: str) -> list[Block]:
    """Return whom a method can be combined with; refusals of one kind together."""
    found: dict[str, list[str]] = {}
    for other in REGISTRY:
        if other in (name, "fedavg"):
            continue
        ruled = verdict(expression, other)
        why = ruled.reason if ruled.code == BREAKS else REASONS[ruled.code]
        found.setdefault(f"{ruled.code} {why}", []).append(f"`{other}`")
    blocks = []
    for key, others in sorted(found.items(), key=lambda pair: pair[0][0] not in (LEGAL, WEIGHTS)):
        code, why = key.split(" ", 1)
        label = {LEGAL: "Combines with", WEIGHTS: "Given weights"}.get(code, "Not with")
        text = ", ".join(others)
        blocks.append(Block("item", text if code == LEGAL else f"{text}: {why}", label))
    return blocks


# --- Markdown --------------------------------------------------------------------------------


def markdown(blocks: Sequence[Block]) -> str:
    """Write a page as Markdown, formulae between double dollars."""
    out: list[str] = []
    for before, block in zip([None, *blocks], blocks, strict=False):
        together = before is not None and before.kind == block.kind == "item"
        out.append(("" if not out else "\n" if together else "\n\n") + _marked(block))
    return "".join(out) + "\n"


def _marked(block: Block) -> str:
    match block.kind:
        case "title":
            line = _prose(block.text[:1].upper() + block.text[1:])
            return f"# {block.label}" + (f"\n\n{line}." if line else "")
        case "section":
            return f"## {_prose(block.text)}"
        case "part":
            return f"## `{block.label}`\n\n{_prose(block.text)}"
        case "maths":
            return f"$$\n{_aligned(block.text)}\n$$"
        case "code":
            return f"```{block.label}\n{block.text}\n```"
        case "item":
            return f"- **{_prose(block.label)}**: {_prose(block.text)}"
        case _:
            return _prose(block.text)


def _aligned(latex: str) -> str:
    several = "&" in latex or "\\\\" in latex
    return f"\\begin{{aligned}}\n{latex}\n\\end{{aligned}}" if several else latex


_PIECES = re.compile(r"(:math:`[^`]+`|``[^`]+``|`[^`]+`)")


def _prose(text: str) -> str:
    r"""Return prose that Markdown takes as it is meant.

    >>> _prose("K~ of :math:`a_b` in <g, h>, `a*b`, _k")
    'K\\~ of $a_b$ in &lt;g, h>, `a*b`, \\_k'
    """
    pieces = _PIECES.split(text)
    for i, piece in enumerate(pieces):
        if piece.startswith(":math:"):
            pieces[i] = f"${piece[7:-1]}$"
        elif piece.startswith("``"):
            pieces[i] = piece[1:-1]
        elif not piece.startswith("`"):
            escaped = re.sub(r"([\\*~|\[\]]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", piece)
            pieces[i] = escaped.replace("<", "&lt;")
    return "".join(pieces)


# --- terminals -------------------------------------------------------------------------------


def terminal(blocks: Sequence[Block], width: int = 92) -> str:
    """Write a page as plain text of a given width; formulae stay LaTeX."""
    return "\n".join(_plain(block, width) for block in blocks).strip("\n")


def _plain(block: Block, width: int) -> str:
    text = re.sub(r":math:`([^`]+)`", r"\1", block.text).replace("``", "`")
    label = block.label.replace("`", "")
    match block.kind:
        case "title":
            return _wrapped(f"{label}: {text}" if text else label, width)
        case "section":
            return f"\n{text}"
        case "part":
            return f"\n{label}\n{_wrapped(text, width, '  ')}"
        case "maths":
            return "\n" + textwrap.indent(text, " " * 6) + "\n"
        case "code":
            return textwrap.indent(text, " " * (6 if block.label == "python" else 2))
        case "item":
            return _wrapped(text, width, f"  {label.lower():<13} ", " " * 16)
        case _:
            return _wrapped(text, width, "  ")


def _wrapped(text: str, width: int, first: str = "", rest: str | None = None) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
