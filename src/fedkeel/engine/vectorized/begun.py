"""Starts of clients that were made before their rounds, of a `SteppedStart`; see `starts`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.vectorized.facts import establish
from fedkeel.method.context import Arrival, ByPart, part_state
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.part import traits_of
from fedkeel.method.roles import LocalStart, SteppedStart
from fedkeel.tree import State, Tree, substate, tensors

BEGUN = "begun"
"""Name, in what a part keeps for a client, of where the client begins."""


@dataclass(frozen=True)
class Begun(LocalStart):
    """Lets a client begin where a `SteppedStart` has ended before, if it has.

    Attributes:
        part: takes the steps of a client whose start was not made before.
    """

    part: ClassVar[SteppedStart]

    def local_start(self, received: Tree, arrival: Arrival) -> Tree:
        """Return what lies in the client state, and note what the part has noted."""
        if BEGUN not in arrival.client_state:
            return self.part.local_start(received, arrival)
        begun = substate(arrival.client_state, BEGUN)
        arrival.noted.update(substate(begun, "noted"))
        start = tensors(substate(begun, "start"))
        return {name: start[name] for name in received}


def stepped_start(setup: TrainingSetup) -> SteppedStart | None:
    """Return the part whose start takes steps that clients can take side by side, or None.

    They cannot where the network draws random numbers, batches may not be padded, or clients differ
    in what they receive or in their networks.
    """
    plan = setup.training.plan
    part, alike = plan.local_start, plan.receiver is None and setup.others is None
    if not (isinstance(part, SteppedStart) and alike):
        return None
    facts = establish(setup)
    return part if facts.pads and facts.draws is None and not facts.not_compilable else None


def begun_before(training: ClientTraining, part: SteppedStart) -> ClientTraining:
    """Return the training of clients whose starts lie in what they keep."""
    attributes = {"name": part.name, "traits": traits_of(part), "part": part}
    begun: LocalStart = type("Begun", (Begun,), attributes)()
    return replace(training, plan=replace(training.plan, local_start=begun))


def with_start(state: ByPart, part: str, begun: State) -> ByPart:
    """Return what a client keeps, with where it begins."""
    return {**state, part: {**part_state(state, part), BEGUN: begun}}
