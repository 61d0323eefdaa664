"""Making a run: a new one, one that was interrupted as if it had not been, or one that is there."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedkeel import config
from fedkeel.cost.autotune import begun_with
from fedkeel.cost.memory import check_disk
from fedkeel.engine.base import Engine
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import RunError
from fedkeel.method.plugins import fingerprint
from fedkeel.records.folder import ANOTHER, RunFolder, deciding
from fedkeel.records.run_record import EngineChoice, RunRecord
from fedkeel.runner.checkpoint import unpacked
from fedkeel.runner.loop import Result, Run
from fedkeel.runner.manifest import describe_run
from fedkeel.runner.progress import REUSED, Silent, Watcher
from fedkeel.version import __version__


def start(
    prepared: Prepared,
    out: Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
    engine: Engine | None = None,
    choice: EngineChoice | None = None,
    name: str = "",
) -> Result:
    """Make a run, take it up again, or return it where it has been made before.

    Args:
        prepared: the run, checked.
        out: its folder, None to keep it in memory.
        resume: whether to go on with an unfinished run that is there.
        watcher: follows it.
        engine: what runs the clients in place of an engine on this machine.
        choice: what the record says of that engine.
        name: what the watcher is told that it is called; method and seed where nothing is given.

    Raises:
        RunError: the folder holds another run, or an unfinished one and `resume` is not set, or
            another process is at work on it.
        TrainingError: training cannot go on.
    """
    watcher = watcher or Silent()
    name = name or f"{prepared.settings.method} seed {prepared.settings.seed}"
    if out is None:
        check_disk(prepared, None)
        record = describe_run(prepared, choice)
        return Run(prepared, None, watcher, name, engine).execute(record, resume=False)
    folder = RunFolder(out)
    text = config.to_toml(prepared.settings)
    found = _found(folder, prepared)
    if found is None:
        check_disk(prepared, out)
        if not folder.exists():
            folder.check_free(text)
    elif found.status == "finished":
        return _reused(folder, found, prepared, watcher, name)
    with folder.alone():
        found = _found(folder, prepared)  # once more: another process may have been at it
        if found is None:
            record = describe_run(prepared, choice)
            folder.clear()
            folder.start(record, text)
            return Run(prepared, folder, watcher, name, engine).execute(record, resume=False)
        if found.status == "finished":
            return _reused(folder, found, prepared, watcher, name)
        if not resume:
            done = len([row for row in folder.rows() if row.round > 0])
            raise RunError(
                f"{out} holds this run, unfinished.",
                got=f"{done} of {found.rounds} rounds, {found.status}",
                do="add --resume (resume=True in Python, resume=true in 'flwr run -c') to go on "
                f"with it, or {ANOTHER}",
            )
        check_disk(prepared, out)
        asked = prepared.settings.engine
        measured = (
            asked.kind == "vectorized" == found.engine.kind and asked.parallel_clients is None
        )
        again = None
        if asked.kind == "auto" or measured:  # a new choice might round differently
            again = begun_with(found.engine, asked)
        record = describe_run(prepared, choice or again)
        folder.write_run(record)
        return Run(prepared, folder, watcher, name, engine).execute(record, resume=True)


def _found(folder: RunFolder, prepared: Prepared) -> RunRecord | None:
    """Return this run as it stands in the folder, None where there is none.

    One that failed before it had a round is none: there is nothing in it to lose.
    """
    if not folder.exists():
        return None
    found = folder.read_run()
    if found.key != prepared.key:
        if _began_nothing(folder, found):
            return None
        raise _another(
            folder, found, _difference(folder, prepared.settings) or _no_setting(found, prepared)
        )
    return found


def check_settings(out: Path, settings: config.Run) -> None:
    """Refuse a folder that holds a run of other settings, before data or nodes are waited for.

    Raises:
        RunError: it does.
    """
    folder = RunFolder(out)
    if folder.exists() and (difference := _difference(folder, settings)):
        found = folder.read_run()
        if not _began_nothing(folder, found):
            raise _another(folder, found, difference)


def _began_nothing(folder: RunFolder, found: RunRecord) -> bool:
    return found.status == "failed" and len(folder.rows(2)) < 2


def _another(folder: RunFolder, found: RunRecord, difference: str) -> RunError:
    return RunError(
        f"{folder} holds another run.",
        got=f"{found.method}, seed {found.seed}, {found.rounds} rounds, {found.status}",
        why=f"{difference}; nothing is written over",
        do=f"{ANOTHER}, or with the command another name (-s name=...)",
    )


def _difference(folder: RunFolder, settings: config.Run) -> str:
    """Return which settings are not those of the run in the folder, in words; "" none."""
    before, now = folder.deciding(), deciding(config.to_toml(settings))
    told = [
        f"{key} is {now.get(key, 'not set')}, there {before.get(key, 'not set')}"
        for key in dict.fromkeys([*now, *before])
        if now.get(key) != before.get(key)
    ]
    if not before:
        return ""
    more = f", and {len(told) - 3} more" if len(told) > 3 else ""
    return "; ".join(told[:3]) + more


def _no_setting(found: RunRecord, prepared: Prepared) -> str:
    """Return what may set a run apart from one of the same settings, in words."""
    version = found.environment.fedkeel
    if version != __version__:
        return f"the version is {__version__}, there {version}"
    if found.data.fingerprint != prepared.setup.federation.data.fingerprint():
        return "the training data differ"
    files = [f"{module.replace('.', '/')}.py" for module in fingerprint(prepared.plan.parts)]
    method = f"the method's own code ({', '.join(files)}), " if files else ""
    return f"{method}the model or how it is written, the division or the test data differ"


def _reused(
    folder: RunFolder, found: RunRecord, prepared: Prepared, watcher: Watcher, name: str
) -> Result:
    """Return a run that has been made before."""
    saved = folder.load()
    if saved is None:
        raise RunError(f"{folder} is marked finished, and has no checkpoint.")
    server = unpacked(saved.arrays, prepared.server, saved.round)
    rows = folder.rows_to(saved.round)
    shutil.rmtree(folder.state, ignore_errors=True)  # a kill may have come between
    watcher.begin(name, found.rounds, saved.round)
    watcher.row(name, rows[-1])
    watcher.end(name, REUSED)
    module = prepared.setup.training.network.state_dict(server.params, server.buffers)
    return Result(found, rows, server.params, server.buffers, module, folder.path)
