"""The doctor on a federation of nodes: what the statistics that sites have sent say by themselves.

Nothing is trained, so there are no trials and no advice of methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from fedkeel.config import Experiment
from fedkeel.data.read.scaling import Moments
from fedkeel.errors import counted
from fedkeel.records.doctor import DoctorRecord, Finding
from fedkeel.records.node_statistics import ColumnStatistics, NodeStatistics, SiteStatistics
from fedkeel.study.doctor.findings import (
    INPUTS_NOTABLE,
    labels,
    level_of,
    sizes,
    targets,
)
from fedkeel.study.doctor.heterogeneity import MomentSkew, label_skew, moment_skew, size_skew
from fedkeel.study.doctor.measurements import INPUTS_DIFFER, Measurements

UNTRAINED = (
    "Nothing was trained: the learning rate, conflict and drift, forgetting, and which method is "
    "best are not known. That takes runs on the nodes, with [diagnose] in the experiment."
)

SECURE = "Secure sums show no single site, so how sites differ in this is not known."
NOT_TOLD = "Not known: fewer than two sites have told of it."


def judge_statistics(experiment: Experiment, statistics: NodeStatistics) -> DoctorRecord:
    """Return what statistics say of how sites differ.

    Args:
        experiment: of the federation.
        statistics: of its sites.
    """
    sites = statistics.sites
    measured = _measured(experiment, statistics)
    of_labels = [site.labels for site in sites if site.labels is not None]
    answers = (labels(measured), targets(measured), sizes(measured), _inputs(measured))
    found = [finding for finding in answers if finding is not None]
    keys = {finding.key for finding in found}
    why = SECURE if statistics.is_secure else NOT_TOLD
    if "labels" not in keys and statistics.label_names:
        found.insert(0, Finding("labels", "Label skew", "unknown", why))
    if "inputs" not in keys:
        found.append(Finding("inputs", "Input skew", "unknown", why))
    return DoctorRecord(
        name=experiment.name,
        clients=len(sites),
        per_round=experiment.cohort.clients or len(sites),
        rounds=0,
        trial_rounds=0,
        validation_examples=0,
        judges_personal=experiment.evaluation.model == "personal",
        findings=tuple(found),
        client_names=tuple(site.name for site in sites),
        label_names=statistics.label_names,
        sizes=tuple(site.examples for site in sites),
        histogram=tuple(item.shown for item in of_labels) if len(of_labels) == len(sites) else (),
        input_distances=() if measured.inputs is None else measured.inputs.of_clients,
        notes=_notes(statistics),
    )


def _measured(experiment: Experiment, statistics: NodeStatistics) -> Measurements:
    sites = statistics.sites
    shown = [site.labels.shown for site in sites if site.labels and sum(site.labels.shown)]
    target = "" if statistics.label_names else experiment.data.label
    return Measurements(
        clients=len(sites),
        per_round=len(sites),
        sizes=size_skew([site.examples for site in sites]),
        lr=experiment.local.lr,
        scores_by_lr={experiment.local.lr: None},
        has_labels=bool(statistics.label_names),
        labels=label_skew(np.array(shown)) if len(shown) > 1 else None,
        targets=_skew(sites, lambda column: column.name == target),
        inputs=_skew(sites, lambda column: column.name != target),
    )


def _skew(
    sites: Sequence[SiteStatistics], is_meant: Callable[[ColumnStatistics], bool]
) -> MomentSkew | None:
    """Return how the means of columns differ that all sites with any mean have told of."""
    told = [site for site in sites if any(column.known for column in site.columns)]
    if len(told) < 2:
        return None
    chosen = [
        index
        for index, column in enumerate(told[0].columns)
        if is_meant(column) and all(site.columns[index].known for site in told)
    ]
    if not chosen:
        return None
    moments = [_moments(site.examples, [site.columns[index] for index in chosen]) for site in told]
    return moment_skew(moments, [site.examples for site in told])


def _moments(count: int, columns: Sequence[ColumnStatistics]) -> Moments:
    means = torch.tensor([column.mean or 0.0 for column in columns], dtype=torch.float64)
    deviations = torch.tensor([column.deviation or 0.0 for column in columns], dtype=torch.float64)
    return Moments(count, means, count * deviations.square())


def _inputs(m: Measurements) -> Finding | None:
    """How far the mean inputs of sites are apart: no examples are here to tell sites apart by."""
    if m.inputs is None:
        return None
    skew = m.inputs
    numbers = {"distance": skew.distance, "by_chance": skew.by_chance, "between": skew.between}
    return Finding(
        "inputs",
        "Input skew",
        level_of(skew.beyond_chance, INPUTS_NOTABLE, INPUTS_DIFFER),
        f"A site's mean input is {skew.distance:.2f} deviations from that of all; small samples "
        f"alone explain {skew.by_chance:.2f}. {100 * skew.between:.0f} % of the variance lies "
        "between sites. Other labels may be the reason.",
        numbers,
    )


def _notes(statistics: NodeStatistics) -> tuple[str, ...]:
    """Return what the findings do not rest on."""
    notes = [UNTRAINED]
    rest = sum(site.labels.rest for site in statistics.sites if site.labels is not None)
    if rest:
        notes.append(
            f"{counted(rest, 'example')} of labels that are too few at a site to be told are in no "
            "count of labels."
        )
    if statistics.total.noise:
        notes.append("Sites have added noise to their counts, which looks like a small skew.")
    notes += [
        f"Without client {', '.join(map(str, clients))}: {reason}"
        for reason, clients in statistics.faults.items()
    ]
    return tuple(notes)
