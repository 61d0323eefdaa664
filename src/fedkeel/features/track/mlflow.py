"""MLflow: an experiment with a run for each run, below the run of its comparison or search."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from fedkeel.features.track.base import FileKind, Numbers, OpenRun, TrackedRun

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

_PARAMS_PER_CALL, _METRICS_PER_CALL, _LONGEST_PARAM = 100, 1000, 6000
"""The limits of MLflow's REST interface."""

REACH_SECONDS = 4.0
"""Time within which a server has to take a connection."""

_ALWAYS = "lr"
"""A number that every round has."""


def open_run(run: TrackedRun) -> OpenRun:
    """Begin a run, or open the one that was begun before; a deleted one begins anew."""
    client = MlflowClient(tracking_uri=run.track.mlflow_uri)
    _check_reachable(client)
    if run.id and _is_active(client, run.id):
        client.update_run(run.id, status="RUNNING")
        known = client.get_metric_history(run.id, _ALWAYS)
        last = max((metric.step for metric in known), default=-1)
        return _MlflowRun(client, run.id, last)
    tags = {f"fedkeel.{key}": value for key, value in run.tags.items()}
    tags["fedkeel.kind"] = run.kind
    if run.group:
        tags["fedkeel.group"] = run.group
    if run.parent:
        tags[MLFLOW_PARENT_RUN_ID] = run.parent
    experiment = _experiment(client, run.track.project)
    id: str = client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
    params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in run.settings.items()]
    for at in range(0, len(params), _PARAMS_PER_CALL):
        client.log_batch(id, params=params[at : at + _PARAMS_PER_CALL])
    return _MlflowRun(client, id)


def _check_reachable(client: MlflowClient) -> None:
    """Refuse a server that nobody listens at, for which MLflow would try for minutes.

    Raises:
        OSError: it cannot be reached within `REACH_SECONDS`.
    """
    uri = urlsplit(client.tracking_uri)
    if uri.scheme not in ("http", "https") or not uri.hostname:
        return
    if uri.scheme in getproxies() and not proxy_bypass(uri.hostname):
        return  # the proxy reaches it
    place = uri.hostname, uri.port or (443 if uri.scheme == "https" else 80)
    try:
        socket.create_connection(place, timeout=REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"no server answers at {uri.hostname}:{place[1]}: {error}") from None


def _is_active(client: MlflowClient, id: str) -> bool:
    try:
        return bool(client.get_run(id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


def _experiment(client: MlflowClient, name: str) -> str:
    """Return the id of an experiment, which another process may be making at the same time."""
    known = client.get_experiment_by_name(name)
    if known is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            known = client.get_experiment_by_name(name)
            if known is None:
                raise
    return str(known.experiment_id)


class _MlflowRun(OpenRun):
    """A run in MLflow."""

    def __init__(self, client: MlflowClient, id: str, last_round: int = -1) -> None:
        super().__init__(id, last_round)
        self._client = client

    def log(self, rounds: Sequence[tuple[int, Numbers]]) -> None:
        _check_reachable(self._client)
        now = int(time.time() * 1000)
        metrics = [
            Metric(_metric_name(name), value, now, round)
            for round, values in rounds
            for name, value in values.items()
        ]
        for at in range(0, len(metrics), _METRICS_PER_CALL):
            self._client.log_batch(self.id, metrics=metrics[at : at + _METRICS_PER_CALL])

    def add_file(self, path: Path, kind: FileKind) -> None:
        _check_reachable(self._client)
        self._client.log_artifact(self.id, str(path), None if kind == "report" else f"{kind}s")

    def add_table(self, name: str, markdown: str) -> None:
        _check_reachable(self._client)
        self._client.log_text(self.id, markdown, f"{name}.md")

    def end(self, status: str, summary: Numbers) -> None:
        self.log([(0, summary)])
        self._client.set_terminated(self.id, _STATUS[status])


def _metric_name(name: str) -> str:
    """Return a name of the characters that MLflow takes: letters, digits, and ``_ - . space /``."""
    return re.sub(r"[^\w\-. /]", "_", name)
