"""Draw gos of compare.py: python benchmarks/chart.py --go NAME --out docs/images/speed.svg

For each recipe, how many times as long as fedkeel's (engine auto) the round of each peer takes, in
its best setting; medians of ratios within one repetition, on a logarithmic axis. Of several gos the
last one that has a recipe and a peer counts.
"""

from __future__ import annotations

import argparse
import math
import statistics
from html import escape
from pathlib import Path

from compare import HERE, Book, seconds

OURS = "fedkeel auto"
PEERS = {
    "plain, 2 processes": ("a plain loop in two processes", "#8a8f98"),
    "pfl": ("pfl-research", "#4477aa"),
    "fluke": ("fluke", "#ccbb44"),
    "Flower": ("Flower's simulation", "#ee6677"),
}
"""Name in the chart and colour, by name in the file."""

NAMES = {
    "A": "A  1000 users, CNN on 32x32x3",
    "B": "B  20 clients x 640, 2NN",
    "B2": "B2  200 clients x 20, 2NN",
    "C10": "C  logistic regression, 10 a round",
    "C100": "C  logistic regression, 100 a round",
    "D": "D  ragged, CNN on 28x28",
    "E": "E  SCAFFOLD, 100 of 10,000",
}
LEFT, WIDTH, BAR, GAP, TOP = 262, 470, 13, 16, 44


def ratios(book: Book) -> dict[str, dict[str, float]]:
    """Return the median ratio by recipe and peer."""
    out: dict[str, dict[str, float]] = {}
    for recipe in NAMES:
        best = {
            name: {
                row["repeat"]: seconds(row)
                for row in book.find(
                    recipe=recipe,
                    contestant=name,
                    memory=False,
                    setting=book.best(recipe, name),
                )
                if "error" not in row
            }
            for name in (OURS, *PEERS)
        }
        ours = best.pop(OURS)
        for name, theirs in best.items():
            both = theirs.keys() & ours.keys()
            if both:
                found = statistics.median(theirs[r] / ours[r] for r in both)
                out.setdefault(recipe, {})[name] = found
    return out


def svg(found: dict[str, dict[str, float]]) -> str:
    """Return the picture."""
    most = max(value for row in found.values() for value in row.values())
    least = min(1.0, *(value for row in found.values() for value in row.values()))
    low, high = math.log10(least) - 0.02, math.log10(most) + 0.05

    def place(value: float) -> float:
        return LEFT + WIDTH * (math.log10(value) - low) / (high - low)

    height = TOP + sum(BAR * len(row) + GAP for row in found.values()) + 30
    body, y = [], float(TOP)
    for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500):
        if low <= math.log10(tick) <= high:
            x, style = place(tick), "base" if tick == 1 else "grid"
            body.append(
                f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="36" y2="{height - 24}"/>'
            )
            body.append(f'<text x="{x:.1f}" y="{height - 8}" class="tick">{tick:g}</text>')
    for recipe, row in found.items():
        middle = y + BAR * len(row) / 2 + 4
        body.append(
            f'<text x="{LEFT - 10}" y="{middle:.1f}" class="name">{escape(NAMES[recipe])}</text>'
        )
        for name, value in sorted(row.items(), key=lambda one: list(PEERS).index(one[0])):
            a, b = sorted((place(1), place(value)))
            body.append(
                f'<rect x="{a:.1f}" y="{y + 1:.1f}" width="{max(b - a, 1):.1f}" height="{BAR - 2}"'
                f' fill="{PEERS[name][1]}"/>'
            )
            body.append(
                f'<text x="{b + 4:.1f}" y="{y + BAR - 3:.1f}" class="value">{value:.3g}</text>'
            )
            y += BAR
        y += GAP
    x = 14.0
    for label, colour in PEERS.values():
        body.append(f'<rect x="{x}" y="10" width="11" height="11" fill="{colour}"/>')
        body.append(f'<text x="{x + 16}" y="20">{escape(label)}</text>')
        x += 34 + 7.0 * len(label)
    style = (
        "text{font:13px system-ui,sans-serif;fill:#24292f}.name{text-anchor:end}"
        ".tick{text-anchor:middle;fill:#57606a;font-size:11px}.value{font-size:11px;fill:#57606a}"
        ".grid{stroke:#d8dee4}.base{stroke:#24292f}"
    )
    width = LEFT + WIDTH + 58
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' aria-label="Seconds of a round, as multiples of those of fedkeel">'
        f'<style>{style}</style><rect width="{width}" height="{height}" fill="#ffffff"/>'
        f"{''.join(body)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--go", nargs="+", required=True)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "cpu.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for go in given.go:
        own = ratios(Book(given.results, go))
        if not own:
            raise SystemExit(f"{given.results} holds no rounds of {OURS!r} under the name {go!r}")
        for recipe, row in own.items():
            found.setdefault(recipe, {}).update(row)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(svg(found), "utf-8")


if __name__ == "__main__":
    main()
