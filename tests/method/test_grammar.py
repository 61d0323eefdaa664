"""Expressions: what can be read, what is canonical, and where errors point."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from each import each
from fedkeel.errors import CompositionError
from fedkeel.method.grammar import (
    Term,
    accepted_hyperparameters,
    parse,
    read_terms,
    split_expressions,
    write_terms,
)
from fedkeel.method.hyperparameters import check_hyperparameters, hyperparameter_types
from fedkeel.method.part import Part
from fedkeel.method.parts.index import ALIASES
from fedkeel.method.registry import REGISTRY

# --- writing ---------------------------------------------------------------------------------


WORDS = st.text("abzAZ_0189", min_size=1, max_size=8).filter(str.isidentifier)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text("ab \"'\\\\,()+=.#\n\té", max_size=8),
)
TERMS = st.builds(
    Term,
    name=st.one_of(WORDS, st.builds("{}.{}:{}".format, WORDS, WORDS, WORDS)),
    part=st.one_of(st.just(""), WORDS),
    values=st.dictionaries(WORDS, VALUES, max_size=4),
    at=st.just(0),
)


@given(st.lists(TERMS, min_size=1, max_size=4))
def test_what_is_written_is_what_was_read(terms: list[Term]) -> None:
    text = write_terms(terms)
    again = [dataclasses.replace(term, at=0) for term in read_terms(text)]
    assert repr(again) == repr(terms)  # 1 is not True, and 0.0 is not -0.0
    assert write_terms(read_terms(f" {text}\n")) == text
    assert split_expressions(f"{text}, {text}") == [text, text]


def test_a_term_says_which_hyperparameters_it_takes() -> None:
    for text, some in (("fedprox", {"mu"}), ("fedgc.sgc", {"margin"}), ("fedavg", set())):
        [term] = read_terms(text)
        assert some <= set(accepted_hyperparameters(term, text))
    with pytest.raises(CompositionError, match="did you mean 'fedprox'"):
        accepted_hyperparameters(read_terms("fedpox")[0], "fedpox")
    with pytest.raises(CompositionError, match="has no part 'x'"):
        accepted_hyperparameters(read_terms("fedgc.x")[0], "fedgc.x")


# --- reading ---------------------------------------------------------------------------------


@each(
    ("text", "canonical"),
    [
        ("fedavg", "fedavg"),
        ("  fedavg\n+\tfedavg ( ) ", "fedavg"),
        ("fedprox", "fedprox"),
        ("fedprox ( mu = 0.5 )+fedavg", "fedprox(mu=0.5)"),
        ("fedprox(mu=0.1)", "fedprox"),  # its default
        ("fedprox(mu=1)", "fedprox(mu=1)"),
        ("fedprox(mu=1e-3)", "fedprox(mu=0.001)"),
        ("fedprox(\n  mu = .5\n)", "fedprox(mu=0.5)"),
        ("fedavgm(beta=0.5)", "momentum(beta=0.5)"),
        ("fedgc.sgc(margin=0.0)+fedprox", "fedgc.sgc(margin=0.0)+fedprox"),
        ("fedgc(margin=0.5)", "fedgc.cgc(margin=0.5)+fedgc.sgc(margin=0.5)"),
        ("gradma(beta1=0.25)", "gradma.w+gradma.s(beta1=0.25)"),
        ("gcfed.local(head=fc2)", "gcfed.local(head='fc2')"),
        ('gcfed.local(head="fc2")', "gcfed.local(head='fc2')"),
        ("gcfed.local(head='a, b)+c')", "gcfed.local(head='a, b)+c')"),
        ("gcfed.local(head='it\\'s')", 'gcfed.local(head="it\'s")'),
        ("gcfed.local(head=None, lam=none)", "gcfed.local"),
        ("gcfed.local(head='none')", "gcfed.local(head='none')"),
        ("gcfed.local(vectors=true)", "gcfed.local(vectors=True)"),
        ("gcfed.local(lam=1, vectors=TRUE)", "gcfed.local(lam=1, vectors=True)"),
        ("localgc", "gcfed.local(layers='all')"),
        ("localgc(layers=body)", "gcfed.local"),
        ("fedgh(rule=mutual, groups='layer')", "fedgh(rule='mutual', groups='layer')"),
        ("gradma.s(memory=1_0)", "gradma.s(memory=10)"),
    ],
)
def test_what_can_be_read(text: str, canonical: str) -> None:
    assert parse(text).expression == canonical


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("fedavg, fedprox+gcfed", ["fedavg", "fedprox+gcfed"]),
        ("fedreg(gamma=0.4, mg=True),fedavg", ["fedreg(gamma=0.4, mg=True)", "fedavg"]),
        ("gcfed(head='a,b')  ,\n fedavg", ["gcfed(head='a,b')", "fedavg"]),
        ("gcfed(head='a)b'), fedavg", ["gcfed(head='a)b')", "fedavg"]),
        ("gcfed(head='\\',('), fedavg", ["gcfed(head='\\',(')", "fedavg"]),
        (", fedavg,,", ["fedavg"]),
        (" ", []),
    ],
)
def test_a_list_is_split_where_no_value_is(text: str, parts: list[str]) -> None:
    assert split_expressions(text) == parts


def test_terms_know_where_they_begin() -> None:
    terms = read_terms(" fedprox(mu=0.1) + gradma.s( memory = 0 )")
    assert [(t.name, t.part, t.values, t.at) for t in terms] == [
        ("fedprox", "", {"mu": 0.1}, 1),
        ("gradma", "s", {"memory": 0}, 19),
    ]


# --- errors point at the character -----------------------------------------------------------


@each(
    ("text", "at", "got", "expected"),
    [
        ("", 1, "the end", "the name of a method"),
        ("  ", 3, "the end", "the name of a method"),
        ("+fedavg", 1, "'+'", "the name of a method"),
        ("fedavg+", 8, "the end", "the name of a method"),
        ("fedavg++fedprox", 8, "'+'", "the name of a method"),
        ("fed-avg", 4, "'-'", "'+' or the end"),
        ("fed avg", 5, "'a'", "'+' or the end"),
        ("gradma.", 8, "the end", "the name of a part of gradma"),
        ("gradma.+x", 8, "'+'", "the name of a part of gradma"),
        ("gradma .s", 8, "'.'", "'+' or the end"),
        ("fedprox(", 9, "the end", "key=value"),
        ("fedprox(=1)", 9, "'='", "key=value"),
        ("fedprox(mu)", 9, "'m'", "key=value"),
        ("fedprox(0.1)", 9, "'0'", "key=value"),
        ("fedprox(mu=)", 12, "')'", "a number, True, False, None or text"),
        ("fedprox(mu=0.1", 15, "the end", "',' or ')'"),
        ("fedprox(mu=0.1,)", 16, "')'", "key=value"),
        ("fedprox(mu=0.1 gamma=2)", 12, "'0'", "a number, True, False, None or text"),
        ("fedprox(mu=1, mu=2)", 15, "'m'", "each key once, not 'mu' again"),
        ("fedprox(mu=[1, 2])", 12, "'['", "a number, True, False, None or text"),
        ("fedprox(mu=__import__('os'))", 12, "'_'", "a number, True, False, None or text"),
        ("fedprox(mu=2**9)", 12, "'2'", "a number, True, False, None or text"),
        ("gcfed(head='fc2)", 12, "'''", "a number, True, False, None or text"),
        ("fedavg)", 7, "')'", "'+' or the end"),
        ("fedavg\n+ fed-avg", 13, "'-'", "'+' or the end"),
    ],
)
def test_what_cannot_be_read(text: str, at: int, got: str, expected: str) -> None:
    with pytest.raises(CompositionError) as caught:
        parse(text)
    assert caught.value.what == f"'{text}' cannot be read at character {at}."
    assert caught.value.got == got
    assert caught.value.expected == expected
    assert len(str(caught.value).splitlines()) <= 4


@each(
    ("text", "says"),
    [
        ("fedpox", "did you mean 'fedprox'?"),
        ("FedGC", "did you mean 'fedgc'?"),
        ("SCAFOLD", "did you mean 'scaffold'?"),
        ("fedavg+gradama", "did you mean 'gradma'?"),
        ("fedgc.sga", "fedgc has no part 'sga'.\n  expected cgc or sgc"),
        ("fedprox.w", "fedprox has no part 'w'.\n  expected only fedprox"),
        ("fedavg.w", "fedavg has no part 'w'.\n  expected only fedavg"),
        ("fedprox(nu=1)", "fedprox has no hyper-parameter 'nu'.\n  do   did you mean 'mu'?"),
        ("fedavg(mu=1)", "fedavg has no hyper-parameter 'mu'.\n  do   fedavg takes none"),
        ("gradma.w(beta1=0.5)", "gradma.w has no hyper-parameter 'beta1'."),
        ("gradma(memry=5)", "did you mean 'memory'?"),
    ],
)
def test_unknown_names_are_told_the_nearest(text: str, says: str) -> None:
    with pytest.raises(CompositionError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4


def test_every_known_name_is_in_the_message_about_an_unknown_one() -> None:
    with pytest.raises(CompositionError) as caught:
        parse("zzz")
    for name in sorted([*REGISTRY, *ALIASES])[:20]:
        assert name in str(caught.value)


# --- the canonical expression ----------------------------------------------------------------


def others(part: Part) -> Iterator[tuple[str, Any]]:
    """Every hyper-parameter with legal values that are not its own."""
    values = [True, False, None, 0, 1, 2, 100, 0.0, 0.125, 0.3, 3.5, 1e-7, 'it\'s "one", (a) + b']
    for f in dataclasses.fields(part):
        options = getattr(hyperparameter_types(type(part))[f.name], "__args__", ())
        for value in [*values, *(o for o in options if isinstance(o, str))]:
            if value == getattr(part, f.name):
                continue
            try:
                check_hyperparameters(dataclasses.replace(part, **{f.name: value}))
            except CompositionError:
                continue
            yield f.name, value


@each("entry", REGISTRY)
def test_canonical_expressions_say_exactly_which_parts(entry: str) -> None:
    plan = parse(entry)
    assert parse(plan.expression).parts == plan.parts
    for at, part in enumerate(plan.parts):
        changed = list(others(part))
        assert {name for name, _ in changed} == {f.name for f in dataclasses.fields(part)}
        for name, value in changed:
            parts = list(plan.parts)
            parts[at] = dataclasses.replace(part, **{name: value})
            expression = "+".join(one_term(p) for p in parts)
            found = parse(expression)
            assert found.parts == tuple(parts)
            assert parse(found.expression).parts == found.parts
            assert parse(found.expression).expression == found.expression


def one_term(part: Part) -> str:
    """A part with all its hyper-parameters written out."""
    given = ", ".join(f"{f.name}={getattr(part, f.name)!r}" for f in dataclasses.fields(part))
    return f"{part.name}({given})"


def test_the_order_of_terms_is_kept() -> None:
    assert parse("gcfed+fedprox").expression == "gcfed.local+gcfed.global+fedprox"
    assert parse("fedprox+gcfed").expression == "fedprox+gcfed.local+gcfed.global"
