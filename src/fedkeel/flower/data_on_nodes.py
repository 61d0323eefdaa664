"""What both ends of a federation know of data that stays on the nodes."""

from __future__ import annotations

from fedkeel.config import Experiment
from fedkeel.data.augment import named_transform
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.read.load import check_augment
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import DataError
from fedkeel.runner.ingredients import task

CLASSES_LOSS = "cross_entropy"
"""The loss that needs names of labels, which every node numbers in the same way."""

NODES = "nodes"
"""The value of ``data.source`` and ``partition.kind`` where data stays on the nodes."""


def is_on_nodes(experiment: Experiment) -> bool:
    """Return whether the data stays on the nodes.

    Raises:
        DataError: only one of ``data.source`` and ``partition.kind`` says so, the names of the
            labels are missing or not different, a holdout is asked for, or new clients are named.
    """
    source, kind = experiment.data.source == NODES, experiment.partition.kind == NODES
    if source != kind:
        raise DataError(
            "Data on the nodes needs data.source = 'nodes' and partition.kind = 'nodes'.",
            got=f"{experiment.data.source!r} and {experiment.partition.kind!r}",
        )
    labels = experiment.data.labels
    if source and not labels and experiment.task.loss == CLASSES_LOSS:
        raise DataError(
            "Data on the nodes needs data.labels, the names of the labels in their order.",
            why="every node has to number the classes in the same way, also those it does not have",
            do='set data.labels = ["benign", "malignant"], or ["0", "1", ...] for numbers; where '
            "no classes are learned, name the loss: task.loss = 'mse'",
        )
    if len(set(labels)) < len(labels):
        repeated = next(name for name in labels if labels.count(name) > 1)
        raise DataError(f"data.labels names {repeated!r} twice.", expected="each label once")
    unnamed = [name for name, known in experiment.data.categories_of.items() if not known]
    if source and unnamed:
        raise DataError(
            f"Data on the nodes needs the names of the categories of {unnamed[0]!r}.",
            why="every node has to make the same inputs, also of categories it does not have",
            do=f'set data.categories = {{{unnamed[0]} = ["a", "b", ...]}}',
        )
    if source and experiment.partition.holdout:
        raise DataError(
            "Data on the nodes takes no partition.holdout.",
            got=experiment.partition.holdout,
            why="each node is evaluated on the share data.test_fraction of its own data",
            do="leave it out, and set data.test_fraction",
        )
    new = experiment.cohort.new_clients
    names = [] if isinstance(new, int) else [name for name in new if isinstance(name, str)]
    if source and names:
        raise DataError(
            "Data on the nodes takes no names in cohort.new_clients.",
            got=repr(names[0]),
            expected="numbers, which are the nodes' partition-id",
            why="every node has to know whom no round selects, and none knows the others' names",
            do="name these clients by their numbers: cohort.new_clients = [0, 2]",
        )
    return source


def how_to_move(experiment: Experiment, nodes: int) -> str:
    """Return what to set where an experiment reads its data itself and nodes are to read theirs."""
    labels = list(experiment.data.labels) or "[all labels, in one order]"
    unnamed = [name for name, known in experiment.data.categories_of.items() if not known]
    return (
        f"for data on nodes set data.source = 'nodes', data.labels = {labels}, "
        + "".join(f"data.categories.{name} = [all of them], " for name in unnamed)
        + f"and [partition] to kind = 'nodes', clients = {nodes} and nothing else "
        'but holdout_by; fedkeel\'s page "Run in Flower" has these lines'
    )


def ingredients(experiment: Experiment, federation: Federation, test: Dataset) -> Ingredients:
    """Return the ingredients of a run at either end.

    Args:
        experiment: what runs.
        federation: the node's own data as one client, or the server's blank placeholder.
        test: the test set of the same end.
    """
    data = federation.data
    check_augment(experiment.data, is_image=len(data.shape) == 3)
    augment = named_transform(experiment.data.augment)
    return Ingredients(
        task(experiment, data),
        lambda seed: federation,
        test,
        experiment.model.name,
        augment,
        experiment.model.args,
    )
