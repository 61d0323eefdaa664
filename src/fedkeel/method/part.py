"""What every part of a method has: a name, a paper, and what it needs and breaks."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field, fields, replace
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
    ONE_MODEL = "one model at the server, which all clients of a round receive"
    LOCAL_STEPS = "local steps that fedkeel makes"
    ROOT_EXAMPLES = "examples at the server, on which it trains as a client does"
    PUBLIC_INPUTS = "public inputs, the same ones at every client"
    OWN_STEPS_ALONE = "no local steps but those on a client's own examples"


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
class Traits:
    """What engines and the server's round have to know of a part beyond its roles.

    A part states, in one line, only those that differ from the default.

    Args:
        needs_only_sum: the server half of an `Upload` uses only the sum of what the clients send.
            Engines may then add the uploads up, so that `cohort.uploads` has sums over some of the
            clients, [G, ...], in place of [K, ...].
        from_last_round_only: a new `ClientState` depends only on the client's last round and not
            on its former state. Engines may then store its matrices as products of two small
            factors when the round had few examples. Results do not depend on it.
        server_holds_sum: the part's server state is a sum over what the clients keep as their
            `ClientState`. When a client loses its state, the sum can no longer be corrected, so the
            part starts again from its first states, at the server and at all clients.
        takes_stale_updates: a server half stays right where clients began at different models. The
            part's docstring says why.
        preserves_penalty_pull: a penalty's gradient reaches the local step as it is. A penalty such
            as FedProx's pulls the model back in each local step, and FedNova and SCAFFOLD count
            that `Penalty.pull` in the length of the local path, by which they divide. It is False
            for a part that takes the gradient at another point, or scales it by something that the
            data decide: the pull is then left out of the length, as if the method had no penalty.
        uses_weights: the clients' weights change the aggregate of a `Reduction`. A run that sets
            `weights` for a part without them is warned.
        counts_absent: the aggregate of a `Reduction` is also of clients that did not reply. The
            server then makes a step in a round without replies too: `reduce` is also called with no
            updates. A part that acts on the aggregate by what the round's clients have sent, an
            `Upload`, has nothing to go by then, and beside it such a round changes nothing.
        hides_updates: the aggregate of a `Reduction` is all that may be used after it, such as a
            sum with noise. `updates` are then that aggregate, once for each of the K clients that
            are expected, and the cohort does not say who they were. `reduce` is also called where
            nobody has replied, with no updates. Such a part breaks PER_CLIENT_UPDATES.
        merges_updates: a `CohortTransform` may return fewer updates, which then count equally. Such
            a part breaks SEPARATE_UPDATES: reductions, tables and states by client do not go with
            it.
        updates_from_present: with a `ServerPolicy`, an update is the client's model minus the
            server's present one, in place of the one that the client was sent.
        keeps_statistics: with a `Personal` part or a `ReceivedModel`, the model's buffers, such as
            running means, stay at the client too.
        shares_nothing: a `Personal` part keeps the whole model at the client, its buffers too. Such
            a part breaks SHARED_PARAMETERS.
        is_personal_model: where a `LocalStart` lets a client begin, or else what a `ReceivedModel`
            picks for it, is also its personal model in an evaluation.
        sends_rows: a `Broadcast` has a row for each of the C clients, tensors [C, ...]. A client is
            sent only its own, which its `ReceivedModel` makes the received model, in place of the
            global one.
    """

    needs_only_sum: bool = False
    from_last_round_only: bool = False
    server_holds_sum: bool = False
    takes_stale_updates: bool = False
    preserves_penalty_pull: bool = True
    uses_weights: bool = True
    counts_absent: bool = False
    hides_updates: bool = False
    merges_updates: bool = False
    updates_from_present: bool = False
    keeps_statistics: bool = False
    shares_nothing: bool = False
    is_personal_model: bool = False
    sends_rows: bool = False


@dataclass(frozen=True)
class Part(ABC):
    """A piece of a method: hyper-parameters, and the roles its class inherits."""

    name: ClassVar[str]
    """Unique name, which is also its namespace of state and messages, e.g. ``fedgc.cgc``."""
    paper: ClassVar[str] = ""
    """Citation key in papers.bib; other methods share the names FedGC and FedGH. "" for none."""
    weights: ClassVar[Weights | None] = None
    """The paper's client weights, where it states any."""
    needs: ClassVar[frozenset[Capability]] = frozenset()
    """What the part asks of model, engine and other parts, beside what its roles and other base
    classes ask. A method whose needs are not met is refused before anything is trained. A part with
    a role that acts on shared parameters, such as a `Penalty`, needs SHARED_PARAMETERS without
    saying so."""
    breaks: ClassVar[frozenset[Capability]] = frozenset()
    """What no other part of the method can have beside this one. A `Preparation` that is also a
    `Criterion`, a `LossTerm` or a `Penalty` breaks EXAMPLE_LOSSES and SURVEYS without saying so."""
    traits: ClassVar[Traits] = Traits()
    """What differs from the usual; `traits_of` reads it."""

    def __init_subclass__(cls) -> None:
        """Add the needs of the base classes to those that the class states."""
        super().__init_subclass__()
        if not isinstance(cls.needs, property):  # one that follows the hyper-parameters is whole
            stated = [vars(kind).get("needs", frozenset()) for kind in cls.__mro__]
            cls.needs = frozenset().union(*(n for n in stated if not isinstance(n, property)))


def traits_of(part: Part) -> Traits:
    """Return a part's traits; one may also be stated as a class attribute of its own name.

    >>> from fedkeel.method.roles import Upload
    >>> class Mine(Upload):
    ...     needs_only_sum = True
    ...     def upload(self, round):
    ...         return {}
    >>> traits_of(Mine()).needs_only_sum
    True
    """
    names = (f.name for f in fields(Traits))
    return replace(part.traits, **{n: getattr(part, n) for n in names if hasattr(part, n)})
