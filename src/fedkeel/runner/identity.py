"""The key of a run: a digest of all that decides its numbers."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping

from fedkeel.base.feature import declarations, declared_tables
from fedkeel.engine.prepared import Prepared
from fedkeel.runner.features import features_of
from fedkeel.tree import walk
from fedkeel.version import __version__

_DESCRIBED_OTHERWISE = (
    "name",
    "method",
    "compare",
    "tune",
    "data",
    "partition",
    "model",
    "task",
    "flower",
)
"""Settings that decide no number, or that a key describes by what was made of them."""


def key_of(prepared: Prepared, user_parts: Mapping[str, str], augment: str) -> str:
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
    settings["local"].pop("train")  # likewise
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
    for table in declared_tables():
        settings.pop(table, None)
        if identities.get(table) is not None:
            settings[table] = identities.pop(table)
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
    if setup.training.public is not None and prepared.ingredients.public is not None:
        identity["public"] = prepared.ingredients.public.fingerprint()
    if setup.own is not None:
        identity["local training"] = setup.own.description.text
    for facts in identities.values():  # of features without a table
        identity |= facts or {}
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
