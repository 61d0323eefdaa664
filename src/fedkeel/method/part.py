"""What every part of a method has: a name, a paper, and what it needs and breaks."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, ClassVar

from fedkeel.config import Weights


class Capability(Enum):
    """What a part may need of task, loop or engine, and another part may break."""

    HEAD = "a named classifier sub-module"
    INPUT_GRADIENT = "inputs that a gradient can be taken of"
    LINEAR_ACCUMULATION = "a local path that is a weighted sum of gradients"
    WHOLE_UPDATES = "updates that are as long as clients have moved, not divided by their steps"
    PER_CLIENT_UPDATES = "single clients' updates at the server"
    SEPARATE_UPDATES = "one update of each client at the server"
    STABLE_CLIENTS = "clients that keep their index from round to round"
    FEATURES = "a classifier whose inputs are the features"
    BLOCKS = "a network of several blocks, one after the other"
    CLASS_COUNTS = "how many examples of each class a client has"
    PLAIN_LOSS = "the plain cross-entropy for the task's loss, in whose place another one is put"
    LOSS_BY_EXAMPLE = "a task's loss that is the mean of the losses of its examples"
    EXAMPLE_LOSSES = "an objective that is a mean over examples, none of which sees another"
    NOISE = "random numbers in every step"
    SOFT_TARGETS = "a loss that takes what a model predicts for its target"
    CLASSES = "one label for each example, and a score for each class"
    SHARED_PARAMETERS = "parameters of the model that all clients share"
    SURVEYS = "an exchange of messages before local training"
    FRESH_UPDATES = "updates that all begin at the server's present model"


class Stage(IntEnum):
    """Order among transforms of one kind; within a stage, the order of the expression."""

    CORRECT = 0
    PROJECT = 1
    LIMIT = 2


def param(
    default: Any,  # noqa: ANN401 - the type is that of the field
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:  # noqa: ANN401
    """Declare a hyper-parameter with its range, which `compose` checks.

    Args:
        default: the value where none is given.
        ge: smallest value allowed.
        gt: lower bound, not allowed itself.
        le: largest value allowed.
        lt: upper bound, not allowed itself.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    return field(default=default, metadata={k: v for k, v in bounds.items() if v is not None})


@dataclass(frozen=True)
class Part(ABC):
    """A piece of a method: hyper-parameters, and the roles its class inherits."""

    name: ClassVar[str]
    """Unique name, which is also its namespace of state and messages, e.g. ``fedgc.cgc``."""
    paper: ClassVar[str]
    """Citation key in papers.bib; other methods share the names FedGC and FedGH."""
    weights: ClassVar[Weights | None] = None
    """The paper's client weights, where it states any."""
    needs: ClassVar[frozenset[Capability]] = frozenset()
    """What the part asks of model, engine and other parts. A method whose needs are not met is
    refused before anything is trained. A part with a role that acts on shared parameters, such as a
    `Penalty`, needs SHARED_PARAMETERS without saying so."""
    breaks: ClassVar[frozenset[Capability]] = frozenset()
    """What no other part of the method can have beside this one. A `Preparation` that is also a
    `Criterion`, a `LossTerm` or a `Penalty` breaks EXAMPLE_LOSSES and SURVEYS without saying so."""
    takes_stale_updates: ClassVar[bool] = False
    """Whether a server half of this part stays right where clients began at different models. Its
    docstring says why."""
    preserves_penalty_pull: ClassVar[bool] = True
    """Whether a penalty's gradient reaches the local step as it is. A penalty such as FedProx's
    pulls the model back in each local step, and FedNova and SCAFFOLD count that `Penalty.pull` in
    the length of the local path, by which they divide. Set it to False if this part takes the
    gradient at another point, or scales it by something that the data decide: the pull is then left
    out of the length, as if the method had no penalty."""
