"""Connections to Ray, and a run's setup pickled for Ray."""

from __future__ import annotations

import gc
import importlib
import io
import json
import logging
import os
import pickle
import re
import subprocess
import sys
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

from fedkeel.base.values import tensors_of
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.process.interrupts import handlers_kept
from fedkeel.engine.ray.watch import check_answer
from fedkeel.errors import RunError

_WORDS = ("auto", "local")
"""Addresses by which Ray looks for a cluster of this machine, or starts one."""

_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}")


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


def head_address(address: str | None) -> str | None:
    """Return HOST:PORT of an address; None where it says only how Ray finds a cluster.

    Raises:
        RunError: it has another form.
    """
    if address in (None, *_WORDS):
        return None
    place = address.removeprefix("ray://")
    if not _PLACE.fullmatch(place):
        raise RunError(
            "engine.address is not an address of a Ray cluster.",
            got=repr(address),
            expected="HOST:PORT, as 'ray start --head' prints it, or 'auto'",
        )
    return place


@contextmanager
def connected(address: str | None, workers: int) -> Iterator[Any]:
    """Connect to Ray in this context; an existing connection is used and stays.

    Args:
        address: of a cluster; None starts a private Ray on this machine and ends it afterwards.
        workers: cores of a Ray that is started here.

    Raises:
        RunError: Ray is not installed, or there is none at the address, or it is no address.
    """
    ray, place = module(), head_address(address)
    if ray.is_initialized():
        yield ray
        return
    try:
        with handlers_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _connect(ray, address, place, workers)
            ray._private.worker._worker_logs_enabled = False  # dumps of what has died, to stdout
            gc.collect()  # Ray leaves files open, which Python would warn of later
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if ray.is_initialized():
            ray.shutdown()
        if address is None:
            raise RunError(
                "Ray cannot be started.", got=reason(error), do="choose another engine.kind"
            ) from error
        raise RunError(
            "There is no Ray cluster to connect to.",
            got=f"{address}: {reason(error)}",
            do="start one with 'ray start --head', or set engine.address to where it is",
        ) from error
    try:
        yield ray
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()
        ray._private.worker._worker_logs_enabled = True


def _connect(ray: Any, address: str | None, place: str | None, workers: int) -> None:  # noqa: ANN401
    common = {"log_to_driver": False, "logging_level": logging.ERROR}
    if place is not None:
        check_answer(place)
    if address is not None:
        ray.init(address=address, **common)
        return
    ray.init(
        address="local",
        num_cpus=workers,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        **common,
    )


def cluster_cores(address: str) -> int:
    """Return the number of processor cores of a cluster.

    Raises:
        RunError: Ray is not installed, or there is none at the address.
    """
    with connected(address, 1) as ray:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))


def reason(error: BaseException) -> str:
    """Return Ray's message of a failure in one line: how a process ended, or what it raised."""
    text = str(error).strip() or type(error).__name__
    if "Worker exit detail: " in text:
        text = text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
        return text.strip().splitlines()[0]
    return text.splitlines()[-1].strip()


# ---- pickling -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PickledSetup:
    """A pickled setup, and apart from it the examples, which every node holds once.

    Args:
        body: everything but the examples.
        arrays: the examples; Ray shares them among the processes of a node.
    """

    body: bytes
    arrays: list[NDArray[np.uint8]]


def pickled(setup: TrainingSetup) -> PickledSetup:
    """Return a setup pickled for Ray, with the code of modules that actors could not import.

    Raises:
        RunError: the model or its loss cannot be pickled.
    """
    cloudpickle = module().cloudpickle
    base = cloudpickle.CloudPickler
    sets = (setup.federation.data, setup.test)
    examples = {id(t) for data in sets for v in (data.x, data.y) for t in tensors_of(v)}

    class Pickler(base):  # type: ignore[misc, valid-type]
        def reducer_override(self, value: object) -> object:
            if id(value) in examples and isinstance(value, Tensor) and value.is_contiguous():
                array: Any = value.numpy()
                return _tensor, (pickle.PickleBuffer(array), array.dtype.str, array.shape)
            return super().reducer_override(value)

    file, buffers, modules = io.BytesIO(), list[pickle.PickleBuffer](), _local_modules()
    for item in modules:
        cloudpickle.register_pickle_by_value(item)
    try:
        Pickler(file, protocol=5, buffer_callback=buffers.append).dump(setup)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(
            "The model or its loss cannot be sent to Ray actors.",
            got=str(error).strip().splitlines()[0],
            do="define it at the top level of a module, or set engine.kind = 'workers'",
        ) from error
    finally:
        for item in modules:
            cloudpickle.unregister_pickle_by_value(item)
    arrays = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    return PickledSetup(file.getvalue(), arrays)


def unpickled(setup: PickledSetup) -> TrainingSetup:
    """Return the setup that was pickled; its examples cannot be written to."""
    loaded: TrainingSetup = pickle.loads(setup.body, buffers=setup.arrays)
    return loaded


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:  # noqa: ANN401
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the array cannot be written to
        return torch.from_numpy(np.frombuffer(buffer, dtype=dtype).reshape(shape))


def _local_modules() -> list[ModuleType]:
    """Return the imported modules that a new Python process would not find in its path."""
    path = _fresh_path()
    is_found = dict.fromkeys((*sys.stdlib_module_names, "__main__", "fedkeel"), True)
    local = []
    for name, item in sys.modules.copy().items():
        package = name.partition(".")[0]
        if not isinstance(item, ModuleType) or getattr(item, "__file__", None) is None:
            continue
        if item.__name__ != name:  # a second name, as os.path is one of posixpath
            continue
        if package not in is_found:
            with suppress(Exception):
                is_found[package] = PathFinder.find_spec(package, path) is not None
        if not is_found.get(package, True):
            local.append(item)
    return local


def _fresh_path() -> list[str]:
    """Return where a new Python process looks for modules."""
    command = [sys.executable, "-P", "-c", "import json, sys; print(json.dumps(sys.path))"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    path: list[str] = json.loads(result.stdout)
    return path
