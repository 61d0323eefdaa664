"""Starting a run: making a new one, continuing an unfinished one, or reading a finished one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from fedkeel import config
from fedkeel.engine.base import TrainingEngine
from fedkeel.engine.choose.engine_rule import kept_engine
from fedkeel.engine.choose.memory import check_disk
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.errors import RunError
from fedkeel.method.plugins import user_modules
from fedkeel.records.folder import ANOTHER, RunFolder, deciding
from fedkeel.records.histogram import is_large
from fedkeel.records.run_record import EngineChoice, RunRecord
from fedkeel.records.trust import is_made_here, mark_as_made_here
from fedkeel.runner.callbacks import Callback, RunInfo
from fedkeel.runner.checkpoint import unpacked
from fedkeel.runner.features import features_of
from fedkeel.runner.loop import RoundLoop
from fedkeel.runner.manifest import describe_run
from fedkeel.runner.more_rounds import is_beginning
from fedkeel.runner.result import Result
from fedkeel.runner.warnings import values_not_seen
from fedkeel.version import __version__


def start(
    prepared: Prepared,
    out: Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    engine: TrainingEngine | None = None,
    choice: EngineChoice | None = None,
) -> Result:
    """Make a run, continue it, or return it where it was finished before.

    Args:
        prepared: the run, checked.
        out: the run folder, None to stay in memory.
        resume: whether to continue an unfinished run that is there.
        callbacks: follow the run.
        engine: runs the clients in place of an engine on this machine.
        choice: the engine, as the record has it; None chooses one. A run of kind `auto` that goes
            on keeps its own.

    Raises:
        RunError: the folder holds another run, or an unfinished one and `resume` is not set, or
            another process is writing into it.
        TrainingError: training cannot go on.
    """
    # The nodes of a federation may be threads of this process: they train, and take turns.
    with one_at_a_time() if engine is None else nullcontext():
        return _start(prepared, out, resume, callbacks, engine, choice)


def _start(
    prepared: Prepared,
    out: Path | None,
    resume: bool,
    callbacks: Sequence[Callback],
    engine: TrainingEngine | None,
    choice: EngineChoice | None,
) -> Result:
    if out is None:
        check_disk(prepared, None)
        return RoundLoop(prepared, describe_run(prepared, choice), None, callbacks, engine).make()
    folder = RunFolder(out)
    text = config.to_toml(prepared.settings)
    before = _run_in(folder, prepared)
    if before is not None and before.status == "finished" and before.key == prepared.key:
        return _finished(folder, before, prepared, callbacks)
    if before is None:
        check_disk(prepared, out)
        if not folder.exists():
            folder.check_free(text)
    with folder.alone():
        before = _run_in(folder, prepared)  # once more: another process may have written
        if before is None:
            record = describe_run(prepared, choice)
            folder.clear()
            folder.start(record, text)
            mark_as_made_here(folder.path, prepared.settings)
            _save_histogram(folder, prepared)
            return RoundLoop(prepared, record, folder, callbacks, engine).make()
        goes_further = before.key != prepared.key
        if before.status == "finished" and not goes_further:
            return _finished(folder, before, prepared, callbacks)
        if not resume:
            raise _unfinished(folder, before)
        folder.check_record()
        check_disk(prepared, out)
        if engine is None:
            choice = kept_engine(before.engine, prepared.settings.engine) or choice
        keys = [*before.earlier_keys, *([before.key] if goes_further else [])]
        record = replace(describe_run(prepared, choice), earlier_keys=keys)
        if goes_further:
            was_made_here = is_made_here(folder.path, prepared.settings)
            folder.start_again(record, text)
            if was_made_here:  # the mark is of the settings, which now have more rounds
                mark_as_made_here(folder.path, prepared.settings)
        else:
            folder.write_run(record)
        _save_histogram(folder, prepared)
        return RoundLoop(prepared, record, folder, callbacks, engine).make(resume=True)


def _save_histogram(folder: RunFolder, prepared: Prepared) -> None:
    """Write the histogram of the partition where it is too large for run.json."""
    federation = prepared.clients
    is_here = federation.how["kind"] != "nodes"
    if is_here and is_large(len(federation), federation.data.classes):
        folder.save_histogram(federation.class_counts())


def check_settings(out: Path, settings: config.Run) -> None:
    """Refuse a folder that holds a run of other settings, before data or nodes are waited for.

    Raises:
        RunError: it does.
    """
    folder = RunFolder(out)
    if folder.exists() and (difference := _difference(folder, settings)):
        before = folder.read_run()
        if not _failed_at_once(folder, before):
            raise _other_run(folder, before, difference)


def _run_in(folder: RunFolder, prepared: Prepared) -> RunRecord | None:
    """Return the record of this run in the folder, None where there is none that has begun."""
    if not folder.exists():
        return None
    record = folder.read_run()
    if record.key == prepared.key:
        return record
    if _failed_at_once(folder, record):
        return None
    if prepared.clients.how["kind"] != "nodes" and is_beginning(record, prepared):
        return record
    difference = _difference(folder, prepared.settings) or _other_difference(record, prepared)
    raise _other_run(folder, record, difference)


def _failed_at_once(folder: RunFolder, record: RunRecord) -> bool:
    """Return whether a run failed before its first round, so that nothing of it can be lost."""
    return record.status == "failed" and len(folder.rows(2)) < 2


def _unfinished(folder: RunFolder, record: RunRecord) -> RunError:
    done = sum(row.round > 0 for row in folder.rows())
    return RunError(
        f"{folder} holds this run, unfinished.",
        got=f"{done} of {record.rounds} rounds; the run {record.ending}",
        do="add --resume (resume=True in Python, resume=true in 'flwr run -c') to go on "
        f"with it, or {ANOTHER}",
    )


def _other_run(folder: RunFolder, record: RunRecord, difference: str) -> RunError:
    return RunError(
        f"{folder} holds another run.",
        got=f"{record.method}, seed {record.seed}, {record.rounds} rounds; the run {record.ending}",
        why=f"{difference}; nothing is overwritten",
        do=f"{ANOTHER}, or with the command another name (-s name=...)",
    )


def _difference(folder: RunFolder, settings: config.Run) -> str:
    """Return which settings differ from those of the run in the folder, "" where none does."""
    before, now = folder.deciding(), deciding(config.to_toml(settings))
    if not before:
        return ""
    differences = [
        f"{key} is {now.get(key, 'not set')}, there {before.get(key, 'not set')}"
        for key in dict.fromkeys([*now, *before])
        if now.get(key) != before.get(key)
    ]
    more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
    return "; ".join(differences[:3]) + more


def _other_difference(record: RunRecord, prepared: Prepared) -> str:
    """Return what differs from a run of the same settings."""
    if prepared.unseen:
        return values_not_seen(prepared)
    version = record.environment.fedkeel
    if version != __version__:
        return f"the version is {__version__}, there {version}"
    if record.data.fingerprint != prepared.data_digest:
        return "the training data differ"
    files = [f"{module.replace('.', '/')}.py" for module in user_modules(prepared.plan.parts)]
    method = f"the method's own code ({', '.join(files)}), " if files else ""
    model = "the model, the loss, or a value that their code reaches"
    return f"{method}{model}, the division or the test data differ"


def _finished(
    folder: RunFolder, record: RunRecord, prepared: Prepared, callbacks: Sequence[Callback]
) -> Result:
    """Return a run that was finished before.

    Raises:
        FedkeelError: it was made without something that a feature is asked for now.
    """
    for feature in features_of(prepared).values():
        feature.check_finished(prepared, folder)
    saved = folder.load()
    if saved is None:
        raise RunError(f"{folder} is marked finished, and has no checkpoint.")
    server = unpacked(saved.arrays, prepared.server, saved.round)
    rows = folder.rows_to(saved.round, saved.rows)
    folder.check_results(record, rows)
    shutil.rmtree(folder.state, ignore_errors=True)  # a kill may have come between
    module = prepared.state_dict(server)
    result = Result(record, rows, server.params, server.buffers, module, folder.path)
    for callback in callbacks:
        callback.on_run_begin(RunInfo(record, saved.round, is_finished=True))
        callback.on_run_end(result)
    return result
