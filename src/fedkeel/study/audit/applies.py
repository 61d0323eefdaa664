"""Which attacks apply to a message, and why others do not."""

from __future__ import annotations

from typing import get_args

import numpy as np
from torch import Tensor

from fedkeel.config.audit import AttackName, InversionName
from fedkeel.study.audit import linear
from fedkeel.study.audit.case import Case

OF_INPUTS = get_args(InversionName)


def why_not(attack: AttackName, case: Case) -> str:
    """Return why an attack does not apply, "" where it does."""
    setup = case.overheard.prepared.setup
    if setup.training.personal and attack in ("loss", "lira"):
        return "the clients keep some parameters, so there is no whole model to ask"
    if setup.training.personal:
        return "the clients keep some parameters, and without them no gradient can be matched"
    data = setup.federation.data
    if not isinstance(data.x, Tensor):
        return "the examples have several inputs by name"
    if not data.x.is_floating_point() and attack in (*OF_INPUTS, "updates"):
        return "inputs are tokens, which cannot be moved step by step"
    if not isinstance(data.y, Tensor) and attack in OF_INPUTS:
        return "the examples have several targets by name"
    if attack != "linear" and not case.classes:
        return "targets are not labels under the cross-entropy"
    if attack in ("loss", "updates") and not np.isin(*case.kinds).any():
        return f"none of the {case.others.says} has a label of the examples behind the update"
    if attack == "lira" and setup.federation.sizes.max() < 2:
        return "no client has two examples, of which a run could leave one out"
    if attack == "linear" and linear.first_layer(case.seen.gradient, data.x[0].numel()) is None:
        return "the model does not begin with a linear layer that has a bias"
    return _without_last_layer(case) if attack == "labels" else ""


def _without_last_layer(case: Case) -> str:
    layer = linear.last_layer(case.seen.gradient, case.classes)
    if layer is None:
        return "no linear layer has one output for each class"
    if layer[1] is None and case.count > 1:
        return "the last layer has no bias, by which labels could be counted"
    return ""
