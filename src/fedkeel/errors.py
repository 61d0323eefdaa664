"""Errors that a user can act on.

Every error a user can cause is a `FedkeelError` with up to four short facts: what was given, what
was expected, why it matters, what to do. The command prints them as at most four lines and exits
with code 2; in Python they are ordinary exceptions.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence

LONGEST_FACT = 500
"""Characters of one fact of an error, at most: a value that it quotes may be of any length."""


class FedkeelError(Exception):
    """Base of all errors that a user can act on.

    The middle of a fact that is longer than `LONGEST_FACT` is left out.

    Args:
        what: one line: what went wrong, naming the thing the user wrote.
        got: what was given.
        expected: what would have been accepted.
        why: why it matters, where that is not obvious.
        do: what to do about it.
        mark: place of a mistake in `got`, in characters from 0. A "^" below it is shown in place of
            `why`.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        why: str | None = None,
        do: str | None = None,
        mark: int | None = None,
    ) -> None:
        self.what = _shortened(what)
        self.got = None if got is None else _presentable(got)
        self.expected = None if expected is None else _presentable(expected)
        self.why = None if why is None else _shortened(why)
        self.do = None if do is None else _shortened(do)
        self.mark = mark
        super().__init__(self.what)

    def __str__(self) -> str:
        """Return the message; Python itself prints the type before it."""
        return "\n".join(self._lines())

    def lines(self) -> list[str]:
        """Return the message as at most four lines, the first of them the type and `what`.

        Line breaks in what a user wrote, or a library said, become spaces; other control characters
        are shown as escapes, see `printable`.
        """
        first, *others = self._lines()
        return [f"{type(self).__name__}: {first}", *others]

    def _lines(self) -> list[str]:
        facts = []
        if self.got is not None:
            facts.append(f"got {self.got}")
        if self.expected is not None:
            facts.append(f"expected {self.expected}")
        lines = [self.what]
        if facts:
            lines.append("  " + "; ".join(facts))
        if self.mark is not None:
            lines.append(" " * (len("  got ") + self.mark) + "^")
        elif self.why:
            lines.append(f"  why  {self.why}")
        if self.do:
            lines.append(f"  do   {self.do}")
        return [printable(" ".join(line.splitlines())) for line in lines]


def _shortened(text: str) -> str:
    """Return a text without its middle where it is longer than `LONGEST_FACT`."""
    if len(text) <= LONGEST_FACT:
        return text
    first, last = text[: LONGEST_FACT - 150], text[-100:]
    return f"{first} [{len(text) - len(first) - len(last):,} characters left out] {last}"


def _presentable(value: object) -> object:
    """Return a value as it is, or as a text of limited length where its own is longer."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; lists in lists
        return f"a value of type {type(value).__name__} that is too large to be shown"
    return value if len(text) <= LONGEST_FACT else _shortened(text)


class ConfigError(FedkeelError):
    """A setting that cannot be used."""


class ArgumentError(ConfigError, TypeError):
    """An argument that a function does not take, or one that it needs."""


class DataError(FedkeelError):
    """Data that cannot be found, read or used."""


class ModelError(FedkeelError):
    """A model that does not fit the data or the method."""


class CompositionError(FedkeelError):
    """Parts of methods that cannot be combined, or an expression that cannot be read."""


class RunError(FedkeelError):
    """A run that cannot start, continue or be read."""


class TrainingError(FedkeelError):
    """Training that cannot go on: every client failed, or a worker could not be kept alive.

    Its `result` is what the run had come to, a `fedkeel.Result`; None where there was none.
    """

    result: object = None


class SlowWork(UserWarning):
    """Work before the first round that takes long, and how far it is."""


class StoppedProcess(UserWarning):
    """A process that trains has been stopped by a signal, and is waited for."""


class ClusterWarning(UserWarning):
    """A cluster has lost a node, or its machines differ. The run goes on."""


class TrackerFailed(UserWarning):
    """A tracker has failed. The run goes on without it."""


def printable(text: str) -> str:
    r"""Return a text with its control and invisible characters as escapes, for a terminal.

    A name or a message from elsewhere could otherwise clear the screen, hide what is beside it, or
    look like a line of fedkeel's own.

    >>> print(printable("a\x1b[2Jb\r\n\u202ec"))
    a\x1b[2Jb\r\n\u202ec
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs" else ascii(c)[1:-1] for c in text
    )


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type where it says nothing.

    >>> first_line(ValueError("bad")), first_line(ValueError())
    ('bad', 'ValueError')
    """
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def enumeration(items: Sequence[str], limit: int = 3) -> str:
    """Return an enumeration, with a count beyond `limit`.

    >>> enumeration(["a", "b", "c"]), enumeration(["a", "b", "c", "d", "e"])
    ('a, b and c', 'a, b, c and 2 others')
    """
    shown = list(items)
    if len(items) > limit + 1:
        shown[limit:] = [f"{len(items) - limit} others"]
    *first, last = shown
    return f"{', '.join(first)} and {last}" if first else last


def nearest(word: str, known: Iterable[str], least: float = 0.5) -> str | None:
    """Return the known word closest to `word`, whatever its case, or None where nothing is close.

    Args:
        word: what a user wrote.
        known: the words that there are.
        least: how close it is at least, from 0 to 1 for the same word.

    >>> nearest("learning_rte", ["epochs", "learning_rate"])
    'learning_rate'
    >>> nearest("xyz", ["epochs"]) is None
    True
    """
    small = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), list(small), n=1, cutoff=least)
    return small[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str], limit: int = 12) -> str:
    """Return a sentence that names the nearest known word and the words there are.

    >>> did_you_mean("fedpox", ["fedavg", "fedprox"])
    "did you mean 'fedprox'? known: fedavg, fedprox"
    >>> did_you_mean("FedAvg, step 2", ["FedAvg", "FedAvg, step of 1.5"])
    "did you mean 'FedAvg, step of 1.5'? known: FedAvg; FedAvg, step of 1.5"
    """
    names = sorted(known)
    close = nearest(word, names)
    between = "; " if any("," in name for name in names) else ", "
    shown = between.join(names[:limit]) + (f"{between}..." if len(names) > limit else "")
    return (f"did you mean {close!r}? " if close else "") + f"known: {shown}"


def counted(value: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "seed"), counted(3, "class"), counted(1200, "client")
    ('one seed', '3 classes', '1,200 clients')
    """
    if value == 1:
        return f"one {noun}"
    return f"{value:,} {noun}{'es' if noun.endswith('s') else 's'}"
