"""What can be diagnosed, what each kind needs, and why a run may not have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedkeel.engine.base import TrainingSetup
from fedkeel.features.diagnose.cka import measure_cka
from fedkeel.features.diagnose.drift import measure_conflict, measure_drift, measure_participation
from fedkeel.features.diagnose.fisher import LIKELIHOODS, measure_fisher
from fedkeel.features.diagnose.forgetting import measure_forgetting, measure_global_forgetting
from fedkeel.features.diagnose.landscape import measure_landscape, measure_sharpness
from fedkeel.features.diagnose.measured import RoundDiagnostics
from fedkeel.features.diagnose.observed_round import ObservedRound
from fedkeel.features.diagnose.settings import Kind
from fedkeel.task.losses import loss_name

Refuse = Callable[[TrainingSetup], str]
"""Setup -> why the quantity cannot be measured there, "" where it can."""


def _needs_examples(setup: TrainingSetup) -> str:
    if setup.federation.how["kind"] == "nodes":
        return "the examples are on the nodes, and the server sees only the updates"
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
        return f"the loss is not a log-likelihood of each example; {known} are"
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
