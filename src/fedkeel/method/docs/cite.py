"""BibTeX of exactly the parts that a method is composed of."""

from __future__ import annotations

from fedkeel.method.compose import Plan
from fedkeel.method.docs.bibliography import bibtex as bibtex
from fedkeel.method.grammar import parse


def keys(plan: Plan) -> list[str]:
    """Return the citation keys of a method's parts, without repeats, in order."""
    papers = dict.fromkeys(part.paper for part in plan.parts if part.paper)
    return list(papers) or (["mcmahan2017"] if plan.expression == "fedavg" else [])


def cite(expression: str) -> str:
    """Return BibTeX of the papers whose parts an expression composes.

    >>> print(cite("fedprox").splitlines()[0])
    @inproceedings{li2020fedprox,
    """
    return bibtex(keys(parse(expression)))
