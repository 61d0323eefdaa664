"""What settings and report know of diagnostics."""

from __future__ import annotations

from fedkeel.base.feature import Declaration, Option
from fedkeel.features.diagnose.charts import CHARTS
from fedkeel.features.diagnose.settings import Diagnose


class DiagnoseDeclaration(Declaration):
    """The table [diagnose]; a run measures nothing beside its scores by itself."""

    feature = "fedkeel.features.diagnose.feature:Diagnostics"
    table = "diagnose"
    settings_class = Diagnose
    default = Diagnose()
    shorthand = "kinds"
    decides_numbers = False
    charts = CHARTS
    options = (
        Option(
            "--diagnose",
            "diagnose.kinds",
            "What to measure beside the scores, e.g. forgetting,cka; see diagnose.kinds.",
            is_list=True,
        ),
    )
    meaning = "what is measured beside the scores."
    example = "kinds=['drift'], every=5"
