"""Ray: whether it is there, a connection to it, and a run's world in a form that it can carry."""

from __future__ import annotations

import gc
import importlib
import io
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.base import TrainingSetup
from fedkeel.errors import RunError

PATIENCE = 5.0
"""Seconds in which a cluster has to answer."""


def module() -> Any:  # noqa: ANN401 - Ray is not installed everywhere, so it has no types here
    """Return the package ``ray``.

    Raises:
        RunError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("ray")
    except ImportError as error:
        raise RunError(
            "engine.kind = 'ray' needs the package ray, which is not installed.",
            got=str(error),
            do="pip install 'fedkeel[ray]', or choose another engine.kind",
        ) from error


@contextmanager
def connected(address: str | None, workers: int) -> Iterator[Any]:
    """Connect to Ray for a while; a connection that is there already is used and stays.

    Args:
        address: of a cluster; None starts Ray on this machine, seen by nobody else, and ends it.
        workers: cores of a Ray that is started here.

    Raises:
        RunError: Ray is not installed, or there is none at the address.
    """
    ray = module()
    if ray.is_initialized():
        yield ray
        return
    try:
        with _handlers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _connect(ray, address, workers)
            gc.collect()  # Ray leaves files open, which Python would warn of later
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if ray.is_initialized():
            ray.shutdown()
        raise RunError(
            "Ray cannot be started."
            if address is None
            else "There is no Ray cluster to connect to.",
            got=reason(error) if address is None else f"{address}: {reason(error)}",
            do="choose another engine.kind"
            if address is None
            else "start one with 'ray start --head', or set engine.address to where it is",
        ) from error
    try:
        yield ray
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()


def _probe(address: str) -> None:
    """Raise OSError where nobody answers at HOST:PORT: Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()


def _connect(ray: Any, address: str | None, workers: int) -> None:  # noqa: ANN401
    common = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        _probe(address)
        ray.init(address=address, **common)
        return
    ray.init(
        address="local",
        num_cpus=workers,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        **common,
    )


@contextmanager
def _handlers() -> Iterator[None]:
    """Keep what this process does when it is asked to end: Ray would end it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cores(address: str) -> int:
    """Return the number of processor cores of a cluster.

    Raises:
        RunError: Ray is not installed, or there is none at the address.
    """
    with connected(address, 1) as ray:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))


def reason(error: BaseException) -> str:
    """Return what Ray says of a failure in one line: how a process ended, or what it raised."""
    text = str(error).strip() or type(error).__name__
    if "Worker exit detail: " in text:
        text = text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
        return text.strip().splitlines()[0]
    return text.splitlines()[-1].strip()


# ---- a world on its way -------------------------------------------------------------------------


@dataclass(frozen=True)
class Carried:
    """A world as bytes, and beside them the examples, which every node has once.

    Args:
        body: everything else.
        arrays: the examples; Ray gives them to all processes of a node without a copy.
    """

    body: bytes
    arrays: list[NDArray[np.uint8]]


def carried(setup: TrainingSetup) -> Carried:
    """Return a world as Ray can carry it. Code of modules that others could not import goes along.

    Raises:
        RunError: the model or its loss cannot be sent.
    """
    cloudpickle = module().cloudpickle
    base = cloudpickle.CloudPickler
    shared = {id(t) for data in (setup.federation.data, setup.test) for t in (data.x, data.y)}

    class Pickler(base):  # type: ignore[misc, valid-type]
        def reducer_override(self, value: object) -> object:
            if id(value) in shared and isinstance(value, Tensor) and value.is_contiguous():
                array: Any = value.numpy()
                return _tensor, (pickle.PickleBuffer(array), array.dtype.str, array.shape)
            return super().reducer_override(value)

    file, buffers, local = io.BytesIO(), list[pickle.PickleBuffer](), _local()
    for one in local:
        cloudpickle.register_pickle_by_value(one)
    try:
        Pickler(file, protocol=5, buffer_callback=buffers.append).dump(setup)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(
            "The model or its loss cannot be sent to Ray actors.",
            got=str(error).strip().splitlines()[0],
            do="define it at the top level of a module, or set engine.kind = 'workers'",
        ) from error
    finally:
        for one in local:
            cloudpickle.unregister_pickle_by_value(one)
    arrays = [np.frombuffer(one.raw(), dtype=np.uint8) for one in buffers]
    return Carried(file.getvalue(), arrays)


def opened(found: Carried) -> TrainingSetup:
    """Return the world that was carried; its examples cannot be written to."""
    setup: TrainingSetup = pickle.loads(found.body, buffers=found.arrays)
    return setup


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:  # noqa: ANN401
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to
        return torch.from_numpy(np.frombuffer(buffer, dtype=dtype).reshape(shape))


def _local() -> list[ModuleType]:
    """Return the modules that were imported from where no other process would look."""
    places = _fresh_path()
    known = dict.fromkeys((*sys.stdlib_module_names, "__main__", "fedkeel"), True)
    found = []
    for name, one in list(sys.modules.items()):
        top = name.partition(".")[0]
        if getattr(one, "__file__", None) is None:
            continue
        if top not in known:
            with suppress(Exception):
                known[top] = PathFinder.find_spec(top, places) is not None
        if not known.get(top, True):
            found.append(one)
    return found


def _fresh_path() -> list[str]:
    """Return where a new Python looks for modules."""
    code = "import json, sys; print(json.dumps(sys.path))"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    path: list[str] = json.loads(done.stdout)
    return path
