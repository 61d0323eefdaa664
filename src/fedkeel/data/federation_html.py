"""A federation as a notebook shows it: a row for each client, a cell for each class."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MOST_CLIENTS, _MOST_CLASSES = 20, 20
"""What is shown of many clients or classes."""


def federation_html(
    sizes: NDArray[np.int64],
    held_out: NDArray[np.int64] | None,
    counts: NDArray[np.int64] | None,
    clients: Sequence[object],
    classes: Sequence[object],
) -> str:
    """Return a table: a client's training examples, and how many of them each class has.

    Args:
        sizes: [C] training examples.
        held_out: [C] examples kept aside for evaluation, None where there are none.
        counts: [C, Y] training examples by class, None where targets are not classes, or where they
            are too many to count in a table.
        clients: C names.
        classes: Y names.
    """
    shown = min(len(sizes), _MOST_CLIENTS)
    labels = [] if counts is None else [str(name) for name in classes[:_MOST_CLASSES]]
    heads = ["client", "examples", *([] if held_out is None else ["held out"]), *labels]
    lines = ["<table><thead><tr>", *(f"<th>{html.escape(head)}</th>" for head in heads)]
    lines.append("</tr></thead><tbody>")
    for client in range(shown):
        lines.append(f"<tr><th>{html.escape(str(clients[client]))}</th><td>{sizes[client]:,}</td>")
        if held_out is not None:
            lines.append(f"<td>{held_out[client]:,}</td>")
        for count in [] if counts is None else counts[client, : len(labels)]:
            share = count / max(sizes[client], 1)
            lines.append(
                f'<td style="background:rgba(30,110,200,{0.6 * share:.2f})">{count:,}</td>'
            )
        lines.append("</tr>")
    lines.append("</tbody></table>")
    says = f"{len(sizes):,} clients, {sizes.sum():,} training examples"
    if shown < len(sizes):
        says += f"; the first {shown} are shown"
    if len(labels) < (0 if counts is None else len(classes)):
        says += f"; the first {len(labels)} of {len(classes)} classes are shown"
    return "".join([*lines, f"<p><small>{says}.</small></p>"])
