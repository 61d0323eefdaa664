"""Which examples make up each mini-batch of a client's round.

A plan is a pure function of (settings, number of examples, seed, round, client, steps done): it is
the same for every method and engine and after any restart, and what a client remembers from round
to round is one number, the steps it has done. N is the client's number of examples, B the number of
examples of a step, S the number of steps. Where gradients are accumulated, B is that many times the
batch size: the mini-batches of a step lie side by side in one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkeel.base.rng import generator
from fedkeel.config import Local
from fedkeel.data.dataset import Ints
from fedkeel.errors import DataError


@dataclass(frozen=True)
class _PassBatches:
    """The batches of one pass over N examples: `count` of `size` examples, the last of `last`."""

    size: int
    count: int
    last: int

    def batch(self, order: Ints, b: int) -> Ints:
        return order[b * self.size : (b + 1) * self.size]


def plan(
    local: Local,
    n: int,
    seed: int,
    round: int,
    client: int,
    done: int = 0,
    random: np.random.Generator | None = None,
) -> list[Ints]:
    """Return the positions, within the client's examples, of each mini-batch of a round.

    - `epochs`: each epoch is a fresh permutation, one after the other from the stream (seed,
      "batches", round, client), divided into batches of B.
    - `steps`, ``continue``: step number t of the client's life, t = done, done + 1, ..., is batch
      t mod M of pass t // M, where a pass has M batches; pass p is the permutation from the stream
      (seed, "passes", p, client). So it goes on across rounds, as GradMA's cycling loader.
    - `steps`, ``random``: each batch is min(B, N) examples drawn without replacement, one batch
      after the other from the stream (seed, "batches", round, client).
    - `steps`, ``poisson``: each example is in each batch with probability min(B, N) / N, by that
      stream: N numbers for each batch. A batch may be empty.

    With ``batch_size = "all"`` every batch is 0..N-1 in stored order, and nothing is drawn.

    Args:
        local: epochs or steps, batch size, sampling, and what happens to a short last batch.
        n: N >= 1.
        seed: seed of the run.
        round: round number, from 0.
        client: index of the client.
        done: number of steps that the client has done in earlier rounds; for ``continue``.
        random: the stream (seed, "batches", round, client), fresh, where it is at hand.

    Returns:
        S arrays of positions in 0..N-1, in order; they may share memory.

    >>> local = Local(lr=0.1, epochs=2, batch_size=2)
    >>> [len(batch) for batch in plan(local, n=5, seed=0, round=0, client=0)]
    [2, 2, 1, 2, 2, 1]
    """
    per_pass = _pass_batches(local, n)
    count = _steps(local, per_pass)
    if local.batch_size == "all":
        return [np.arange(n)] * count
    if local.steps is not None and local.sampling == "continue":
        return _batches_across_rounds(per_pass, n, seed, client, range(done, done + count))
    random = random or generator(seed, "batches", round, client)
    if local.sampling == "poisson":
        return [np.flatnonzero(random.random(n) < per_pass.size / n) for _ in range(count)]
    if local.steps is not None:
        size = min(per_pass.size, n)
        return [random.choice(n, size, replace=False) for _ in range(count)]
    batches: list[Ints] = []
    for _ in range(count // per_pass.count):
        order = random.permutation(n)
        batches += [per_pass.batch(order, b) for b in range(per_pass.count)]
    return batches


def draws_each_round(local: Local) -> bool:
    """Return whether each round draws its batches anew, from a stream of its own."""
    return local.batch_size != "all" and (local.steps is None or local.sampling != "continue")


def count_steps(local: Local, n: int) -> int:
    """Return S, the number of mini-batches of a round, without drawing them.

    >>> count_steps(Local(lr=0.1, epochs=2, batch_size=2), 5)
    6
    """
    return _steps(local, _pass_batches(local, n))


def count_examples(local: Local, n: int, done: int = 0) -> int:
    """Return the number of examples in a round's mini-batches, each as often as it occurs.

    With ``poisson`` it is the expected number, but for rounding.

    Args:
        local: as in `plan`.
        n: as in `plan`.
        done: as in `plan`; how many short batches a round of ``continue`` meets depends on it.

    >>> count_examples(Local(lr=0.1, steps=2, batch_size=4), 5)
    5
    """
    per_pass = _pass_batches(local, n)
    count = _steps(local, per_pass)
    if local.steps is not None and local.sampling in ("random", "poisson"):
        return count * min(per_pass.size, n)
    start = done if local.steps is not None else 0
    ends = (start + count) // per_pass.count - start // per_pass.count  # batches that end a pass
    return (count - ends) * per_pass.size + ends * per_pass.last


def _batches_across_rounds(
    per_pass: _PassBatches, n: int, seed: int, client: int, step_numbers: range
) -> list[Ints]:
    batches: list[Ints] = []
    current, order = -1, np.arange(0)
    for number in step_numbers:
        turn, b = divmod(number, per_pass.count)
        if turn != current:
            current, order = turn, generator(seed, "passes", turn, client).permutation(n)
        batches.append(per_pass.batch(order, b))
    return batches


def _steps(local: Local, per_pass: _PassBatches) -> int:
    return per_pass.count * local.epochs if local.epochs is not None else int(local.steps or 0)


def _pass_batches(local: Local, n: int) -> _PassBatches:
    if n < 1:
        raise DataError("A client without examples cannot train.", got=f"{n} examples")
    size = n if local.examples_per_step == "all" else min(local.examples_per_step, n)
    full, rest = divmod(n, size)
    short = (
        rest > 0 and local.drop_last != "always" and not (local.drop_last == "single" and rest == 1)
    )
    return _PassBatches(size, full + 1, rest) if short else _PassBatches(size, full, size)


def batches_per_pass(local: Local, n: int) -> int:
    """Return the number of mini-batches in one pass over a client's N examples.

    >>> batches_per_pass(Local(lr=0.1, epochs=3, batch_size=2), 5)
    3
    """
    return _pass_batches(local, n).count


def batch_sizes(local: Local, n: int) -> set[int]:
    """Return the numbers of examples that mini-batches of a client of N examples have.

    With ``poisson`` it is the expected number.

    >>> batch_sizes(Local(lr=0.1, epochs=3, batch_size=2), 5) == {2, 1}
    True
    """
    per_pass = _pass_batches(local, n)
    if local.sampling == "poisson":
        return {per_pass.size}
    return {per_pass.size, per_pass.last} if per_pass.count > 1 else {per_pass.last}
