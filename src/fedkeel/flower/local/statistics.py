"""Statistics of sites: of a federation that is up, or of one that is started for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedkeel.base.named_files import writing
from fedkeel.config import Experiment
from fedkeel.errors import ConfigError, RunError, did_you_mean
from fedkeel.features.budget.policy import read_policy
from fedkeel.flower.data_on_nodes import how_to_move, is_on_nodes
from fedkeel.flower.export import export
from fedkeel.flower.local.federation import data_configs
from fedkeel.flower.local.processes import (
    AS_JSON,
    ENVIRONMENT,
    FlowerProcesses,
    json_answer,
    quoted,
    search_path,
)
from fedkeel.flower.server.serve import OUTCOME, RunEnd
from fedkeel.records.folder import RunFolder
from fedkeel.records.node_statistics import FILE, NodeStatistics

STATUS_SECONDS = 10.0
"""Time between questions to Flower whether the server's app still runs."""

PATIENCE = 120.0
"""Seconds that a command of Flower may take."""


def configs_with_policy(
    experiment: Experiment, data: Sequence[str], policy: Path | None, federation: str | None
) -> list[str]:
    """Return the configuration of nodes that are started here to be asked for statistics.

    Args:
        experiment: of the federation.
        data: of each node.
        policy: of all of them.
        federation: name of one that is up, which takes none of this.

    Raises:
        ConfigError: the data of each client, or the policy, are not there.
    """
    needed = experiment.partition.clients or 0
    if federation is not None or not is_on_nodes(experiment) or len(data) != needed:
        raise ConfigError(
            "Statistics are of a federation that is up, or of data that are named here.",
            got=f"data.source = {experiment.data.source!r} and {len(data)} times --data"
            + (" beside --federation" if federation is not None else ""),
            expected="data.source = 'nodes', and --federation NAME, or --data for each client",
            do=None if is_on_nodes(experiment) else how_to_move(experiment, len(data) or needed),
        )
    if policy is None:
        raise ConfigError(
            "A site answers only as far as its policy consents.",
            do="name one for the nodes that are started here, --policy POLICY.toml, with "
            '[statistics] kinds = ["labels", "missing"]',
        )
    read_policy(policy)
    return [f"{one} policy={quoted(str(policy.absolute()))}" for one in data_configs(data)]


def of_local_nodes(
    experiment: Experiment, out: Path, configs: Sequence[str], kinds: str, secure: bool = False
) -> NodeStatistics:
    """Start a federation on this machine, ask its nodes for statistics, and end it.

    Args:
        experiment: of the federation.
        out: folder of the results; logs are in its folder ``flower``.
        configs: the configuration of each SuperNode.
        kinds: what is asked for.
        secure: whether to use TLS and node keys.

    Raises:
        FedkeelError: the nodes have not answered.
    """
    folder = _prepared(out)
    with RunFolder(folder).alone():
        (folder / "superlink.db").unlink(missing_ok=True)
        export(experiment, folder / "app")
        state = quoted(str(folder / "state"))
        with FlowerProcesses(folder, [f"{one} state={state}" for one in configs], secure) as local:
            run = local.submit(folder / "app", _config(out, kinds))

            def status() -> str:
                return local.status(run) if local.is_alive("superlink") else "stopped"

            return _result(out, status)


def of_federation(experiment: Experiment, out: Path, name: str, kinds: str) -> NodeStatistics:
    """Ask the nodes of a federation that is up for statistics.

    Args:
        experiment: of the federation, with the same app as its nodes have.
        out: folder of the results, on the SuperLink's machine.
        name: of the SuperLink in Flower's own configuration, as ``flwr run`` takes it.
        kinds: what is asked for.

    Raises:
        ConfigError: the configuration has no such name.
        FedkeelError: the nodes have not answered.
    """
    known = json_answer(_flwr(["config", "list", *AS_JSON]))["superlink"]
    if name not in known:
        raise ConfigError(
            "Flower's configuration has no such federation.",
            got=repr(name),
            do=did_you_mean(name, known),
        )
    folder = _prepared(out)
    with RunFolder(folder).alone():
        export(experiment, folder / "app")
        settings = " ".join(f"{key}={quoted(text)}" for key, text in _config(out, kinds).items())
        words = ["run", str(folder / "app"), name, *AS_JSON, "-c", settings]
        run = str(json_answer(_flwr(words))["run-id"])

        def status() -> str:
            runs = json_answer(_flwr(["list", name, "--run-id", run, *AS_JSON]))["runs"]
            return str(runs[0]["status"])

        return _result(out, status)


def _prepared(out: Path) -> Path:
    """Return the folder of logs and the app, without what an earlier command has left."""
    folder = out.absolute() / "flower"
    with writing(f"{out} cannot be written to."):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("app", "keys"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for file in (folder / OUTCOME, out / FILE):
            file.unlink(missing_ok=True)
    return folder


def _config(out: Path, kinds: str) -> dict[str, str]:
    return {"out": str(out.absolute()), "statistics": kinds}


def _result(out: Path, status: Callable[[], str]) -> NodeStatistics:
    """Wait for the server's app, and return what it has written.

    Args:
        out: folder of the results.
        status: asks Flower how the app fares.

    Raises:
        RunError: it has failed, or has ended without a word.
    """
    outcome, last = out / "flower" / OUTCOME, time.monotonic()
    while not outcome.exists():
        time.sleep(0.2)
        if time.monotonic() - last > STATUS_SECONDS:
            last, now = time.monotonic(), status()
            if (now == "stopped" or now.startswith("finished")) and not outcome.exists():
                raise RunError(
                    "The server's app ended without statistics.",
                    got=now,
                    do=f"look into {out / 'flower'}; where the SuperLink is another machine, they "
                    f"are in {out.absolute()} there",
                )
    ended = RunEnd.read(out / "flower")
    if ended.status == "failed":
        raise RunError(ended.what, got=ended.got, do=ended.do)
    return NodeStatistics.read(out / FILE)


def _flwr(words: Sequence[str]) -> str:
    """Run one of Flower's commands with the user's own configuration; return its output.

    Raises:
        RunError: it fails, or does not return in time.
    """
    problem = f"'flwr {words[0]}' failed."
    try:
        done = subprocess.run(
            ["flwr", *words],
            env={**os.environ, **ENVIRONMENT, "PATH": search_path()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except FileNotFoundError:
        raise RunError(
            "Flower's command 'flwr' is not there.",
            why="it is neither beside this Python nor in PATH",
            do="pip install 'fedkeel[flower]'",
        ) from None
    except (subprocess.TimeoutExpired, OSError) as error:
        raise RunError(problem, got=type(error).__name__) from None
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise RunError(problem, got=" ".join(output)[-300:])
    return done.stdout
