"""A node's configuration: which clients it plays, where its data and its files are."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from fedkeel.base.named_files import expanded
from fedkeel.config import Experiment
from fedkeel.data.dataset import Dataset
from fedkeel.errors import ConfigError
from fedkeel.features.budget.kept_noise import noise_kept_in
from fedkeel.features.budget.policy import Policy, read_policy
from fedkeel.flower.data_on_nodes import is_on_nodes
from fedkeel.flower.node.guard import Guard, check_settings
from fedkeel.flower.node.hardware import Hardware
from fedkeel.flower.node.local_data import read_local_data
from fedkeel.flower.node.node import Node
from fedkeel.flower.node.sent_settings import check_sent
from fedkeel.flower.node.signing import read_signing
from fedkeel.flower.node.statistics import OwnData, as_it_is, check_same_data
from fedkeel.flower.protocol import DESCRIBE
from fedkeel.runner.features import check_nodes
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare

_KEYS = (
    "partition-id",
    "num-partitions",
    "state",
    "data",
    "name",
    "policy",
    "key",
    "peers",
    "device",
    "engine",
)
"""Keys of a node's configuration. Other apps on the node may have keys of their own."""

STATE = Path.home() / ".fedkeel" / "state"
"""The node's folder where its configuration names none."""


def make_node(
    experiment: Experiment,
    config: Mapping[str, object],
    installed: Experiment | None = None,
    kind: str = DESCRIBE,
) -> Node:
    """Return a node that can reply to requests. What may not be asked for is refused first.

    Args:
        experiment: the same as at the server.
        config: the node's configuration: ``partition-id`` and ``num-partitions``; ``state``, the
            folder of its clients' state; with data of its own also ``data`` and ``name``;
            ``policy``, the file of the site's own policy; for secure sums ``key``, the file of the
            key that signs, and ``peers``, that of the public keys of the nodes it trusts;
            ``device`` and ``engine``, where and how the node trains, see `hardware`.
        installed: the experiment of the node's own app, without what the server has set; None where
            the server sets nothing.
        kind: type of the message that is to be answered.

    Raises:
        PolicyError: the settings name code or files that are not the node's, or the site's policy
            does not allow what is asked.
        FedkeelError: the data or the model cannot be used, or the configuration is not complete.
    """
    _refuse_misspelled(config)
    number, nodes = _integer(config, "partition-id"), _integer(config, "num-partitions", 1)
    folder, policy = state_folder(config), site_policy(config)
    check_asked(experiment, installed, policy, kind)
    place = Hardware.read(config).place(experiment.engine, policy)
    check_nodes(experiment)  # which may import the method, so after what the server has sent
    signing = read_signing(_file(config, "key"), _file(config, "peers"))
    has_own_data = is_on_nodes(experiment)
    data = config.get("data")
    read = partial(read_local_data, source=data, client=number) if has_own_data else gather
    with noise_kept_in(folder):
        prepared = prepare(experiment, read(experiment))
    clients, name = frozenset({number}), str(config.get("name") or "")
    if not has_own_data:
        clients, name = frozenset(range(number, prepared.population.clients, max(nodes, 1))), ""
    guard = None if policy is None else Guard(policy, prepared)
    own_data = None
    if has_own_data:
        own_data = OwnData(experiment.data, partial(_as_it_is, experiment, data, number))
    return Node(prepared, clients, folder, name, guard, signing, place, own_data)


def check_asked(
    experiment: Experiment, installed: Experiment | None, policy: Policy | None, kind: str
) -> None:
    """Refuse what may not be asked for. A node that is kept is to check this for every message.

    Args:
        experiment: what the server has set.
        installed: the experiment of the node's own app; None where the server sets nothing.
        policy: the site's own.
        kind: type of the message.

    Raises:
        PolicyError: the settings name code, files or data that are not the node's, or the policy
            does not allow what is asked.
    """
    own = experiment if installed is None else installed
    check_sent(own, experiment, policy)
    check_same_data(own, experiment, kind)
    if policy is not None:
        check_settings(policy, experiment, kind)


def _as_it_is(experiment: Experiment, source: object, client: int) -> Dataset:
    """Return all examples of a node's own data, for statistics."""
    as_they_are = experiment.model_copy(update={"data": as_it_is(experiment.data)})
    return read_local_data(as_they_are, source, client).clients(experiment.seed).data


def site_policy(config: Mapping[str, object]) -> Policy | None:
    """Return the site's own policy, None where the configuration names none.

    Raises:
        ConfigError: it cannot be read; the node then answers nothing.
    """
    file = _file(config, "policy")
    return None if file is None else read_policy(file)


def _file(config: Mapping[str, object], name: str) -> Path | None:
    """Return the file that a key of the configuration names, None where it does not."""
    if name not in config:
        return None
    file = expanded(str(config[name]))
    if not file.is_absolute():
        raise ConfigError(
            f"The node's configuration needs the whole path of {name!r}.",
            got=f"{name} = {str(file)!r}",
            do=f"start it with --node-config '{name}=\"{file.absolute()}\" ...'",
        )
    return file


def site_files(config: Mapping[str, object]) -> list[Path]:
    """Return the files and folders of the site that a configuration names."""
    names = [str(config[key]) for key in ("policy", "key", "peers", "data") if key in config]
    return [expanded(name) for name in names]


def trains_on_device(config: Mapping[str, object], experiment: Experiment) -> bool:
    """Return whether a node trains other than a simulation on a processor does.

    Raises:
        FedkeelError: the configuration or the policy cannot be read, or allow no device.
    """
    _refuse_misspelled(config)
    place = Hardware.read(config).place(experiment.engine, site_policy(config))
    return not place.is_plain


def state_folder(config: Mapping[str, object]) -> Path:
    """Return the node's folder, which holds its clients' state and its log."""
    return expanded(str(config.get("state") or STATE))


def _refuse_misspelled(config: Mapping[str, object]) -> None:
    """Refuse a key that is almost one of ours: its value would be ignored."""
    for key in sorted(set(config) - set(_KEYS)):
        close = difflib.get_close_matches(key, set(_KEYS) - set(config), n=1, cutoff=0.8)
        if close:
            raise ConfigError(
                f"The node's configuration has no key {key!r}.",
                do=f"did you mean {close[0]!r}? known: {', '.join(_KEYS)}",
            )


def _integer(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(
            f"The node's configuration needs {name!r}.",
            got=repr(value),
            expected="a whole number >= 0, without quotes",
            do=f"start it with --node-config '{name}=0 ...'",
        )
    return value
