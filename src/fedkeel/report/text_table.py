"""A table of texts, in each form in which one is printed."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from fedkeel.errors import printable

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
    "‡": r"$^\ddagger$",
    "²": r"$^2$",
}

NAME_WIDTH = 27
"""Characters after which a name goes on in another line of a terminal, where it can be broken."""


HEAD_WIDTH = 12
"""The same of a heading above numbers that may stand on several lines."""


@dataclass(frozen=True)
class TextTable:
    """A table whose first column has names. R rows, C columns.

    Args:
        headings: [C] texts; a line break may stand before a unit.
        rows: [R] of C texts; a line break is kept in a terminal.
        marked: (row, column) of cells in bold.
        notes: texts below it.
        texts: columns that hold texts and no numbers; they begin at the left.
        has_code: whether the names are written as code where a form can do so.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[tuple[int, int]] = frozenset()
    notes: Sequence[str] = ()
    texts: frozenset[int] = frozenset({0})
    has_code: bool = True

    @property
    def _heads(self) -> list[str]:
        """The headings, each on one line."""
        return [heading.replace("\n", " ") for heading in self.headings]

    @property
    def _lines(self) -> list[list[str]]:
        """The rows, each on one line."""
        return [[cell.replace("\n", " ") for cell in row] for row in self.rows]

    def markdown(self) -> str:
        """Return it as Markdown, each note in a paragraph of its own."""
        rule = ["---" if place in self.texts else "---:" for place in range(len(self.headings))]
        lines = [self._heads, rule]
        for index, (name, *cells) in enumerate(self._lines):
            if self.has_code:
                name = "`" + printable(name).replace("|", "\\|").replace("`", "'") + "`"
            bold = [
                f"**{cell}**" if (index, place) in self.marked else cell
                for place, cell in enumerate(cells, 1)
            ]
            lines.append([name, *bold])
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        return table + "".join(f"\n{printable(note)}\n" for note in self.notes)

    def latex(self) -> str:
        """Return it as a LaTeX tabular, which needs the package booktabs; notes are comments."""
        lines = [
            r"\begin{tabular}{l" + "r" * (len(self.headings) - 1) + "}",
            r"\toprule",
            " & ".join(map(latex_text, self._heads)) + r" \\",
            r"\midrule",
        ]
        for index, (name, *rest) in enumerate(self._lines):
            cells = [rf"\texttt{{{latex_text(printable(name))}}}"]
            for place, cell in enumerate(map(latex_text, rest), 1):
                cells.append(rf"\textbf{{{cell}}}" if (index, place) in self.marked else cell)
            lines.append(" & ".join(cells) + r" \\")
        notes = (r"Needs \usepackage{booktabs}.", *map(printable, self.notes))
        lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in notes)]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """Return it as HTML for a notebook."""
        heads = "".join(f"<th>{html.escape(head)}</th>" for head in self._heads)
        lines = [f"<table><thead><tr>{heads}</tr></thead><tbody>"]
        for index, (name, *rest) in enumerate(self._lines):
            cells = [f"<tr><th><code>{html.escape(name)}</code></th>"]
            for place, cell in enumerate(map(html.escape, rest), 1):
                shown = f"<b>{cell}</b>" if (index, place) in self.marked else cell
                cells.append(f"<td>{shown}</td>")
            lines.append("".join([*cells, "</tr>"]))
        notes = (f"<p><small>{html.escape(note)}</small></p>" for note in self.notes)
        return "".join([*lines, "</tbody></table>", *notes])

    def terminal(self, *, is_wrapped: bool = False) -> Table:
        """Return it for a terminal.

        Args:
            is_wrapped: whether numbers may stand on several lines where the terminal is narrow.
        """
        table = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, 0, 0, 1),
            pad_edge=False,
            caption=Text("\n".join(map(printable, self.notes))) if self.notes else None,
            caption_justify="left",
        )
        for place, heading in enumerate(self.headings):
            text = _printable_lines(heading)
            if is_wrapped:
                text = "\n".join(wrapped(line, HEAD_WIDTH) for line in text.split("\n"))
            head = Text(text)  # it may be a name from elsewhere: no markup
            if place in self.texts:
                table.add_column(head, overflow="fold")
            else:
                table.add_column(
                    head,
                    justify="right",
                    no_wrap=not is_wrapped,
                    overflow="fold" if is_wrapped else "ellipsis",
                )
        for index, row in enumerate(self.rows):
            texts = list(map(_printable_lines, row))
            texts[0] = wrapped(texts[0]) if self.has_code else texts[0]
            marks = ("bold" if (index, place) in self.marked else "" for place in range(len(row)))
            table.add_row(*map(Text, texts, marks))
        return table

    def lines(self) -> Iterator[str]:
        """Yield it as lines of plain text, the headings first, without the notes."""
        rows = [self._heads, *self._lines]
        widths = [max(len(row[place]) for row in rows) for place in range(len(self.headings))]
        for row in rows:
            cells = (
                cell.ljust(width) if place in self.texts else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            yield "  ".join(cells).rstrip()


def _printable_lines(text: str) -> str:
    """Return a text as a terminal may show it, with its line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def latex_text(text: str) -> str:
    r"""Return a text as LaTeX sets it.

    >>> latex_text("fedprox_a & 50 % ± 1")
    'fedprox\\_a \\& 50 \\% $\\pm$ 1'
    """
    return "".join(_LATEX.get(character, character) for character in text)


def wrapped(name: str, width: int = NAME_WIDTH) -> str:
    """Return a name whose lines end after a "+" or a space, or within a longer part after a mark.

    >>> wrapped("fedprox(mu=0.1)+gcfed", 16).splitlines()
    ['fedprox(mu=0.1)+', 'gcfed']
    >>> wrapped("fedprox(mu=0.1)+gcfed", 10).splitlines()
    ['fedprox(', 'mu=0.1)+', 'gcfed']
    """
    pieces = []
    for part in re.split(r"(?<=[+ ])", name):
        is_long = len(part.rstrip()) > width
        pieces += re.split(r"(?<=[(,_])|(?<=\.)(?=\D)", part) if is_long else [part]
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
