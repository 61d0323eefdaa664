"""Whether clients of runs that differ in numbers of the method can share steps, found out by two.

A part may look at its number (`if self.tau == 0`), or give it to a function that takes no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.vectorized.batching import ClientGroup, PaddedSizes
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.engine.vectorized.facts import SetupFacts, establish
from fedkeel.engine.vectorized.memory import uncompiled
from fedkeel.engine.vectorized.run_inputs import PlacedRun
from fedkeel.engine.vectorized.run_numbers import with_numbers
from fedkeel.engine.vectorized.strategy import Strategy
from fedkeel.engine.vectorized.trial import of_few_steps, smallest_clients
from fedkeel.errors import first_line
from fedkeel.method.context import Message
from fedkeel.tree import State, Tree, walk

STEPS = 2
"""Steps that are tried: in the first one a client is where it began, so nothing pulls it back."""

LOOKED_AT = "a part decides by the number, or gives it to a function that takes no tensor"


def shared_numbers(
    setup: TrainingSetup, message: Message, others: Mapping[str, float]
) -> dict[str, str]:
    """Return why runs that differ in numbers do not train side by side, "" where they do, by name.

    Args:
        setup: method, model, data and seed of one run.
        message: any message of that run.
        others: the numbers of another run, by name, where they differ.
    """
    facts = replace(establish(setup), short_rounds=False)
    first = of_few_steps(setup, STEPS)
    if not _obstacle(first, facts, message, others):
        return dict.fromkeys(others, "")
    return {name: _obstacle(first, facts, message, {name: other}) for name, other in others.items()}


def _obstacle(
    first: TrainingSetup, facts: SetupFacts, message: Message, others: Mapping[str, float]
) -> str:
    """Return why two runs cannot share steps and the end of a round, "" where they can.

    Each has to give what it gives beside one of its own numbers, whose steps hold them.
    """
    try:
        second = replace(first, training=with_numbers(first.training, others))
        with use_numerics(first.precision):
            pairs = [_trained([run, run], facts, message, ()) for run in (first, second)]
            both = _trained([first, second], facts, message, tuple(others))
        for row, pair in enumerate(pairs):
            if isinstance(pair, str):
                return pair
            if isinstance(both, str):
                return LOOKED_AT
            if not all(_are_close(t[row], both[path][row]) for path, t in pair.items()):
                return "a step gives something else where the numbers are inputs"
    except Exception as error:  # of a part that is not made for such numbers
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def _trained(
    setups: Sequence[TrainingSetup], facts: SetupFacts, message: Message, varied: tuple[str, ...]
) -> Tree | str:
    """Return what comes of a client of each run that makes some steps beside the others, by path.

    A text says why they do not train side by side.
    """
    first, cpu = setups[0], torch.device("cpu")
    strategy = replace(Strategy.choose(facts, len(setups), cpu), round_end="side by side")
    trainer = VectorizedTrainer(
        first,
        len(setups),
        facts=facts,
        strategy=strategy,
        fixed=PaddedSizes.of(first),
        varied=varied,
        loop=uncompiled,
    )
    [job] = smallest_clients(first, 1)
    waiting = [
        group
        for setup in setups
        for group in ClientGroup.single_clients(
            trainer.inputs(PlacedRun(setup, setup, varied), message, lambda _: None), [job]
        )
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # dropout draws the same each time
        groups = list(trainer.train(waiting))
    if trainer.reasons:
        return trainer.reasons[-1]
    clients = groups[0].clients
    kept: dict[str, Any] = dict(clients.client_state.state)
    state: State = {**clients.state, "kept": kept, "loss": clients.loss}
    return dict(walk(state))


def _are_close(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are the same up to rounding."""
    if not first.is_floating_point():
        return torch.equal(first, second)
    root = torch.finfo(first.dtype).eps ** 0.5
    largest = float(first.nan_to_num().abs().max()) if first.numel() else 0.0
    return torch.allclose(first, second, rtol=root, atol=root * largest, equal_nan=True)
