"""The engine that runs the clients: the requested one, or one by a rule that reads no clock.

On a processor it takes the engine with the fewest nominal seconds (`nominal_seconds.py`). It looks
at what all methods and seeds of a comparison share, and at what each method allows. So all of them
get the same engine, and a repeated run gets it again. Its bounds on groups are measured: see
``docs/benchmarks``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedkeel import config
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.choose.device import available_gpus, choose_device, named_devices
from fedkeel.engine.choose.nominal_seconds import Work
from fedkeel.engine.choose.work import run_work
from fedkeel.engine.prepared import Prepared, learning_rate
from fedkeel.engine.process.affinity import core_count
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.engine.rehearsal import with_empty_answers
from fedkeel.engine.vectorized.facts import establish, why_not_compiled
from fedkeel.errors import RunError
from fedkeel.method.plugins import user_modules
from fedkeel.method.server_round import server_message
from fedkeel.records.run_record import EngineChoice
from fedkeel.task.models import MODELS
from fedkeel.tree import numel

SHORT_RUN_SECONDS = 3.0
"""A run of less nominal seconds on one core is over before a GPU is worth its start."""

LONG_STEP = 5e9
"""Multiply-adds of a step from which compiled steps gain nothing on a CPU: arithmetic decides, and
large networks take seconds to compile."""

GROUP_SIZE, LARGEST_GROUP = 32, 128
"""Clients of a group on a CPU, at most: more take longer to compile, and leave the cache. Groups of
small batches may be larger."""

GROUP_EXAMPLES = 320
"""Examples in a step of a group on a CPU that may be larger than `GROUP_SIZE`."""

GROUP_ENTRIES = 2**25
"""Parameters of all clients of a group on a CPU, at most (128 MB in float32)."""

SMALL_CONVOLUTIONS = 1e7
"""Multiply-adds of a step up to which a network with convolutions gains from groups on a CPU. They
save the overhead of operations, and their convolutions are slower."""

SMALL_ATTENTION = 1e8
"""The same for a network whose attention is a single operation of torch. That operation has no axis
for clients, so side by side attention is made of products."""

LARGE_CONVOLUTION, MANY_CONVOLUTIONS = 1e8, 16
"""Multiply-adds of one client's convolution, on average over its layers and in the forward pass,
from which clients train alone on a GPU, each on a stream of its own; and layers of convolutions
from which they do so whatever their size. One client's step takes a fraction of the time to
compile."""

GPU_GROUP_SIZE, GPU_GROUP_ENTRIES = 512, 2**28
"""Clients of a group on a GPU, and their parameters (1 GB in float32), at most."""


def choose_engine(prepared: Prepared) -> EngineChoice:
    """Return the engine of a run."""
    rule = EngineRule()
    rule.add(prepared)
    return rule.choose()


class EngineRule:
    """Chooses one engine for runs that differ in nothing but the method and the seed.

    What one of the methods does not allow, no run does; their order does not matter.
    """

    def __init__(self) -> None:
        self._first: Prepared | None = None
        self._count = self._runs = 0
        self._work: Work | None = None
        self._obstacle = self._hindered = ""  # why steps are not compiled, and of which method
        self._pads = True
        self._device, self._device_reasons = "cpu", list[str]()

    @one_at_a_time()
    def add(self, prepared: Prepared, runs: int = 1) -> None:
        """Add a method, and find out what it and its model allow.

        The package's own models and methods are known to be compiled. Others are tried, if compiled
        steps would be worth it.

        Args:
            prepared: a run of the method.
            runs: how many runs share the functions that are compiled for the first of them.
        """
        requested = prepared.settings.engine
        if self._first is None or not self._first.engine_has_clients:  # that has a single client
            self._first = prepared
        self._count += 1
        self._runs += runs
        if not prepared.plan.makes_steps or requested.kind not in ("auto", "vectorized"):
            return
        self._work = self._work or run_work(prepared)
        is_open = requested.kind == "auto" and requested.devices is None
        if is_open and _is_short(self._work, requested):
            self._device = "cpu"
        elif self._count == 1:
            self._device, self._device_reasons = choose_device(requested, prepared.setup)
        if is_open and self._device == "cpu":
            if self._fastest(prepared, self._work, 1 / runs).kind != "vectorized":
                return
            self._obstacle = self._obstacle or _obstacle(prepared, self._work)
            self._hindered = self._hindered or prepared.plan.expression * bool(self._obstacle)
        if not self._obstacle:
            self._pads = self._pads and establish(prepared.setup).pads

    @one_at_a_time()
    def choose(self) -> EngineChoice:
        """Return the engine of all runs that were added.

        Raises:
            ValueError: none was added.
        """
        prepared = self._first
        if prepared is None:
            raise ValueError("no run was added")
        requested, cohort = prepared.settings.engine, max(prepared.population.per_round, 1)
        workers = min(requested.workers or core_count(), cohort)
        choice = EngineChoice(
            kind=requested.kind,
            workers=workers,
            parallel_clients=1,
            device="cpu",
            dtype=requested.dtype,
            precision=requested.precision,
            asked=requested.kind,
        )
        if requested.kind == "sequential":
            device, _ = choose_device(requested, prepared.setup)
            return replace(choice, workers=1, device=device)
        if requested.kind == "workers":
            return choice
        if requested.kind == "ray":
            return _ray_choice(choice, requested, cohort)
        work, device = self._work or run_work(prepared), self._device
        if not prepared.plan.makes_steps:
            return _own_choice(choice, requested, prepared, work)
        devices = named_devices(requested)[:cohort]
        if device == "cpu" and not devices:
            who = "" if self._count == 1 else f"{self._hindered}: "
            told = [who + self._obstacle] if self._obstacle else []
            found = self._fastest(prepared, work, self._count / self._runs)
            return replace(
                choice,
                kind=found.kind,
                workers=found.workers,
                parallel_clients=found.group,
                reasons=[*self._device_reasons, *told],
            )
        if devices:
            workers = len(devices)
        elif device == "cuda":  # one process keeps a GPU busy
            workers = workers if requested.workers else 1
        is_fixed = requested.workers is not None or bool(devices)
        size = requested.parallel_clients
        size = min(size or _group_size(prepared, work, workers, device, self._pads), cohort)
        return replace(
            choice,
            kind="vectorized",
            workers=workers if is_fixed else min(workers, math.ceil(cohort / size)),
            parallel_clients=size,
            device=device,
            devices=devices,
            reasons=self._device_reasons,
        )

    def _fastest(self, prepared: Prepared, work: Work, compilations: float) -> _Way:
        """Return the way of the fewest nominal seconds on the processor that settings leave open.

        Between ways that take as long the first one counts.

        Args:
            prepared: a run.
            work: of each run.
            compilations: how often each run compiles, on average.
        """
        requested, cohort = prepared.settings.engine, max(prepared.population.per_round, 1)
        most = min(requested.workers or core_count(), cohort)
        counts = [most] if requested.workers else sorted({1, most})
        exact = [_Way("workers" if n > 1 else "sequential", n, 1) for n in counts]
        compiled = []
        for n in counts:
            size = requested.parallel_clients
            size = min(size or _group_size(prepared, work, n, "cpu", self._pads), cohort)
            used = n if requested.workers else min(n, math.ceil(cohort / size))
            compiled.append(_Way("vectorized", used, size))
        if requested.kind == "vectorized":
            ways = compiled
        elif self._obstacle or work.multiply_adds > LONG_STEP:
            ways = exact
        else:
            ways = exact + compiled
        is_tried = _is_tried(prepared)

        def seconds(way: _Way) -> float:
            if way.kind == "vectorized":
                return work.compiled_seconds(way.workers, way.group, compilations, is_tried)
            return work.exact_seconds(way.workers)

        return min(ways, key=seconds)


@dataclass(frozen=True)
class _Way:
    """An engine on the processor, its processes, and the clients that it trains side by side."""

    kind: str
    workers: int
    group: int


def _is_short(work: Work, requested: config.Engine) -> bool:
    """Return whether a run is over before a GPU is worth its start."""
    is_asked_for = requested.device == "cuda"
    return not is_asked_for and work.rounds * work.round_seconds < SHORT_RUN_SECONDS


def _is_tried(prepared: Prepared) -> bool:
    """Return whether it has to be tried if steps can be compiled."""
    return prepared.ingredients.model not in MODELS or bool(user_modules(prepared.plan.parts))


def _obstacle(prepared: Prepared, work: Work) -> str:
    """Return why a run's steps cannot be compiled, "" where they can."""
    setup = prepared.setup
    if reason := why_not_compiled(setup):
        return f"steps are not compiled: {reason}"
    if not _is_tried(prepared):
        return ""
    from fedkeel.engine.vectorized.trial import compile_obstacle  # slow to import

    lr = learning_rate(prepared.settings, setup.training, 0)
    message = server_message(prepared.plan, prepared.server, lr)
    clients = 1 if _trains_alone_on_cpu(setup, work) else 2
    return compile_obstacle(setup, with_empty_answers(message, prepared.spec), clients)


def kept_engine(previous: EngineChoice, requested: config.Engine) -> EngineChoice | None:
    """Return the engine with which a run goes on, or other runs of its comparison are made.

    It is the previous one where the settings leave the choice open, in one process if that is
    requested, and None where they do not.

    Raises:
        RunError: the previous one trained on a GPU, and there is none.
    """
    is_open = requested.kind == "vectorized" and requested.parallel_clients is None
    if requested.kind != "auto" and not (is_open and previous.kind == "vectorized"):
        return None
    if requested.devices is not None:
        return _on_devices(previous, named_devices(requested))
    if previous.device == "cuda" and requested.device == "cpu":
        return None
    if previous.device == "cuda" and not torch.cuda.is_available():
        raise RunError(
            "This run or comparison was begun on a GPU, and torch finds no GPU now.",
            why="without it the results differ by rounding, and dropout draws other numbers",
            do="set engine.device = 'cpu' to go on nevertheless",
        )
    if requested.workers != 1:
        return _on_available_devices(previous)
    kind = "sequential" if previous.kind in ("workers", "ray") else previous.kind
    return replace(previous, kind=kind, workers=1, devices=[], address=None)


def _on_devices(previous: EngineChoice, devices: list[str]) -> EngineChoice | None:
    """Return an engine spread over other devices of its kind, None where its bits were others."""
    device = devices[0].partition(":")[0]
    if (previous.kind, previous.device) != ("vectorized", device):
        return None
    return replace(previous, devices=devices, workers=len(devices))


def _on_available_devices(previous: EngineChoice) -> EngineChoice:
    """Return an engine without the GPUs that are no longer there."""
    available = ["cpu", *available_gpus()]
    devices = [name for name in previous.devices if name in available]
    if previous.devices and not devices:
        devices = ["cuda:0"]
    return replace(previous, devices=devices, workers=len(devices) or previous.workers)


def _own_choice(
    choice: EngineChoice, requested: config.Engine, prepared: Prepared, work: Work
) -> EngineChoice:
    """Return the choice for the user's own training, which is not compiled."""
    if requested.kind == "vectorized" or requested.devices is not None:
        raise RunError(
            "The vectorized engine cannot run local training of your own.",
            got="engine.devices" if requested.devices else "engine.kind = 'vectorized'",
            why="it compiles fedkeel's own steps for many clients at once",
            do="set engine.kind = 'auto' or 'sequential', 'workers', 'ray'; no engine.devices",
        )
    device, reasons = choose_device(requested, prepared.setup)
    if device == "cuda":
        return replace(choice, kind="sequential", workers=1, device=device)
    counts = [choice.workers] if requested.workers else [1, choice.workers]
    workers = min(counts, key=work.exact_seconds)
    kind = "workers" if workers > 1 else "sequential"
    return replace(choice, kind=kind, workers=workers, reasons=reasons)


def _group_size(prepared: Prepared, work: Work, workers: int, device: str, pads: bool) -> int:
    """Return how many clients are trained side by side.

    A worker's share of the cohort is cut into groups of about the same size: a share of 50 clients
    into two of 25, not into 32 and 18.
    """
    setup, entries = prepared.setup, numel(prepared.setup.training.network.params)
    sizes = setup.federation.sizes
    if not pads and len(np.unique(sizes[sizes > 0])) > 1:
        return 1  # few clients of a round have the same batch sizes
    if device == "cpu" and _trains_alone_on_cpu(setup, work):
        return 1
    if device == "cuda" and _fills_gpu(setup, work):
        return 1
    if device == "cpu":
        limit = min(max(GROUP_EXAMPLES // work.batch, GROUP_SIZE), LARGEST_GROUP)
        limit = min(limit, GROUP_ENTRIES // entries)
    else:
        limit = min(GPU_GROUP_SIZE, GPU_GROUP_ENTRIES // entries)
    share = math.ceil(work.cohort / workers)
    return math.ceil(share / math.ceil(share / max(limit, 1)))


def _trains_alone_on_cpu(setup: TrainingSetup, work: Work) -> bool:
    """Return whether groups of clients gain nothing on a CPU."""
    if work.fused_attention and work.multiply_adds > SMALL_ATTENTION:
        return True
    return _has_convolutions(setup) and work.multiply_adds > SMALL_CONVOLUTIONS


def _has_convolutions(setup: TrainingSetup) -> bool:
    """Return whether the network has tensors of more than two axes."""
    return any(t.ndim > 2 for t in setup.training.network.params.values())


def _fills_gpu(setup: TrainingSetup, work: Work) -> bool:
    """Return whether a few clients that train alone use a GPU well.

    The gradient takes three times the forward pass. Networks most of whose layers are not
    convolutions do not.
    """
    weights = [t.ndim for t in setup.training.network.params.values() if t.ndim > 1]
    convolutions = sum(ndim > 2 for ndim in weights)
    if 2 * convolutions <= len(weights):
        return False
    mean = work.multiply_adds / 3 / convolutions
    return mean >= LARGE_CONVOLUTION or convolutions >= MANY_CONVOLUTIONS


def _ray_choice(choice: EngineChoice, requested: config.Engine, cohort: int) -> EngineChoice:
    """Return the choice for Ray: an actor for each core of the cluster, sequential by default."""
    workers, group = requested.workers, requested.parallel_clients
    if requested.address is not None and workers is None:
        from fedkeel.engine.ray.cluster import cluster_cores

        workers = cluster_cores(requested.address)
    return replace(
        choice,
        workers=min(workers or core_count(), cohort),
        parallel_clients=None if group is None else min(group, cohort),
        address=requested.address,
    )
