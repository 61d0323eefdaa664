"""Verdicts on pairs: the same in both orders, in agreement with `compose`, and of use."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import combinations

from each import each
from fedkeel.errors import CompositionError
from fedkeel.method.compose import broken_by, compose, needs_of
from fedkeel.method.grammar import parse
from fedkeel.method.legality import (
    BREAKS,
    LEGAL,
    REASONS,
    SLOT_CODES,
    TWICE,
    WEIGHTS,
    PairVerdict,
    all_pairs,
    task_kinds,
    verdict,
)
from fedkeel.method.part import Part
from fedkeel.method.registry import REGISTRY
from fedkeel.method.roles import ROLES, SLOTS


@cache
def verdicts() -> dict[tuple[str, str], PairVerdict]:
    return {pair: verdict(*pair) for pair in all_pairs()}


def refused() -> dict[tuple[str, str], PairVerdict]:
    return {pair: found for pair, found in verdicts().items() if not found.legal}


def test_every_pair_has_a_verdict() -> None:
    count = len(REGISTRY)
    assert len(verdicts()) == count * (count - 1) // 2
    assert {found.code for found in verdicts().values()} <= set(REASONS)


def test_the_order_of_a_pair_does_not_matter() -> None:
    for (one, other), found in verdicts().items():
        back = verdict(other, one)
        assert (back.code, back.legal) == (found.code, found.legal), (one, other)


def test_every_legal_pair_composes_of_all_its_parts() -> None:
    for (one, other), found in verdicts().items():
        if found.legal:
            plan = parse(f"{one}+{other}")
            assert plan.parts == (*parse(one).parts, *parse(other).parts)
            assert found == PairVerdict(LEGAL)
            assert found.reason == ""


@each("pair", refused)
def test_every_refusal_says_what_to_do(pair: tuple[str, str]) -> None:
    found = verdicts()[pair]
    error = found.error
    assert error is not None
    assert error.do
    assert len(str(error).splitlines()) <= 4
    parts = [part.name for name in pair for part in parse(name).parts]
    advice = ["set weights", "name it once", *(f"drop {one}" for one in ("one of", *parts))]
    assert any(error.do.startswith(word) for word in advice)
    assert found.reason.endswith(".")
    assert error.do.split(";")[0].split(",")[0][1:] in found.reason


def holds(code: str, ones: tuple[Part, ...], others: tuple[Part, ...]) -> bool:
    """Whether what a code says of two methods is so."""
    both = [(a, b) for a in ones for b in others]
    if code == TWICE:
        return any(a.name == b.name for a, b in both)
    if code == BREAKS:
        return any(needs_of(a) & broken_by(b) or needs_of(b) & broken_by(a) for a, b in both)
    if code == WEIGHTS:
        return any(a.weights and b.weights and a.weights != b.weights for a, b in both)
    slot = next(slot for slot, known in SLOT_CODES.items() if known == code)
    return any(isinstance(a, slot) and isinstance(b, slot) for a, b in both)


def test_codes_say_what_is_so() -> None:
    for (one, other), found in verdicts().items():
        ones, others = parse(one).parts, parse(other).parts
        for code in REASONS:
            if code != LEGAL and (code == found.code or found.legal):
                assert holds(code, ones, others) == (code == found.code), (one, other, code)


def test_a_choice_of_weights_makes_w_legal_and_nothing_else() -> None:
    for pair, found in refused().items():
        try:
            parse("+".join(pair), weights="uniform")
            composes = True
        except CompositionError:
            composes = False
        assert composes == (found.code == WEIGHTS)


def test_slots_are_named_by_their_codes() -> None:
    assert set(SLOT_CODES) == set(SLOTS)
    assert len(set(REASONS)) == len(SLOTS) + 4
    for slot, code in SLOT_CODES.items():
        assert f"'{ROLES[slot]}'" in REASONS[code]
        special = {
            "training phases": "P",
            "local start": "I",
            "received model": "V",
            "second local model": "M",
            "server policy": "Y",
            "server optimiser": "S",
            "local optimiser": "O",
            "personal prediction": "N",
        }
        assert code == special.get(ROLES[slot], ROLES[slot][0].upper())


def test_more_than_two_are_decided_by_twos() -> None:
    """What the page of the matrix says of three methods and more."""
    draw = random.Random(0)
    legal = refused = 0
    for _ in range(600):
        names = draw.sample(list(REGISTRY), draw.choice([3, 4]))
        two_by_two = all(verdict(a, b).legal for a, b in combinations(names, 2))
        try:
            compose([part for name in names for part in parse(name).parts])
            together = True
        except CompositionError:
            together = False
        assert together == two_by_two, names
        legal, refused = legal + together, refused + (not together)
    assert legal > 50
    assert refused > 50


def test_expressions_have_verdicts_too() -> None:
    assert verdict("fedprox(mu=0.5)+gcfed", "scaffold").code == LEGAL
    assert verdict("fedprox+momentum", "addition(lr=0.5)").code == "S"
    assert verdict("fedgc.cgc", "fedgc").code == TWICE
    assert verdict("fednova(length='steps')", "fedreg").code == LEGAL
    assert re.search(r"fednova\(length='steps'\)", verdict("fednova", "fedreg").reason)
    assert verdict("scaffold", "fedgc").reason == (
        "the papers weight clients differently. "
        "Set weights = 'uniform', 'processed' or 'examples' in the experiment."
    )


def test_tasks_do_not_depend_on_a_choice_of_weights() -> None:
    assert verdict("scaffold", "fedgc").code == WEIGHTS
    assert task_kinds("scaffold+fedgc") == task_kinds("fedgc")
    assert task_kinds("fedgc+fedlc") == ["classification"]
