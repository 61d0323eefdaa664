"""The messages between a node and the server, in words, with their bytes.

Bytes of tensors are those that the records of a run count. A header is text whose numbers have more
or fewer digits, so its bytes are those of an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedkeel.config import Experiment
from fedkeel.engine.spec import TensorSpec
from fedkeel.errors import CompositionError, counted
from fedkeel.features.secure.participant import Participant, Revealed, threshold
from fedkeel.flower.data_on_nodes import is_on_nodes
from fedkeel.flower.node.node import Node
from fedkeel.flower.protocol import (
    OK,
    ClientRequest,
    ClientResult,
    NodeTraining,
    Request,
    TrainingReply,
)
from fedkeel.flower.secure_protocol import (
    BUFFERS,
    UPDATE,
    KeysReply,
    NodeKeys,
    SharesReply,
    SharesRequest,
    UnmaskReply,
    VectorLayout,
    session_of,
    texts,
)
from fedkeel.flower.wire import HEADER, NUMBER, Header
from fedkeel.method.compose import Plan
from fedkeel.method.docs import docstring
from fedkeel.method.grammar import parse
from fedkeel.method.part import Part
from fedkeel.records.pictures import PROBABILITIES
from fedkeel.task.metrics.metric_set import MetricSet

DIGEST = "0" * 16
EACH_ROUND, EACH_CLIENT = "each round", "each round, for each client that it trains"
AFTER_EACH_ROUND = "after each round"
MODEL_WORDS = "The model as the server has it"

UPDATE_WORDS = (
    "The update: how training on the data of this site has changed each number of the model"
)
BUFFER_WORDS = "Statistics of the layers (means and variances of their inputs), which are averaged"


@dataclass(frozen=True)
class Sent:
    """Something that is sent.

    Args:
        what: its content, in words.
        when: how often it is sent.
        size: its bytes, None where the form of the data is not known.
        in_round: whether each round of training has it.
        part: the name under which the records of a run count its bytes, "" for headers.
        with_scores: whether it belongs to the evaluation, which not every round need have.
        at_most: whether so many bytes are the most, because zeros are left out.
    """

    what: str
    when: str
    size: int | None
    in_round: bool = False
    part: str = ""
    with_scores: bool = False
    at_most: bool = False


def answers(experiment: Experiment, node: Node | None, nodes: int) -> list[Sent]:
    """Return what a node sends.

    Args:
        experiment: what the federation runs.
        node: a node with data of the same form, None where there are none at hand.
        nodes: number of nodes.
    """
    plan = _plan(experiment, node)
    found = [_description(experiment, node)]
    if experiment.flower.secure_aggregation:
        found += _secure_answers(plan, node, nodes)
    else:
        when = EACH_ROUND if is_on_nodes(experiment) else EACH_CLIENT
        found += [*_survey_answers(plan, node, when), *_training_answers(plan, node, when)]
    if _evaluates(experiment, node):
        found += _scores(experiment, node)
    if is_on_nodes(experiment):
        found.append(STATISTICS)
    return [*found, FAILURE]


def requests(experiment: Experiment, node: Node | None, nodes: int) -> list[Sent]:
    """Return what a node receives; the arguments are those of `answers`."""
    plan = _plan(experiment, node)
    found: list[Sent] = []
    if plan.surveys:
        spec = None if node is None else node.specs.survey
        found += _model(plan, spec, "The model, for what is asked before training")
    spec = None if node is None else node.specs.training
    found += _model(plan, spec, MODEL_WORDS)
    size = None if node is None else _length(_request(node))
    what = "The request: number of the round, learning rate, which clients are to train"
    found.append(Sent(what, EACH_ROUND, size, True))
    if experiment.flower.secure_aggregation:
        keys = None if node is None else _Steps(node, nodes).received
        words = "Public keys of the other nodes, and what these have encrypted for this one"
        found.append(Sent(words, EACH_ROUND, keys, True))
    if _evaluates(experiment, node):
        size = None if node is None else _size(node.specs.evaluation, ("",))
        is_judged = _are_judged(experiment, node)
        when = _times(experiment, is_judged)
        found.append(Sent("The model, to be evaluated", when, size, with_scores=is_judged))
    return found


def _model(plan: Plan, spec: Mapping[str, TensorSpec] | None, what: str) -> Iterator[Sent]:
    """What a message to clients has: the model, and what parts of the method send with it."""
    size = None if spec is None else _size(spec, ("params/", BUFFERS))
    yield Sent(what, EACH_ROUND, size, True, "model")
    for part in plan.parts:
        size = _size(spec or {}, (f"broadcast/{part.name}/",))
        if size:
            words = f"What the method's part {part.name} sends with the model"
            yield Sent(words, EACH_ROUND, size, True, part.name)


FAILURE = Sent(
    "Where a client fails: which one, the step, the part, and the kind of error. The text of the "
    "error, which may name a file or a column, stays in the log of this machine",
    "only after a failure",
    200,
)

STATISTICS = Sent(
    "Statistics of the data, such as how many examples have each label: only the kinds that the "
    "policy of this site names under [statistics], and nothing where there is none",
    "only when the server asks for them",
    None,
)


def _plan(experiment: Experiment, node: Node | None) -> Plan:
    if node is not None:
        return node.prepared.plan
    return parse(experiment.method, weights=experiment.weights)


# --- before the first round -----------------------------------------------------------------------


def _description(experiment: Experiment, node: Node | None) -> Sent:
    has_own_data = is_on_nodes(experiment)
    what = "A description: number of examples, shape of an input, number of classes, versions of "
    what += "the software, digests of the settings, of the model and of the data"
    if has_own_data:
        what += "; the names of the classes and of a table's columns, the name of the node"
    if has_own_data and experiment.data.normalize == "standardize":
        what += "; of each column the mean and the sum of squared deviations"
    size = None if node is None else len(str(node.describe()[HEADER]["values"]))
    return Sent(what, "when a run begins, before statistics, and when the node comes back", size)


# --- a round --------------------------------------------------------------------------------------


def _survey_answers(plan: Plan, node: Node | None, when: str) -> Iterator[Sent]:
    spec = {} if node is None else node.specs.answer
    for part in plan.surveys:
        size = None if node is None else _size(spec, (f"{part.name}/",))
        what = f"Before training, numbers that the method's part {part.name} needs: {_words(part)}"
        yield Sent(what, when, size, True, part.name)


def _training_answers(plan: Plan, node: Node | None, when: str) -> Iterator[Sent]:
    spec = {} if node is None else node.specs.reply
    if plan.codec is None:
        size = None if node is None else _size(spec, (UPDATE,))
        yield Sent(UPDATE_WORDS, when, size, True, "model")
    if size := _size(spec, (BUFFERS,)):
        yield Sent(BUFFER_WORDS, when, size, True, "model")
    for part in plan.parts:
        sends = part in plan.uploads or part is plan.codec
        size = None if node is None else _size(spec, (f"uploads/{part.name}/",))
        if sends and size != 0:
            what = f"Numbers that the method's part {part.name} needs beside it: {_words(part)}"
            if part is plan.codec:
                what = f"{UPDATE_WORDS}, made shorter by the method's part {part.name}"
            yield Sent(what, when, size, True, part.name)
    yield _numbers(node, when)


def _numbers(node: Node | None, when: str) -> Sent:
    """What goes with an update: losses, diagnostics and counts."""
    names = [] if node is None else sorted(node.specs.diagnostics)
    what = "Numbers about the training: its loss, steps and examples; on what device, and how"
    if names:
        what += f"; diagnostics of the method: {', '.join(names)}"
    size = None
    if node is not None:
        size = _length(_training_reply(node)) + NUMBER * (1 + len(names))
    return Sent(what, when, size, True)


def _secure_answers(plan: Plan, node: Node | None, nodes: int) -> Iterator[Sent]:
    steps = None if node is None else _Steps(node, nodes)
    keys, shares, unmask = (
        (None, None, None) if steps is None else (steps.keys, steps.shares, steps.unmask)
    )
    layout = None if node is None else VectorLayout.of(node.prepared)
    what = "Two new public keys, with a signature where the site has one"
    yield Sent(what, EACH_ROUND, keys, True)
    what = "Parts of this node's secrets, each encrypted for one other node, and digests of them"
    yield Sent(what, EACH_ROUND, shares, True)
    parts = [part.name for part in plan.uploads]
    what = "The masked sum of the clients of this node: their update"
    what += "".join(f", the message of the method's part {name}" for name in parts)
    what += ", weight, loss and diagnostics. By itself it looks like random numbers"
    yield Sent(what, EACH_ROUND, None if layout is None else NUMBER * layout.size, True)
    what = "Numbers beside it: of each client its steps and examples, and whether it has trained; "
    what += "on what device, and how"
    yield Sent(what, EACH_ROUND, None if node is None else _length(_training_reply(node)), True)
    what = "What takes the masks off the sum of all nodes: parts of the secrets of the others"
    yield Sent(what, EACH_ROUND, unmask, True)


# --- evaluation -----------------------------------------------------------------------------------


def _evaluates(experiment: Experiment, node: Node | None) -> bool:
    """Return whether nodes measure models: on data or by models that only they have."""
    return _are_judged(experiment, node) or (
        node is not None and node.prepared.plan.has_personal_models
    )


def _are_judged(experiment: Experiment, node: Node | None) -> bool:
    """Return whether a run is judged by what nodes measure."""
    return is_on_nodes(experiment) or (node is not None and node.prepared.judges == "personal")


def _scores(experiment: Experiment, node: Node | None) -> Iterator[Sent]:
    metrics, size, counts = None, None, None
    if node is not None:
        metrics, number = node.prepared.setup.metrics, NUMBER * len(node.clients)
        size = number * metrics.on_nodes().state_size
        counts = number * metrics.of_pictures().state_size
    what = "Scores of the model, and of a model of the site's own where the method makes one, on "
    what += "examples of this site that are kept aside: sums over all of them"
    if metrics is not None:
        what += f", for {', '.join(metrics.on_nodes().order)}{_by_score(metrics)}"
    is_judged = _are_judged(experiment, node)
    yield Sent(what, _times(experiment, is_judged), size, with_scores=is_judged, at_most=True)
    if is_judged and counts != 0:
        what = "Counts for the pictures of the report, such as right and wrong answers by class"
        if metrics is not None and PROBABILITIES in metrics.of_pictures().order:
            cells = metrics.of_pictures().sizes[-1]
            what += f", and counts by score and true label ({cells:,} cells)"
        yield Sent(what, "at the end of a run", counts, at_most=True)


def _by_score(metrics: MetricSet) -> str:
    """Return which metrics count examples by score and true label, and in how many cells."""
    cells = [f"{name} ({count:,} cells)" for name, count in metrics.score_cells.items()]
    return f"; counts by score and true label for {', '.join(cells)}" if cells else ""


def _times(experiment: Experiment, is_judged: bool) -> str:
    """Return when models are measured; the page has in a note when they are once more."""
    settings = experiment.evaluation
    if is_judged:
        return _after(settings.every)
    return "after the last round" if not settings.clients_every else _after(settings.clients_every)


def _after(every: int) -> str:
    return AFTER_EACH_ROUND if every == 1 else f"after every {counted(every, 'round')}"


# --- sizes ----------------------------------------------------------------------------------------


class _Steps:
    """Bytes of the steps of a secure sum, of an example with as many nodes.

    Keys, parts of secrets and digests have the same length for all nodes.
    """

    def __init__(self, node: Node, nodes: int) -> None:
        header = Header(run=_run(node), round=100)
        count = max(nodes, 2)
        numbers = [2**63 + number for number in range(count)]  # Flower's have 64 bits
        session = session_of(header)
        people = {number: Participant.new(number, session) for number in numbers}
        peers = {number: person.public_keys for number, person in people.items()}
        minimum = threshold(count, node.prepared.settings.flower.secure_minimum)
        knows, sealed, bound = people[numbers[0]].share(peers, min(minimum, count))
        clients = max(1, len(node.clients))
        shown = [NodeKeys.of(number, keys, clients) for number, keys in peers.items()]
        run, round = header.run, header.round
        one_share = knows.seed_shares[numbers[0]]
        revealed = Revealed(dict.fromkeys(numbers, one_share), {})
        self.keys = _length(KeysReply(run=run, round=round, keys=shown[0]))
        self.shares = _length(
            SharesReply(
                run=run,
                round=round,
                shares=texts(sealed),
                seed=bound.seed.hex(),
                bound=texts(bound.shares),
            )
        )
        self.unmask = _length(UnmaskReply.of(header, revealed))
        others = {n: bytes(len(text)) for n, text in zip(numbers[1:], sealed.values(), strict=True)}
        request = SharesRequest(run=run, round=round, node=str(numbers[0]), keys=tuple(shown))
        self.received = _length(request) + len(str(texts(others)))


def _request(node: Node) -> Request:
    clients = tuple(
        ClientRequest(
            client=client, steps_done=1000, state_round=0, state_digest=DIGEST, checkpoint_round=0
        )
        for client in sorted(node.clients)
    )
    digest = node.prepared.setup.federation.data.fingerprint()
    return Request(
        run=_run(node),
        round=100,
        agreement=node.agreement,
        data_digest=digest,
        lr=0.01,
        clients=clients,
    )


def _training_reply(node: Node) -> TrainingReply:
    results = tuple(
        ClientResult(client=client, status=OK, steps=1000, examples=10_000, state_digest=DIGEST)
        for client in sorted(node.clients)
    )
    training = NodeTraining(engine="vectorized", device="cuda:0", name="GPU", precision="float32")
    return TrainingReply(run=_run(node), round=100, clients=results, training=training)


def _run(node: Node) -> str:
    return f"{node.prepared.key}-{DIGEST}"


def _length(header: Header) -> int:
    return len(header.model_dump_json())


def _size(spec: Mapping[str, TensorSpec], prefixes: tuple[str, ...]) -> int:
    return sum(tensor.nbytes for path, tensor in spec.items() if path.startswith(prefixes))


def _words(part: Part) -> str:
    """Return what a part says that it sends; of a user's own part, its first line."""
    try:
        return docstring.read(type(part)).sent
    except CompositionError:
        return docstring.summary(type(part)) or "its own message"
