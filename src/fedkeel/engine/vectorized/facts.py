"""What the vectorized engine finds out about a setup before it trains."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np

from fedkeel.data import batches
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.compiler.dropout_masks import RandomDraws, random_draws
from fedkeel.engine.compiler.low_rank_matrix import saves_work
from fedkeel.engine.vectorized.memory_format import ConvolutionWatch
from fedkeel.engine.vectorized.padding import method_obstacle, network_obstacle
from fedkeel.method.context import Population
from fedkeel.method.plugins import user_modules
from fedkeel.task.batch import Batch

SHORT_ROUND = 8
"""Steps of a round that is compiled as a whole, at most."""


@dataclass(frozen=True)
class SetupFacts:
    """What is known about a setup before clients are trained side by side.

    Args:
        not_compilable: why steps of the model cannot be compiled, "" where they may be.
        draws: what the network draws in training; None where it draws nothing.
        padding_obstacle: why batches may not be padded, "" where they may.
        short_rounds: whether rounds are so short and alike that they are compiled as a whole.
        channels_last: whether a single client's images may be laid out with channels last.
    """

    not_compilable: str
    draws: RandomDraws | None
    padding_obstacle: str
    short_rounds: bool
    channels_last: bool = True

    @property
    def pads(self) -> bool:
        """Whether batches may be padded: neither other examples nor any part see the padding."""
        return not self.padding_obstacle


_FACTS: dict[int, SetupFacts] = {}
"""Facts by the id of their setup, as long as the setup exists."""


def establish(setup: TrainingSetup) -> SetupFacts:
    """Return what decides how a setup is trained; the trials are made once for each setup."""
    if id(setup) not in _FACTS:
        _FACTS[id(setup)] = _try_out(setup)
        weakref.finalize(setup, _FACTS.pop, id(setup), None)
    return _FACTS[id(setup)]


def _try_out(setup: TrainingSetup) -> SetupFacts:
    """Find out what decides how a setup is trained, by trials on a few examples."""
    network, short = setup.training.network, has_short_rounds(setup)
    if reason := why_not_compiled(setup):
        return SetupFacts(reason, RandomDraws(False, reason=reason), reason, short)
    with ConvolutionWatch() as watch:
        draws = random_draws(network, few_examples(setup))
    return SetupFacts("", draws, _padding_obstacle(setup, draws), short, watch.may_be_last)


PUBLIC_FIRST = "clients train on public inputs first, one client at a time"
"""Why a method with `PublicTraining` is not compiled."""


def why_not_compiled(setup: TrainingSetup) -> str:
    """Return why no step of a setup is compiled, as far as no trial is needed; "" for no reason."""
    if not setup.training.plan.makes_steps:
        return "local training is your own, and trains one client at a time"
    if setup.training.plan.public_training is not None:
        return PUBLIC_FIRST
    if setup.others is not None:
        return "clients have different networks, and train one at a time"
    if setup.training.local.sampling == "poisson":
        return "batches drawn by Poisson sampling differ in size, and may be empty"
    return setup.training.network.traits.why_not_traceable


def _padding_obstacle(setup: TrainingSetup, draws: RandomDraws | None) -> str:
    plan, network, batch = setup.training.plan, setup.training.network, few_examples(setup)
    if draws is not None and plan.preparations:
        return "the model draws random numbers for prepared examples"
    if setup.training.local.piece_size and (draws is not None or network.mixes_examples):
        return "examples of a piece of a step see each other, or the model draws for each piece"
    obstacle = network_obstacle(network, batch, draws)
    if obstacle or not user_modules(plan.parts):  # the package's own parts bear padding
        return obstacle
    clients = len(setup.federation)
    population = Population.of(network, clients, clients)
    classes = setup.federation.data.classes
    return method_obstacle(setup.training, population, classes, batch, draws)


def few_examples(setup: TrainingSetup) -> Batch:
    """Return up to three examples, from all over the training set."""
    data = setup.federation.data
    rows = np.unique(np.linspace(0, len(data) - 1, 3).astype(np.int64))
    few = data.take(rows).to(setup.training.network.dtype)
    return Batch(few.x, few.y)


def has_short_rounds(setup: TrainingSetup) -> bool:
    """Return whether all rounds are so short and alike that few compiled whole rounds serve all."""
    sizes = np.unique(setup.federation.sizes[setup.federation.sizes > 0])
    if len(sizes) > SHORT_ROUND:
        return False
    local = setup.training.local
    if max(batches.count_steps(local, int(n)) for n in sizes) > SHORT_ROUND:
        return False
    shapes = {tuple(map(len, batches.plan(local, int(n), 0, 0, 0))) for n in sizes}
    return len(shapes) <= 2


def has_low_rank_rounds(setup: TrainingSetup) -> bool:
    """Return whether changes of matrices in a short round are products of factors: less work.

    Clients of several runs start at different matrices, so that there is no such product for all.
    """
    local, sizes = setup.training.local, setup.federation.sizes
    rank = batches.count_examples(local, int(sizes[sizes > 0].min()))
    matrices = [t.shape for t in setup.training.network.params.values() if t.ndim == 2]
    return any(saves_work(rank, a, b) for a, b in matrices)
