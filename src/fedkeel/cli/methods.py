"""``fedkeel methods``: the list, or one expression in full."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from fedkeel.cli.common import JSON, document, say, stderr


def methods(
    expression: str = typer.Argument(None, metavar="[EXPR]", help="e.g. fedprox+gcfed"),
    bibtex: bool = typer.Option(False, "--bibtex", help="Print BibTeX of exactly these parts."),
    check: bool = typer.Option(False, "--check", help="Check that it does what methods have to."),
    as_json: bool = JSON,
) -> None:
    """List the methods, or describe one: formula, source, order, state, bytes, citations.

    What --check finds matters most for a method of your own: whether engines agree on it, whether
    it goes on after a kill as if nothing had been, whether it changes what is not its own.
    """
    from fedkeel.method.docs.cite import bibtex as entries
    from fedkeel.method.docs.cite import keys
    from fedkeel.method.grammar import parse

    if expression is None:
        document(_listed()) if as_json else _print_list()
    elif check:
        _check(expression, as_json)
    elif bibtex:
        found = keys(parse(expression))
        if found:
            print(entries(found))
        else:
            say(stderr(), f"{expression} names no paper: there is nothing to cite")
    elif as_json:
        document(_objects(expression))
    else:
        _print_page(expression)


def _check(expression: str, as_json: bool) -> None:
    from dataclasses import asdict

    from fedkeel.conformance import run_checks

    found = run_checks(expression)
    if as_json:
        document([asdict(one) for one in found])
    else:
        for one in found:
            print(f"{'fails' if one.failure else 'holds'}  {one.name}")
            if one.failure:
                print(f"       {one.failure}")
    if any(one.failure for one in found):
        raise typer.Exit(1)


def _print_page(expression: str) -> None:
    from shutil import get_terminal_size

    from fedkeel.method.docs.page import page, terminal
    from fedkeel.study.footprint import footprint_lines

    width = max(40, min(get_terminal_size().columns, 100))
    print(terminal(page(expression, footprint_lines(expression)), width))


def _objects(expression: str) -> list[dict[str, Any]]:
    from fedkeel.method.docs.describe import facts
    from fedkeel.method.grammar import parse

    return [asdict(facts(part)) for part in parse(expression).parts]


def _listed() -> list[dict[str, Any]]:
    from fedkeel.method.registry import REGISTRY

    out = []
    for name, recipe in REGISTRY.items():
        parts = _objects(name)
        out.append(
            {
                "name": name,
                "paper": recipe.paper,
                "title": recipe.title,
                "roles": list(dict.fromkeys(role for part in parts for role in part["roles"])),
                "needs": sorted({need for part in parts for need in part["needs"]}),
                "parts": parts,
            }
        )
    return out


def _print_list() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fedkeel.method.plugins import installed_methods
    from fedkeel.method.registry import ALIASES

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("method", "what it does", "parts", "paper"):
        table.add_column(head, overflow="fold")
    for one in _listed():
        also = [alias for alias, name in ALIASES.items() if name == one["name"]]
        name = one["name"] + (f" ({', '.join(also)})" if also else "")
        parts = [part["name"] for part in one["parts"]]
        shown = ", ".join(parts) if parts != [one["name"]] else ""
        table.add_row(name, one["title"], shown, one["paper"])
    for own, paths in installed_methods().items():
        table.add_row(own, "of an installed package", ", ".join(paths), "")
    Console().print(table)
    print("combine with '+':  fedprox(mu=0.1)+gcfed    describe one:  fedkeel methods fedgc")
