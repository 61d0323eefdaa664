"""BibTeX of exactly the parts that a method is composed of."""

from __future__ import annotations

from fedkeel.method.compose import Plan
from fedkeel.method.docs.bibliography import bibtex as bibtex
from fedkeel.method.grammar import parse
from fedkeel.method.parts.index import METHODS


def keys(plan: Plan) -> list[str]:
    """Return the citation keys of a method's parts, without repeats, in order.

    Before them stands the paper that put the parts of other papers together, where one did.
    """
    papers = dict.fromkeys(part.paper for part in plan.parts if part.paper)
    names = {part.name for part in plan.parts}
    recipes = [e for e in METHODS.values() if len(e.parts) > 1 and names.issuperset(e.parts)]
    return [*(e.paper for e in recipes if e.paper not in papers), *papers] or (
        ["mcmahan2017"] if plan.expression == "fedavg" else []
    )


def cite(expression: str) -> str:
    """Return BibTeX of the papers whose parts an expression composes.

    >>> print(cite("fedprox").splitlines()[0])
    @inproceedings{li2020fedprox,
    """
    return bibtex(keys(parse(expression)))
