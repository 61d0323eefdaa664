"""Warnings before a run: it can be made, and its result may not be what the user expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

import numpy as np
import torch

from fedkeel import config
from fedkeel.base.settings import Kinds
from fedkeel.data.codings import coding_warnings
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.read.identifiers import is_number
from fedkeel.engine.prepared import Prepared, learning_rate
from fedkeel.engine.rehearsal import rehearse_client
from fedkeel.errors import counted
from fedkeel.method.part import traits_of
from fedkeel.method.parts.fedbn import FedBN
from fedkeel.method.parts.fedsalora import FedSALoRA
from fedkeel.method.parts.flora import FLoRA
from fedkeel.method.parts.lora import FFALoRA, RoLoRA
from fedkeel.method.parts.scaffnew import Scaffnew
from fedkeel.method.plugins import user_modules
from fedkeel.method.roles import LocalWork
from fedkeel.method.server_round import server_message
from fedkeel.runner.batch_checks import error_on_one_example, has_batch_of
from fedkeel.runner.defence_warnings import defence_warnings, rounds_without_reserve
from fedkeel.runner.features import feature_kinds
from fedkeel.runner.split_warnings import is_from_catalogue, split_warnings
from fedkeel.runner.task_warnings import task_warnings
from fedkeel.task.losses import OF_QUANTITIES, is_plain_cross_entropy, loss_name
from fedkeel.tree import nbytes, walk

LARGE_INPUT = 100.0
"""Absolute value of an input from which a table should be scaled."""

ONE_SIDED = 0.8
"""Share of the test examples with one label from which accuracy says little."""

MANY_CLASSES, FEW_EXAMPLES = 20, 20
"""Classes without names, and examples for each, from which labels look like quantities."""

MUCH_MEMORY = 1_000_000_000
"""Bytes of a part's server memory from which there is a warning."""


def find_warnings(prepared: Prepared) -> list[str]:
    """Return the warnings about a run; about the data none where only the nodes see them."""
    federation = prepared.setup.federation
    of_features = [text for kind in feature_kinds().values() for text in kind.warnings(prepared)]
    defences = [*defence_warnings(prepared), *rounds_without_reserve(prepared)]
    if federation.how["kind"] == "nodes":
        return list(filter(None, [*of_features, *defences]))
    data = federation.data
    warnings = (
        *of_features,
        *defences,
        *data.warnings,
        *coding_warnings(data),
        *_unused_settings(prepared.settings),
        _optimiser_that_is_not_used(prepared),
        *_settings_that_a_part_replaces(prepared),
        _clients_that_are_missed(prepared),
        _parameters_that_are_missed(prepared),
        values_not_seen(prepared),
        *_label_warnings(prepared),
        *split_warnings(federation, prepared.setup.test),
        *_names_that_nearly_agree(federation),
        _unscaled_columns(data) or _swapped_series_axes(data),
        *task_warnings(prepared),
        _generator_that_is_set(prepared),
        _step_that_does_not_repeat(prepared),
        _batches_of_two(prepared),
        _correction_without_augmentation(prepared),
        _large_server_memory(prepared),
    )
    return [message for message in warnings if message]


def _label_warnings(prepared: Prepared) -> tuple[str, ...]:
    """Return the warnings about labels; none where the targets are something else."""
    data, test = prepared.setup.federation.data, prepared.setup.test
    if not data.has_labels or prepared.setup.training.network.task_loss in OF_QUANTITIES:
        return ()
    return (
        _single_class(data) or _dominant_class(data, test),
        _labels_without_training(data, test),
        _labels_that_look_like_quantities(data),
    )


def _optimiser_that_is_not_used(prepared: Prepared) -> str:
    """Return a warning where a run chooses a local optimiser and its method brings another one."""
    part, local = prepared.plan.client_optimiser, prepared.settings.local
    names = ("optimiser", "momentum", "nesterov", "betas", "eps", "keep_state")
    chosen = [
        name for name in names if getattr(local, name) != config.Local.model_fields[name].default
    ]
    if part is None or not chosen:
        return ""
    return f"local.{chosen[0]} has no effect: {part.name} brings its own local optimiser"


def _settings_that_a_part_replaces(prepared: Prepared) -> Iterator[str]:
    """Yield a warning for each setting in whose place the method puts one of its own."""
    plan, settings = prepared.plan, prepared.settings
    if prepared.is_baseline:
        return
    local, used = settings.local, plan.work(settings.local)
    replaced = [
        f"local.{name} = {getattr(local, name)!r}"
        for name, field in config.Local.model_fields.items()
        if getattr(local, name) not in (getattr(used, name), field.default)
    ]
    if replaced:
        work = next(part.name for part in plan.parts if isinstance(part, LocalWork))
        verb = "has" if len(replaced) == 1 else "have"
        yield f"{work} says itself how clients train: {' and '.join(replaced)} {verb} no effect"
    reduction, weights = plan.reduction, settings.weights
    is_chosen = weights in ("examples", "uniform") and weights != reduction.weights
    if is_chosen and not traits_of(reduction).uses_weights:
        yield f"weights = {weights!r} has no effect: {reduction.name} uses none"
    criterion = plan.objective.criterion
    loss = prepared.setup.training.network.task_loss
    if criterion is not None and not is_plain_cross_entropy(loss):
        yield (
            f"clients train on the loss of {criterion.name}, in place of {loss_name(loss)!r}, "
            "which is measured all the same"
        )
    buffers = prepared.ingredients.task.buffers
    keeping = plan.buffers_keeper
    if keeping is not None and buffers == "average" and prepared.setup.training.network.buffers:
        yield f"model.buffers = 'average' has no effect: {keeping.name} keeps them at the clients"


def _clients_that_are_missed(prepared: Prepared) -> str:
    """Return a warning where a method for all clients in each round is run with some of them."""
    population = prepared.population
    parts = [part.name for part in prepared.plan.parts if isinstance(part, Scaffnew)]
    if not parts or population.per_round == population.clients:
        return ""
    return (
        f"{parts[0]} counts on all {population.clients} clients in each round; with "
        f"{population.per_round} it ends beside the optimum: use scaffold, or "
        f"cohort.clients = {population.clients}"
    )


def _parameters_that_are_missed(prepared: Prepared) -> str:
    """Return a warning where a method is for parameters that the model does not have."""
    layout = prepared.setup.training.network.layout
    for part in prepared.plan.parts:
        if isinstance(part, FedBN):
            if not (layout.normalisation or prepared.setup.training.network.buffers):
                return f"{part.name} has no effect: the model has no normalisation layers"
            continue
        if not isinstance(part, (FFALoRA, RoLoRA, FLoRA, FedSALoRA)):
            continue
        names = {FFALoRA: "frozen", RoLoRA: "second", FLoRA: "base", FedSALoRA: "keep"}
        word = getattr(part, names[type(part)])
        if not any(word in name for name in layout.names):
            return (
                f"{part.name} has no effect: no trained parameter's name contains {word!r}; "
                "it is for adapters such as those of peft"
            )
    return ""


def values_not_seen(prepared: Prepared) -> str:
    """Return a warning where values could not be read, by which a run is known again."""
    if not prepared.unseen:
        return ""
    more = f" and {len(prepared.unseen) - 3} more" if len(prepared.unseen) > 3 else ""
    return (
        "this run is made anew each time, and cannot be continued: what "
        f"{', '.join(prepared.unseen[:3])}{more} holds cannot be read, so nobody can tell whether "
        "an earlier run had the same (docs/concepts/reproducibility.md)"
    )


def _unused_settings(settings: config.Run) -> list[str]:
    """Return a warning for each setting that has no effect beside the others."""
    tables: dict[str, Kinds] = {"local.schedule": settings.local.schedule}
    messages = []
    if isinstance(settings, config.Experiment):
        tables["partition"] = settings.partition
        client, kind = settings.data.client, settings.partition.kind
        if client is not None and kind not in ("client", "nodes"):
            messages.append(
                f"data.client = {client!r} has no effect: partition.kind {kind!r} divides the "
                "examples anew"
            )
    for name, table in tables.items():
        for key, kinds in table.idle.items():
            messages.append(
                f"{name}.{key} = {getattr(table, key)!r} has no effect: it is for kind "
                f"{' or '.join(map(repr, kinds))}"
            )
    return messages


def _labels_that_look_like_quantities(data: Dataset) -> str:
    """Return a warning where numbers are taken for classes of which each has few examples."""
    used = len(data.used_labels)
    names = [name for name in data.label_names if not is_number(name)]
    if names or is_from_catalogue(data) or used < MANY_CLASSES or len(data) >= FEW_EXAMPLES * used:
        return ""
    return (
        f"{len(data):,} training examples have {used} different numbers for labels: are they a "
        "quantity? Each number is learned as a separate class; divide a quantity into a few classes"
    )


def _names_that_nearly_agree(federation: Federation) -> Iterator[str]:
    """Yield a warning where names differ only by the case of their letters, or are one number."""
    for names, what in (
        (federation.data.label_names, "labels"),
        (federation.names, "clients"),
    ):
        if _are_plain_numbers(names):
            continue
        known: dict[object, str] = {}
        for name in names:
            is_value = is_number(name)
            other = known.setdefault(Decimal(name) if is_value else name.casefold(), name)
            if other != name:
                how = "are one number, written in two ways" if is_value else "differ only in case"
                yield f"{other!r} and {name!r} are two {what}: they {how}"
                break


def _are_plain_numbers(names: Sequence[str]) -> bool:
    """Return whether names are whole numbers in their shortest form, of which no two are one."""
    digits = "".join(names)
    with_zero = [name for name in names if name[:1] in ("0", "")]
    return digits.isascii() and digits.isdecimal() and with_zero in ([], ["0"])


def _single_class(data: Dataset) -> str:
    """Return a warning where all training examples have one label."""
    labels = data.used_labels.tolist()
    if len(labels) > 1:
        return ""
    label = data.label_names[labels[0]] if data.label_names else labels[0]
    return (
        f"all training examples have the label {label!r}: a model that always predicts it is right"
    )


def _dominant_class(data: Dataset, test: Dataset) -> str:
    """Return a warning where nearly all test examples have one label."""
    counts = np.bincount(test.labels, minlength=1)
    top, total = int(counts.argmax()), max(int(counts.sum()), 1)
    share = int(counts[top]) / total
    if share < ONE_SIDED or data.classes < 2:
        return ""
    label = data.label_names[top] if top < len(data.label_names) else top
    return (
        f"{int(counts[top]):,} of {total:,} test examples have the label {label!r}: a model "
        f"that always predicts it reaches {100 * share:.1f} %, so look at each class by itself "
        "(docs/guides/models.md, One class is rare)"
    )


def _labels_without_training(data: Dataset, test: Dataset) -> str:
    """Return a warning where nobody trains on labels of the test set."""
    is_trained = np.isin(test.labels, data.used_labels)
    count = int((~is_trained).sum())
    if not count:
        return ""
    verb = "has" if count == 1 else "have"
    return (
        f"{count:,} of {counted(len(test), 'test example')} {verb} a label that no training "
        "example has: nobody can learn it"
    )


def _unscaled_columns(data: Dataset) -> str:
    """Return a warning where the columns of a table are of very different or large scales."""
    x = data.x
    if not data.columns or data.scale is not None or isinstance(x, dict):
        return ""
    if not x.is_floating_point():
        return ""
    sizes = x.abs().flatten(1).amax(dim=0)
    column = int(sizes.argmax())
    if float(sizes[column]) < LARGE_INPUT:
        return ""
    return (
        f"column {data.columns[column]!r} goes up to {float(sizes[column]):,.4g}: "
        'normalize = "standardize" in [data] brings all columns to one scale'
    )


def _swapped_series_axes(data: Dataset) -> str:
    """Return a warning where the steps of a series may have been taken for its channels."""
    scales = [data.scale, *data.client_scales.values()]
    scale = next((scale for scale in scales if scale is not None), None)
    if scale is None or isinstance(data.shape, dict) or len(data.shape) != 2:
        return ""
    first, second = data.shape
    if len(scale[0]) != first or first <= second:
        return ""
    return (
        f"standardising took inputs {list(data.shape)} for series of {first} channels and "
        f"{counted(second, 'step')}: of series [steps, channels] say "
        'channels = "last" in [data], or in fedkeel.from_clients'
    )


def _generator_that_is_set(prepared: Prepared) -> str:
    """Return a warning where the model or the loss sets global random numbers."""
    library = prepared.setup.training.network.traits.sets_generator
    if not library:
        return ""
    return (
        f"the model or its loss sets the random numbers of {library} while it trains (by a seed, "
        "or a state that it puts back): every step of every client then draws the same ones. Leave "
        "it out: the run's seed decides them"
    )


def _step_that_does_not_repeat(prepared: Prepared) -> str:
    """Return a warning where a step of the user's own method does not repeat."""
    modules = user_modules(prepared.plan.parts)
    if not modules:
        return ""
    lr = learning_rate(prepared.settings, prepared.setup.training, 0)
    message = server_message(prepared.plan, prepared.server, lr)
    first, second = (dict(walk(rehearse_client(prepared.setup, message))) for _ in range(2))
    if all(torch.equal(t, second[path]) or not t.isfinite().all() for path, t in first.items()):
        return ""
    return (
        "the same step of the same client gives another result each time: does "
        f"{', '.join(modules)} draw random numbers that are not torch's, or keep something outside "
        "its state? Engines will not agree, and a continued run will differ from an unbroken one"
    )


def _batches_of_two(prepared: Prepared) -> str:
    """Return a warning where batch normalisation turns any two examples into +1 and -1.

    Only rounding is left of their difference, and its gradient magnifies that: two exact engines
    differ in such a client's update as much as two clients do.
    """
    training, federation = prepared.setup.training, prepared.setup.federation
    if not training.network.mixes_examples:
        return ""
    sizes, rounds = [int(n) for n in np.unique(federation.sizes) if n], prepared.settings.rounds
    with_pairs = [n for n in sizes if has_batch_of(training.local, n, rounds, 2)]
    if not with_pairs or not error_on_one_example(training.network, federation.data):
        return ""
    count = int(np.isin(federation.sizes, with_pairs).sum())
    return (
        f"{count} of {counted(len(federation), 'client')} {'has' if count == 1 else 'have'} "
        "mini-batches of two examples, which batch normalisation turns into +1 and -1 whatever "
        "they are: rounding decides what is learnt from them, so compare over several seeds, or "
        "give every client more examples, or use fedkeel.replace_batch_norm(module)"
    )


def _correction_without_augmentation(prepared: Prepared) -> str:
    """Return a warning where a part corrects by gradients of examples that are not augmented."""
    parts = [part.name for part in prepared.plan.surveys]
    if not parts or not prepared.setup.augment:
        return ""
    return (
        f"{parts[0]} computes its corrections on examples without augmentation, which cancels "
        f"data.augment near the received model: `fedkeel methods {parts[0]}`, Deviations"
    )


def _large_server_memory(prepared: Prepared) -> str:
    """Return a warning where a part lets the server remember very much."""
    sizes = {part: nbytes(state) for part, state in prepared.server.memory.items()}
    part = max(sizes, key=lambda name: sizes[name], default="")
    if not part or sizes[part] < MUCH_MEMORY:
        return ""
    models = sizes[part] / nbytes(prepared.server.params)
    return (
        f"{part} lets the server remember up to {sizes[part] / 1e9:,.1f} GB, as much as "
        f"{models:,.0f} models, and every checkpoint holds it: `fedkeel methods {part}` says what "
        "that depends on"
    )
