"""The audit of a run: one round is overheard, and attacked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedkeel import config
from fedkeel.base.feature import baselines
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.errors import ConfigError, DataError, counted
from fedkeel.features.budget.feature import privacy_of
from fedkeel.features.diagnose.settings import Diagnose
from fedkeel.features.progress.display import FINISHED, ProgressDisplay
from fedkeel.features.stop.settings import Stop
from fedkeel.records.audit import AttackResult, AuditRecord, Skipped
from fedkeel.records.files import write_text
from fedkeel.runner.prepare import prepare
from fedkeel.study.audit.applies import why_not
from fedkeel.study.audit.attacks import ATTACKS
from fedkeel.study.audit.case import Case
from fedkeel.study.audit.observation import Overheard, overhear
from fedkeel.study.audit.shadow import lira

RESULTS = "attacks.jsonl"
"""File in the folder of an audit with what the attacks found, one a line."""

FORM = 2
"""To be raised where attacks find other numbers of the same run, so that these are made anew."""


def examine(
    run: config.Run,
    ingredients: Ingredients,
    settings: config.Audit,
    out: Path | None = None,
    display: ProgressDisplay | None = None,
) -> AuditRecord:
    """Make a run up to the round that is attacked, and attack what was sent in it.

    Args:
        run: settings of the run. Its rounds stay those of the whole run.
        ingredients: data and model.
        settings: what the attacker sees and tries.
        out: folder in which what was found is kept; attacks that are there are not made again.
            None keeps nothing.
        display: shows the progress.

    Raises:
        ConfigError: the method sends nothing, its server does not wait, or the run has no such
            round.
        DataError: the examples are on nodes.
        TrainingError: training cannot go on.
        KeyboardInterrupt: after the attack at hand; the same call goes on there.
    """
    display = display or ProgressDisplay()
    display.prepare()
    prepared = prepare(_settings(run, settings), _checked(run, ingredients, settings))
    if prepared.plan.policy is not None:
        raise ConfigError(
            f"{run.method!r} is not audited: its server does not wait.",
            why="a step of it takes updates of models of several rounds",
            do="audit the method without it, whose clients send the same",
        )
    if prepared.plan.receiver is not None:
        raise ConfigError(
            f"{run.method!r} is not audited: its clients begin at several models.",
            why="the attacks take each update as a move from the one model that was sent",
            do="audit the method without it, whose clients send an update of the same form",
        )
    kept = _Kept(out, prepared)
    with interrupts(display.stopping) as stop:
        follow = display.follow("run")
        overheard = overhear(prepared, settings.round, [follow])
        results: list[AttackResult] = []
        skipped: list[Skipped] = []
        for client in _clients(overheard, settings):
            case = Case(overheard, settings, client)
            for attack in settings.attacks:
                if stop.is_set():
                    raise KeyboardInterrupt
                reason = why_not(attack, case)
                if reason:
                    skipped.append(Skipped(attack, reason))
                elif attack != "lira":
                    results.append(kept.result(case, attack, display))
        skipped = list(dict.fromkeys(skipped))
        if "lira" in settings.attacks and all(s.attack != "lira" for s in skipped):
            results.append(_shadow_runs(overheard, settings, kept, display))
    record, spent = _record(overheard, settings), overheard.record.features.get("epsilon")
    return replace(record, results=tuple(results), skipped=tuple(skipped), epsilon=spent)


def _settings(run: config.Run, settings: config.Audit) -> config.Run:
    """Return the run's settings without what ends it early, scored only at the round."""
    every = run.evaluation.model_copy(update={"every": settings.round})
    update = {"evaluation": every, "stop": Stop(), "diagnose": Diagnose()}
    return run.model_copy(update=update)


def _checked(run: config.Run, ingredients: Ingredients, settings: config.Audit) -> Ingredients:
    if run.method in baselines():
        raise ConfigError(
            f"The baseline {run.method!r} sends nothing that could be attacked.",
            do="audit a method: -s method=fedavg",
        )
    if settings.round > run.rounds:
        raise ConfigError(
            "The round that is attacked is not one of the run's.",
            got=f"round {settings.round}",
            expected=f"1 to {run.rounds}",
        )
    if ingredients.clients(run.seed).how["kind"] == "nodes":
        raise DataError(
            "The audit needs the examples, and these are on nodes.",
            why="what an attacker finds is compared with them",
            do="run it where the data are, or on public data that are like them",
        )
    return ingredients


def _clients(overheard: Overheard, settings: config.Audit) -> list[int]:
    """Return the clients that are attacked: those with the fewest examples first.

    They are the worst case: the fewer examples are behind an update, the more it says of each.
    """
    if settings.view != "client":
        return [-1]
    replies = overheard.replies
    finite = np.flatnonzero(replies.finite & (replies.processed > 0))
    if not len(finite):
        raise DataError("No client has sent an update in this round that could be attacked.")
    order = finite[np.argsort(replies.processed[finite], kind="stable")]
    return [int(k) for k in replies.clients[order[: settings.targets]]]


def _record(overheard: Overheard, settings: config.Audit) -> AuditRecord:
    prepared, row = overheard.prepared, overheard.record
    run, score = prepared.settings, prepared.setup.metrics.score
    privacy = privacy_of(run)
    return AuditRecord(
        name=run.name,
        method=run.method,
        seed=run.seed,
        view=settings.view,
        round=settings.round,
        rounds=run.rounds,
        clients=len(overheard.replies.clients),
        score=None if row.test is None else row.test.values.get(score.name),
        score_name=score.label,
        delta=None if privacy is None else privacy.delta,
        unit=None if privacy is None else privacy.unit,
    )


def _shadow_runs(
    overheard: Overheard, settings: config.Audit, kept: _Kept, display: ProgressDisplay
) -> AttackResult:
    name = "lira"

    def make(tick: Callable[[int], None]) -> AttackResult:
        split = lira(
            overheard.prepared,
            settings.round,
            settings.shadows,
            settings.seed,
            lambda _: tick(1),
        )
        return AttackResult(
            name,
            "Who was trained on, by likelihood ratios (LiRA)",
            f"the model after {counted(settings.round, 'round')}",
            "the models of runs like this one, which it makes on halves of the same examples; the "
            "candidates with their labels",
            f"{settings.shadows} runs, each the target once",
            split.sentence(),
            {**split.numbers(), "others_alike": 1.0},
        )

    return kept.cached(name, settings, -1, make, _Ticker(name, settings.shadows, "run", display))


class _Kept:
    """The results of attacks, in a file where there is a folder."""

    def __init__(self, out: Path | None, prepared: Prepared) -> None:
        self._file = None if out is None or prepared.unseen else out / RESULTS
        self._run = prepared.key
        self._lines: dict[str, AttackResult] = {}
        if self._file is not None and self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):  # of another version, or edited
                    values = json.loads(line)
                    self._lines[values["key"]] = AttackResult.from_json(values["result"])

    def result(self, case: Case, attack: str, display: ProgressDisplay) -> AttackResult:
        """Return an attack's result, made now or before."""
        settings = case.settings
        iterations = {"dlg": settings.lbfgs * settings.tries, "cosine": settings.iterations}

        def make(tick: Callable[[int], None]) -> AttackResult:
            precision = case.overheard.prepared.setup.precision
            with use_numerics(precision), torch.random.fork_rng(devices=[]):
                return ATTACKS[attack](case, tick)

        title = f"{attack}, {case.target}"
        ticker = _Ticker(title, iterations.get(attack, 1), "iteration", display)
        return self.cached(attack, settings, case.client, make, ticker)

    def cached(
        self,
        attack: str,
        settings: config.Audit,
        client: int,
        make: Callable[[Callable[[int], None]], AttackResult],
        ticker: _Ticker,
    ) -> AttackResult:
        """Return the result of `make`, or that of an earlier call with the same settings."""
        values = settings.model_dump(exclude={"attacks", "targets"})
        text = json.dumps([FORM, self._run, attack, client, values], sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        if key in self._lines:
            return self._lines[key]
        with ticker:
            result = make(ticker)
        if self._file is not None:
            self._lines[key] = result
            lines = (
                json.dumps({"key": key, "result": result.to_json()}, allow_nan=False)
                for key, result in self._lines.items()
            )
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file, "\n".join(lines) + "\n")
        return result


class _Ticker:
    """Shows how far an attack is, at most a hundred times.

    Args:
        name: the attack.
        steps: how many there will be.
        unit: what a step is.
        display: shows them.
    """

    def __init__(self, name: str, steps: int, unit: str, display: ProgressDisplay) -> None:
        self._name, self._steps, self._unit, self._display = name, steps, unit, display
        self._done = self._shown = 0

    def __enter__(self) -> None:
        self._display.begin(self._name, self._steps, 0)

    def __call__(self, more: int) -> None:
        self._done += more
        if self._done - self._shown >= max(self._steps // 100, 1):
            self._shown = self._done
            self._display.step(self._name, min(self._done, self._steps), self._unit)

    def __exit__(self, error: object, *details: object) -> None:
        if error is None:
            self._display.end(self._name, FINISHED)
