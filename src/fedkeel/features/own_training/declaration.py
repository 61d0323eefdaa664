"""What records and report know of local training by the user's own function."""

from __future__ import annotations

from fedkeel.base.feature import Declaration


class OwnTrainingDeclaration(Declaration):
    """The user's function in place of local steps: asked for by `local.train`, without a table."""

    feature = "fedkeel.features.own_training.feature:UserTraining"
    table = "own_training"
    meaning = "local training by the user's own function."
