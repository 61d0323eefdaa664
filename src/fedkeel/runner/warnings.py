"""What a user should know before a run: nothing is wrong, and something may well go otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fedkeel import config
from fedkeel.config.base import Kinds
from fedkeel.data.dataset import Dataset, Federation
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.engine.prepared import Prepared, learning_rate
from fedkeel.engine.rehearsal import rehearse_client
from fedkeel.errors import counted
from fedkeel.method.plugins import user_part_digests
from fedkeel.method.server_round import server_message
from fedkeel.runner.prepare import meets, raises_on_one
from fedkeel.tree import nbytes, walk

LARGE = 100.0
"""Size of an input from which a table is taken to want another scale."""

SIDED = 0.8
"""Share of the test examples with one label from which accuracy says little."""

MANY, FEW = 20, 20
"""Classes without names, and examples for each of them, from which they are taken for such."""

SEARCHED, ROWS, SHARED = 20_000_000, 100_000, 0.1
"""Numbers and examples up to which a training set is compared with the test set, which takes
a quarter of a second, and the share of the latter from which it is told that they are the same."""

HEAVY = 1_000_000_000
"""Bytes that a server remembers from which it is said before a run."""


def find_warnings(prepared: Prepared) -> list[str]:
    """Return what is to be known before a run, none in a federation whose data nobody sees."""
    federation = prepared.setup.federation
    if federation.how["kind"] == "nodes":
        return []
    data = federation.data
    found = (
        *_idle(prepared.settings),
        _one_class(data) or _one_sided(data, prepared.setup.test),
        _unseen(data, prepared.setup.test),
        _quantity(data),
        _seen(data, prepared.setup.test),
        *_cases(federation),
        _nothing_held(federation),
        _unscaled(data) or _series(data),
        _softmax(prepared),
        _strays(prepared),
        _pairs(prepared),
        _unaugmented(prepared),
        _heavy(prepared),
    )
    return [told for told in found if told]


def _idle(settings: config.Run) -> list[str]:
    """Return a hint for each setting that is given and means nothing beside the others."""
    tables: dict[str, Kinds] = {"local.schedule": settings.local.schedule}
    found = []
    if isinstance(settings, config.Experiment):
        tables["partition"] = settings.partition
        client, kind = settings.data.client, settings.partition.kind
        if client is not None and kind not in ("client", "nodes"):
            found.append(
                f"data.client = {client!r} decides nothing: partition.kind {kind!r} divides the "
                "examples anew"
            )
    for name, table in tables.items():
        for key, kinds in table.idle.items():
            found.append(
                f"{name}.{key} = {getattr(table, key)!r} decides nothing: it is for kind "
                f"{' or '.join(map(repr, kinds))}"
            )
    return found


def _quantity(data: Dataset) -> str:
    """Return a hint where numbers are taken for classes of which each has few examples."""
    used = len(np.unique(data.y.numpy()))
    words = [name for name in data.label_names if not name.lstrip("-").isdigit()]
    if words or _known(data) or used < MANY or len(data) >= FEW * used:
        return ""
    return (
        f"{len(data):,} training examples have {used} different numbers for labels: are they a "
        "quantity? Each is a class of its own, however near it is to the next; divide quantities "
        "into a few classes"
    )


def _known(data: Dataset) -> bool:
    """Return whether all of the data come from the catalogue."""
    return all(source in SOURCES for source in data.sources)


def _seen(data: Dataset, test: Dataset) -> str:
    """Return a hint where test examples are trained on, number for number."""
    large = max(data.x.numel(), test.x.numel()) > SEARCHED or max(len(data), len(test)) > ROWS
    if large or _known(data) or data.shape != test.shape or data.x.dtype != test.x.dtype:
        return ""
    trained = set(_rows(data))
    count = sum(row in trained for row in _rows(test))
    if count < SHARED * len(test) or not count:
        return ""
    return (
        f"{count:,} of {counted(len(test), 'test example')} are among those that are trained on, "
        "number for number: accuracy on them says little about new ones"
    )


def _rows(data: Dataset) -> Iterator[int]:
    """Yield a digest of each example with its label."""
    flat = data.x.reshape(len(data), -1).numpy()
    for row, label in zip(flat, data.y.tolist(), strict=True):
        yield hash((row.tobytes(), label))


def _cases(federation: Federation) -> Iterator[str]:
    """Yield a hint where names differ by the case of their letters alone."""
    for names, what in (
        (federation.data.label_names, "labels"),
        (federation.names, "clients"),
    ):
        known: dict[str, str] = {}
        for name in names:
            other = known.setdefault(name.casefold(), name)
            if other != name:
                yield f"{other!r} and {name!r} are two {what}: they differ in case alone"
                break


def _nothing_held(federation: Federation) -> str:
    """Return a hint where no client is large enough to hold anything out."""
    if federation.holdout_rows is None or len(federation.holdout_rows):
        return ""
    return (
        "no client has enough examples to hold any out (holdout), so none is evaluated on its own"
    )


def _one_class(data: Dataset) -> str:
    """Return a hint where all training examples have one label."""
    found = np.unique(data.y.numpy()).tolist()
    if len(found) > 1:
        return ""
    label = data.label_names[found[0]] if data.label_names else found[0]
    return f"all training examples have the label {label!r}: every model is right by saying so"


def _one_sided(data: Dataset, test: Dataset) -> str:
    """Return a hint where nearly all test examples have one label."""
    counts = np.bincount(test.y.numpy(), minlength=1)
    most, all_of_them = int(counts.argmax()), max(int(counts.sum()), 1)
    share = int(counts[most]) / all_of_them
    if share < SIDED or data.classes < 2:
        return ""
    label = data.label_names[most] if most < len(data.label_names) else most
    return (
        f"{int(counts[most]):,} of {all_of_them:,} test examples have the label {label!r}: a model "
        f"that always says so reaches {100 * share:.1f} %, so look at each class by itself "
        "(docs/guides/models.md, One class is rare)"
    )


def _unseen(data: Dataset, test: Dataset) -> str:
    """Return a hint where nobody trains on labels of the test set."""
    seen = np.isin(test.y.numpy(), np.unique(data.y.numpy()))
    count = int((~seen).sum())
    if not count:
        return ""
    verb = "has" if count == 1 else "have"
    return (
        f"{count:,} of {counted(len(test), 'test example')} {verb} a label that no training "
        "example has: nobody can learn it"
    )


def _unscaled(data: Dataset) -> str:
    """Return a hint where the columns of a table are of very different or large scales."""
    if not data.columns or data.scale is not None or not data.x.is_floating_point():
        return ""
    sizes = data.x.abs().flatten(1).amax(dim=0)
    column = int(sizes.argmax())
    if float(sizes[column]) < LARGE:
        return ""
    return (
        f"column {data.columns[column]!r} goes up to {float(sizes[column]):,.4g}: "
        'normalize = "standardize" in [data] brings all columns to one scale'
    )


def _series(data: Dataset) -> str:
    """Return a hint where the steps of a series may have been taken for its channels."""
    if data.scale is None or len(data.shape) != 2:
        return ""
    first, second = data.shape
    if len(data.scale[0]) != first or first <= second:
        return ""
    return (
        f"standardising took inputs {list(data.shape)} for series of {first} channels and "
        f"{counted(second, 'step')}: of series [steps, channels] swap the axes, x.swapaxes(1, 2), "
        "and again in the model"
    )


def _softmax(prepared: Prepared) -> str:
    """Return a hint where the module ends in a softmax, and its loss takes another."""
    network = prepared.setup.training.network
    if not network.uses_cross_entropy:
        return ""
    with torch.no_grad():
        few = prepared.setup.test.x[:8]
        made = network.test_logits(network.params, network.buffers, few)
    if made.shape[1] < 2 or made.min() < 0 or ((made.sum(dim=1) - 1).abs() > 1e-3).any():
        return ""
    return (
        "the model returns probabilities, and cross-entropy takes scores: it makes a softmax of "
        "the softmax, which learns slowly and never surely, so leave it out of the model"
    )


def _strays(prepared: Prepared) -> str:
    """Return a hint where a method of one's own does not do the same twice."""
    own = user_part_digests(prepared.plan.parts)
    if not own:
        return ""
    lr = learning_rate(prepared.settings, prepared.setup.training, 0)
    message = server_message(prepared.plan, prepared.server, lr)
    one, two = (dict(walk(rehearse_client(prepared.setup, message))) for _ in range(2))
    if all(torch.equal(t, two[path]) or not t.isfinite().all() for path, t in one.items()):
        return ""
    return (
        f"the same step of the same client comes out otherwise each time: does {', '.join(own)} "
        "draw random numbers that are not torch's, or keep something outside its state? Engines "
        "will not agree, and a run that goes on will not be the one that was stopped"
    )


def _pairs(prepared: Prepared) -> str:
    """Return a hint where batch normalisation makes +1 and -1 of two examples, whatever they are.

    What is left of their difference is rounding, which its gradient then magnifies: two exact
    engines differ in such a client's update as much as two clients do.
    """
    training, federation = prepared.setup.training, prepared.setup.federation
    if not training.network.mixes_examples:
        return ""
    sizes, rounds = [int(n) for n in np.unique(federation.sizes) if n], prepared.settings.rounds
    found = [n for n in sizes if meets(training.local, n, rounds, 2)]
    if not found or not raises_on_one(training.network, federation.data):
        return ""
    count = int(np.isin(federation.sizes, found).sum())
    return (
        f"{count} of {counted(len(federation), 'client')} {'has' if count == 1 else 'have'} "
        "mini-batches of two examples, which batch normalisation turns into +1 and -1 whatever "
        "they are: rounding decides what is learnt from them, so compare over several seeds, or "
        "give every client more examples, or use fedkeel.replace_batch_norm(module)"
    )


def _unaugmented(prepared: Prepared) -> str:
    """Return a hint where a part corrects by gradients of examples that are not augmented."""
    parts = [part.name for part in prepared.plan.surveys]
    if not parts or not prepared.setup.augment:
        return ""
    return (
        f"{parts[0]} corrects its gradients by those of the examples as they are, so that near the "
        f"received model nothing of data.augment is left: `fedkeel methods {parts[0]}`, Deviations"
    )


def _heavy(prepared: Prepared) -> str:
    """Return a hint where a part lets the server remember very much."""
    sizes = {part: nbytes(state) for part, state in prepared.server.memory.items()}
    part = max(sizes, key=lambda one: sizes[one], default="")
    if not part or sizes[part] < HEAVY:
        return ""
    models = sizes[part] / nbytes(prepared.server.params)
    return (
        f"{part} lets the server remember up to {sizes[part] / 1e9:,.1f} GB, as much as "
        f"{models:,.0f} models, and every checkpoint holds it: `fedkeel methods {part}` says what "
        "that depends on"
    )
