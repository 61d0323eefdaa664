"""The doctor on a federation of nodes: what the statistics that sites have sent say by themselves.

Nothing is trained, so there are no trials and no advice of methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedkeel.config import Experiment
from fedkeel.data.read.scaling import Moments
from fedkeel.errors import enumeration
from fedkeel.records.doctor import DoctorRecord, Finding, Level
from fedkeel.records.node_statistics import ColumnStatistics, NodeStatistics, SiteStatistics
from fedkeel.study.doctor.findings import (
    INPUTS_NOTABLE,
    labels,
    level_of,
    named_columns,
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
    label_names, histogram = statistics.label_names, [item.shown for item in of_labels]
    if label_names and any(item.rest for item in of_labels):
        label_names = (*label_names, "in no count")
        histogram = [(*item.shown, item.rest) for item in of_labels]
    answers = (
        _labels(measured, statistics),
        targets(measured),
        sizes(measured),
        _inputs(measured, statistics),
    )
    distances = () if measured.inputs is None else measured.inputs.of_clients
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
        label_names=label_names,
        sizes=tuple(site.examples for site in sites),
        histogram=tuple(histogram) if len(histogram) == len(sites) else (),
        input_distances=distances if len(distances) == len(sites) else (),
        notes=_notes(statistics),
    )


def _measured(experiment: Experiment, statistics: NodeStatistics) -> Measurements:
    sites, told = statistics.sites, _told(statistics)
    shown = [site.labels.shown for site in sites if site.labels and sum(site.labels.shown)]
    target = "" if statistics.label_names else experiment.data.label
    names = [name for name, is_everywhere in _columns(told).items() if is_everywhere]
    of_inputs = [name for name in names if name != target]
    skew = _skew(told, of_inputs)
    return Measurements(
        clients=len(sites),
        per_round=len(sites),
        sizes=size_skew([site.examples for site in sites]),
        lr=experiment.local.lr,
        scores_by_lr={experiment.local.lr: None},
        has_labels=bool(statistics.label_names),
        labels=label_skew(np.array(shown)) if len(shown) > 1 else None,
        targets=_skew(told, [name for name in names if name == target]),
        inputs=skew,
        columns_apart=skew.most_apart(of_inputs) if skew else (),
        constant=tuple((of_inputs[i], told[site].name) for site, i in skew.constant)
        if skew
        else (),
    )


def _told(statistics: NodeStatistics) -> list[SiteStatistics]:
    """Return the sites that have told the mean of any column."""
    return [site for site in statistics.sites if any(column.known for column in site.columns)]


def _columns(told: Sequence[SiteStatistics]) -> dict[str, bool]:
    """Return of which columns any site has told the mean, and whether all of them have."""
    columns = zip(*(site.columns for site in told), strict=True)
    known = {of_sites[0].name: [bool(c.known) for c in of_sites] for of_sites in columns}
    return {name: all(of_sites) for name, of_sites in known.items() if any(of_sites)}


def _skew(told: Sequence[SiteStatistics], names: Sequence[str]) -> MomentSkew | None:
    """Return how the means of columns differ; None where there are no two sites, or no columns."""
    if len(told) < 2 or not names:
        return None
    moments = []
    for site in told:
        columns = {column.name: column for column in site.columns}
        moments.append(_moments(site.examples, [columns[name] for name in names]))
    return moment_skew(moments, [site.examples for site in told])


def _moments(count: int, columns: Sequence[ColumnStatistics]) -> Moments:
    means = torch.tensor([column.mean or 0.0 for column in columns], dtype=torch.float64)
    deviations = torch.tensor([column.deviation or 0.0 for column in columns], dtype=torch.float64)
    return Moments(count, means, count * deviations.square())


def _labels(m: Measurements, statistics: NodeStatistics) -> Finding | None:
    """How the labels of sites differ, and which sites are not judged, as they tell of no label."""
    found = labels(m)
    silent = [site for site in statistics.sites if site.labels and not sum(site.labels.shown)]
    if found is None or not silent:
        return found
    names = enumeration([site.name for site in silent], 6)
    says = f"{found.says} Without {names}, where a label is too rare for any to be told."
    one_sided = [site.name for site in silent if _has_one_label(site)]
    if not one_sided:
        return replace(found, says=says)
    says += f" Nearly all examples have the same label at {enumeration(one_sided, 6)}."
    level: Level = "notable" if found.level == "fine" else found.level
    return replace(found, says=says, level=level)


def _has_one_label(site: SiteStatistics) -> bool:
    """Return whether fewer examples than the smallest count have any but the most frequent label.

    So it is where no label is told of, though one has enough examples: it was withheld because the
    others together have too few.
    """
    labels = 0 if site.labels is None else len(site.labels.shown)
    return not site.noise and site.examples > labels * (site.minimum - 1)


def _inputs(m: Measurements, statistics: NodeStatistics) -> Finding | None:
    """How far the mean inputs of sites are apart: no examples are here to tell sites apart by."""
    if m.inputs is None:
        return None
    skew = m.inputs
    numbers = {"distance": skew.distance, "by_chance": skew.by_chance, "between": skew.between}
    columns = _columns(_told(statistics)).items()
    partly = [repr(name) for name, is_everywhere in columns if not is_everywhere]
    without = f" Not told by every site, and left out: {enumeration(partly, 6)}." if partly else ""
    return Finding(
        "inputs",
        "Input skew",
        level_of(skew.beyond_chance, INPUTS_NOTABLE, INPUTS_DIFFER),
        f"A site's mean input is {skew.distance:.2f} deviations from that of all; small samples "
        f"alone explain {skew.by_chance:.2f}. {100 * skew.between:.0f} % of the variance lies "
        f"between sites. Other labels may be the reason.{named_columns(m)}{without}",
        numbers,
    )


def _notes(statistics: NodeStatistics) -> tuple[str, ...]:
    """Return what the findings do not rest on."""
    notes = [UNTRAINED]
    rest = {site.name: site.labels.rest for site in statistics.sites if site.labels is not None}
    withheld = [f"{count:,} at {name}" for name, count in rest.items() if count]
    if withheld:
        notes.append(
            f"Examples in no count of labels, as a label is too rare at their site: "
            f"{enumeration(withheld, 6)}."
        )
    if statistics.total.noise:
        notes.append("Sites have added noise to their counts, which looks like a small skew.")
    notes += [
        f"Without client {', '.join(map(str, clients))}: {reason}"
        for reason, clients in statistics.faults.items()
    ]
    return tuple(notes)
