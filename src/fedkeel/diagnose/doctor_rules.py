"""The rules: which methods are worth tuning here, and which are not.

Each rule is one line of `FOR_ONE_MODEL`, `FOR_PERSONAL_MODELS` or `AGAINST`: when it holds, what it
suggests, and why. The first rules that hold give the three methods, in order. ``BENCHMARK`` marks a
rule that rests on seven settings of `docs/results/doctor.md`, in which every method was tuned; the
others there were tuned afterwards, to test the rules. What rests on a paper says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedkeel.config import Choices, Space
from fedkeel.diagnose.doctor_measurements import (
    INPUTS_DIFFER,
    LABELS_DIFFER,
    LABELS_DIFFER_MUCH,
    Measurements,
)
from fedkeel.records.doctor import Advice

ADVISED = 3
"""Methods that are worth tuning."""

BENCHMARK = "benchmark: docs/results/doctor.md"

CONFLICTS = 0.5
"""Share of pairs of updates that conflict from which conflict counts without label skew."""

EVEN = 1.5
"""Largest over smallest number of local steps up to which clients count as doing equal work."""


@dataclass(frozen=True)
class Rule:
    """A rule.

    Args:
        name: its name.
        when: whether it holds.
        methods: expressions, the best first.
        why: the reason, with the measurements behind it.
        ground: what it rests on.
    """

    name: str
    when: Callable[[Measurements], bool]
    methods: tuple[str, ...]
    why: Callable[[Measurements], str]
    ground: str = BENCHMARK


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _labels(m: Measurements) -> str:
    return f"label skew {_share(m.label_skew)} beyond chance"


def _score(m: Measurements, value: float | None) -> str:
    return "no score" if value is None else m.score.format(value)


def _who(m: Measurements) -> str:
    return f"{m.per_round} of {m.clients} clients in a round"


FOR_ONE_MODEL: tuple[Rule, ...] = (
    Rule(
        "strong label skew, most clients",
        lambda m: m.label_skew >= LABELS_DIFFER_MUCH and not m.is_partial,
        ("fedgh", "gradma.s", "feddyn"),  # the first three of 16 on digits of one class
        lambda m: f"{_labels(m)}, {_share(m.conflict)} of pairs of updates conflict, {_who(m)}",
    ),
    Rule(
        "strong label skew, few clients",
        lambda m: m.label_skew >= LABELS_DIFFER_MUCH and m.is_partial,
        ("gradma.s", "feddyn", "scaffold"),  # the first three of 16 on MNIST of two classes
        lambda m: f"{_labels(m)}, {_who(m)}, so a memory of absent clients helps",
    ),
    Rule(
        "conflict without label skew",
        lambda m: m.conflict >= CONFLICTS and m.input_skew >= INPUTS_DIFFER,
        ("scaffold", "fedgh", "fednova"),  # in front on Parkinson's and heart disease
        lambda m: (
            f"{_share(m.conflict)} of pairs of updates conflict, and inputs tell clients "
            f"apart ({_share(m.input_skew)} of what could be known)"
        ),
    ),
    Rule(
        "little to correct",
        lambda m: True,
        ("momentum", "fedgh", "gradma.s"),  # at or near the top on IID digits, equal sizes or not
        lambda m: (
            "no strong skew of labels or inputs, so a longer or steadier server step is "
            "what is left to gain"
        ),
    ),
)

FOR_PERSONAL_MODELS: tuple[Rule, ...] = (
    Rule(
        "batch normalisation and other inputs",
        lambda m: m.has_batch_norm and m.input_skew >= INPUTS_DIFFER,
        ("fedbn+finetune", "fedbn"),
        lambda m: (
            f"inputs tell clients apart ({_share(m.input_skew)} of what could be known), and "
            "the model has batch normalisation"
        ),
        "paper: Li et al., FedBN, ICLR 2021",
    ),
    Rule(
        "classes",
        lambda m: m.has_labels,
        ("fedrod", "finetune", "ditto"),  # the first three of 12 on MNIST of two classes
        lambda m: (
            f"personal models are judged; on their own examples clients alone have "
            f"{_score(m, m.local_own)}, and one model {_score(m, m.fedavg)}"
        ),
    ),
    Rule(
        "quantities",
        lambda m: True,
        ("ditto", "finetune", "apfl"),  # the next three there, which need no classes
        lambda m: (
            f"personal models are judged; on their own examples clients alone have "
            f"{_score(m, m.local_own)}, and one model {_score(m, m.fedavg)}"
        ),
    ),
)

AGAINST: tuple[Rule, ...] = (
    Rule(
        "personal methods for one model",
        lambda m: not m.judges_personal,
        ("fedper", "fedrep", "ditto"),
        lambda m: (
            "one model for all is judged, and these leave none or do not change it "
            '(evaluation.model = "personal" judges the clients\' own)'
        ),
        "what the methods do",
    ),
    Rule(
        "missing classes",
        lambda m: (
            m.labels is not None and m.has_labels and m.labels.classes < 0.5 * m.labels.of_classes
        ),
        ("fedlc",),  # far below FedAvg in all three settings with missing classes
        lambda m: (
            f"a client has {m.labels.classes:g} of {m.labels.of_classes} classes (median), "
            "and calibration by counts learns nothing of a class that is missing"
            if m.labels
            else ""
        ),
    ),
    Rule(
        "labels alike, little conflict",
        lambda m: m.has_labels and m.label_skew < LABELS_DIFFER and m.conflict < CONFLICTS,
        ("scaffold",),  # below FedAvg on IID digits, of equal and of unequal sizes
        lambda m: (
            f"{_labels(m)}, {_share(m.conflict)} of pairs of updates conflict: there is "
            "little drift to correct"
        ),
    ),
    Rule(
        "adaptive server without strong label skew",
        lambda m: m.label_skew < LABELS_DIFFER_MUCH and not m.judges_personal,
        ("fedadam",),  # below FedAvg in all four such settings
        lambda m: (
            f"{_labels(m)}; in short runs its server step has to be tuned more finely than "
            "the gain is worth"
        ),
    ),
    Rule(
        "extrapolation",
        lambda m: not m.judges_personal,
        ("fedexp",),  # below FedAvg in five of six settings
        lambda m: "its longer server steps lost to FedAvg tuned alike in five of six settings",
    ),
    Rule(
        "equal work",
        lambda m: m.unevenness <= EVEN,
        ("fednova",),
        lambda m: (
            f"clients make {m.steps[0]} to {m.steps[1]} local steps, where it is FedAvg or "
            "nearly so"
        ),
        "a law of the method: with equal steps it is FedAvg exactly",
    ),
    Rule(
        "no batch normalisation",
        lambda m: m.judges_personal and not m.has_batch_norm,
        ("fedbn",),
        lambda m: "the model has no batch normalisation to keep at clients",
        "what the method does",
    ),
)

CHOICES: dict[str, dict[str, Choices]] = {
    "fedprox": {"mu": (0.01, 0.3)},
    "momentum": {"beta": (0.5, 0.9)},
    "fedadam": {"lr": (0.01, 0.1)},
    "feddyn": {"alpha": (0.01, 0.1)},
    "fedcm": {"alpha": (0.1, 0.5)},
    "fedsam": {"rho": (0.02, 0.1)},
    "gcfed": {"lam": (0.3, 0.9)},
    "gradma.s": {"beta1": (0.5, 0.9)},
    "fedntd": {"beta": (0.3, 1.0)},
    "finetune": {"epochs": (1, 5)},
    "ditto": {"lam": (0.1, 1.0)},
}
"""The most important hyper-parameter of each method, as in the benchmark."""

FACTORS = (0.3, 1.0, 3.0)
"""Factors on the pilot's best learning rate that are searched."""


def advise(m: Measurements) -> tuple[Advice, ...]:
    """Return the three methods that are worth tuning, by the first rules that hold."""
    rules = FOR_PERSONAL_MODELS if m.judges_personal else FOR_ONE_MODEL
    chosen: dict[str, Advice] = {}
    for rule in rules:
        for method in rule.methods if rule.when(m) else ():
            chosen.setdefault(method, _advice(rule, method, m))
    return tuple(chosen.values())[:ADVISED]


def discourage(m: Measurements, advised: Sequence[str]) -> tuple[Advice, ...]:
    """Return methods that are not worth tuning, each once, without the advised ones."""
    chosen: dict[str, Advice] = {}
    for rule in AGAINST:
        for method in rule.methods if rule.when(m) else ():
            if method not in advised:
                chosen.setdefault(method, _advice(rule, method, m))
    return tuple(chosen.values())


def _advice(rule: Rule, method: str, m: Measurements) -> Advice:
    return Advice(method, rule.why(m), rule.ground, rule.name)


def search_space(m: Measurements, methods: Sequence[str], tune: Space) -> Space:
    """Return the search of the three: learning rates about the pilot's best, and `CHOICES`.

    Args:
        m: has the pilot's best learning rate.
        methods: the three.
        tune: the experiment's search, of which all but the choices stays.
    """
    rates = tuple(float(f"{m.best_lr * factor:.3g}") for factor in FACTORS)
    names = {name for method in methods for name in method.split("+")}
    choices = {name: space for name, space in CHOICES.items() if name in names}
    return tune.model_copy(update={"space": {"local.lr": rates}, "method": choices})
