"""The page of a method: formula, source, traffic, order of a round, citation, partners.

`page` returns blocks, and so do `partners`, which names every other method, and `exceptions`, which
has rules in place of names: what is written with it does not change when a method is added.
`markdown` and `terminal` turn blocks into text.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedkeel.errors import CompositionError
from fedkeel.method.compose import Plan, broken_by, needs_of, roles_of
from fedkeel.method.docs.bibliography import bibtex, reference
from fedkeel.method.docs.cite import keys
from fedkeel.method.docs.describe import Hyperparameter, describe, hyperparameters
from fedkeel.method.docs.docstring import Maths, read, summary
from fedkeel.method.grammar import parse
from fedkeel.method.legality import BREAKS, LEGAL, REASONS, WEIGHTS, verdict
from fedkeel.method.part import Capability, Part
from fedkeel.method.parts.index import ALIASES
from fedkeel.method.registry import REGISTRY
from fedkeel.method.roles import ROLES, SLOTS

Kind = Literal["title", "section", "part", "text", "maths", "code", "item"]


@dataclass(frozen=True)
class PageBlock:
    """A piece of a page.

    Args:
        kind: kind of the piece.
        text: prose with `code` in backticks, LaTeX, or code.
        label: the term that an item explains, or the language of code.
    """

    kind: Kind
    text: str
    label: str = ""


def page(expression: str, traffic: Iterable[tuple[str, str]] = ()) -> list[PageBlock]:
    """Return the page of a method.

    Args:
        expression: a method's name, or any expression.
        traffic: bytes sent and stored, as (quantity, amount).

    Raises:
        CompositionError: the method cannot be composed.
    """
    plan = parse(expression)
    name = ALIASES.get(expression, expression)
    recipe = REGISTRY.get(name)
    blocks = [PageBlock("title", recipe.title if recipe else "", name if recipe else expression)]
    blocks += [PageBlock("text", f"{reference(key)} (`{key}`).") for key in keys(plan)]
    blocks += [PageBlock("item", text, label) for label, text in _facts(plan, name)]
    for part in plan.parts or (plan.reduction, plan.server_optimiser):
        blocks += _part(part)
    blocks += [
        PageBlock("section", "The order of a round"),
        PageBlock("code", describe(plan), "text"),
    ]
    traffic_items = [PageBlock("item", text, label) for label, text in traffic]
    if traffic_items:
        blocks += [PageBlock("section", "Sent and kept"), *traffic_items]
    if keys(plan):
        blocks += [
            PageBlock("section", "Citation"),
            PageBlock("code", bibtex(keys(plan)), "bibtex"),
        ]
    return blocks


def _facts(plan: Plan, name: str) -> list[tuple[str, str]]:
    """Return (label, text) of the facts that a method has something of."""
    aliases = [alias for alias, entry in ALIASES.items() if entry == name]
    needs = sorted({need.value for part in plan.parts for need in part.needs})
    is_stated = any(part.weights for part in plan.parts)
    parts = " + ".join(f"`{part.name}`" for part in plan.parts)
    facts = [
        ("also called", ", ".join(f"`{alias}`" for alias in aliases)),
        ("made of", parts or "no part: the server's defaults are `mean` and `addition`"),
        ("weights", f"`{plan.weights}`" + (", as the paper states" if is_stated else "")),
        ("needs", "; ".join(needs)),
    ]
    return [(label, text) for label, text in facts if text]


def _part(part: Part) -> list[PageBlock]:
    roles = PageBlock("item", ", ".join(roles_of(part)), "Roles")
    try:
        doc = read(type(part))
    except CompositionError as error:  # a user's part may run without a complete docstring
        first_line = summary(type(part))
        problem = error.what if first_line else "This part has no docstring."
        return [
            PageBlock("part", first_line or problem, part.name),
            *([PageBlock("text", problem)] if first_line else []),
            roles,
            *(PageBlock("item", _typed(one), f"`{one.name}`") for one in hyperparameters(part)),
        ]
    blocks = [PageBlock("part", doc.summary, part.name)]
    for piece in doc.body:
        if isinstance(piece, Maths):
            blocks.append(PageBlock("maths", piece.latex))
        else:
            blocks.append(PageBlock("text", piece))
    blocks += [*([PageBlock("item", doc.source, "Source")] if doc.source else []), roles]
    for one in hyperparameters(part):
        blocks.append(PageBlock("item", f"{doc.args[one.name]} ({_typed(one)})", f"`{one.name}`"))
    for label in ("Sent", "State", "Cost", "Laws", "Deviations"):
        blocks.append(PageBlock("item", getattr(doc, label.lower()), label))
    return [*blocks, PageBlock("code", doc.example, "python")]


def _typed(parameter: Hyperparameter) -> str:
    """Return type, range and value of a hyper-parameter."""
    limits = [f"{_SIGNS[sign]} {bound:g}" for sign, bound in parameter.range.items()]
    typed = ", ".join([parameter.type.removeprefix("Literal[").removesuffix("]"), *limits])
    return f"`{typed}`; here `{parameter.value!r}`"


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def partners(expression: str) -> list[PageBlock]:
    """Return the methods that a method combines with, and the others by reason."""
    name = ALIASES.get(expression, expression)
    by_reason: dict[tuple[str, str], list[str]] = {}
    for other in REGISTRY:
        if other not in (name, "fedavg"):
            result = verdict(expression, other)
            reason = result.reason if result.code == BREAKS else REASONS[result.code]
            by_reason.setdefault((result.code, reason), []).append(f"`{other}`")
    blocks = [PageBlock("section", "Partners")]
    for code, reason in sorted(by_reason, key=lambda key: key[0] not in (LEGAL, WEIGHTS)):
        label = {LEGAL: "Combines with", WEIGHTS: "Given weights"}.get(code, "Not with")
        others = ", ".join(by_reason[code, reason])
        blocks.append(PageBlock("item", others if code == LEGAL else f"{others}: {reason}", label))
    return blocks


def exceptions(expression: str) -> list[PageBlock]:
    """Return the rules that exclude methods beside this one, which name no other method."""
    parts = parse(expression).parts
    slots = [f"`{ROLES[slot]}`" for slot in SLOTS if any(isinstance(p, slot) for p in parts)]
    stated = sorted({f"`{part.weights}`" for part in parts if part.weights is not None})
    rules = [
        ("Parts", _listed(f"`{part.name}`" for part in parts), "one that has {} too"),
        ("Roles", _listed(slots), "one that plays {} too, which one part of a method plays"),
        ("Needs", _capabilities(map(needs_of, parts)), "one that breaks {}"),
        ("Breaks", _capabilities(map(broken_by, parts)), "one that needs {}"),
        ("Weights", _listed(stated), "one that states other weights than {}, unless the run does"),
    ]
    items = [PageBlock("item", rule.format(what), label) for label, what, rule in rules if what]
    says = "Combines with every method" + (", except" if items else "; it has no part of its own.")
    return [PageBlock("section", "Partners"), PageBlock("text", says), *items]


def _listed(names: Iterable[str]) -> str:
    return " or ".join(names)


def _capabilities(sets: Iterable[frozenset[Capability]]) -> str:
    capabilities = sorted(frozenset[Capability]().union(*sets), key=lambda one: one.name)
    return _listed(f"`{one.name}` ({one.value})" for one in capabilities)


# --- Markdown --------------------------------------------------------------------------------


def markdown(blocks: Sequence[PageBlock]) -> str:
    """Return a page as Markdown, with formulae between double dollars."""
    text = ""
    for before, block in zip([None, *blocks], blocks, strict=False):
        in_list = before is not None and before.kind == block.kind == "item"
        text += ("" if not text else "\n" if in_list else "\n\n") + _marked(block)
    return text + "\n"


def _marked(block: PageBlock) -> str:
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
    is_aligned = "&" in latex or "\\\\" in latex
    return f"\\begin{{aligned}}\n{latex}\n\\end{{aligned}}" if is_aligned else latex


_PIECES = re.compile(r"(:math:`[^`]+`|``[^`]+``|`[^`]+`)")


def _prose(text: str) -> str:
    r"""Return prose with Markdown's special characters escaped.

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


def terminal(blocks: Sequence[PageBlock], width: int = 92) -> str:
    """Return a page as plain text of a given width; formulae stay LaTeX."""
    return "\n".join(_plain(block, width) for block in blocks).strip("\n")


def _plain(block: PageBlock, width: int) -> str:
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
