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
    if expression is None:
        document(_listed()) if as_json else _print_list()
    elif check:
        _check(expression, as_json)
    elif bibtex:
        _print_bibtex(expression)
    elif as_json:
        document(_objects(expression))
    else:
        _print_page(expression)


def _print_bibtex(expression: str) -> None:
    from fedkeel.method.docs.cite import bibtex, keys
    from fedkeel.method.grammar import parse

    citations = keys(parse(expression))
    if citations:
        print(bibtex(citations))
    else:
        say(stderr(), f"{expression} names no paper: there is nothing to cite")


def _check(expression: str, as_json: bool) -> None:
    from fedkeel.study.conformance import run_checks

    checks = run_checks(expression)
    if as_json:
        document([asdict(check) for check in checks])
    else:
        for check in checks:
            print(f"{'fails' if check.failure else 'holds'}  {check.name}")
            if check.failure:
                print(f"       {check.failure}")
            if check.note:
                print(f"note   {check.note}")
    if any(check.failure for check in checks):
        raise typer.Exit(1)


def _print_page(expression: str) -> None:
    from shutil import get_terminal_size

    from fedkeel.method.docs.page import page, partners, terminal
    from fedkeel.study.footprint import footprint_lines

    width = max(40, min(get_terminal_size().columns, 100))
    blocks = [*page(expression, footprint_lines(expression)), *partners(expression)]
    print(terminal(blocks, width))


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
    from rich.console import Console

    from fedkeel.method.parts.index import ALIASES, METHODS, installed_methods
    from fedkeel.report.text_table import TextTable

    rows = []
    for name, entry in METHODS.items():
        aliases = ", ".join(alias for alias, method in ALIASES.items() if method == name)
        parts = ", ".join(entry.parts) if list(entry.parts) != [name] else ""
        rows.append((f"{name} ({aliases})" if aliases else name, entry.title, parts, entry.paper))
    for name, paths in installed_methods().items():
        rows.append((name, "of an installed package", ", ".join(paths), ""))
    heads = ("method", "what it does", "parts", "paper")
    Console().print(TextTable(heads, rows, texts=frozenset(range(4))).terminal())
    print("combine with '+':  fedprox(mu=0.1)+gcfed    describe one:  fedkeel methods fedgc")
