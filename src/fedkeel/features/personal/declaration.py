"""What records and report know of the scores of clients."""

from __future__ import annotations

from fedkeel.base.feature import Declaration


class PersonalDeclaration(Declaration):
    """Scores of clients: asked for by ``evaluation`` and by the method, without a table."""

    feature = "fedkeel.features.personal.feature:ScoresOfClients"
    table = "personal"
    meaning = "scores of each client, and of its personal model, as evaluation says."
