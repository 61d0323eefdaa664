"""The steps of a secure sum: what adds up, what stays hidden, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeel.errors import CompositionError
from fedkeel.features.secure.collector import Collector
from fedkeel.features.secure.fixed_point import BITS, LARGEST, decoded, encoded
from fedkeel.features.secure.legality import refusal, refuse_single_updates
from fedkeel.features.secure.participant import Participant, Revealed, threshold
from fedkeel.features.secure.primitives import (
    SecureSumError,
    WrongSecretError,
    mask,
    new_key,
    public_key,
    shared_key,
)
from fedkeel.method.grammar import parse
from fedkeel.method.registry import REGISTRY

SIZE = 500


class Sum:
    """Participants that have exchanged keys, and a collector."""

    def __init__(self, count: int, silent: tuple[int, ...] = ()) -> None:
        self.people = {7 * k + 1: Participant.new(7 * k + 1, "run 0") for k in range(count)}
        self.keys = {k: one.public_keys for k, one in self.people.items()}
        self.least = threshold(count)
        self.collector = Collector("run 0", self.least, SIZE, self.keys)
        for number in [k for i, k in enumerate(self.people) if i not in silent]:
            after, texts, bound = self.people[number].share(self.keys, self.least)
            self.people[number] = after
            self.collector.take_shares(number, texts, bound)
        random = np.random.default_rng(count)
        self.values = {k: random.normal(size=SIZE) for k in self.people}
        self.sent: dict[int, np.ndarray] = {}

    def send(self, number: int) -> None:
        self.people[number], vector = self.people[number].masked(
            encoded(self.values[number]), *self.given(number)
        )
        self.sent[number] = vector
        self.collector.add(number, vector)

    def given(self, number: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
        return self.collector.texts_for(number), self.collector.commitments_for(number)

    def reveal(self, number: int) -> Revealed:
        return self.people[number].reveal(self.collector.survivors, self.collector.dropped)

    def total(self, helpers: int) -> np.ndarray:
        for number in self.collector.survivors[:helpers]:
            self.collector.take_revealed(number, self.reveal(number))
        return decoded(self.collector.unmasked())


@settings(max_examples=8)
@given(st.integers(2, 6), st.data())
def test_the_sum_is_that_of_who_has_sent(count: int, data: st.DataObject) -> None:
    """Word for word, modulo 2^64; whoever is silent or drops out, while enough are left."""
    least = threshold(count)
    silent = data.draw(st.sets(st.integers(0, count - 1), max_size=count - least))
    made = Sum(count, tuple(silent))
    spare = len(made.collector.shared) - least
    senders = made.collector.shared[data.draw(st.integers(0, spare)) :]
    sizes = st.floats(-LARGEST / count, LARGEST / count)  # times its share of a mean
    for number in senders:
        made.values[number][:4] = data.draw(st.lists(sizes, min_size=4, max_size=4))
        made.send(number)
    helpers = data.draw(st.integers(least, len(senders)))
    for number in made.collector.survivors[:helpers]:
        made.collector.take_revealed(number, made.reveal(number))
    words = sum((encoded(made.values[k]) for k in senders), np.zeros(SIZE, np.uint64))
    unmasked = made.collector.unmasked()
    assert np.array_equal(unmasked, words)
    expected = sum(made.values[k] for k in senders)
    rounding = len(senders) * 2.0 ** -(BITS + 1) + LARGEST * 2.0**-50  # of float64 itself
    assert np.abs(decoded(unmasked) - expected).max() <= rounding
    rest = np.abs(decoded(unmasked) - expected)[4:]  # small numbers
    assert rest.max() <= len(senders) * 2.0 ** -(BITS + 1)


def test_what_is_sent_looks_random() -> None:
    """Each bit is 1 for half of the numbers, and sums of too few are no closer to the values."""
    made = Sum(4)
    for number in list(made.people):
        made.send(number)
    words = np.concatenate(list(made.sent.values()))
    shares = [float(((words >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(64)]
    assert max(abs(share - 0.5) for share in shares) < 6 * 0.5 / np.sqrt(len(words))
    three = list(made.sent.values())[:3]
    partly = decoded(three[0] + three[1] + three[2])
    expected = sum(list(made.values.values())[:3])
    assert np.median(np.abs(partly - expected)) > LARGEST / 2
    with pytest.raises(SecureSumError, match="Too few"):
        made.total(helpers=made.least - 1)


def test_masks_depend_on_every_bit_of_their_key() -> None:
    key = bytearray(32)
    plain = mask(bytes(key), 100)
    for place in (0, 17, 31):
        key[place] ^= 1
        assert (mask(bytes(key), 100) != plain).all()
    mine, theirs = new_key(), new_key()
    keys = [shared_key(mine, public_key(theirs), purpose) for purpose in ("a", "b")]
    assert keys[0] == shared_key(theirs, public_key(mine), "a") != keys[1]


def test_a_participant_does_not_reveal_what_would_unmask_a_single_vector() -> None:
    made = Sum(5)
    numbers = list(made.people)
    for number in numbers[:4]:
        made.send(number)
    one, all_but_last = made.people[numbers[0]], numbers[:4]
    for survivors, dropped in (
        (numbers, numbers[4:]),  # both secrets of one
        (all_but_last, []),  # somebody is missing
        (numbers[:2], numbers[2:]),  # too few
        (numbers[1:], numbers[:1]),  # it has sent a vector itself
        ([*all_but_last, 99], numbers[4:]),  # a stranger
    ):
        with pytest.raises(SecureSumError):
            one.reveal(survivors, dropped)
    with pytest.raises(SecureSumError, match="unsafe"):
        made.people[numbers[4]].reveal(all_but_last, numbers[4:])
    one.reveal(all_but_last, numbers[4:])


def test_a_vector_is_masked_once_and_never_for_too_few() -> None:
    made = Sum(5)
    number, *others = made.people
    texts, bound = made.given(number)
    few = {k: texts[k] for k in others[:1]}
    vector = encoded(made.values[number])
    with pytest.raises(SecureSumError, match="too few"):
        made.people[number].masked(vector, few, bound)
    made.send(number)
    with pytest.raises(SecureSumError, match="out of turn"):
        made.people[number].masked(vector, texts, bound)


def changed(shares: Mapping[int, bytes], *numbers: int) -> dict[int, bytes]:
    return {k: bytes(4) + v[4:-1] + b"x" if k in numbers else v for k, v in shares.items()}


@pytest.mark.parametrize("what", ["seeds", "keys"])
def test_who_reveals_a_wrong_share_is_named_and_the_others_make_the_sum(what: str) -> None:
    made = Sum(6)
    gone, liar, *rest = made.people
    for number in (liar, *rest):
        made.send(number)
    shares = made.reveal(liar)
    wrong = changed(getattr(shares, what), gone, rest[2])
    with pytest.raises(WrongSecretError, match="reveals a wrong share") as error:
        made.collector.take_revealed(liar, replace(shares, **{what: wrong}))
    assert error.value.number == liar
    assert liar not in made.collector.revealed
    expected = sum(made.values[k] for k in (liar, *rest))
    assert np.abs(made.total(6) - expected).max() <= 5 * 2.0 ** -(BITS + 1)


@pytest.mark.parametrize("way", ["wrong texts", "wrong commitments", "other secrets"])
def test_who_gives_wrong_shares_is_named_and_nobody_else(way: str) -> None:
    """It may give the others what it is not bound to, or be bound to shares of another secret."""
    made = Sum(5)
    liar, *honest = made.people
    person, bound = made.people[liar], made.collector.commitments[liar]
    if way == "wrong texts":
        texts = {k: text[:-1] + b"x" for k, text in made.collector.texts_for(liar).items()}
        made.collector.take_shares(liar, texts, bound)
    elif way == "wrong commitments":
        made.collector.commitments[liar] = replace(
            bound, shares={k: bytes(len(digests)) for k, digests in bound.shares.items()}
        )
    else:
        other = replace(Participant.new(liar, "run 0"), cipher_key=person.cipher_key)
        other = replace(other, mask_key=person.mask_key)
        _, texts, more = other.share(made.keys, made.least)
        made.collector.take_shares(liar, texts, replace(more, seed=bound.seed))
    for number in made.people:
        made.send(number)
    for number in honest:
        made.collector.take_revealed(number, made.reveal(number))
    with pytest.raises(WrongSecretError) as error:
        made.collector.unmasked()
    assert error.value.number == liar


def test_one_who_says_that_it_could_not_use_a_share_puts_nobody_out() -> None:
    made = Sum(5)
    liar, victim, *rest = made.people
    for number in made.people:
        made.send(number)
    shares = made.reveal(liar)
    silent = replace(shares, seeds={k: v for k, v in shares.seeds.items() if k != victim})
    made.collector.take_revealed(liar, silent)
    for number in rest[:2]:
        made.collector.take_revealed(number, made.reveal(number))
    with pytest.raises(SecureSumError, match="Too few") as error:
        made.collector.unmasked()
    assert not isinstance(error.value, WrongSecretError)
    made.collector.take_revealed(rest[2], made.reveal(rest[2]))
    expected = sum(made.values.values())
    assert np.abs(decoded(made.collector.unmasked()) - expected).max() <= 5 * 2.0 ** -(BITS + 1)


def test_keys_that_cannot_be_right_are_refused() -> None:
    one, other = Participant.new(1, "s"), Participant.new(2, "s")
    keys = {1: one.public_keys, 2: other.public_keys}
    for wrong in (
        {1: one.public_keys, 2: one.public_keys},  # a key is there twice
        {1: other.public_keys, 2: one.public_keys},  # its own is another
        {2: other.public_keys},
    ):
        with pytest.raises(SecureSumError, match="public keys"):
            one.share(wrong, 2)
    with pytest.raises(SecureSumError, match="too few"):
        one.share(keys, 3)
    zero = {1: one.public_keys, 2: replace(other.public_keys, cipher=bytes(32))}
    with pytest.raises(SecureSumError, match="is not valid"):
        one.share(zero, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -2 * LARGEST])
def test_numbers_that_would_wrap_around_are_refused(value: float) -> None:
    with pytest.raises(SecureSumError, match="cannot take"):
        encoded(np.array([0.0, value]))
    extremes = np.array([LARGEST, -LARGEST, 2.0**-BITS])
    assert (decoded(encoded(extremes)) == extremes).all()


def test_methods_that_need_single_updates_are_refused() -> None:
    """The capability decides, and what a method sends beside; each reason names a part."""
    refused = {name: found for name in REGISTRY if (found := refusal(parse(name)))}
    assert {"fedgh", "fedgc", "median", "krum", "mifa", "mime", "topk", "fednova"} <= set(refused)
    sums = {"fedavg", "scaffold", "feddyn", "fedadam", "dpclient", "fedcurv", "fedexp", "gcfed"}
    assert not sums & set(refused)
    for name in ("fedgh", "scaffold+mime", "fedavg+quantise"):
        with pytest.raises(CompositionError, match="secure aggregation"):
            refuse_single_updates(parse(name))
