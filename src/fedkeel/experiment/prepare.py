"""From settings to a world: data loaded, divided, a model made, a method composed, all checked.

Everything that can be refused is refused here, before a run folder exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from fedkeel import config
from fedkeel.data.dataset import Dataset, Federation
from fedkeel.data.divide.partition import divide
from fedkeel.data.read.load import load
from fedkeel.engine.buffers import Layout, Spec, specs
from fedkeel.engine.rounds import answered, rehearse
from fedkeel.engine.rows import SURVEY
from fedkeel.engine.world import World
from fedkeel.errors import ModelError, RunError
from fedkeel.method.client import Bench
from fedkeel.method.compose import SIMULATION, Plan
from fedkeel.method.context import Population
from fedkeel.method.grammar import parse
from fedkeel.method.outside import fingerprint
from fedkeel.method.roles import Capability
from fedkeel.method.server import Server, server_message, server_rows, server_start
from fedkeel.records import RunFolder
from fedkeel.task.models import make
from fedkeel.task.network import Network, blocks
from fedkeel.task.task import Task
from fedkeel.tree import nbytes, walk
from fedkeel.version import __version__

Place = Literal["memory", "disk"]

AT_EASE = 10**9
"""Bytes of client state that are kept in memory unasked: a checkpoint writes all of them."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Ingredients:
    """Data and model, before a seed and a method are chosen.

    Args:
        task: model, loss, head, buffers.
        clients: gives the clients for a seed.
        test: the test set.
        model: what to call the model.
        augment: whether training images are cropped and mirrored.
    """

    task: Task
    clients: Callable[[int], Federation]
    test: Dataset
    model: str
    augment: bool = False


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Args:
        settings: what was asked for.
        world: method, model, data and seed.
        server: the server before the first round.
        spec: what a client's reply looks like.
        population: how many clients there are, and in a round.
        ingredients: what it was made of.
        key: digest of all that decides the numbers.
        state: where client state lives.
    """

    settings: config.Run
    world: World
    server: Server
    spec: dict[str, Spec]
    population: Population
    ingredients: Ingredients
    key: str = ""
    state: Place = "memory"

    @property
    def plan(self) -> Plan:
        """The method."""
        return self.world.bench.plan

    @property
    def table(self) -> dict[str, Spec]:
        """What the server remembers of one client, by path."""
        return specs(dict(server_rows(self.plan, self.server.params)))


def gather(experiment: config.Experiment) -> Ingredients:
    """Load the data of an experiment and look up its model.

    Raises:
        DataError: the data cannot be found, read or used.
        ModelError: there is no such model, or it cannot be made.
    """
    train, test = load(experiment.data, experiment.seed)
    return Ingredients(
        task=task(experiment, train),
        clients=lambda seed: divide(train, experiment.partition, seed),
        test=test,
        model=experiment.model.name,
        augment=experiment.data.augment == "crop_flip",
    )


def task(experiment: config.Experiment, train: Dataset) -> Task:
    """Return the task of an experiment, for data of the form of `train`.

    Raises:
        ModelError: there is no such model.
    """
    settings = experiment.model
    build = partial(make, settings.name, train.shape, train.classes, settings.args)
    return Task(build, head=settings.head, buffers=settings.buffers)


def prepare(settings: config.Run, ingredients: Ingredients) -> Prepared:
    """Make everything that a run needs, and refuse what cannot work.

    Raises:
        FedkeelError: with what was given, what was expected, why, and what to do.
    """
    dtype = DTYPES[settings.engine.dtype]
    federation = ingredients.clients(settings.seed)
    federation = _with_type(federation, dtype)
    test = ingredients.test.to(dtype)
    network = ingredients.task.network(federation.data, settings.seed, dtype)
    _check_test(network, federation.data, test)
    plan = parse(settings.method, _provides(network, federation), settings.weights)
    population = Population(len(federation), settings.cohort.size(len(federation)))
    bench = Bench(plan, network, plan.work(settings.local), ingredients.task.buffers)
    world = World(
        bench,
        federation,
        test,
        settings.seed,
        ingredients.augment,
        settings.evaluation.batch_size,
    )
    server = server_start(plan, network, population, ingredients.task.buffers == "average")
    lr = learning_rate(settings, bench, 0)
    spec = rehearse(world, server_message(plan, server, lr))
    prepared = Prepared(settings, world, server, spec, population, ingredients)
    return replace(prepared, key=_key(prepared), state=_place(prepared))


def learning_rate(settings: config.Run, bench: Bench, round: int) -> float:
    """Return the local learning rate of a round, counted from 0."""
    return bench.local.lr * bench.local.schedule.factor(round, settings.rounds)


def cores() -> int:
    """Return the number of processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _with_type(federation: Federation, dtype: torch.dtype) -> Federation:
    data = federation.data.to(dtype)
    return federation if data is federation.data else replace(federation, data=data)


def _provides(network: Network, federation: Federation) -> frozenset[Capability]:
    found = set(SIMULATION)
    if network.head:
        found |= {Capability.HEAD, Capability.FEATURES}
    if len(blocks(network.names)) > 1:
        found.add(Capability.BLOCKS)
    if not network.mixes_examples:
        found.add(Capability.EXAMPLE_LOSSES)
    if federation.data.x.is_floating_point():
        found.add(Capability.INPUT_GRADIENT)
    return frozenset(found)


def _check_test(network: Network, train: Dataset, test: Dataset) -> None:
    if test.shape != train.shape:
        raise ModelError(
            "Training and test inputs differ in shape.",
            got=f"{list(train.shape)} and {list(test.shape)}",
        )
    outputs = network.logits(
        network.params, network.throwaway(network.buffers), test.x[:2], train=False
    ).shape[1]
    if test.classes > outputs:
        raise ModelError(
            "The model's output does not fit the test labels.",
            got=f"{outputs} outputs for {test.classes} classes",
            do="change the last layer, or check the test labels",
        )


@dataclass(frozen=True)
class Estimate:
    """What a run will send and keep.

    Args:
        down: bytes to a client in a round, by part; ``model`` is the model itself.
        up: bytes from a client in a round, by part.
        client_state: bytes that a client keeps.
        clients: how many clients will keep them, at most.
        table: bytes that the server remembers of each client.
        server_state: bytes that the server remembers besides, beyond the model.
        state: where the clients' state lives.
        disk: bytes of the file of client state, at most; 0 where it lives in memory.
    """

    down: dict[str, int]
    up: dict[str, int]
    client_state: int
    clients: int
    table: int
    server_state: int
    state: Place = "memory"
    disk: int = 0

    @property
    def resident(self) -> int:
        """Bytes of state in this process when every client that will take part has done so."""
        return (self.rows if not self.disk else 0) + self.server_state

    @property
    def rows(self) -> int:
        """Bytes of what is remembered of clients, by themselves and by the server."""
        return (self.client_state + self.table) * self.clients


def estimate(prepared: Prepared) -> Estimate:
    """Return what a run will send and keep, from its first message and a rehearsed reply."""
    spec, server, population = prepared.spec, prepared.server, prepared.population
    rounds = prepared.settings.rounds
    message = answered(server_message(prepared.plan, server, 1.0), spec)
    down = {"model": nbytes(dict(message.params)) + nbytes(dict(message.buffers))}
    down.update({part: nbytes(state) for part, state in message.sent.items()})
    update = 0 if prepared.plan.codec else _bytes(spec, "delta/")
    up = {"model": update + _bytes(spec, "buffers/")}
    for path in spec:
        if path.startswith(("uploads/", SURVEY)):
            part = path.split("/")[1]
            up[part] = _bytes(spec, f"uploads/{part}/") + _bytes(spec, f"{SURVEY}{part}/")
    # each client's row, and again where it changed since the checkpoint, and those being written
    rows = min(2 * population.clients + population.per_round, population.per_round * rounds)
    return Estimate(
        down=down,
        up=up,
        client_state=_bytes(spec, "mine/"),
        clients=min(population.clients, population.per_round * rounds),
        table=_bytes(prepared.table, ""),
        server_state=nbytes(dict(server.memory)),
        state=prepared.state,
        disk=rows * _row(prepared) if prepared.state == "disk" else 0,
    )


def _bytes(spec: dict[str, Spec], prefix: str) -> int:
    return sum(one.nbytes for path, one in spec.items() if path.startswith(prefix))


def _row(prepared: Prepared) -> int:
    """Return the bytes of a client's row in the files, its own and the server's."""
    mine = {path: one for path, one in prepared.spec.items() if path.startswith("mine/")}
    return Layout(mine).nbytes + Layout(prepared.table).nbytes


def _place(prepared: Prepared) -> Place:
    """Return where client state lives, and refuse a run whose state would not fit into memory.

    Whether the disk has room depends on the folder: see `check_disk`.
    """
    needed, asked = estimate(prepared), prepared.settings.engine
    rows = needed.rows
    budget = _free_bytes() if asked.memory_gb is None else int(asked.memory_gb * 1e9)
    place: Place = "memory"
    if rows and asked.state == "disk":
        place = "disk"
    elif rows and asked.state == "auto":
        fits = budget is None or needed.resident <= budget
        at_ease = asked.memory_gb is not None or rows <= AT_EASE
        place = "memory" if fits and at_ease else "disk"
    needed = estimate(replace(prepared, state=place))
    if budget is None or needed.resident <= budget:
        return place
    got, do = f"{size(needed.server_state)} at the server", "or raise engine.memory_gb"
    if rows and place == "memory":
        got = f"{_rows_words(prepared)} + {got} = {size(needed.resident)}"
        do = "raise engine.memory_gb, or set engine.state = 'disk'"
    raise RunError(
        "The state of the clients and the server would not fit into memory.",
        got=got,
        expected=f"at most {size(budget)}",
        do=f"use fewer clients or rounds, a smaller model, a method without client state, {do}",
    )


def check_disk(prepared: Prepared, folder: Path | None) -> None:
    """Refuse a run whose client state would not fit on the disk, before round 1.

    Args:
        prepared: the run.
        folder: the run folder, which need not exist; None for a run that has none.

    Raises:
        RunError: it would not fit.
    """
    needed = estimate(prepared).disk
    place = Path(tempfile.gettempdir()) if folder is None else folder.absolute()
    there = next(path for path in (place, *place.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if folder is not None:  # what a run that goes on has there already
        free += sum(file.stat().st_size for file in RunFolder(folder).state.glob("*"))
    if needed <= free:
        return
    raise RunError(
        "The state of the clients would not fit on the disk.",
        got=f"{_rows_words(prepared)}; with what a checkpoint keeps, {size(needed)}",
        expected=f"at most {size(free)}, which is free in {there}",
        do="choose a folder on another disk (--out), use fewer clients or rounds, a smaller model, "
        "or a method without client state",
    )


def _rows_words(prepared: Prepared) -> str:
    needed = estimate(prepared)
    kept = {path.split("/")[1] for path in prepared.spec if path.startswith("mine/")}
    kept |= {part.name for part in prepared.plan.tables}
    by = f" (kept by {', '.join(sorted(kept))})" if kept else ""
    return f"{size(needed.client_state + needed.table)} x {needed.clients} clients{by}"


def size(count: int) -> str:
    """Return a number of bytes in the unit that suits it.

    >>> size(1_234_567_890), size(2_500_000), size(40)
    ('1.2 GB', '2.5 MB', '40 bytes')
    """
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count} bytes"


def _free_bytes() -> int | None:
    """Return the memory that can be had, where the system says."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024  # what is free, and what caches would give back
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Where an object lies, in its repr: another place in every process."""


def _key(prepared: Prepared) -> str:
    """Return a digest of settings, data, initial model and version: of all that decides numbers."""
    settings = prepared.settings.model_dump(mode="json")
    for name in ("name", "method", "compare", "tune", "data", "partition", "model", "flower"):
        settings.pop(name, None)
    settings["engine"] = {"dtype": prepared.settings.engine.dtype}
    world = prepared.world
    digest = hashlib.blake2b(digest_size=8)
    facts = {
        "version": __version__,
        "method": prepared.plan.expression,
        "weights": prepared.plan.weights,
        "buffers": world.bench.buffers,
        "augment": world.augment,
        "settings": settings,
        "train": world.federation.data.fingerprint(),
        "test": world.test.fingerprint(),
        "network": _ADDRESS.sub("", world.bench.network.describe()),
        "own": fingerprint(prepared.plan.parts),
    }
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for array in (
        world.federation.rows,
        world.federation.offsets,
        world.federation.held_rows,
        world.federation.held_offsets,
    ):
        digest.update(b"" if array is None else array.tobytes())
    for _, tensor in walk({"p": dict(world.bench.network.everything())}):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
