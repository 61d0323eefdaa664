"""What records and report know of a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fedkeel.base.feature import Declaration
from fedkeel.records.baselines import LOCAL

CENTRALISED = "centralised"


class BaselinesDeclaration(Declaration):
    """A run that sends nothing: asked for by the name of the method, without a table."""

    feature = "fedkeel.features.baselines.feature:Baseline"
    table = "baselines"
    needs = ("personal",)
    baselines: ClassVar[Mapping[str, str]] = {
        LOCAL: "each client trains alone",
        CENTRALISED: "one model is trained on the examples of all clients in one place, by as many "
        "steps as the clients make together",
    }
    report = "fedkeel.features.baselines.report:BaselinesReport"
    meaning = "a run that sends nothing, to which methods are compared."
