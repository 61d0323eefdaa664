"""Public inputs: those of a file, or a share of the training examples that no client gets."""

from __future__ import annotations

import numpy as np

from fedkeel.base.rng import generator
from fedkeel.config import Data
from fedkeel.data.dataset import Dataset
from fedkeel.data.read.load import load
from fedkeel.errors import DataError


def with_public(settings: Data, train: Dataset) -> tuple[Dataset, Dataset | None]:
    """Return the training set without what is public, and the public inputs, None for none.

    All runs of an experiment have the same, as they have one test set.

    Raises:
        DataError: a file cannot be read, or too few examples are there for a share.
    """
    share, file = settings.public_fraction, settings.public
    if share is not None and file is not None:
        raise DataError(
            "data.public and data.public_fraction both say what is public.", do="drop one of them"
        )
    if file is not None:
        return train, load(settings.model_copy(update={"test": file}))[1]
    if share is None:
        return train, None
    order = generator(0, "data.public").permutation(len(train))
    count = round(share * len(train))
    if not 0 < count < len(train):
        raise DataError(
            "data.public_fraction leaves no public example, or none to train on.",
            got=f"{share:g} of {len(train)} examples",
        )
    rows = np.sort(order[:count]), np.sort(order[count:])
    return train.take(rows[1]), train.take(rows[0])
