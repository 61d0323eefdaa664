"""Draw the picture of a round: python docs/images/round.py."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

WIDTH, BOX, GAP, TOP, STRIDE = 940, 30, 8, 74, 12
SERVER, CLIENT, STEP = "#e8eefc", "#e9f6ec", "#fff6e0"
COLUMNS = (
    ("1. Server sends", 20, 200, SERVER, ("Dispatch", "Broadcast")),
    (
        "2. Client begins",
        240,
        200,
        CLIENT,
        (
            "Personal, Phases",
            "LocalWork",
            "ClientState (init)",
            "Survey",
            "ReceivedModel, LocalStart",
            "Preparation",
            "PublicTraining",
        ),
    ),
    (
        "3. Local step, S times",
        460,
        220,
        STEP,
        (
            "LocalModel",
            "Criterion, LossTerm, Penalty",
            "GradientRule",
            "GradientTransform",
            "ClientOptimiser",
            "StepCorrection",
            "Carry",
        ),
    ),
    (
        "4. Client ends",
        700,
        220,
        CLIENT,
        ("UpdateTransform", "Codec", "ClientState (next)", "Upload"),
    ),
)
ROUND = (
    "ServerPolicy",
    "CohortTransform",
    "Reduction",
    "AggregateTransform",
    "ServerOptimiser",
    "ServerState, Table",
)
EVALUATION = ("FineTuning", "PersonalPrediction")


def text(x: float, y: float, words: str, bold: bool = False, anchor: str = "middle") -> str:
    """Return a line of text."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def box(x: float, y: float, width: float, words: str) -> str:
    """Return a box with words in it."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX}"'
    frame = f'<rect {place} rx="5" fill="#fff" stroke="#667"/>'
    return frame + text(x + width / 2, y + 20, words)


def arrow(path: str) -> str:
    """Return an arrow along a path."""
    return f'<path d="{path}" fill="none" stroke="#445" stroke-width="1.6" marker-end="url(#tip)"/>'


def chain(roles: Sequence[str], y: float) -> list[str]:
    """Return boxes side by side, as wide as their words, with arrows between them."""
    out, x = [], 30.0
    letter = (900 - 20 - (len(ROUND) - 1) * STRIDE) / sum(len(role) + 3 for role in ROUND)
    for role in roles:
        if x > 30:
            out.append(arrow(f"M{x - STRIDE:g} {y + 15:g} L{x - 2:g} {y + 15:g}"))
        width = letter * (len(role) + 3)
        out.append(box(x, y, round(width, 1), role))
        x = round(x + width + STRIDE, 1)
    return out


def draw() -> str:
    """Return the whole picture."""
    out = [f'<rect width="{WIDTH}" height="512" fill="#fbfbfd"/>']
    height = max(len(roles) for *_, roles in COLUMNS) * (BOX + GAP) + 34
    out.append(text(20, 30, "One round: which role acts when", bold=True, anchor="start"))
    for title, x, width, colour, roles in COLUMNS:
        place = f'x="{x}" y="{TOP - 26}" width="{width}" height="{height}"'
        out.append(f'<rect {place} rx="8" fill="{colour}"/>')
        out.append(text(x + width / 2, TOP - 6, title, bold=True))
        for i, role in enumerate(roles):
            out.append(box(x + 10, TOP + 6 + i * (BOX + GAP), width - 20, role))
    middle = TOP - 26 + height / 2
    for start, end in ((220, 240), (440, 460), (680, 700)):
        out.append(arrow(f"M{start - 2} {middle:g} L{end - 2} {middle:g}"))
    out.append(arrow(f"M570 {TOP - 26 + height} q0 18 -60 18 q-30 0 -30 -14"))
    out.append(text(556, TOP + height + 8, "next mini-batch", anchor="start"))
    y = TOP + height + 44
    out.append(f'<rect x="20" y="{y - 26}" width="900" height="84" rx="8" fill="{SERVER}"/>')
    out.append(
        text(
            32, y - 6, "5. Server aggregates the K replies of the cohort", bold=True, anchor="start"
        )
    )
    out.append(arrow(f"M810 {TOP - 26 + height} L810 {y - 28}"))
    out += chain(ROUND, y + 8)
    out.append(f'<rect x="20" y="{y + 72}" width="900" height="84" rx="8" fill="{CLIENT}"/>')
    out.append(
        text(32, y + 92, "A client's evaluation, where it is due", bold=True, anchor="start")
    )
    out += chain(EVALUATION, y + 106)
    out.append(arrow(f"M60 {y - 26} L60 {TOP - 26 + height + 2}"))
    out.append(text(72, y - 34, "next round", anchor="start"))
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#445"/></marker></defs>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 174}" '
        'font-family="system-ui, sans-serif" font-size="13.5" fill="#223" role="img" '
        'aria-label="The roles of a round in their order">'
    )
    out[0] = f'<rect width="{WIDTH}" height="{y + 174}" fill="#fbfbfd"/>'
    return "\n".join([head, tip, *out, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
