"""Mini-batches: epochs, steps that continue, steps at random."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from each import each
from fedkeel.base.rng import generator
from fedkeel.config import Local
from fedkeel.data.batches import count_examples, count_steps, plan
from fedkeel.errors import DataError


def local(**more):
    return Local(lr=0.1, **more)


def lengths(settings, n, **more):
    return [len(batch) for batch in plan(settings, n, 0, 0, 0, **more)]


@pytest.mark.parametrize(
    ("n", "size", "never", "single", "always"),
    [
        (5, 2, [2, 2, 1], [2, 2], [2, 2]),
        (6, 4, [4, 2], [4, 2], [4]),
        (6, 3, [3, 3], [3, 3], [3, 3]),
        (3, 4, [3], [3], [3]),
        (1, 4, [1], [1], [1]),
        (3, 1, [1, 1, 1], [1, 1, 1], [1, 1, 1]),
        (4, "all", [4], [4], [4]),
    ],
)
def test_a_short_last_batch(n, size, never, single, always):
    for drop, expected in (("never", never), ("single", single), ("always", always)):
        for epochs in (1, 3):
            settings = local(epochs=epochs, batch_size=size, drop_last=drop)
            assert lengths(settings, n) == expected * epochs
        settings = local(steps=2 * len(expected), batch_size=size, drop_last=drop)
        assert lengths(settings, n) == expected * 2


def test_epochs_are_consecutive_permutations_of_one_stream():
    batches = plan(local(epochs=3, batch_size=4), 10, seed=2, round=5, client=7)
    random = generator(2, "batches", 5, 7)
    for epoch in range(3):
        order = np.concatenate(batches[3 * epoch : 3 * epoch + 3])
        assert order.dtype == np.int64
        np.testing.assert_array_equal(order, random.permutation(10))


def test_dropped_batches_leave_the_other_epochs_alone():
    kept = plan(local(epochs=2, batch_size=4), 10, 0, 0, 0)
    cut = plan(local(epochs=2, batch_size=4, drop_last="always"), 10, 0, 0, 0)
    assert [b.tolist() for b in cut] == [kept[i].tolist() for i in (0, 1, 3, 4)]


@each("size", [1, 4, 10, 64])
@each("drop", ["never", "single", "always"])
def test_steps_continue_across_rounds(size, drop):
    """Rounds of any lengths, laid end to end, are one long round; no epoch mixes two passes."""
    whole = plan(local(steps=23, batch_size=size, drop_last=drop), 9, 0, 0, 3)
    done, pieces = 0, []
    for round, count in enumerate((5, 1, 7, 10)):
        settings = local(steps=count, batch_size=size, drop_last=drop)
        pieces += plan(settings, 9, 0, 10 + round, 3, done)
        done += count
    assert [b.tolist() for b in pieces] == [b.tolist() for b in whole]
    each = count_steps(local(epochs=1, batch_size=size, drop_last=drop), 9)
    for p in range(23 // each):
        order = np.concatenate(whole[p * each : (p + 1) * each])
        np.testing.assert_array_equal(
            order, generator(0, "passes", p, 3).permutation(9)[: len(order)]
        )
        assert len(order) == (8 if size == 4 and drop != "never" else 9)


def test_continuing_does_not_depend_on_the_round_but_on_the_client():
    settings = local(steps=3, batch_size=4)
    a, b, c = (plan(settings, 50, 0, r, k, 4) for r, k in ((0, 1), (9, 1), (0, 2)))
    assert [x.tolist() for x in a] == [x.tolist() for x in b]
    assert [x.tolist() for x in a] != [x.tolist() for x in c]


def test_random_batches_are_drawn_without_replacement():
    batches = plan(local(steps=200, batch_size=4, sampling="random"), 10, 0, 0, 0)
    assert all(len(set(b.tolist())) == 4 and b.min() >= 0 and b.max() < 10 for b in batches)
    seen = np.bincount(np.concatenate(batches), minlength=10)  # mean 80, deviation 6.9
    assert (np.abs(seen - 80) < 5 * 6.9).all()
    assert len({tuple(sorted(b.tolist())) for b in batches}) > 100


@pytest.mark.parametrize(
    "settings",
    [local(epochs=2, batch_size="all"), local(steps=2, batch_size="all", sampling="random")],
)
def test_one_batch_of_all_is_in_stored_order(settings):
    assert [b.tolist() for b in plan(settings, 4, 0, 0, 0, 5)] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("settings", [local(epochs=1), local(steps=2, sampling="random")])
def test_streams_are_named_by_seed_round_and_client(settings):
    base = plan(settings, 30, 0, 0, 0)
    again = plan(settings, 30, 0, 0, 0, done=3)
    assert [b.tolist() for b in base] == [b.tolist() for b in again]
    for name in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert [b.tolist() for b in plan(settings, 30, *name)] != [b.tolist() for b in base]


@given(
    n=st.integers(1, 40),
    size=st.one_of(st.integers(1, 50), st.just("all")),
    work=st.one_of(
        st.builds(lambda epochs: {"epochs": epochs}, st.integers(1, 4)),
        st.builds(
            lambda steps, sampling: {"steps": steps, "sampling": sampling},
            st.integers(1, 60),
            st.sampled_from(["continue", "random"]),
        ),
    ),
    drop=st.sampled_from(["never", "single", "always"]),
    done=st.integers(0, 90),
)
def test_a_pass_takes_each_example_once_and_a_batch_none_twice(n, size, work, drop, done):
    """Of a pass at most its short last batch is left out, as `drop_last` says."""
    settings = local(**work, batch_size=size, drop_last=drop)
    batches = plan(settings, n, 3, 1, 2, done)
    assert count_steps(settings, n) == len(batches)
    assert count_examples(settings, n, done) == sum(map(len, batches))
    full = n if size == "all" else min(size, n)
    for batch in batches:
        assert 1 <= len(batch) <= full
        assert len(set(batch.tolist())) == len(batch)
        assert set(batch.tolist()) <= set(range(n))
    if settings.sampling == "random" and settings.steps:
        assert all(len(batch) == full for batch in batches)
        return
    per_pass = count_steps(local(epochs=1, batch_size=size, drop_last=drop), n)
    rest = n % full
    dropped = rest if drop == "always" or (drop == "single" and rest == 1) else 0
    begin = 0 if settings.epochs or size == "all" else -done % per_pass
    for first in range(begin, len(batches) - per_pass + 1, per_pass):
        rows = np.concatenate(batches[first : first + per_pass])
        assert len(np.unique(rows)) == len(rows) == n - dropped


def test_a_client_without_examples_is_refused():
    for call in (
        lambda: plan(local(epochs=1), 0, 0, 0, 0),
        lambda: count_steps(local(epochs=1), 0),
    ):
        with pytest.raises(DataError, match="without examples"):
            call()
