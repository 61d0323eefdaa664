"""What a run sends and keeps, and whether there is room for it in memory and on the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fedkeel import config
from fedkeel.engine.prepared import Place, Prepared
from fedkeel.engine.rehearsal import SURVEY_PREFIX, client_state_spec, with_empty_answers
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.layout import RowLayout, row_layout
from fedkeel.engine.vectorized.low_rank import low_rank_codec
from fedkeel.errors import RunError
from fedkeel.method.compose import Plan
from fedkeel.method.context import Population
from fedkeel.method.server_memory import initial_memory
from fedkeel.method.server_round import server_message
from fedkeel.records.folder import RunFolder
from fedkeel.records.run_record import Estimate
from fedkeel.tree import Tree, nbytes

AT_EASE = 10**9
"""Bytes of client state that are kept in memory unasked: a checkpoint writes all of them. Where a
server's state is larger, it is measured before it is made."""


def estimate(prepared: Prepared) -> Estimate:
    """Return what a run will send and keep, from its first message and a rehearsed reply."""
    spec, server, population = prepared.spec, prepared.server, prepared.population
    rounds = prepared.settings.rounds
    message = with_empty_answers(server_message(prepared.plan, server, 1.0), spec)
    down = {"model": nbytes(dict(message.params)) + nbytes(dict(message.buffers))}
    down.update({part: nbytes(state) for part, state in message.broadcast.items()})
    update = 0 if prepared.plan.codec else _bytes(spec, "update/")
    up = {"model": update + _bytes(spec, "buffers/")}
    for path in spec:
        if path.startswith(("uploads/", SURVEY_PREFIX)):
            part = path.split("/")[1]
            up[part] = _bytes(spec, f"uploads/{part}/") + _bytes(spec, f"{SURVEY_PREFIX}{part}/")
    # each client's row, and again where it changed since the checkpoint, and those being written
    rows = min(2 * population.clients + population.per_round, population.per_round * rounds)
    return Estimate(
        down=down,
        up=up,
        client_state=_bytes(spec, "client_state/"),
        clients=min(population.clients, population.per_round * rounds),
        table=_bytes(prepared.table, ""),
        server_state=nbytes(dict(server.memory)),
        state=prepared.state,
        disk=rows * _row(prepared) if prepared.state == "disk" else 0,
    )


def _bytes(spec: dict[str, TensorSpec], prefix: str) -> int:
    return sum(one.nbytes for path, one in spec.items() if path.startswith(prefix))


def _row(prepared: Prepared) -> int:
    """Return the bytes of a client's row in the files, its own and the server's."""
    mine = client_state_spec(prepared.spec)
    own = row_layout(mine, low_rank_codec(mine, prepared.plan))
    return own.nbytes + RowLayout(prepared.table).nbytes


def place(prepared: Prepared) -> Place:
    """Return where client state lives, and refuse a run whose state would not fit into memory.

    Whether the disk has room depends on the folder: see `check_disk`.
    """
    needed, asked = estimate(prepared), prepared.settings.engine
    rows = needed.rows
    budget = _budget(asked)
    chosen: Place = "memory"
    if rows and asked.state == "disk":
        chosen = "disk"
    elif rows and asked.state == "auto":
        fits = budget is None or needed.resident <= budget
        at_ease = asked.memory_gb is not None or rows <= AT_EASE
        chosen = "memory" if fits and at_ease else "disk"
    needed = estimate(replace(prepared, state=chosen))
    if budget is None or needed.resident <= budget:
        return chosen
    got, do = f"{size(needed.server_state)} at the server", "or raise engine.memory_gb"
    if rows and chosen == "memory":
        got = f"{_rows_words(prepared)} + {got} = {size(needed.resident)}"
        do = "raise engine.memory_gb, or set engine.state = 'disk'"
    raise _too_much(got, budget, do)


def check_server(plan: Plan, params: Tree, population: Population, asked: config.Engine) -> None:
    """Refuse a large server that would not fit into memory, before it is made.

    A smaller one is made, and counted with what clients keep: see `place`.

    Raises:
        RunError: it would not.
    """
    hollow = {k: v.to("meta") for k, v in params.items()}  # of the same form, without memory
    try:
        needed = nbytes(dict(initial_memory(plan, hollow, population)))
    except Exception:  # a part may look at numbers, which there are none of
        return
    budget = _budget(asked)
    if budget is not None and needed > max(budget, AT_EASE):
        raise _too_much(f"{size(needed)} at the server", budget, "or raise engine.memory_gb")


def _budget(asked: config.Engine) -> int | None:
    """Return the bytes that state may take; None where nobody says."""
    return _free_bytes() if asked.memory_gb is None else int(asked.memory_gb * 1e9)


def _too_much(got: str, budget: int, do: str) -> RunError:
    return RunError(
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
    wanted = Path(tempfile.gettempdir()) if folder is None else folder.absolute()
    there = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if folder is not None:  # what a run that goes on has there already
        free += sum(_taken(file) for file in RunFolder(folder).state.glob("*"))
    if needed <= free:
        return
    raise RunError(
        "The state of the clients would not fit on the disk.",
        got=f"{_rows_words(prepared)}; with what a checkpoint keeps, {size(needed)}",
        expected=f"at most {size(free)}, which is free in {there}",
        do="choose a folder on another disk (--out, in Python out=...), use fewer clients or "
        "rounds, a smaller model, or a method without client state",
    )


def _taken(file: Path) -> int:
    """Return the bytes that a file takes on the disk, without its holes."""
    found = file.stat()
    return found.st_blocks * 512 if hasattr(found, "st_blocks") else found.st_size


def _rows_words(prepared: Prepared) -> str:
    needed = estimate(prepared)
    kept = {path.split("/")[1] for path in prepared.spec if path.startswith("client_state/")}
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
