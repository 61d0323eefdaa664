"""The messages between server and nodes: their kinds, headers and tensors.

Both ends work out for themselves which tensors a message has, and on what they have to agree.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from fedkeel.config import Settings
from fedkeel.data.read.scaling import Moments
from fedkeel.engine.base import ServerModel
from fedkeel.engine.message_state import message_state
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.rehearsal import SURVEY_PREFIX, with_empty_answers
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.features.attackers.feature import adversary_of, attack_of
from fedkeel.features.budget.feature import privacy_of
from fedkeel.flower.wire import Header
from fedkeel.method.part_digests import user_part_digests
from fedkeel.method.server_round import server_message
from fedkeel.task.network import Network
from fedkeel.tree import walk
from fedkeel.version import __version__

TRAIN, SURVEY, DESCRIBE = "train", "train.survey", "query.describe"
DESCRIBE_DATA = "query.describe_data"
"""Asks a node to describe itself for statistics: without the sums that only a training needs."""

DESCRIPTIONS = (DESCRIBE, DESCRIBE_DATA)
"""Types of the messages that ask a node to describe itself."""

EVALUATE, PICTURES, PERSONAL = "evaluate", "evaluate.pictures", "evaluate.personal"
"""Message types of Flower, with their actions."""

OK, RESTARTED, LOST = "ok", "restarted", "lost"
"""Statuses of a client after training: trained; trained without its lost client state; not trained,
because its client state is lost. Any other status says what went wrong."""

MAX_SIZE = 10**8
"""Examples of a client, and numbers in an input, that the server accepts in a node's description.
"""

MAX_REASONS = 10
"""Reasons that a node gives for how it trains, at most."""

Count = Annotated[int, Field(ge=0, le=MAX_SIZE)]


class Agreement(Settings):
    """Digests of what server and nodes have to agree on.

    Args:
        experiment: of version, method, local training, seed and precision. Data are not part of it.
        model: of the model that each end makes for itself: its code, and its numbers that are never
            sent.
    """

    experiment: str = Field(max_length=100)
    model: str = Field(max_length=100)

    @classmethod
    def of(cls, prepared: Prepared) -> Agreement:
        """Return the digests of a run."""
        settings, network = prepared.settings, prepared.setup.training.network
        facts = {
            "version": __version__,
            "method": prepared.plan.expression,
            "user parts": user_part_digests(prepared.plan.parts),
            "weights": prepared.plan.weights,
            "local": settings.local.model_dump(mode="json"),
            "seed": settings.seed,
            "dtype": settings.engine.dtype,
            "buffers": prepared.setup.training.buffers,
            "parameters": {k: list(v.shape) for k, v in network.params.items()},
        }
        if prepared.setup.own is not None:
            facts["training"] = prepared.setup.own.description.text
        if settings.flower.secure_aggregation:
            secure = ("secure_aggregation", "secure_minimum", "secure_norm", "quorum")
            facts["sums"] = settings.flower.model_dump(mode="json", include=set(secure))
            # nodes count on each other's noise, so they have to make the same
            privacy = privacy_of(settings)
            budget = privacy and privacy.model_dump(exclude={"key_file"})
            facts["noise"] = [budget, prepared.population.clients, settings.rounds]
        if "channels" in prepared.setup.federation.how:
            facts["channels"] = prepared.setup.federation.how["channels"]
        if attack_of(prepared) is not None:
            facts["adversary"] = adversary_of(settings).model_dump(mode="json")
        experiment = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8)
        model = _model_digest(network, prepared)
        return cls(experiment=experiment.hexdigest(), model=model)


def _model_digest(network: Network, prepared: Prepared) -> str:
    """Return a digest of a model, without the numbers that every message brings."""
    server = prepared.server
    local = {k: v for k, v in network.buffers.items() if k not in server.buffers}
    local |= prepared.setup.training.personal_params
    digest = hashlib.blake2b(network.describe().encode(), digest_size=8)
    for path, tensor in walk({"frozen": dict(network.frozen), "local": dict(local)}):
        digest.update(path.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class MessageSpecs:
    """Shape and type of each tensor of each message, by path.

    Args:
        training: what clients receive before they train.
        survey: what they receive before a survey.
        evaluation: what they receive to evaluate.
        personal: what they receive to evaluate their personal models.
        reply: what each sends after training.
        diagnostics: the diagnostics that go with it.
        answer: an answer to a survey.
        client_state: what each keeps on its node.
    """

    training: Mapping[str, TensorSpec]
    survey: Mapping[str, TensorSpec]
    evaluation: Mapping[str, TensorSpec]
    personal: Mapping[str, TensorSpec]
    reply: Mapping[str, TensorSpec]
    diagnostics: Mapping[str, TensorSpec]
    answer: Mapping[str, TensorSpec]
    client_state: Mapping[str, TensorSpec]

    @classmethod
    def of(cls, prepared: Prepared) -> MessageSpecs:
        """Return the specs of a run."""
        message = server_message(prepared.plan, prepared.server, 1.0)
        evaluation = replace(message, params=prepared.server.params, broadcast={})
        others = ServerModel.of(prepared.plan, prepared.server).broadcast
        personal = replace(evaluation, broadcast=others)
        reply = ["buffers/", "uploads/"]
        if prepared.plan.codec is None:  # else the update is among the uploads
            reply.append("update/")

        def below(prefix: str) -> dict[str, TensorSpec]:
            items = prepared.spec.items()
            return {k.removeprefix(prefix): v for k, v in items if k.startswith(prefix)}

        return cls(
            training=specs_of(message_state(with_empty_answers(message, prepared.spec))),
            survey=specs_of(message_state(message)),
            evaluation=specs_of(message_state(evaluation)),
            personal=specs_of(message_state(personal)),
            reply={k: v for k, v in prepared.spec.items() if k.startswith(tuple(reply))},
            diagnostics=below("diagnostics/"),
            answer=below(SURVEY_PREFIX),
            client_state=below("client_state/"),
        )


Finite = tuple[float, ...]


class ColumnSums(Settings):
    """Sums of a node's training inputs, for the scale that all nodes have in common.

    Args:
        count: numbers in each column.
        mean: mean of each column.
        squares: sum of the squared deviations from it.
    """

    count: int = Field(ge=1, le=MAX_SIZE * MAX_SIZE)
    mean: Finite = Field(min_length=1, max_length=MAX_SIZE)
    squares: Finite = Field(max_length=MAX_SIZE)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.squares) != len(self.mean):
            raise ValueError("the sums are of different numbers of columns")
        if min(self.squares) < 0:
            raise ValueError("'squares' has a number below 0")
        return self

    @classmethod
    def of(cls, moments: Moments) -> Self:
        """Return what is sent of moments."""
        mean, squares = (tuple(array.tolist()) for array in (moments.mean, moments.squares))
        return cls(count=moments.count, mean=mean, squares=squares)

    def moments(self) -> Moments:
        """Return the moments."""
        arrays = (torch.tensor(array, dtype=torch.float64) for array in (self.mean, self.squares))
        return Moments(self.count, *arrays)


class CommonScale(Settings):
    """How the inputs of all nodes are standardised: (input - mean) / deviation.

    Args:
        mean: mean of each column.
        deviation: deviation of each, > 0.
    """

    mean: Finite
    deviation: Finite


class ClientRequest(Settings):
    """What a request says of one client.

    Args:
        client: stable client index.
        steps_done: local steps that it has made in earlier rounds.
        state_round: the round after which the server last took its client state, 0 for none.
        state_digest: digest of that client state.
        checkpoint_round: the same round at the server's last checkpoint, to which the server may
            go back.
    """

    client: int
    steps_done: int
    state_round: int
    state_digest: str
    checkpoint_round: int


class Request(Header):
    """Header of what a node is asked to do.

    Args:
        agreement: what server and node have to agree on.
        data_digest: digest of the node's data when the run began.
        lr: local learning rate of the round.
        clients: the clients that are asked.
        scale: how the inputs of all nodes are standardised, None where they are not, or each node
            does so by its own examples.
    """

    agreement: Agreement
    data_digest: str
    lr: float
    clients: tuple[ClientRequest, ...]
    scale: CommonScale | None = None

    @property
    def client_ids(self) -> list[int]:
        """The indices of the clients that are asked."""
        return [item.client for item in self.clients]


class ClientResult(Settings):
    """What a node says of one client after training.

    Args:
        client: stable client index.
        status: `OK`, `RESTARTED`, `LOST`, or what went wrong.
        steps: local steps made.
        examples: examples processed.
        state_digest: digest of its new client state, "" for none.
    """

    client: int
    status: str
    steps: int = 0
    examples: int = 0
    state_digest: str = ""


class NodeTraining(Settings):
    """What a node says of how it trains. By default it has the bits of a simulation.

    Args:
        engine: ``sequential`` or ``vectorized``; "" where the site does not tell.
        device: names of the devices; "" where the site does not tell.
        name: what the maker calls the GPU, "" on the processor.
        precision: of the products there, see `config.Engine`.
        reasons: why clients are trained in a plainer way than could be.
    """

    engine: str = Field("sequential", max_length=20)
    device: str = Field("cpu", max_length=200)
    name: str = Field("", max_length=100)
    precision: str = Field("", max_length=20)
    reasons: tuple[Annotated[str, Field(max_length=200)], ...] = Field((), max_length=MAX_REASONS)

    @property
    def is_plain(self) -> bool:
        """Whether it has the bits of a simulation with the `sequential` engine."""
        return (self.engine, self.device) == ("sequential", "cpu")


UNTOLD = NodeTraining(engine="", device="")
"""What a node says whose site does not tell how it trains."""


class TrainingReply(Header):
    """Header of a node's reply after training.

    Args:
        clients: a result for each client of the request.
        training: how they were trained.
    """

    clients: tuple[ClientResult, ...]
    training: NodeTraining = NodeTraining()


class ClientDescription(Settings):
    """What a node says of one client: its index, and how many examples it has.

    Args:
        client: stable client index.
        train_examples: number of training examples.
        test_examples: number of examples that are kept aside for evaluation.
    """

    client: Count
    train_examples: Count
    test_examples: Count


class Form(Settings):
    """The form of a tensor of examples.

    Args:
        shape: shape of one example.
        whole: whether it holds whole numbers, such as tokens and labels.
    """

    shape: tuple[Count, ...]
    whole: bool


class NodeDescription(Header):
    """Header of what a node says of itself.

    Args:
        clients: the clients that it plays.
        inputs: form of the inputs, of each by name where there are several, else by "".
        targets: form of the targets, likewise.
        classes: number of classes, 0 where the targets are quantities.
        labels: names of the labels, empty where they are numbers.
        columns: names of a table's columns, in the order of the inputs; else empty.
        data_digest: digest of its data.
        name: the node's name, "" for none.
        version: its version of fedkeel.
        agreement: what it has to agree on with the server.
        sums: of its training inputs, where all nodes are to be standardised alike, else None.
        training: how it trains.
    """

    clients: tuple[ClientDescription, ...]
    inputs: dict[str, Form] = Field(max_length=100)
    targets: dict[str, Form] = Field(max_length=100)
    classes: int = Field(ge=0, le=10**6)
    labels: tuple[str, ...]
    columns: tuple[str, ...] = Field(max_length=MAX_SIZE)
    data_digest: str = Field(max_length=64)
    name: str = Field(max_length=200)
    version: str = Field(max_length=100)
    agreement: Agreement
    sums: ColumnSums | None = None
    training: NodeTraining = NodeTraining()

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        forms = (*self.inputs.values(), *self.targets.values())
        if sum(math.prod(form.shape) for form in forms) > MAX_SIZE:
            raise ValueError(f"'inputs' have more than {MAX_SIZE} numbers")
        return self

    @property
    def client_ids(self) -> list[int]:
        """The indices of the clients that it plays."""
        return [item.client for item in self.clients]
