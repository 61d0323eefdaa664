"""Warnings about robust aggregates, and ends of rounds, without an effect for the cohort."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, cast

from fedkeel.config.flower import smallest_count
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import FedkeelError, counted
from fedkeel.method.compose import expression_of
from fedkeel.method.parts.krum import Krum
from fedkeel.method.parts.mixing import Bucketing
from fedkeel.method.roles import CohortTransform, Reduction
from fedkeel.runner.features import features_of

MANY = 1000
"""Clients up to which is looked for the number from which a defence has an effect."""


def defence_warnings(prepared: Prepared) -> Iterator[str]:
    """Yield warnings about defences against broken clients."""
    if prepared.is_baseline:
        return
    for part, count in defences(prepared):
        yield without_effect(part, count)


def defences(prepared: Prepared) -> Iterator[tuple[CohortTransform | Reduction, int]]:
    """Yield the parts that may withstand broken clients, and how many updates each has, at most."""
    if prepared.is_baseline:
        return
    count, plan = _replies(prepared), prepared.plan
    parts: list[CohortTransform | Reduction] = [*plan.cohort_transforms, plan.reduction]
    for part in parts:
        yield part, count
        if isinstance(part, Bucketing):
            count = math.ceil(count / part.size)


def _replies(prepared: Prepared) -> int:
    """Return how many updates a round has, at most."""
    count = prepared.population.per_round
    if prepared.step_size is not None:
        return count
    return min((item.most_replies(count) for item in features_of(prepared).values()), default=count)


def without_effect(part: CohortTransform | Reduction, count: int) -> str:
    """Return that a part defends against nobody among so many clients, "" where it does."""
    of_all = counted(count, "client")
    if isinstance(part, Bucketing):
        if 1 < count <= part.size:
            return (
                f"{expression_of([part])} makes one update of {of_all}, their mean: what follows "
                f"has nothing to compare; set size below {count}"
            )
        return ""
    is_meant = getattr(part, "beta", None) == 0.0  # documented as the mean
    if part.withstands(count) != 0 or is_meant or count < 2:
        return ""
    said = (
        "reckons with no broken client among" if isinstance(part, Krum) else "leaves out nobody of"
    )
    text = f"{expression_of([part])} {said} {of_all}"
    remedy = ways(part, count, 1)
    return f"{text}: {remedy}" if remedy else text


def ways(part: CohortTransform | Reduction, count: int, broken: int) -> str:
    """Return how a part withstands so many broken clients: with more clients, or another share."""
    sizes = range(count + 1, MANY)
    enough = next((n for n in sizes if (part.withstands(n) or 0) >= broken), None)
    advice = [] if enough is None else [f"use {enough} clients or more"]
    if any(field.name == "beta" for field in fields(cast(Any, part))):
        share, changed = math.ceil(1000 * broken / count) / 1000, None
        with suppress(FedkeelError):  # a share beyond what the part takes
            changed = replace(cast(Any, part), beta=share)
        if changed is not None and changed.withstands(count) >= broken:
            advice.append(f"set beta = {share:g}")
    return ", or ".join(advice)


def rounds_without_reserve(prepared: Prepared) -> Iterator[str]:
    """Yield warnings where shares of replies in a federation of nodes are rounded up to all."""
    if prepared.is_baseline or not prepared.on_nodes:
        return
    flower = prepared.settings.flower
    yield share_of_all(
        "flower.quorum", flower.quorum, prepared, "so that one silent node stops the run"
    )
    if prepared.plan.policy is None:
        yield share_of_all("flower.enough", flower.enough, prepared, "so that nobody is left out")


def share_of_all(setting: str, share: float, prepared: Prepared, effect: str) -> str:
    """Return that a share of a round's replies, below 1, is rounded up to all of them, else ""."""
    count = prepared.population.per_round
    if share == 1.0 or count < 2 or smallest_count(share, count) < count:
        return ""
    most = math.floor(1000 * (count - 1) / count) / 1000
    return (
        f"{setting} = {share:g} of {counted(count, 'client')} is rounded up to all of them, "
        f"{effect}; give at most {most:g}"
    )
