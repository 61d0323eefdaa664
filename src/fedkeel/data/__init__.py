"""Data: known sets, files of one's own, and what divides them among clients."""

from fedkeel.data.augment import Crops, crop_flip, crops
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation, federation
from fedkeel.data.read.download import get
from fedkeel.data.read.load import load
from fedkeel.data.read.sources import KnownSet, known_sets
from fedkeel.data.read.user_data import dataset

__all__ = [
    "Crops",
    "Dataset",
    "Federation",
    "KnownSet",
    "crop_flip",
    "crops",
    "dataset",
    "federation",
    "get",
    "known_sets",
    "load",
]
