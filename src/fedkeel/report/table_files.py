"""The table of results for a paper: LaTeX, and CSV with every figure unrounded."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from fedkeel.errors import printable
from fedkeel.report.columns import ResultRow
from fedkeel.report.tables import footnotes, visible_columns

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
    "–": "--",
    "†": r"$^\dagger$",
    "²": r"$^2$",
}


def latex_table(rows: Sequence[ResultRow]) -> str:
    """Return the table as a LaTeX tabular, which needs the package booktabs.

    The footnotes follow as comments.
    """
    columns = visible_columns(rows)
    headings = ["method", *(f"{column.heading} {column.unit}".strip() for column in columns)]
    lines = [
        r"\begin{tabular}{l" + "r" * len(columns) + "}",
        r"\toprule",
        " & ".join(map(latex_text, headings)) + r" \\",
        r"\midrule",
    ]
    for row in rows:
        cells = [rf"\texttt{{{latex_text(printable(row.label))}}}"]
        for column in columns:
            text = latex_text(column.cell(row))
            cells.append(rf"\textbf{{{text}}}" if column.name in row.marked else text)
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [f"% {printable(str(note))}" for note in footnotes(rows)]
    return "\n".join(lines) + "\n"


def latex_text(text: str) -> str:
    r"""Return a text as LaTeX sets it.

    >>> latex_text("fedprox_a & 50 % ± 1")
    'fedprox\\_a \\& 50 \\% $\\pm$ 1'
    """
    return "".join(_LATEX.get(character, character) for character in text)


def csv_table(rows: Sequence[ResultRow]) -> str:
    """Return every figure of the table as CSV, unrounded, a line for each method.

    The columns are those of `ResultRow.to_json`; what may be claimed has names from ``claim_`` on.
    """
    records = []
    for row in rows:
        values = row.to_json()
        claim = values.pop("claim") or {}
        values["marked"] = " ".join(values["marked"])
        claimed = {f"claim_{name}".replace("claim_claim", "claim"): v for name, v in claim.items()}
        records.append({**values, **claimed})
    names = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
