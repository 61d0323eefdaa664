"""What records and report know of a selection of clients by their losses."""

from __future__ import annotations

from fedkeel.base.feature import Declaration


class SelectionDeclaration(Declaration):
    """Clients chosen by their losses: asked for by ``cohort.sampling``, without a table."""

    feature = "fedkeel.features.selection.feature:SelectionByLosses"
    table = "selection"
    meaning = "the clients of a round are chosen by their losses, as cohort.sampling says."
