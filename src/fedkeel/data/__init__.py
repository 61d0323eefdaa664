"""Data: known sets, files of one's own, and what divides them among clients."""

from fedkeel.data.augment import crop_flip
from fedkeel.data.dataset import Dataset, Federation, dataset, federation
from fedkeel.data.download import get
from fedkeel.data.load import load
from fedkeel.data.sources import Row, known

__all__ = [
    "Dataset",
    "Federation",
    "Row",
    "crop_flip",
    "dataset",
    "federation",
    "get",
    "known",
    "load",
]
