"""Preparing a run: loading and dividing data, making model and method, and checking everything.

Everything that can be refused is refused here, before a run folder exists.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor, nn

from fedkeel import config
from fedkeel.base.feature import declarations
from fedkeel.cost.evaluation import check_evaluation
from fedkeel.cost.memory import check_server, choose_place, evaluation_batch
from fedkeel.data import batches
from fedkeel.data.augment import check_transform, named_transform
from fedkeel.data.cohort import numbered
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.partition.recipes import divide
from fedkeel.data.read.hugging_face import load_any
from fedkeel.data.values import rows_of, shape_of, shape_text
from fedkeel.diagnose.kinds import check_kinds
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.evaluation import count_examples
from fedkeel.engine.prepared import Draft, Ingredients, Prepared, learning_rate
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.engine.rehearsal import rehearse
from fedkeel.errors import ConfigError, DataError, ModelError, RunError, counted
from fedkeel.memory import format_bytes, free_memory
from fedkeel.method.compose import SIMULATION
from fedkeel.method.context import Population
from fedkeel.method.grammar import parse
from fedkeel.method.legality import check_optimiser, check_sampling
from fedkeel.method.local_training import LocalTraining
from fedkeel.method.part import Capability
from fedkeel.method.plugins import describe_user_parts, digests_of_modules
from fedkeel.method.server_memory import server_start
from fedkeel.method.server_round import server_message
from fedkeel.reached_values import Description, describe_value
from fedkeel.runner.features import divided, features_asked_for, features_of
from fedkeel.secure.legality import check_secure_aggregation
from fedkeel.task.losses import (
    OF_QUANTITIES,
    cox,
    cross_entropy,
    is_plain_cross_entropy,
    make_loss,
)
from fedkeel.task.models import make
from fedkeel.task.models.lora import AdaptedBuilder
from fedkeel.task.network import Network
from fedkeel.task.output_check import check_tokens
from fedkeel.task.parameter_names import blocks
from fedkeel.task.target_check import check_targets
from fedkeel.task.task import Task
from fedkeel.tree import walk
from fedkeel.user_code import one_line
from fedkeel.version import __version__

_STEP_BYTES = 200
"""Bytes that a mini-batch takes beside the positions of its examples."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def gather(experiment: config.Experiment) -> Ingredients:
    """Load the data of an experiment and look up its model.

    Raises:
        DataError: the data cannot be found, read or used.
        ModelError: there is no such model, or it cannot be made.
    """
    return ingredients(experiment, *load_any(experiment.data, experiment.partition.holdout_by))


def ingredients(experiment: config.Experiment, train: Dataset, test: Dataset) -> Ingredients:
    """Look up the model of an experiment whose data have been loaded.

    Raises:
        ModelError: as `gather`.
    """
    return Ingredients(
        task=task(experiment, train),
        clients=lambda seed: divide(train, experiment.partition, seed),
        test=test,
        model=experiment.model.name,
        augment=named_transform(experiment.data.augment),
        model_args=experiment.model.args,
    )


def task(experiment: config.Experiment, train: Dataset) -> Task:
    """Return the task of an experiment, for data of the form of `train`.

    Raises:
        ModelError: there is no such model.
    """
    settings = experiment.model
    shape = train.shape if isinstance(train.shape, tuple) else ()
    outputs = train.classes
    if make_loss(experiment.task.loss) in OF_QUANTITIES or not outputs:
        width = shape_of(train.y)
        outputs = math.prod(width) if isinstance(width, tuple) else 1
    build: Callable[[], nn.Module] = partial(make, settings.name, shape, outputs, settings.args)
    if settings.lora is not None:
        build = AdaptedBuilder(build, settings.lora)
    wanted = experiment.task
    return Task(
        build,
        head=settings.head,
        loss=wanted.loss,
        buffers=settings.buffers,
        metrics=wanted.metrics,
        score=wanted.score,
    )


@one_at_a_time()
def prepare(settings: config.Run, ingredients: Ingredients) -> Prepared:
    """Make everything that a run needs, and refuse what cannot work.

    Raises:
        FedkeelError: with what was given, what was expected, why, and what to do.
    """
    if torch.is_inference_mode_enabled():
        raise RunError(
            "Nothing can be trained inside torch.inference_mode(), where there are no gradients.",
            do="make the call outside of the `with` block or the decorated function",
        )
    dtype = DTYPES[settings.engine.dtype]
    given = _converted(ingredients.clients(settings.seed), dtype)
    clients = divided(settings, given)
    cohort = numbered(settings.cohort, clients.names, len(clients))
    settings = settings.model_copy(update={"cohort": cohort})
    features = features_asked_for(settings)
    method = next((item.method for item in features if item.method), settings.method)
    data = clients.data
    test = _matched_test_set(data, ingredients.test.to(dtype))
    plan = parse(method, weights=settings.weights)
    task = ingredients.task
    if plan.buffers_keeper:
        task = replace(task, buffers="local")
    network = task.network(data, settings.seed, dtype)
    network.mixed = settings.engine.precision == "bf16-mixed"
    _check_test_targets(network, data, test)
    metrics = task.metric_set(network, data)
    if clients.how["kind"] == "nodes" and (name := metrics.why_not_on_nodes()):
        raise ModelError(
            f"The metric {name!r} has to see all examples at once, and nodes send sums alone.",
            do="leave it out of the metrics where the data are on nodes",
        )
    augment = _described_transform(ingredients, data, settings.seed)
    provides = _capabilities(network, data)
    plan = parse(method, provides, settings.weights)
    local = plan.work(settings.local)
    check_optimiser(plan, local)
    training = LocalTraining(
        plan,
        network,
        local,
        task.buffers,
        rounds=settings.rounds,
        personal=plan.personal_names(network.layout),
    )
    own_seed = partial(int, settings.seed)
    who = clients, clients, cohort  # those that train are those of the data, for now
    draft = Draft(settings, *who, training, provides, ingredients.augment, own_seed)
    for feature in features:
        draft = feature.wrap(draft)
    training, plan, federation = draft.training, draft.training.plan, draft.federation
    _check_accumulation(training.local, federation)
    _check_round_length(training.local, federation)
    _check_batches_of_one(training, federation, settings.rounds)
    per_round = draft.cohort.size(len(federation))
    population = Population.of(network, len(federation), draft.step_size or per_round)
    check_sampling(plan, training.local)
    if settings.flower.secure_aggregation:
        nodes = settings.flower.secure_minimum
        check_secure_aggregation(settings.method, training, nodes, len(federation))
    setup = TrainingSetup(
        training,
        federation,
        test,
        settings.seed,
        metrics,
        ingredients.augment,
        settings.evaluation.batch_size
        or evaluation_batch(network, rows_of(federation.data.x, slice(2))),
        settings.engine.precision,
        keeps_updates=draft.keeps_updates,
    )
    _check_evaluation_of_one(setup)
    check_evaluation(setup)
    check_kinds(settings, setup)
    check_server(plan, training.shared_params, population, settings.engine)
    server = server_start(training, population)
    lr = learning_rate(settings, training, 0)
    try:
        spec = rehearse(setup, server_message(plan, server, lr))
    except ModelError as error:  # where it is raised, the name of the method is unknown
        error.what = error.what.replace("The method ", f"{plan.expression!r} ", 1)
        raise
    user_parts = describe_user_parts(plan.parts)
    in_parts = (place for module in user_parts.values() for place in module.unseen)
    unseen = (*network.unseen, *metrics.unseen, *augment.unseen, *in_parts)
    prepared = Prepared(
        settings,
        setup,
        server,
        spec,
        draft.clients,
        draft.cohort,
        population,
        ingredients,
        draft.make_server_seed,
        unseen=unseen,
        is_baseline=draft.is_baseline,
        data_digest=given.data.fingerprint(),
        step_size=draft.step_size,
        features=draft.features,
    )
    for feature in features_of(prepared).values():
        feature.check(prepared)
    key = _key(prepared, digests_of_modules(user_parts), augment.text)
    return replace(prepared, key=key, state=choose_place(prepared))


def _described_transform(ingredients: Ingredients, data: Dataset, seed: int) -> Description:
    """Return a text of all that decides what a user's transform does, and try it."""
    if not callable(ingredients.augment):
        return Description(str(ingredients.augment))
    few = data.part(slice(4))
    check_transform(ingredients.augment, few.x, few.y, seed)
    return describe_value(ingredients.augment, "augment")


def _converted(federation: Federation, dtype: torch.dtype) -> Federation:
    data = federation.data.to(dtype)
    return federation if data is federation.data else replace(federation, data=data)


def _capabilities(network: Network, data: Dataset) -> frozenset[Capability]:
    capabilities = set(SIMULATION)
    if data.has_labels and network.scores_classes:
        capabilities.add(Capability.CLASSES)
    if network.soft_target is not None:
        capabilities.add(Capability.SOFT_TARGETS)
    if network.head:
        capabilities |= {Capability.HEAD, Capability.FEATURES}
    if len(blocks(network.names)) > 1:
        capabilities.add(Capability.BLOCKS)
    if is_plain_cross_entropy(network.task_loss):
        capabilities.add(Capability.PLAIN_LOSS)
    if not network.weighs_examples:
        capabilities.add(Capability.LOSS_BY_EXAMPLE)
        if not network.mixes_examples:
            capabilities.add(Capability.EXAMPLE_LOSSES)
    if isinstance(data.x, Tensor) and data.x.is_floating_point():
        capabilities.add(Capability.INPUT_GRADIENT)
    return frozenset(capabilities)


def _matched_test_set(train: Dataset, test: Dataset) -> Dataset:
    """Return the test set with labels numbered as those that are trained on."""
    if train.columns and test.columns and train.columns != test.columns:
        both = zip_longest(test.columns, train.columns)
        got, expected = next((a, b) for a, b in both if a != b)
        raise DataError(
            "The columns of the test set are not those of the training set.",
            got=repr(got),
            expected=repr(expected),
            why="columns are matched by their position, not by their name",
            do="put the columns of both in one order",
        )
    if isinstance(train.y, dict) or isinstance(test.y, dict):
        return test
    if not train.classes and test.classes:  # whole numbers by chance
        return replace(test, y=test.y.to(train.y.dtype), classes=0)
    if train.has_labels and not test.classes:
        raise DataError(
            "The targets of the test set are quantities, and those of the training set are labels.",
            got=f"targets such as {test.y.flatten()[0].item():g}",
            expected=f"labels 0..{train.classes - 1}",
            why="numbers that are all whole are taken as labels",
            do="say classes=0 for the training set where its targets are quantities, too",
        )
    return test.with_label_names(train.label_names, "The test set") if train.label_names else test


def _check_test_targets(network: Network, train: Dataset, test: Dataset) -> None:
    if test.shape != train.shape:
        raise ModelError(
            "Training and test inputs differ in shape.",
            got=f"{shape_text(test.x)} of the test set",
            expected=f"{shape_text(train.x)}, as in training, but for the number of examples",
            do="prepare both alike",
        )
    if shape_of(test.y) != shape_of(train.y):
        raise DataError(
            "Training and test targets differ in shape.",
            got=f"{shape_text(test.y)} of the test set",
            expected=f"{shape_text(train.y)}, as in training, but for the number of examples",
            do="prepare both alike",
        )
    outputs = network.scores_shape[0] if network.scores_shape else 0
    if network.task_loss is cross_entropy and test.has_labels and test.classes > outputs:
        raise ModelError(
            "The model's output does not fit the test labels.",
            got=f"{counted(outputs, 'output')} for {counted(test.classes, 'class')}",
            do="change the last layer, or check the test labels",
        )
    check_targets(network, test, "The test set")
    check_tokens(network, test, "The test set")


def _check_accumulation(local: config.Local, federation: Federation) -> None:
    """Refuse steps of more mini-batches than any client has in a pass."""
    largest = int(federation.sizes.max(initial=1))
    most = max(1, -(-largest // local.piece_size)) if local.piece_size else local.accumulate
    if local.accumulate > most:
        raise ConfigError(
            "local.accumulate is more than the mini-batches of any client.",
            got=f"{local.accumulate}; a pass of the largest client, of "
            f"{counted(largest, 'example')}, has {most} of {local.batch_size}",
            expected=f"1..{most}",
            do="lower local.accumulate or local.batch_size",
        )


def _check_round_length(local: config.Local, federation: Federation) -> None:
    """Refuse a round whose mini-batches, as positions of examples, do not fit into memory."""
    n = max(1, int(federation.sizes.max(initial=1)))
    steps = batches.count_steps(local, n)
    needed = _STEP_BYTES * steps + 8 * batches.count_examples(local, n)
    free = free_memory()
    if free is not None and needed > free // 2:
        raise ConfigError(
            "A client's round is too long.",
            got=f"{counted(steps, 'step')} for {counted(n, 'example')}, whose list takes "
            f"{format_bytes(needed)}",
            expected=f"at most {format_bytes(free // 2)}, half of what is free",
            do=f"lower local.{'epochs' if local.steps is None else 'steps'}, and raise rounds",
        )


def _check_batches_of_one(training: LocalTraining, federation: Federation, rounds: int) -> None:
    """Refuse batches of one example where batch normalisation cannot take them."""
    network, local = training.network, training.local
    if not network.mixes_examples and network.task_loss is not cox:
        return
    sizes = [n for n in np.unique(federation.sizes) if n and has_batch_of(local, int(n), rounds, 1)]
    error = error_on_one_example(network, federation.data) if sizes else ""
    if not error:
        return
    is_concerned, has_one = np.isin(federation.sizes, sizes), federation.sizes == 1
    client = int(np.flatnonzero(is_concerned)[0])
    remedies = []
    if local.batch_size == 1:
        remedies.append("raise local.batch_size")
    elif (is_concerned & ~has_one).any():
        remedies.append("set local.drop_last = 'single'")
    if has_one.any():
        remedies.append("give every client more examples (min_size = 2 of kind 'dirichlet')")
    count = is_concerned.sum()
    raise ModelError(
        f"{count} of {len(federation)} clients {'has' if count == 1 else 'have'} a mini-batch of "
        "one example, which this network cannot be trained on.",
        got=f"e.g. client {client} of size {federation.sizes[client]}, "
        f"local.batch_size = {local.batch_size!r}",
        why=f"batch normalisation: {error}",
        do=f"{', and '.join(remedies)}; or use fedkeel.replace_batch_norm(module)",
    )


def _check_evaluation_of_one(setup: TrainingSetup) -> None:
    """Refuse evaluations that end with one example where statistics of the batch are used."""
    if not setup.training.network.batch_statistics:
        return
    counts = {
        "test set": count_examples(setup, "test"),
        "clients' own examples": count_examples(setup, "clients"),
    }
    size = setup.shard
    with_one = [name for name, n in counts.items() if n and (size == 1 or n % size == 1)]
    error = (
        error_on_one_example(setup.training.network, setup.federation.data, False)
        if with_one
        else ""
    )
    if not error:
        return
    larger = range(size + 1, max(counts.values()) + 2)
    fitting = (s for s in larger if all(n % s != 1 for n in counts.values()))
    raise ModelError(
        "The last batch of an evaluation has one example, which this network cannot score.",
        got=f"{counts[with_one[0]]} in the {with_one[0]}, in batches of {size}",
        why=f"batch normalisation, by the batch at hand: {error}",
        do=f"set evaluation.batch_size = {next(fitting)}"
        if 1 not in counts.values()
        else "give more examples, or use fedkeel.replace_batch_norm(module)",
    )


def has_batch_of(local: config.Local, n: int, rounds: int, size: int) -> bool:
    """Return whether a client of `n` examples has a batch of `size` in so many rounds."""
    if local.sampling == "poisson":
        return size <= n
    if size not in batches.batch_sizes(local, n):
        return False
    if n == size or local.batch_size == size or local.steps is None:
        return True
    return local.sampling == "continue" and local.steps * rounds >= batches.batches_per_pass(
        local, n
    )


def error_on_one_example(network: Network, data: Dataset, train: bool = True) -> str:
    """Return the error that the network raises on one example, "" where it raises none."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            one = rows_of(data.x, slice(1))
            network.logits(network.params, network.copy_buffers(network.buffers), one, train)
    except Exception as error:  # whatever a user's module may raise
        return one_line(error)
    return ""


_DESCRIBED_OTHERWISE = (
    "name",
    "method",
    "compare",
    "diagnose",
    "tune",
    "data",
    "partition",
    "model",
    "task",
    "flower",
)
"""Settings that decide no number, or that a key describes by what was made of them."""


def _key(prepared: Prepared, user_parts: Mapping[str, str], augment: str) -> str:
    """Return a digest of settings, data, initial model and version: of all that decides numbers.

    Where some of the user's values cannot be read in full, it is another one each time.

    Args:
        prepared: the run; its key is not used.
        user_parts: digests of the modules of the user's own parts, by name.
        augment: a text of all that the user's transform does.
    """
    settings = prepared.settings.model_dump(mode="json")
    for name in _DESCRIBED_OTHERWISE:
        settings.pop(name, None)
    settings.pop("weights")  # those that are used are below
    settings["cohort"] = prepared.settings.cohort.decisive()
    engine = prepared.settings.engine
    settings["engine"] = {"dtype": engine.dtype}
    if engine.precision != "float32":
        settings["engine"]["precision"] = engine.precision
    identities = {
        table: feature.identity(settings.get(table))
        for table, feature in features_of(prepared).items()
        if declarations()[table].decides_numbers
    }
    for table in declarations():
        settings.pop(table, None)
        if identities.get(table) is not None:
            settings[table] = identities[table]
    setup, clients = prepared.setup, prepared.clients
    digest = hashlib.blake2b(digest_size=8)
    identity = {
        "version": __version__,
        "method": prepared.plan.expression,
        "weights": prepared.plan.weights,
        "buffers": setup.training.buffers,
        "augment": augment if callable(setup.augment) else setup.augment,
        "settings": settings,
        "train": setup.federation.data.fingerprint(),
        "test": setup.test.fingerprint(),
        "network": setup.training.network.describe(),
        "metrics": setup.metrics.describe(),
        "own": user_parts,
    }
    if prepared.settings.flower.secure_aggregation:
        identity["sums"] = "secure"
    if prepared.unseen:
        identity["only once"] = secrets.token_hex(16)
    digest.update(json.dumps(identity, sort_keys=True).encode())
    on_nodes = clients.how["kind"] == "nodes"  # whose rows the server does not know
    for array in (
        None if on_nodes else clients.rows,
        clients.offsets,
        clients.holdout_rows,
        clients.holdout_offsets,
    ):
        digest.update(b"" if array is None else array.tobytes())
    network = setup.training.network
    saved = network.initial_state()
    unsaved = {k: v for k, v in {**network.buffers, **network.frozen}.items() if k not in saved}
    for _, tensor in walk({"p": dict(saved), "not saved": dict(unsaved)}):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
