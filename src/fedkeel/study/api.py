"""The Python interface in one call: what `Simulation` does, without a name for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from fedkeel import config
from fedkeel.records.audit import AuditRecord
from fedkeel.records.doctor import DoctorRecord
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.result import Result
from fedkeel.study.arguments import SharedArguments, takes_shared_arguments
from fedkeel.study.comparison import Comparison
from fedkeel.study.simulation import Simulation


@takes_shared_arguments
def run(
    method: str,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = True,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    **shared: Unpack[SharedArguments],
) -> Result:
    """Train one method on clients' data.

    Its arguments are those of `Simulation` and of `Simulation.run`, which says what it raises.
    """
    return Simulation(**shared).run(
        method, seed=seed, out=out, resume=resume, progress=progress, callbacks=callbacks
    )


@takes_shared_arguments
def compare(
    methods: str | Sequence[str],
    *,
    seeds: int = 3,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    jobs: int = 1,
    **shared: Unpack[SharedArguments],
) -> Comparison:
    """Train several methods with several seeds, everything else the same.

    Its arguments are those of `Simulation` and of `Simulation.compare`.
    """
    return Simulation(**shared).compare(
        methods,
        seeds=seeds,
        seed=seed,
        out=out,
        progress=progress,
        callbacks=callbacks,
        jobs=jobs,
    )


@takes_shared_arguments
def doctor(
    *,
    trial_rounds: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    jobs: int = 1,
    methods: Sequence[str] | None = None,
    progress: bool | None = None,
    **shared: Unpack[SharedArguments],
) -> DoctorRecord:
    """Say how clients differ, what goes wrong with FedAvg on them, and what is worth tuning.

    Its arguments are those of `Simulation` and of `Simulation.doctor`.
    """
    return Simulation(**shared).doctor(
        trial_rounds=trial_rounds, seed=seed, out=out, jobs=jobs, methods=methods, progress=progress
    )


@takes_shared_arguments
def audit(
    method: str,
    *,
    attack: config.Audit | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool | None = None,
    **shared: Unpack[SharedArguments],
) -> AuditRecord:
    """Attack what a method sends in a round, and say what the attacker learns.

    Its arguments are those of `Simulation` and of `Simulation.audit`.
    """
    return Simulation(**shared).audit(method, attack=attack, seed=seed, out=out, progress=progress)
