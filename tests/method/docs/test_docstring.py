"""Docstrings of parts are read strictly; every part that is written can be read."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass, fields
from typing import ClassVar

import pytest

from each import each
from fedkeel.errors import CompositionError
from fedkeel.method import parts as room
from fedkeel.method.docs.docstring import FIELDS, Maths, read
from fedkeel.method.part import Part, param
from fedkeel.method.registry import REGISTRY


def written() -> list[type[Part]]:
    """Every part that a file of the room defines, whether the registry names it or not."""
    found = {}
    for info in pkgutil.iter_modules(room.__path__):
        module = importlib.import_module(f"{room.__name__}.{info.name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Part) and not inspect.isabstract(kind):
                found[kind.__qualname__] = kind
    return [found[name] for name in sorted(found)]


KINDS = written()


def test_every_part_of_the_registry_is_among_those_written() -> None:
    named = {kind for recipe in REGISTRY.values() for kind in recipe.parts.values()}
    assert named <= set(KINDS)


@each("kind", KINDS)
def test_every_part_is_documented_whole(kind: type[Part]) -> None:
    doc = read(kind)
    assert len(doc.summary) < 100
    assert list(doc.args) == [f.name for f in fields(kind)]
    assert ">>> " in doc.example
    assert all(piece.latex if isinstance(piece, Maths) else piece for piece in doc.body)


@each("kind", KINDS)
def test_every_part_has_a_formula_or_says_it_in_a_line(kind: type[Part]) -> None:
    doc = read(kind)
    assert any(isinstance(piece, Maths) for piece in doc.body) or len(doc.summary) > 20


@each("kind", KINDS)
def test_the_source_is_the_paper_that_is_cited(kind: type[Part]) -> None:
    """With a number that one can turn to."""
    source = read(kind).source
    assert kind.paper in source
    assert any(word in source.lower() for word in ("eq.", "algorithm", "section", "definition"))


# --- reading ---------------------------------------------------------------------------------

WHOLE = r"""Moves something.

    First words, over
    two lines.

    .. math::
        a &= b \\
        c &= d

    where d is known.

    .. math:: e = f

    Source: somewhere, Eq. (1), which goes on
        in the next line.

    Args:
        mu: weight, >= 0. It has
            two lines.
        nu: another.
    Sent: nothing.
    State: none.
    Cost: little: one pass.
    Laws: mu = 0
        is nothing.
    Deviations: none.

    Example:
        >>> for i in range(2):
        ...     print(i)
        0
        1
    """


@dataclass(frozen=True)
class Sample(Part):
    mu: float = param(0.0)
    nu: float = param(0.0)
    name: ClassVar[str] = "sample"
    paper: ClassVar[str] = "somebody2030"


def documented(text: str) -> type[Part]:
    return type("Sample", (Sample,), {"__doc__": text})


def test_what_is_read() -> None:
    doc = read(documented(WHOLE))
    assert doc.summary == "Moves something."
    assert doc.body == (
        "First words, over two lines.",
        Maths("a &= b \\\\\nc &= d"),
        "where d is known.",
        Maths("e = f"),
    )
    assert doc.source == "somewhere, Eq. (1), which goes on in the next line."
    assert doc.args == {"mu": "weight, >= 0. It has two lines.", "nu": "another."}
    assert (doc.sent, doc.state, doc.cost) == ("nothing.", "none.", "little: one pass.")
    assert (doc.laws, doc.deviations) == ("mu = 0 is nothing.", "none.")
    assert doc.example == ">>> for i in range(2):\n...     print(i)\n0\n1"


@each("name", FIELDS)
def test_a_field_that_is_missing_or_misspelt(name: str) -> None:
    for other in (name[:-1] + "x", "Zzzz"):
        with pytest.raises(CompositionError) as caught:
            read(documented(WHOLE.replace(f"    {name}:", f"    {other}:")))
        said = str(caught.value)
        assert said.startswith("The docstring of sample (Sample) ")
        assert f"'{name}'" in said or f"'{other}'" in said
        assert caught.value.do is not None
        assert len(said.splitlines()) <= 4


@each(
    ("old", "new", "said"),
    [
        ("Moves something.\n", "Moves something\n", "one line that ends with a full stop"),
        ("Moves something.\n", "Moves something.\n    More.\n", "one line that ends"),
        ("Sent: nothing.", "Sent:", "has no 'Sent'"),
        ("Sent: nothing.", "Sent: nothing.\n    Sent: again.", "has 'Sent' twice"),
        ("Cost: little: one pass.\n", "", "has no 'Cost'"),
        (
            "    Sent: nothing.\n    State: none.\n",
            "",
            "has no 'Sent', 'State'.\n  do   write 'Sent: ...'; write 'State: ...'",
        ),
        ("    State: none.\n", "    Stat: none.\n", "did you mean 'State'?"),
        ("    State: none.\n", "    State: none.\n    loose words\n", "a line outside of fields"),
        ("    State: none.\n", "    State: none.\n    Note: aside.\n", "has no field 'Note'"),
        ("        nu: another.\n", "", "other hyper-parameters than it has"),
        ("        nu: another.\n", "        nu:\n", "other hyper-parameters than it has"),
        ("        nu: another.\n", "        xi: x.\n", "other hyper-parameters than it has"),
        ("        mu: weight", "        weight", "a line in Args that names none"),
        ("Deviations: none.\n\n    Example:", "Example:", "has no 'Deviations'"),
    ],
)
def test_what_is_refused(old: str, new: str, said: str) -> None:
    assert old in WHOLE
    with pytest.raises(CompositionError) as caught:
        read(documented(WHOLE.replace(old, new)))
    assert said in str(caught.value)


def test_fields_in_another_order() -> None:
    text = WHOLE.replace(
        "    Sent: nothing.\n    State: none.", "    State: none.\n    Sent: nothing."
    )
    with pytest.raises(CompositionError, match="fields in another order"):
        read(documented(text))


def test_args_without_hyper_parameters() -> None:
    @dataclass(frozen=True)
    class Plain(Part):
        name: ClassVar[str] = "plain"

    Plain.__doc__ = WHOLE
    with pytest.raises(CompositionError, match="another order"):
        read(Plain)


@dataclass(frozen=True)
class Private(Part):
    """Is a method of one's own.

    Sent: nothing.
    State: none.
    Cost: none.
    Laws: none.
    Deviations: none.

    Example:
        >>> 1
        1
    """

    name: ClassVar[str] = "private"


def test_a_private_method_needs_no_source() -> None:
    doc = read(Private)
    assert (doc.source, doc.sent, doc.deviations) == ("", "nothing.", "none.")
    assert Private.paper == ""


def test_a_source_is_asked_for_where_a_paper_is_cited_or_the_word_is_misspelt() -> None:
    class Cites(Private):
        __doc__ = Private.__doc__
        paper: ClassVar[str] = "li2020fedprox"

    class Misspelt(Private):
        __doc__ = inspect.cleandoc(Private.__doc__ or "").replace("Sent:", "Sorce: me.\nSent:")

    class Ours(Private):
        __doc__ = Private.__doc__
        __module__ = "fedkeel.method.parts.ours"

    for kind in (Cites, Misspelt, Ours):
        with pytest.raises(CompositionError, match="has no 'Source'"):
            read(kind)
