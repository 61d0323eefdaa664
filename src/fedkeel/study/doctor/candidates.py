"""The methods that the doctor tries, what each of them is for, and why one is left out.

A candidate is left out only where it cannot run, or where it is FedAvg by a law of the method. All
others are tried in short runs, which `study/doctor/trials.py` makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fedkeel.config import Choices, Space
from fedkeel.study.doctor.measurements import Measurements

FACTORS = (0.3, 1.0, 3.0)
"""Factors on the pilot's best learning rate that are tried, and that the file searches."""

Reason = Callable[[Measurements], str]


@dataclass(frozen=True)
class Candidate:
    """A method that may be tried.

    Args:
        method: its expression.
        aim: what it is for, with the measurement that says how much of it there is.
        choices: values of its most important hyper-parameter, by the hyper-parameter's name.
    """

    method: str
    aim: Reason
    choices: Mapping[str, Choices] = field(default_factory=dict)


def _share(value: float) -> str:
    return "a share not measured" if math.isnan(value) else f"{100 * value:.0f} %"


def _skew(m: Measurements) -> str:
    if m.labels is not None:
        return f"label skew {_share(m.label_skew)} beyond chance"
    return f"{_share(m.input_skew)} of what inputs could tell of their client"


def _nothing(m: Measurements) -> str:
    return "the reference"


def _wanted(m: Measurements) -> str:
    return "tried because it is in the list of methods"


def _drift(m: Measurements) -> str:
    return f"corrects drift: {_share(m.conflict)} of pairs of updates conflict, {_skew(m)}"


def _conflict(m: Measurements) -> str:
    return f"takes conflict out of updates: {_share(m.conflict)} of their pairs conflict"


def _server(m: Measurements) -> str:
    return f"changes the server's step: {m.per_round} of {m.clients} clients are in a round"


def _forgetting(m: Measurements) -> str:
    if math.isnan(m.forgetting):
        return "keeps what other clients taught: forgetting was not measured"
    way = "raises" if m.forgetting > 0 else "lowers"
    change = f"local training {way} the loss of others by {abs(100 * m.forgetting):.0f} %"
    return f"keeps what other clients taught: {change}"


def _labels(m: Measurements) -> str:
    return f"calibrates for each client's labels: {_skew(m)}"


def _flat(m: Measurements) -> str:
    return f"looks for flat minima: {_skew(m)}"


def _work(m: Measurements) -> str:
    return f"evens out unequal work: clients make {m.steps[0]} to {m.steps[1]} local steps"


def _personal(m: Measurements) -> str:
    if not (m.is_gain(m.local_own, m.fedavg) or m.is_gain(m.fedavg, m.local_own)):
        return "fits each client: whether that is needed cannot be told from the short runs"
    alone, shared = (
        "no score" if value is None else m.score.format(value) for value in (m.local_own, m.fedavg)
    )
    return f"fits each client: trained on only its own examples {alone}, one model for all {shared}"


def _norm(m: Measurements) -> str:
    told = _share(m.input_skew)
    return f"keeps normalisation at clients: {told} of what inputs could tell of their client"


_FEDAVG = Candidate("fedavg", _nothing)
_FEDPROX = Candidate("fedprox", _drift, {"mu": (0.01, 0.3)})
_SCAFFOLD = Candidate("scaffold", _drift)
_MOMENTUM = Candidate("momentum", _server, {"beta": (0.5, 0.9)})
_FEDADAM = Candidate("fedadam", _server, {"lr": (0.01, 0.1)})
_FEDLC = Candidate("fedlc", _labels, {"tau": (0.1, 1.0)})

FOR_ONE_MODEL = (
    _FEDAVG,
    _FEDPROX,
    _SCAFFOLD,
    Candidate("fednova", _work),
    _MOMENTUM,
    _FEDADAM,
    Candidate("feddyn", _drift, {"alpha": (0.01, 0.1)}),
    Candidate("fedcm", _drift, {"alpha": (0.1, 0.5)}),
    Candidate("fedsam", _flat, {"rho": (0.02, 0.1)}),
    Candidate("gcfed", _drift, {"lam": (0.3, 0.9)}),
    Candidate("fedgc", _conflict),
    Candidate("fedgh", _conflict),
    Candidate("gradma.s", _server, {"beta1": (0.5, 0.9)}),
    Candidate("fedntd", _forgetting, {"beta": (0.3, 1.0)}),
    _FEDLC,
    Candidate("fedexp", _server),
)

FOR_PERSONAL_MODELS = (
    *(_FEDAVG, _FEDPROX, _SCAFFOLD, _MOMENTUM, _FEDADAM, _FEDLC),
    Candidate("fedper", _personal),
    Candidate("fedrep", _personal),
    Candidate("finetune", _personal, {"epochs": (1, 5)}),
    Candidate("ditto", _personal, {"lam": (0.1, 1.0)}),
    Candidate("apfl", _personal),
    Candidate("fedrod", _personal),
    Candidate("fedbn", _norm),
    Candidate("fedbn+finetune", _norm, {"epochs": (1, 5)}),
)


def candidates(
    judges_personal: bool, methods: Sequence[str] | None = None
) -> tuple[Candidate, ...]:
    """Return what may be tried for one model, or for the clients' personal models.

    Args:
        judges_personal: whether personal models are judged.
        methods: expressions in place of the usual ones; of methods that are not among the usual
            ones, only the learning rate is searched.
    """
    usual = FOR_PERSONAL_MODELS if judges_personal else FOR_ONE_MODEL
    if methods is None:
        return usual
    known = {candidate.method: candidate for candidate in (*FOR_ONE_MODEL, *FOR_PERSONAL_MODELS)}
    return tuple(known.get(method, Candidate(method, _wanted)) for method in methods)


def reason_against(method: str, m: Measurements) -> str:
    """Return why a method is not tried, "" where it is."""
    if method == "fednova" and m.steps[0] == m.steps[1]:
        return f"all clients make {m.steps[0]} local steps, where it is FedAvg exactly"
    if "fedbn" in method and not m.has_batch_norm:
        return "the model has no batch normalisation to keep at clients"
    return ""


def search_space(methods: Sequence[Candidate], lr: float, tune: Space) -> Space:
    """Return a search of learning rates about one, and of the methods' hyper-parameters.

    Args:
        methods: what is searched.
        lr: the middle learning rate.
        tune: a search, of which all but the choices stays.
    """
    rates = tuple(float(f"{lr * factor:.3g}") for factor in FACTORS)
    choices = {
        candidate.method.rpartition("+")[2]: dict(candidate.choices)
        for candidate in methods
        if candidate.choices
    }
    return tune.model_copy(update={"space": {"local.lr": rates}, "method": choices})
