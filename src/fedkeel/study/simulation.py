"""A study: what its runs share, as one value, and what can be done with it."""

from __future__ import annotations

import reprlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from fedkeel import config
from fedkeel.base.fingerprint.reached_values import Description, describe_value
from fedkeel.engine.choose.memory import check_disk
from fedkeel.engine.prepared import Ingredients
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.errors import ArgumentError, counted
from fedkeel.method.grammar import split_expressions
from fedkeel.records.audit import AuditRecord
from fedkeel.records.doctor import DoctorRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.manifest import describe_run
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.study.arguments import (
    SharedArguments,
    check_callbacks,
    check_settings,
    checked_folder,
    checked_ingredients,
    folder_of,
    shared_settings,
    takes_shared_arguments,
)
from fedkeel.study.compare import compare as compare_methods
from fedkeel.study.comparison import Comparison
from fedkeel.study.doctor.examine import examine as examine_clients
from fedkeel.study.run import run as run_method
from fedkeel.study.tune import tune as search
from fedkeel.study.tuning_result import TuningResult
from fedkeel.study.watching import watched


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Simulation:
    """What the runs of a study share: data, model, training, and all but method and seed.

    It never changes, and its methods may be called in any order. Threads that call them take
    turns: torch's random generator is one for a process.

    Args:
        task: model, loss and head.
        clients: the training data, divided among clients.
        rounds: T, the number of rounds.
        local: local training.
        test: test inputs [N, ...] and labels [N], or what else `fedkeel.dataset` takes; None for
            the test examples of the clients, or else those that they hold out, see `from_clients`.
        public: inputs and labels that all clients have, in any form of `test`, for methods such as
            ``fedmd``; None for none.
        participation: share of the clients in each round; all where nothing is given.
        clients_per_round: number of clients in each round, in place of `participation`.
        cohort: participation in full, in place of the two above.
        weights: how clients count in the mean. ``"method"`` takes what the method states. None is
            ``"method"`` for one run, and for a comparison or a search ``"examples"`` for every
            method: none leads by its own.
        evaluation: when the model is evaluated.
        stop: when a run ends before its last round; None never.
        adversary: attackers among the clients; None for none.
        root: examples of the server's own, for methods such as ``fltrust``; None for none.
        privacy: the budget of differential privacy, which noise is calibrated for. In a comparison
            with one of unit ``client``, all clients have equal weights.
        system: how long clients take, in virtual time; None counts no time.
        engine: what runs the clients.
        augment: a random change of each batch in training, (x [B, ...], y [B, ...], random) -> (x,
            y) of the same form. It draws from `random`, a `numpy.random.Generator`, or from torch,
            and the same numbers come again in every engine and after a restart.
        local_training: a function of yours that trains a client, see `LocalTraining`, in place of
            fedkeel's own steps. `local` tells it how much work is asked for.
        diagnose: what is measured beside the scores, see `Diagnose`: e.g. ``"forgetting, cka"``.
            Baselines, and the trials of a search, have none.
        track: which trackers runs report to, see `Track`: e.g. ``"tensorboard, mlflow"``. The runs
            of a comparison or a search are grouped there.

    Raises:
        FedkeelError: with what was given, what was expected, why, and what to do.

    Example:
        >>> import fedkeel as fk
        >>> from torch import nn
        >>> x, y = [[float(i % 3), 1.0] for i in range(60)], [i % 3 for i in range(60)]
        >>> study = fk.Simulation(
        ...     task=fk.Task(nn.Linear(2, 3)),
        ...     clients=fk.iid(x, y, clients=4),
        ...     test=(x, y),
        ...     rounds=2,
        ...     local=fk.Local(lr=0.1, epochs=1),
        ... )
        >>> study
        Simulation(Linear, 4 clients with 60 examples, 60 test examples, rounds=2,
            local=Local(lr=0.1, epochs=1))
        >>> study.run("fedavg", seed=1).record.status
        'finished'
    """

    settings: config.Run
    ingredients: Ingredients

    @takes_shared_arguments
    def __init__(self, **shared: Unpack[SharedArguments]) -> None:
        data = shared["task"], shared["clients"], shared.get("test")
        code = shared.get("augment"), shared.get("local_training"), shared.get("public")
        settings = shared_settings(shared)
        vars(self).update(settings=settings, ingredients=checked_ingredients(*data, *code))

    def __repr__(self) -> str:
        given, clients = self.ingredients, self.ingredients.clients(0)
        sizes = f"{counted(len(clients), 'client')} with {counted(len(clients.rows), 'example')}"
        tested = counted(len(given.test), "test example")
        parts = [given.model, sizes, tested, *_chosen(self.settings)]
        text = f"Simulation({', '.join(part.replace(' ', _SPACE) for part in parts)})"
        lines = textwrap.fill(text, 96, subsequent_indent="    ", max_lines=4, placeholder=" ...)")
        return lines.replace(_SPACE, " ")

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same settings, model, code and examples."""
        if not isinstance(other, Simulation):
            return NotImplemented
        if self is other or self.settings != other.settings:
            return self is other
        described = self._described()
        return not described.unseen and described == other._described()

    def __hash__(self) -> int:
        return hash(repr(self))

    def _described(self) -> Description:
        """Return a text of model and data."""
        given, clients = self.ingredients, self.ingredients.clients(0)
        division = clients.rows, clients.offsets, clients.holdout_rows, clients.holdout_offsets
        examples = clients.data.fingerprint(), given.test.fingerprint()
        public = given.public and given.public.fingerprint()
        own = given.augment, given.own, public
        return describe_value((given.task, *own, clients.names, division, examples))

    def _of(self, method: str, seed: int) -> config.Run:
        """Return the settings of a run, or refuse its method or seed (ConfigError)."""
        shared = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
        return config.build(config.Run, {**shared, "method": method, "seed": seed}, "run")

    def run(
        self,
        method: str,
        *,
        seed: int = 0,
        out: str | Path | None = None,
        resume: bool = True,
        progress: bool | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Result:
        """Train one method on clients' data.

        Args:
            method: expression, e.g. ``"fedprox(mu=0.1)+gcfed"``; or a baseline, see `compare`.
            seed: seed of the initial model, the cohorts and the batches.
            out: run folder; None keeps the run in memory.
            resume: whether an unfinished run in `out` is continued.
            progress: whether to show progress; None does so on a terminal, and in a notebook.
            callbacks: follow the run, see `Callback`.

        Returns:
            Rows, parameters, and what ran. A run that was finished before is read, not made again.

        Raises:
            FedkeelError: the method cannot be composed, or run on these data.
            KeyboardInterrupt: after Ctrl-C or SIGTERM, when the round at hand has ended and, with
                `out`, everything is saved: the same call goes on there. A second one ends it at
                once.
            Exception: whatever a callback raises; see `Callback`.
        """
        settings, folder = self._of(method, seed), checked_folder(out)
        check_callbacks(callbacks)
        return run_method(settings, self.ingredients, folder, resume, progress, callbacks)

    def check(self, method: str, *, seed: int = 0) -> RunRecord:
        """Refuse what `run` would refuse. Trains nothing.

        Args:
            method: as in `run`.
            seed: as in `run`.

        Returns:
            What would run: ``describe`` is the method in words, ``estimate`` its memory and
            traffic, and ``warnings`` are what a user should know before.

        Raises:
            FedkeelError: as in `run`.
        """
        with one_at_a_time():
            prepared = prepare(self._of(method, seed), self.ingredients)
            check_disk(prepared, None)
            return describe_run(prepared)

    def compare(
        self,
        methods: str | Sequence[str],
        *,
        seeds: int = 3,
        seed: int = 0,
        out: str | Path | None = None,
        progress: bool | None = None,
        callbacks: Sequence[Callback] = (),
        jobs: int = 1,
    ) -> Comparison:
        """Train several methods with several seeds, everything else the same.

        Runs of a method that differ in the seed train side by side where that pays.

        Where `task` has a function or class in place of a module, every seed starts from another
        initial model.

        Args:
            methods: expressions; or one text, in which commas stand between them. ``"local"`` and
                ``"centralised"`` are the baselines: each client alone, all examples in one place.
            seeds: number of seeds, >= 1, counted from `seed`.
            seed: the first seed.
            out: folder of the comparison; None keeps it in memory. No page is written: use
                ``comparison.report().save(path)``, or the command ``fedkeel report FOLDER``.
            progress: as in `run`.
            callbacks: as in `run`. All runs call the same ones, one run after the other;
                `on_run_begin` says which begins. What a callback raises ends the comparison.
            jobs: runs at a time, each in a process of one thread; those that train side by side
                count as one. More than one needs `out`, and no callbacks.

        Raises:
            FedkeelError: as in `run`, before anything has run.
            KeyboardInterrupt: as in `run`; the same call takes the runs that are there in `out`.
        """
        expressions = split_expressions(methods) if isinstance(methods, str) else methods
        wanted = config.build(config.Compare, {"methods": expressions, "seeds": seeds}, "compare")
        settings, folder = self._of("fedavg", seed), checked_folder(out)
        check_callbacks(callbacks)
        with watched(progress) as display:
            of_runs = wanted.methods, wanted.seeds, folder, display, callbacks, jobs
            return compare_methods(settings, self.ingredients, *of_runs)

    def tune(
        self,
        methods: str | Sequence[str],
        space: config.Space | None = None,
        *,
        out: str | Path | None = None,
        seed: int = 0,
        jobs: int = 1,
        progress: bool | None = None,
    ) -> TuningResult:
        """Search for the best settings of each method, with the same budget and score.

        Args:
            methods: as in `compare`.
            space: the choices, the budget and the score; None searches the local learning rate.
            out: folder of the search, which it needs: the next trials are chosen by the runs in
                it. Finished runs in it are used again, unfinished ones continued.
            seed: as in `compare`; that of the trials is the space's own where it has one.
            jobs: runs at a time, each in a process of one thread.
            progress: as in `run`.

        Raises:
            FedkeelError: as in `compare`; or something cannot be searched.
            KeyboardInterrupt: as in `run`; the same call goes on there.
        """
        if out is None:
            raise ArgumentError(
                "Simulation.tune() also needs 'out'.",
                expected="the folder of the search",
                why="a search keeps its trials and the best settings on disk, and goes on there",
                do='write e.g. out="runs/search"',
            )
        space = config.Space() if space is None else space
        check_settings("space", space, config.Space, "space={'local.lr': (0.03, 0.1)}")
        expressions = split_expressions(methods) if isinstance(methods, str) else methods
        wanted = config.build(config.Compare, {"methods": expressions}, "tune")
        settings, folder = self._of("fedavg", seed), folder_of(out)
        with watched(progress) as display:
            return search(settings, self.ingredients, wanted.methods, space, folder, jobs, display)

    def doctor(
        self,
        *,
        trial_rounds: int | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        jobs: int = 1,
        methods: Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> DoctorRecord:
        """Say how clients differ, what goes wrong with FedAvg on them, and what is worth tuning.

        The test set is only checked: everything is measured on a fifth of each client's training
        examples.

        Args:
            trial_rounds: rounds of a trial of the second stage; None takes twenty, or those of the
                simulation if fewer. Everything that the doctor does costs in proportion.
            seed: as in `run`.
            out: folder of the runs, from which finished ones are read; None keeps none.
            jobs: runs at a time, each in a process of one thread.
            methods: expressions that are tried in place of the usual ones.
            progress: as in `run`.

        Raises:
            FedkeelError: as in `run`.
            KeyboardInterrupt: as in `run`.
        """
        settings, folder = self._of("fedavg", seed), checked_folder(out)
        with watched(progress) as display:
            wanted = trial_rounds, folder, display, jobs, methods
            return examine_clients(settings, self.ingredients, *wanted)

    def audit(
        self,
        method: str,
        *,
        attack: config.Audit | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        progress: bool | None = None,
    ) -> AuditRecord:
        """Attack what a method sends in a round, and say what the attacker learns.

        The run is made on the reference engine up to the round that is attacked; runs of the
        attacker's own use the engine of the simulation. The test examples stand for what an
        attacker has of its own, and for those that nobody trained on.

        Args:
            method: as in `run`.
            attack: what the attacker sees and tries, ``fedkeel.Audit(view="sum")``; None takes the
                defaults.
            seed: as in `run`.
            out: folder in which results are kept; attacks that are there are not made again.
            progress: as in `run`.

        Raises:
            FedkeelError: as in `run`; or the method sends nothing.
            KeyboardInterrupt: after the attack at hand; the same call goes on there.
        """
        from fedkeel.study.audit.examine import examine  # it loads SciPy, which takes a second

        attack = config.Audit() if attack is None else attack
        check_settings("attack", attack, config.Audit, "view='sum', round=5")
        settings, folder = self._of(method, seed), checked_folder(out)
        with watched(progress) as display:
            return examine(settings, self.ingredients, attack, folder, display)


_SPACE = "\xa0"
"""A space at which no line is broken."""


def _chosen(settings: config.Settings) -> list[str]:
    """Return the settings that are not as by default, as one writes them."""
    shown = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.get_default(call_default_factory=True):
            text = reprlib.repr(value)
            if isinstance(value, config.Settings):
                text = f"{type(value).__name__}({', '.join(_chosen(value))})"
            shown.append(f"{name}={text}")
    return shown
