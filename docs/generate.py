"""Write the pages that follow from the code: one for each method, their table, the legality matrix.

    python docs/generate.py            # into docs/
    python docs/generate.py --out DIR  # elsewhere

The pages are committed; a test fails where they are not what the code says.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from fedkeel.errors import FedkeelError
from fedkeel.experiment.footprint import footprint, told
from fedkeel.method.bibliography import reference
from fedkeel.method.legality import BREAKS, LEGAL, REASONS, Verdict, verdict
from fedkeel.method.page import markdown, page
from fedkeel.method.registry import ALIASES, REGISTRY

COMMAND = "python docs/generate.py"
NOTICE = f"<!-- Written by `{COMMAND}` from the code. Do not edit. -->\n\n"


def pages() -> dict[str, str]:
    """Return every generated page by its path below docs/."""
    out = {f"methods/{name}.md": markdown(page(name, told(name))) for name in REGISTRY}
    out["methods/README.md"] = table()
    out["legality.md"] = legality()
    return {path: NOTICE + text for path, text in out.items()}


def table() -> str:
    """Return the table of all methods."""
    head = ["method", "what it does", "paper", "down", "up", "client", "server", "cost"]
    lines = [_row(head), _row(["---"] * 3 + ["---:"] * 5)]
    where = ""
    for name, recipe in REGISTRY.items():
        also = [f"`{alias}`" for alias, entry in ALIASES.items() if entry == name]
        cells = [", ".join([f"[`{name}`]({name}.md)", *also]), recipe.title]
        cells.append(reference(recipe.paper).replace("|", "\\|"))
        try:
            found = footprint(name)
        except FedkeelError:
            cells += [""] * 5
        else:
            needs, where = found.estimate, found.where
            kept = [count / found.model for count in (needs.client_state, found.server)]
            cells += [f"{one:.2f}" for one in (found.down, found.up)]
            cells += [f"{one:.2f}" if one else "" for one in kept]
            cells.append(f"{found.gradients:.2f}")
        lines.append(_row(cells))
    return "\n".join(
        [
            "# Methods",
            "",
            "*Down* and *up*: models sent to and from a client in a round. *Client* and *server*: "
            "models kept from round to round by each client and for all of them. *Cost*: what a "
            "client multiplies for each example, where FedAvg's gradient is 1; small models make "
            f"what is done with parameters look dear. Measured on {where}.",
            "",
            "Methods are combined with `+`; [legality.md](../legality.md) says which can be.",
            "",
            *lines,
            "",
        ]
    )


def legality() -> str:
    """Return the matrix of all pairs, and what each code means."""
    names = list(REGISTRY)
    found = {(a, b): verdict(a, b) for a in names for b in names if a != b}
    lines = [_row(["", "", *(str(i) for i in range(1, len(names) + 1))])]
    lines.append(_row(["---:", "---", *([":-:"] * len(names))]))
    for i, a in enumerate(names, start=1):
        codes = [found[a, b].code if a != b else "" for b in names]
        cells = [code if code in ("", LEGAL) else f"**{code}**" for code in codes]
        lines.append(_row([str(i), f"`{a}`", *cells]))
    out = [
        "# Which methods can be combined",
        "",
        "Decided before any data is touched. Every reason lies between two methods, so any number "
        "of them can be combined where every two of them can.",
        "",
        *(f"- `{code}`: {why}" for code, why in REASONS.items() if _used(found, code)),
        "",
        *lines,
    ]
    for code, why in REASONS.items():
        if code != LEGAL and _used(found, code):
            out += ["", f"## `{code}`", "", f"{why[0].upper()}{why[1:]}", ""]
            out += _listed(names, found, code)
    return "\n".join([*out, ""])


def _used(found: dict[tuple[str, str], Verdict], code: str) -> bool:
    return any(one.code == code for one in found.values())


def _listed(names: list[str], found: dict[tuple[str, str], Verdict], code: str) -> list[str]:
    """Return the pairs of a code, each pair once; what breaks what is said for each."""
    out = []
    for i, a in enumerate(names, start=1):
        others = [b for b in names[i:] if found[a, b].code == code]
        if code == BREAKS:
            out += [f"- `{a}` with `{b}`: {found[a, b].reason}" for b in others]
        elif others:
            out.append(f"- `{a}` with {', '.join(f'`{b}`' for b in others)}")
    return out


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write(folder: Path) -> list[Path]:
    """Write the pages into a folder, and remove pages of methods that are no more."""
    shutil.rmtree(folder / "methods", ignore_errors=True)
    written = []
    for path, text in pages().items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return written


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR")
    folder = parser.parse_args().out
    print(f"{len(write(folder))} pages in {folder}")


if __name__ == "__main__":
    main()
