"""What can be diagnosed, what each kind needs, and why a run may not have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedkeel import config
from fedkeel.config.diagnose import Kind
from fedkeel.diagnose.cka import measure_cka
from fedkeel.diagnose.drift import measure_conflict, measure_drift, measure_participation
from fedkeel.diagnose.fisher import LIKELIHOODS, measure_fisher
from fedkeel.diagnose.forgetting import measure_forgetting, measure_global_forgetting
from fedkeel.diagnose.landscape import measure_landscape, measure_sharpness
from fedkeel.diagnose.measured import RoundDiagnostics
from fedkeel.diagnose.observed_round import ObservedRound
from fedkeel.engine.base import TrainingSetup
from fedkeel.errors import ConfigError
from fedkeel.records.baselines import BASELINES
from fedkeel.task.losses import loss_name

Refuse = Callable[[TrainingSetup], str]
"""Setup -> why the quantity cannot be measured there, "" where it can."""


def _needs_examples(setup: TrainingSetup) -> str:
    if setup.federation.how["kind"] == "nodes":
        return "the examples are on the nodes, and the server sees the updates alone"
    return ""


def _needs_global_model(setup: TrainingSetup) -> str:
    if setup.training.personal:
        kept = ", ".join(sorted(setup.training.personal)[:3])
        return f"parameters stay at the clients ({kept}), so no global model is whole"
    return _needs_examples(setup)


def _needs_likelihood(setup: TrainingSetup) -> str:
    network = setup.training.network
    if network.task_loss not in LIKELIHOODS:
        known = ", ".join(sorted(loss_name(loss) for loss in LIKELIHOODS))
        return f"the loss is no log-likelihood of each example; {known} are"
    if network.batch_statistics:
        return "batch normalisation by the batch at hand mixes the examples"
    return _needs_global_model(setup)


@dataclass(frozen=True)
class DiagnosticKind:
    """One kind of diagnostics.

    Args:
        measure: what is measured of a round.
        refuse: why it cannot be measured in a run.
        trains: whether clients are trained again, or others than the cohort.
    """

    measure: Callable[[ObservedRound], RoundDiagnostics]
    refuse: Refuse = lambda _: ""
    trains: bool = False


DIAGNOSTICS: Mapping[Kind, DiagnosticKind] = {
    "forgetting": DiagnosticKind(measure_forgetting, _needs_global_model),
    "global_forgetting": DiagnosticKind(measure_global_forgetting, _needs_global_model),
    "drift": DiagnosticKind(measure_drift),
    "conflict": DiagnosticKind(measure_conflict),
    "participation": DiagnosticKind(measure_participation, _needs_examples, trains=True),
    "fisher": DiagnosticKind(measure_fisher, _needs_likelihood, trains=True),
    "cka": DiagnosticKind(measure_cka, _needs_global_model),
    "landscape": DiagnosticKind(measure_landscape, _needs_global_model),
    "sharpness": DiagnosticKind(measure_sharpness, _needs_global_model),
}


def check_federation(settings: config.Run) -> None:
    """Refuse diagnostics that train clients where these are on nodes.

    Raises:
        ConfigError: names the kind.
    """
    for kind in settings.diagnose.kinds:
        if settings.flower.secure_aggregation:
            raise ConfigError(
                f"The diagnostics {kind!r} cannot be measured under secure aggregation.",
                why="they compare single clients' updates, of which the server sees the sum alone",
                do="leave it out of diagnose.kinds, or simulate the federation: fedkeel run",
            )
        if DIAGNOSTICS[kind].trains:
            raise ConfigError(
                f"The diagnostics {kind!r} cannot be measured in a Flower federation.",
                why="they train clients once more, and clients train on their nodes",
                do="leave it out of diagnose.kinds, or simulate the federation: fedkeel run",
            )


def check_kinds(settings: config.Run, setup: TrainingSetup) -> None:
    """Refuse diagnostics that cannot be measured in a run. A baseline has none, whatever is asked.

    Raises:
        ConfigError: names the kind, and the reason.
    """
    for kind in () if settings.method in BASELINES else settings.diagnose.kinds:
        if reason := DIAGNOSTICS[kind].refuse(setup):
            fitting = [name for name, item in DIAGNOSTICS.items() if not item.refuse(setup)]
            raise ConfigError(
                f"The diagnostics {kind!r} cannot be measured in a run of {settings.method!r}.",
                why=reason,
                do=f"leave it out of diagnose.kinds; what can be measured: {', '.join(fitting)}",
            )
