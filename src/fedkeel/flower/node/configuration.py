"""What a node has: its clients and their data, by the node's own configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from fedkeel.config import Experiment
from fedkeel.errors import ConfigError
from fedkeel.flower.node.local_data import away, own
from fedkeel.flower.node.node import Site
from fedkeel.runner.prepare import gather, prepare

_KEYS = ("partition-id", "num-partitions", "state", "data", "name")
"""What a node's configuration may say; other apps on the node may have keys of their own."""

STATE = Path.home() / ".fedkeel" / "state"
"""Where clients keep their state, where the node's configuration names no folder."""


def site(experiment: Experiment, config: Mapping[str, object]) -> Site:
    """Return what a node needs to answer.

    Args:
        experiment: the same as at the server.
        config: the node's configuration: ``partition-id`` and ``num-partitions``; ``state``, the
            folder of what its clients keep; for data of its own ``data`` and ``name``.

    Raises:
        FedkeelError: the data or the model cannot be used, or the configuration is not complete.
    """
    _misspelled(config)
    number, of = _whole(config, "partition-id"), _whole(config, "num-partitions", 1)
    root = folder(config)
    if away(experiment):
        prepared = prepare(experiment, own(experiment, config, number))
        return Site(prepared, frozenset({number}), root, str(config.get("name") or ""))
    prepared = prepare(experiment, gather(experiment))
    clients = range(number, prepared.population.clients, max(of, 1))
    return Site(prepared, frozenset(clients), root)


def folder(config: Mapping[str, object]) -> Path:
    """Return where a node keeps what its clients remember, and its log."""
    return Path(str(config.get("state") or STATE)).expanduser()


def _misspelled(config: Mapping[str, object]) -> None:
    """Refuse a key that is all but one of ours: what it says would count for nothing."""
    for key in sorted(set(config) - set(_KEYS)):
        near = difflib.get_close_matches(key, set(_KEYS) - set(config), n=1, cutoff=0.8)
        if near:
            raise ConfigError(
                f"The node's configuration has no key {key!r}.",
                do=f"did you mean {near[0]!r}? known: {', '.join(_KEYS)}",
            )


def _whole(values: Mapping[str, object], name: str, default: int | None = None) -> int:
    found = values.get(name, default)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ConfigError(
            f"The node's configuration needs {name!r}.",
            got=repr(found),
            expected="a whole number >= 0, without quotes",
            do=f"start it with --node-config '{name}=0 ...'",
        )
    return found
