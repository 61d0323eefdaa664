"""The personal model of each client, and its scores on the client's own examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from fedkeel.base.rng import seed_torch, torch_seed
from fedkeel.base.values import Values, count_of, only_tensor, rows_of
from fedkeel.engine.base import ClientJob, PersonalScores, ServerModel, TrainingSetup
from fedkeel.engine.client_inputs import client_info, take_examples
from fedkeel.engine.evaluation import Predict, joined, split_examples
from fedkeel.engine.local import train_client
from fedkeel.method.checks import call, explain_errors
from fedkeel.method.compose import compose
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.method.local_loop import client_start
from fedkeel.method.local_training import BUFFERS, LOCAL_MODEL, PERSONAL
from fedkeel.method.part import param
from fedkeel.method.roles import FineTuning, Phases
from fedkeel.task.batch import Batch, Output
from fedkeel.task.metrics.metric_set import Measured, MetricSet
from fedkeel.task.network import Network
from fedkeel.task.outputs import Outputs
from fedkeel.task.parameter_names import ParameterLayout
from fedkeel.tree import Tree, tensors

ReadState = Callable[[int], ByPart | None]
"""Client -> what it keeps, None where it has not taken part."""


@dataclass(frozen=True)
class Only(Phases):
    """Trains some parameters and leaves the others, for a fine-tuning."""

    names: str = param("")

    name = "only"
    paper = "yu2020salvaging"

    def phases(self, layout: ParameterLayout, personal: frozenset[str]) -> Sequence[frozenset[str]]:
        """Return one phase, of the names."""
        return [frozenset(self.names.split(","))]

    def phase(self, step: int, steps: int, round: int) -> int:
        """Return 0."""
        return 0


def personal_model(
    setup: TrainingSetup, server: ServerModel, client: int, state: ByPart | None
) -> tuple[Tree, Tree]:
    """Return the parameters and buffers of a client's personal model.

    A client that has never taken part has the global model, with the initial personal parameters;
    where the server has several models, it has the one that it would receive. One that trains
    alone, in the baseline `local`, has what it has trained.

    Args:
        setup: method, model, data and seed.
        server: the global model.
        client: index of the client.
        state: what the client keeps.
    """
    setup, state = setup.of(client), state or {}
    training = setup.training
    plan, network = training.plan, training.network
    params = server.params
    if plan.starts_are_personal and (state or plan.receiver is not None):
        sent = server.broadcast
        message = Message(params, server.buffers, sent, server.round, training.local.lr)
        rows, info = setup.federation.client(client), client_info(setup, client)
        every = partial(take_examples, setup, rows)
        with torch.random.fork_rng(devices=[]):  # as in the round that may follow
            seed_torch(torch_seed(setup.seed, "torch", server.round, client))
            begun, local = client_start(training, message, state or None, info, every)
            params = dict(begun.start if plan.local_start is None else local.params)
    if plan.local_model is not None:
        if LOCAL_MODEL in state:
            model = tensors(state[LOCAL_MODEL])
        else:
            model = call(plan.local_model.init_model, params, network.layout)
        params = call(plan.local_model.personal_model, model, params)
    if training.personal:
        kept = tensors(state[PERSONAL]) if PERSONAL in state else training.personal_params
        params = {**params, **kept}
    buffers = server.buffers or network.buffers
    if BUFFERS in state:
        buffers = tensors(state[BUFFERS])
    if plan.fine_tuning is None or not setup.federation.sizes[client]:
        return params, buffers
    return _fine_tuned(setup, plan.fine_tuning, params, buffers, server.round, client)


def _fine_tuned(
    setup: TrainingSetup,
    part: FineTuning,
    params: Tree,
    buffers: Tree,
    round: int,
    client: int,
) -> tuple[Tree, Tree]:
    """Return the model after plain training on the client's examples."""
    training, layout = setup.training, setup.training.network.layout
    names = call(part.fine_tuned, layout)
    only = () if names == frozenset(layout.names) else (Only(",".join(sorted(names))),)
    local = call(part.fine_tuning, training.local)
    has_buffers = bool(training.network.buffers)
    tuning = replace(
        training,
        plan=compose(only),
        local=local,
        buffers="local" if has_buffers else training.buffers,
        personal=frozenset(layout.names),
    )
    message, job = Message({}, buffers, {}, round, local.lr), ClientJob(0, client, steps_done=0)
    kept: ByPart = {PERSONAL: dict(params), **({BUFFERS: dict(buffers)} if has_buffers else {})}
    state = train_client(replace(setup, training=tuning), message, job, kept).reply.client_state
    return tensors(state[PERSONAL]), tensors(state[BUFFERS]) if has_buffers else buffers


def measure_client(
    setup: TrainingSetup, server: ServerModel, client: int, state: ByPart | None
) -> tuple[Tensor, Tensor]:
    """Return what is measured of a client's personal model on its own examples.

    Returns:
        The states [S], and the values [n, M] that are kept.
    """
    measured = _measure(setup, server, [client], lambda _: state)
    return measured.states[0], measured.kept


@dataclass(frozen=True)
class _Answers:
    """What a client's personal model returns for one batch of its own examples.

    Args:
        output: what the model returns.
        y: [B, ...] the targets.
        measured: what the metrics say of it; None where they may look at it later, with others.
    """

    output: Outputs
    y: Values
    measured: Measured | None


def _answers(
    setup: TrainingSetup,
    server: ServerModel,
    client: int,
    state: ByPart | None,
    seed_of: Callable[[int], int],
) -> Iterator[_Answers]:
    """Yield what a client's personal model answers, shard by shard.

    A module, a loss or a metric that draws random numbers draws the same ones each time, by the
    seed of the first example of its shard.
    """
    setup = setup.of(client)
    data, rows, metrics = setup.federation.data, setup.federation.own_rows(client), setup.metrics
    network = setup.training.network
    can_wait = metrics.see_each_example and network.uses_cross_entropy
    with torch.no_grad(), explain_errors(f"The evaluation of client {client} failed"):
        params, buffers = personal_model(setup, server, client, state)
        predict = _prediction(setup, params, buffers, client)
        for start in range(0, len(rows), setup.shard):
            index = torch.from_numpy(rows[start : start + setup.shard])
            x, y = rows_of(data.x, index), rows_of(data.y, index)
            with torch.random.fork_rng(devices=[]):
                seed_torch(seed_of(start))
                output, measured = predict(x), None
                if not (can_wait and _are_scores_of_labels(output, y)):
                    group = torch.zeros(len(index), dtype=torch.int64)
                    measured = metrics.measure_output(output, y, group, 1)
            yield _Answers(output, y, measured)


def _are_scores_of_labels(output: Outputs, y: Values) -> bool:
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        return False
    return (output.ndim, y.ndim) == (2, 1) and not y.is_floating_point()


def _measure(
    setup: TrainingSetup, server: ServerModel, clients: Sequence[int], read_state: ReadState
) -> Measured:
    """Return what is measured of clients' personal models: states [C, S], and values [N, M].

    A model sees the examples of its own client only, in batches of the same shape whoever else is
    measured: all bits are those of one client after the other. Metrics that bear it look at the
    answers of many clients at once, as they cost more than a small model does.
    """
    places: list[int] = []
    seed_of = cache(partial(torch_seed, setup.seed, "evaluation.clients", 0))

    def answers() -> Iterator[_Answers]:
        for place, client in enumerate(clients):
            for one in _answers(setup, server, client, read_state(client), seed_of):
                places.append(place)
                yield one

    measured = joined(setup.metrics, _measured(setup, answers()))
    place = torch.tensor(places, dtype=torch.int64)
    return replace(measured, states=setup.metrics.merged(measured.states, place, len(clients)))


def _measured(setup: TrainingSetup, answers: Iterable[_Answers]) -> Iterator[Measured]:
    """Yield what is measured of answers, in their order: a row of states for each of them."""
    waiting: list[tuple[Outputs, Tensor]] = []
    examples = 0
    for one in answers:
        if one.measured is None:
            waiting.append((one.output, only_tensor(one.y, "a label")))
            examples += count_of(one.y)
        if waiting and (one.measured is not None or examples >= setup.eval_batch):
            yield _measured_together(setup.metrics, waiting)
            waiting, examples = [], 0
        if one.measured is not None:
            yield one.measured
    if waiting:
        yield _measured_together(setup.metrics, waiting)


def _measured_together(metrics: MetricSet, answers: Sequence[tuple[Tensor, Tensor]]) -> Measured:
    """Return what is measured of scores and labels, a row of states for each pair of them."""
    sizes = torch.tensor([len(y) for _, y in answers])
    group = torch.repeat_interleave(torch.arange(len(answers)), sizes)
    scores, labels = (torch.cat(parts) for parts in zip(*answers, strict=True))
    return metrics.measure_output(scores, labels, group, len(answers))


def _prediction(setup: TrainingSetup, params: Tree, buffers: Tree, client: int) -> Predict:
    """Return what a client's personal model predicts."""
    network = setup.training.network.with_running_statistics()
    part = setup.training.plan.personal_prediction

    def output(batch: Batch) -> Output:
        return network.output(params, network.copy_buffers(buffers), batch, train=False)

    if part is None:
        return lambda x: network.test_output(params, buffers, x)
    rows, data = torch.from_numpy(setup.federation.client(client)), setup.federation.data
    examples = Batch(rows_of(data.x, rows), rows_of(data.y, rows))
    known, targets = output(examples), only_tensor(examples.y, "a personal prediction")

    def predict(x: Tree | Tensor) -> Outputs:
        result: Tensor = call(part.predict, output(Batch(x, examples.y)), known, targets)
        return result

    return predict


def measure_personal(
    setup: TrainingSetup, server: ServerModel, read_state: ReadState
) -> PersonalScores:
    """Return the scores of all clients' personal models."""
    measured = _measure_all(setup, server, read_state)
    sizes = split_examples(setup, "clients").sizes
    return scores_of(setup.metrics, measured.states, sizes, measured.kept)


def count_personal(setup: TrainingSetup, server: ServerModel, read_state: ReadState) -> Tensor:
    """Return [C, S] counts of what each client's personal model answers on its own examples.

    They are those of `MetricSet.of_pictures`.
    """
    setup = replace(setup, metrics=setup.metrics.of_pictures())
    return _measure_all(setup, server, read_state).states


def _measure_all(setup: TrainingSetup, server: ServerModel, read_state: ReadState) -> Measured:
    """Return what is measured of all clients' personal models."""
    setup = setup.with_networks(Network.with_running_statistics)  # copied once for all clients
    return _measure(setup, server, range(len(setup.federation)), read_state)


def scores_of(metrics: MetricSet, states: Tensor, sizes: Ints, kept: Tensor) -> PersonalScores:
    """Return the scores of each client and of all together.

    Args:
        metrics: what was measured.
        states: [C, S] states of the clients; NaN of one that nobody measured, which does not count.
        sizes: [C] numbers of examples.
        kept: [N, M] kept values, one client after the other.
    """
    is_missing = states.isnan().all(dim=1)
    is_measured = ~is_missing if metrics.state_size else torch.ones_like(is_missing)
    counts = torch.where(is_measured, torch.from_numpy(sizes), 0)
    states = torch.where(is_measured[:, None], states, 0.0)
    group = torch.repeat_interleave(torch.arange(len(sizes)), counts)[: len(kept)]
    per_client = metrics.scores(states, counts, kept, group)
    together = torch.zeros_like(group)
    all_states = metrics.merged(states, torch.zeros(len(states), dtype=torch.int64), 1)
    total = metrics.scores(all_states, counts.sum()[None], kept, together)[0]
    return PersonalScores(total, per_client)
