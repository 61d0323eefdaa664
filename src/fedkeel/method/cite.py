"""BibTeX of exactly the parts that a method is composed of."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files

from fedkeel.method.compose import Plan
from fedkeel.method.grammar import parse

_ENTRY = re.compile(r"@\w+\{([^,]+),.*?\n\}", re.DOTALL)


def keys(plan: Plan) -> list[str]:
    """Return the citation keys of a method's parts, without repeats, in order."""
    return list(dict.fromkeys([p.paper for p in plan.parts])) or ["mcmahan2017"]


def cite(expression: str) -> str:
    """Return BibTeX of the papers whose parts an expression composes.

    >>> print(cite("fedprox").splitlines()[0])
    @inproceedings{li2020fedprox,
    """
    return bibtex(keys(parse(expression)))


def bibtex(wanted: list[str]) -> str:
    """Return the BibTeX entries of citation keys."""
    entries = _entries()
    return "\n\n".join(entries[key] for key in wanted)


@lru_cache(maxsize=1)
def _entries() -> dict[str, str]:
    text = files("fedkeel.method").joinpath("papers.bib").read_text(encoding="utf-8")
    return {found.group(1): found.group() for found in _ENTRY.finditer(text)}
