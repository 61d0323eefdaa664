"""What records and report know of a baseline."""

from __future__ import annotations

from fedkeel.base.feature import Declaration


class BaselinesDeclaration(Declaration):
    """A run that sends nothing: asked for by the name of the method, without a table."""

    feature = "fedkeel.features.baselines.feature:Baseline"
    table = "baselines"
    report = "fedkeel.features.baselines.report:BaselinesReport"
    meaning = "a run that sends nothing, to which methods are compared."
