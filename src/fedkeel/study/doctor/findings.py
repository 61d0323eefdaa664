"""What the measurements say, one finding for each question. Methods are in `doctor_candidates`."""

from __future__ import annotations

import math

from fedkeel.errors import counted, enumeration
from fedkeel.records.doctor import Finding, Level
from fedkeel.study.doctor.measurements import (
    INPUTS_DIFFER,
    LABELS_ALIKE,
    LABELS_DIFFER,
    LABELS_DIFFER_MUCH,
    Measurements,
)

GINI_NOTABLE, GINI_PROBLEM = 0.2, 0.5
CONFLICT_NOTABLE, CONFLICT_PROBLEM = 0.1, 0.3
TARGETS_NOTABLE, TARGETS_PROBLEM = 0.1, 0.3
INPUTS_NOTABLE = 0.2
FORGETTING_NOTABLE, FORGETTING_PROBLEM = 0.1, 0.5


def findings(m: Measurements) -> tuple[Finding, ...]:
    """Return all findings, those of the data first."""
    answers = (
        *(labels(m), targets(m), sizes(m), inputs(m), rate(m), drift(m), forgetting(m)),
        *(participation(m), weights(m), batch_norm(m), centralised(m), local(m)),
    )
    return tuple(finding for finding in answers if finding is not None)


def level_of(value: float, notable: float, problem: float) -> Level:
    """Return how much a number matters, by two bounds."""
    if math.isnan(value):
        return "unknown"
    return "problem" if value >= problem else "notable" if value >= notable else "fine"


def labels(m: Measurements) -> Finding | None:
    """How the labels of clients differ."""
    skew = m.labels
    if skew is None:
        return None
    level = level_of(skew.beyond_chance, LABELS_DIFFER, LABELS_DIFFER_MUCH)
    what = "Labels" if m.has_labels else "Target tokens"
    is_chance = skew.beyond_chance <= max(skew.by_chance, LABELS_ALIKE)
    verdict = {
        "fine": "are distributed alike"
        if is_chance
        else "differ between clients, by less than what counts as skew",
        "notable": "differ between clients",
        "problem": "differ strongly between clients",
    }[level]
    held = f"{skew.classes:g} of {skew.of_classes}"
    return Finding(
        "labels",
        "Label skew",
        level,
        f"{what} {verdict}: a client has {held} (median), and {100 * skew.variation:.0f} % of its "
        f"examples would need another label to match all clients together; small samples alone "
        f"explain {100 * skew.by_chance:.0f} %.",
        {
            "total_variation": skew.variation,
            "by_chance": skew.by_chance,
            "jensen_shannon_distance": skew.divergence,
            "classes": skew.classes,
            "of_classes": float(skew.of_classes),
        },
    )


def targets(m: Measurements) -> Finding | None:
    """How the quantities that are predicted differ."""
    skew = m.targets
    if skew is None:
        return None
    level = level_of(skew.between, TARGETS_NOTABLE, TARGETS_PROBLEM)
    return Finding(
        "targets",
        "Target skew",
        level,
        f"{100 * skew.between:.0f} % of the variance of the target lies between clients. A "
        f"client's mean is {skew.distance:.2f} deviations from that of all; small samples alone "
        f"explain {skew.by_chance:.2f}.",
        {"between": skew.between, "distance": skew.distance, "by_chance": skew.by_chance},
    )


def sizes(m: Measurements) -> Finding:
    """How the numbers of examples differ."""
    skew = m.sizes
    level = level_of(skew.gini, GINI_NOTABLE, GINI_PROBLEM)
    steps = (
        ""
        if m.steps[0] == m.steps[1]
        else f" A client makes {m.steps[0]} to {m.steps[1]} local steps in a round."
    )
    return Finding(
        "sizes",
        "Quantity skew",
        level,
        f"The largest client has {skew.ratio:.3g} times the examples of the smallest, and "
        f"{100 * skew.largest:.0f} % of all (Gini {skew.gini:.2f}).{steps}",
        {
            "gini": skew.gini,
            "ratio": skew.ratio,
            "largest": skew.largest,
            "fewest_steps": float(m.steps[0]),
            "most_steps": float(m.steps[1]),
        },
    )


def inputs(m: Measurements) -> Finding | None:
    """How the inputs of clients differ, beyond what their labels explain."""
    if m.inputs is None:
        return None
    known = m.separability
    numbers = {
        "distance": m.inputs.distance,
        "by_chance": m.inputs.by_chance,
        "told_apart": None if known is None else known.accuracy,
        "told_apart_by_chance": None if known is None else known.by_chance,
    }
    moments = (
        f"A client's mean input is {m.inputs.distance:.2f} deviations from that of all; small "
        f"samples alone explain {m.inputs.by_chance:.2f}." + named_columns(m)
    )
    if known is None:
        return Finding("inputs", "Input skew", "unknown", moments, numbers)
    beyond = ", labels apart," if m.has_labels else ""
    level = level_of(m.input_skew, INPUTS_NOTABLE, INPUTS_DIFFER)
    return Finding(
        "inputs",
        "Input skew",
        level,
        f"A linear classifier knows the client of {100 * known.accuracy:.0f} % of the inputs"
        f"{beyond} where guessing among {known.clients} knows {100 * known.by_chance:.0f} %. "
        + moments,
        numbers,
    )


def named_columns(m: Measurements) -> str:
    """Name the columns in which clients differ most, and those that are constant at a client."""
    says = ""
    if m.columns_apart:
        named = enumeration([f"{name!r} ({distance:.2f})" for name, distance in m.columns_apart])
        says += f" Most in {named}."
    if m.constant:
        named = enumeration([f"{column!r} at {client}" for column, client in m.constant], 6)
        says += f" Constant: {named}."
    return says


def rate(m: Measurements) -> Finding:
    """Whether the learning rate is the problem."""
    score, best = m.scores_by_lr.get(m.lr), m.fedavg
    numbers = {"given": m.lr, "best": m.best_lr, "score": score, "best_score": best}
    title = "Learning rate"
    if best is None:
        return Finding("rate", title, "unknown", "Nothing was trained.", numbers)
    if score is None:
        says = f"FedAvg diverges at {m.lr:g}; at {m.best_lr:g} it reaches {m.score.format(best)}."
        return Finding("rate", title, "problem", says, numbers)
    if m.is_gain(best, score):
        word = "small" if m.best_lr > m.lr else "large"
        says = (
            f"{m.lr:g} is too {word} here: FedAvg has {m.score.format(score)} with it, and "
            f"{m.score.format(best)} with {m.best_lr:g}."
        )
        return Finding("rate", title, "problem", says, numbers)
    says = f"{m.lr:g} is among the best of those tried: FedAvg has {m.score.format(score)} with it."
    return Finding("rate", title, "fine", says, numbers)


def drift(m: Measurements) -> Finding:
    """Whether updates conflict and local models drift apart."""
    numbers = {
        "conflict": m.conflict,
        "cosine": m.diagnostics.get("conflict.cosine", math.nan),
        "diversity": m.diversity,
    }
    if math.isnan(m.conflict):
        says = "Not measured: a round has only one client."
        return Finding("drift", "Conflict and drift", "unknown", says, numbers)
    level = level_of(m.conflict, CONFLICT_NOTABLE, CONFLICT_PROBLEM)
    return Finding(
        "drift",
        "Conflict and drift",
        level,
        f"{100 * m.conflict:.0f} % of pairs of updates point against each other; their mean cosine "
        f"is {numbers['cosine']:.2f}. The mean square of their norms is {m.diversity:.1f} times "
        "that of their mean, which would be once without drift.",
        numbers,
    )


def forgetting(m: Measurements) -> Finding:
    """Whether local training forgets what other clients' examples taught."""
    numbers = {
        "loss_increase": m.diagnostics.get("forgetting.increase", math.nan),
        "loss_before": m.diagnostics.get("forgetting.loss_before", math.nan),
        "lost_accuracy": m.diagnostics.get("forgetting.by_class", math.nan),
    }
    level = level_of(m.forgetting, FORGETTING_NOTABLE, FORGETTING_PROBLEM)
    if level == "unknown":
        says = "Not measured: it takes two rounds of one shared model."
        return Finding("forgetting", "Forgetting", level, says, numbers)
    way = "raises" if m.forgetting > 0 else "lowers"
    return Finding(
        "forgetting",
        "Forgetting",
        level,
        f"A round of local training {way} the loss on the examples of the clients of the round "
        f"before by {abs(100 * m.forgetting):.0f} % (from {numbers['loss_before']:.3g}).",
        numbers,
    )


def participation(m: Measurements) -> Finding:
    """Whether too few clients in a round are the problem."""
    numbers = {"share": m.participation, "all_clients": m.all_clients, "fedavg": m.fedavg}
    title = "Participation"
    if m.per_round == m.clients:
        says = "All clients take part in each round."
        return Finding("participation", title, "fine", says, numbers)
    who = f"{m.per_round} of {counted(m.clients, 'client')} take part in a round"
    gain = m.gain(m.all_clients, m.fedavg)
    if gain is None or m.all_clients is None or m.fedavg is None:
        says = f"{who}. What all of them would bring was not measured, for its cost."
        return Finding("participation", title, "unknown", says, numbers)
    scores = [m.score.format(value) for value in (m.fedavg, m.all_clients)]
    says = f"{who}. FedAvg has {scores[0]}, and {scores[1]} with all"
    level: Level = "problem" if m.is_gain(m.all_clients, m.fedavg) else "fine"
    return Finding("participation", title, level, f"{says}.", numbers)


def weights(m: Measurements) -> Finding | None:
    """Whether the sizes are the problem: what equal client weights change."""
    if m.equal_weights is None or m.fedavg is None:
        return None
    numbers = {"equal_weights": m.equal_weights, "fedavg": m.fedavg}
    better = m.is_gain(m.equal_weights, m.fedavg)
    worse = m.is_gain(m.fedavg, m.equal_weights)
    verdict = "helps" if better else "costs" if worse else "changes nothing beyond chance"
    says = (
        f"Weighting clients equally {verdict}: {m.score.format(m.equal_weights)}, and "
        f"{m.score.format(m.fedavg)} by their sizes."
    )
    return Finding("weights", "Client weights", "problem" if better else "fine", says, numbers)


def batch_norm(m: Measurements) -> Finding | None:
    """Whether batch normalisation is the problem."""
    if not m.has_batch_norm:
        return None
    numbers = {"kept_at_clients": m.kept_norm, "fedavg": m.fedavg}
    title = "Batch normalisation"
    if m.kept_norm is None or m.fedavg is None:
        says = "The model has it; statistics kept at each client could not be tried."
        return Finding("batch_norm", title, "unknown", says, numbers)
    is_problem = m.is_gain(m.kept_norm, m.fedavg)
    says = (
        f"With the normalisation kept at each client, its own examples have "
        f"{m.score.format(m.kept_norm)}; averaged, {m.score.format(m.fedavg)}."
    )
    advice = " For one model for all, use GroupNorm: fedkeel.replace_batch_norm." * is_problem
    return Finding("batch_norm", title, "problem" if is_problem else "fine", says + advice, numbers)


def centralised(m: Measurements) -> Finding:
    """How far FedAvg is from training in one place."""
    gap = m.gain(m.centralised, m.fedavg)
    numbers = {"centralised": m.centralised, "fedavg": m.fedavg, "gap": gap}
    if gap is None or m.centralised is None or m.fedavg is None:
        says = "Centralised training diverged."
        return Finding("centralised", "To centralised", "unknown", says, numbers)
    level: Level = "notable" if m.is_gain(m.centralised, m.fedavg) else "fine"
    return Finding(
        "centralised",
        "To centralised",
        level,
        f"Training in one place, with as many steps at the same learning rate, has "
        f"{m.score.format(m.centralised)}; FedAvg {m.score.format(m.fedavg)}.",
        numbers,
    )


def local(m: Measurements) -> Finding:
    """How far FedAvg is above clients that train alone."""
    gain = m.gain(m.fedavg, m.local_own)
    numbers = {"local_own": m.local_own, "local": m.local, "fedavg": m.fedavg, "gain": gain}
    if gain is None or m.local_own is None or m.fedavg is None:
        says = "Training alone diverged."
        return Finding("local", "Above local", "unknown", says, numbers)
    everybody = "" if m.local is None else f" On everybody's it has {m.score.format(m.local)}."
    is_sure = m.is_gain(m.local_own, m.fedavg)
    level: Level = "fine" if gain >= 0 else "notable"
    ahead = ""
    if is_sure and m.judges_personal:
        level = "problem"
    if gain < 0:
        most = f"two standard errors of a score ({m.score.format(2 * m.noise)})"
        ahead = f" Training alone is ahead by {'more' if is_sure else 'less'} than {most}."
    return Finding(
        "local",
        "Above local",
        level,
        f"On a client's own examples its own model has {m.score.format(m.local_own)}, and FedAvg's "
        f"{m.score.format(m.fedavg)}.{ahead}{everybody}",
        numbers,
    )
