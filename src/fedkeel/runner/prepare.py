"""Preparing a run: data, method, features and the checks of all of them together.

Everything that can be refused is refused here, before a run folder exists.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from fedkeel import config
from fedkeel.base.fingerprint.reached_values import Description, describe_value
from fedkeel.base.values import rows_of
from fedkeel.data.augment import check_transform
from fedkeel.data.cohort import numbered
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.choose.evaluation import check_evaluation
from fedkeel.engine.choose.memory import check_server, choose_place, evaluation_batch
from fedkeel.engine.prepared import Draft, Ingredients, Prepared, learning_rate
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.engine.rehearsal import rehearse
from fedkeel.errors import ModelError, RunError
from fedkeel.method.context import Population
from fedkeel.method.grammar import parse
from fedkeel.method.legality import check_optimiser, check_sampling
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.part import Capability
from fedkeel.method.part_digests import describe_user_parts, digests_of_modules
from fedkeel.method.provided import provided_capabilities
from fedkeel.method.server_memory import server_start
from fedkeel.method.server_round import server_message
from fedkeel.runner.batch_checks import (
    check_accumulation,
    check_batches_of_one,
    check_evaluation_of_one,
    check_round_length,
)
from fedkeel.runner.data_checks import check_test_targets, matched_test_set, public_inputs
from fedkeel.runner.features import divided, features_asked_for, features_of
from fedkeel.runner.identity import key_of

DTYPES = {"float32": torch.float32, "float64": torch.float64}


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
    test = matched_test_set(data, ingredients.test.to(dtype))
    plan = parse(method, weights=settings.weights)
    task = ingredients.task
    if plan.buffers_keeper:
        task = replace(task, buffers="local")
    network = task.network(data, settings.seed, dtype)
    network.mixed = settings.engine.precision == "bf16-mixed"
    check_test_targets(network, data, test)
    metrics = task.metric_set(network, data)
    if clients.how["kind"] == "nodes" and (name := metrics.why_not_on_nodes()):
        raise ModelError(
            f"The metric {name!r} has to see all examples at once, and nodes send only sums.",
            do="leave it out of the metrics where the data are on nodes",
        )
    augment = _described_transform(ingredients, data, settings.seed)
    provides = provided_capabilities(network, data)
    if ingredients.public is not None:
        provides |= {Capability.PUBLIC_INPUTS}
    plan = parse(method, provides, settings.weights)
    local = plan.work(settings.local)
    check_optimiser(plan, local)
    training = ClientTraining(
        plan,
        network,
        local,
        task.buffers,
        rounds=settings.rounds,
        personal=plan.personal_names(network.layout),
        public=public_inputs(plan, network, data, ingredients.public),
    )
    own_seed = partial(int, settings.seed)
    who = clients, clients, cohort  # those that train are those of the data, for now
    own = ingredients.own
    seeds_and_task = own_seed, task
    draft = Draft(settings, *who, training, provides, ingredients.augment, *seeds_and_task, own=own)
    for feature in features:
        draft = feature.wrap(draft)
    training, plan, federation = draft.training, draft.training.plan, draft.federation
    check_accumulation(training.local, federation)
    check_round_length(training.local, federation)
    check_batches_of_one(training, federation, settings.rounds)
    per_round = draft.cohort.size(len(federation))
    population = Population.of(network, len(federation), draft.step_size or per_round)
    population = replace(population, public=len(training.public or ()))
    check_sampling(plan, training.local)
    setup = TrainingSetup(
        training,
        federation,
        test,
        settings.seed,
        metrics,
        ingredients.augment,
        settings.evaluation.batch_size
        or min(
            evaluation_batch(one, rows_of(federation.data.x, slice(2))) for one in draft.networks
        ),
        settings.engine.precision,
        keeps_updates=draft.keeps_updates,
        own=draft.own,
        others=draft.others,
    )
    check_evaluation_of_one(setup)
    check_evaluation(setup)
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
    in_training = () if setup.own is None else setup.own.description.unseen
    in_networks = (place for one in draft.networks for place in one.unseen)
    unseen = (*in_networks, *metrics.unseen, *augment.unseen, *in_parts, *in_training)
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
        judges=draft.judges,
        data_digest=given.data.fingerprint(),
        step_size=draft.step_size,
        features=draft.features,
    )
    for feature in features_of(prepared).values():
        feature.check(prepared)
    key = key_of(prepared, digests_of_modules(user_parts), augment.text)
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
