"""The catalogue of known sets: sizes, files, addresses, checksums, statistics, citations."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Literal

from fedkeel.errors import DataError, did_you_mean

Layout = Literal["embedded", "idx", "libsvm", "svhn", "cifar", "mnist-m", "tiny-imagenet"]


@dataclass(frozen=True)
class Download:
    """A file that can be downloaded.

    Args:
        file: its name, also the last part of its address.
        checksum: ``md5:`` or ``sha256:`` and the published digest in hexadecimal.
        size: bytes, for showing only.
        unpacked_folder: folder that a tar archive holds; empty for a file that is not an archive.
    """

    file: str
    checksum: str
    size: int
    unpacked_folder: str = ""


@dataclass(frozen=True)
class ImageSet:
    """A known set of images.

    Args:
        name: what settings call it.
        layout: what its files look like.
        train: number of training examples.
        test: number of test examples.
        shape: (channels, height, width).
        label_names: names of the classes.
        folders: folders to look in, below each folder that data is looked for in; downloads go
            into the first. ``.`` is that folder itself.
        files: names of the files that are needed, without ``.gz`` or ``.bz2``.
        citation: one line.
        mean: published mean of each channel in [0, 1]; empty where none is published.
        std: published deviation of each channel.
        mirrors: addresses of folders that hold all of `downloads`, best first.
        downloads: what to download; empty where there is nothing that can be fetched.
        first_label: label that stands for class 0.
        transposed: whether rows and columns are exchanged in the files.
        archive: a zip file that may hold the files, each gzipped; empty where there is none.
        pickled_folder: a folder with the same set as pickles, which are not read.
        note: where to get it when it cannot be fetched.
    """

    name: str
    layout: Layout
    train: int
    test: int
    shape: tuple[int, int, int]
    label_names: tuple[str, ...]
    folders: tuple[str, ...]
    files: tuple[str, ...]
    citation: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    mirrors: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
    first_label: int = 0
    transposed: bool = False
    archive: str = ""
    pickled_folder: str = ""
    note: str = ""

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.label_names)


_DIGITS = tuple(string.digits)
_GREY28 = (1, 28, 28)
_RGB32 = (3, 32, 32)
_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_LECUN = "LeCun et al., Gradient-based learning applied to document recognition, Proc. IEEE 1998"
_COHEN = "Cohen et al., EMNIST: Extending MNIST to handwritten letters, IJCNN 2017"
_KRIZHEVSKY = "Krizhevsky, Learning multiple layers of features from tiny images, 2009"


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _mnist_files(*files: tuple[str, int]) -> tuple[Download, ...]:
    return tuple(
        Download(f"{name}.gz", f"md5:{digest}", size)
        for name, (digest, size) in zip(_IDX, files, strict=True)
    )


def _emnist(
    split: str, train: int, test: int, names: str, mean: float, std: float, first_label: int = 0
) -> ImageSet:
    return ImageSet(
        name=f"emnist-{split}",
        layout="idx",
        train=train,
        test=test,
        shape=_GREY28,
        label_names=tuple(names),
        folders=("EMNIST/raw", "EMNIST", "emnist", "EMNIST/raw/gzip", "gzip", "."),
        files=tuple(
            f"emnist-{split}-{half}-{kind}-ubyte"
            for half in ("train", "test")
            for kind in ("images-idx3", "labels-idx1")
        ),
        citation=_COHEN,
        mean=(mean,),
        std=(std,),
        mirrors=("https://biometrics.nist.gov/cs_links/EMNIST/",),
        downloads=(Download("gzip.zip", "md5:58c8d27c78d21e728a6bc7b3cc06412e", 561_753_746),),
        first_label=first_label,
        transposed=True,
        archive="gzip.zip",
    )


_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_CIFAR10 = _split("airplane automobile bird cat deer dog frog horse ship truck")
_CIFAR100 = _split(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse
    mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
    porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
    snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
    tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """
)

# Merged sets have one class for the upper and lower case of c i j k l m o p s u v w x y z.
_MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
_ALL = string.digits + string.ascii_uppercase + string.ascii_lowercase

_SOURCES = (
    ImageSet(
        name="digits",
        layout="embedded",
        train=1_438,
        test=359,
        shape=(1, 8, 8),
        label_names=_DIGITS,
        folders=(),
        files=(),
        citation="Alpaydin, Kaynak, Optical recognition of handwritten digits, UCI 1998",
        note="it comes with scikit-learn",
    ),
    ImageSet(
        name="mnist",
        layout="idx",
        train=60_000,
        test=10_000,
        shape=_GREY28,
        label_names=_DIGITS,
        folders=("MNIST/raw", "mnist/raw", "MNIST", "mnist", "."),
        files=_IDX,
        citation=_LECUN,
        mean=(0.1307,),
        std=(0.3081,),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        downloads=_mnist_files(
            ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
            ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
            ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
            ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
        ),
    ),
    ImageSet(
        name="fashion-mnist",
        layout="idx",
        train=60_000,
        test=10_000,
        shape=_GREY28,
        label_names=_FASHION,
        folders=(
            "FashionMNIST/raw",
            "fashion-mnist/raw",
            "FashionMNIST",
            "fashion-mnist",
            "fashion_mnist",
            ".",
        ),
        files=_IDX,
        citation="Xiao et al., Fashion-MNIST, arXiv:1708.07747, 2017",
        mean=(0.2860,),
        std=(0.3530,),
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        downloads=_mnist_files(
            ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
            ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        ),
    ),
    # byclass has the numbers of GC-Fed's experiments; its images measure 0.1736, 0.3316, as do
    # those of bymerge, which are the same.
    _emnist("digits", 240_000, 40_000, string.digits, 0.1733, 0.3317),
    _emnist("letters", 124_800, 20_800, string.ascii_lowercase, 0.1722, 0.3309, first_label=1),
    _emnist("balanced", 112_800, 18_800, _MERGED, 0.1751, 0.3332),
    _emnist("byclass", 697_932, 116_323, _ALL, 0.1751, 0.3333),
    _emnist("bymerge", 697_932, 116_323, _MERGED, 0.1736, 0.3316),
    _emnist("mnist", 60_000, 10_000, string.digits, 0.1733, 0.3317),
    ImageSet(
        name="usps",
        layout="libsvm",
        train=7_291,
        test=2_007,
        shape=(1, 16, 16),
        label_names=_DIGITS,
        folders=("USPS", "usps", "."),
        files=("usps", "usps.t"),
        citation="Hull, A database for handwritten text recognition research, IEEE TPAMI 1994",
        mirrors=("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/",),
        downloads=(
            Download("usps.bz2", "md5:ec16c51db3855ca6c91edd34d0e9b197", 6_579_383),
            Download("usps.t.bz2", "md5:8ea070ee2aca1ac39742fdd1ef5ed118", 1_831_726),
        ),
        first_label=1,
    ),
    ImageSet(
        name="svhn",
        layout="svhn",
        train=73_257,
        test=26_032,
        shape=_RGB32,
        label_names=_DIGITS,
        folders=("SVHN", "svhn", "."),
        files=("train_32x32.mat", "test_32x32.mat"),
        citation="Netzer et al., Reading digits in natural images with unsupervised feature "
        "learning, NIPS workshop 2011",
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        mirrors=("http://ufldl.stanford.edu/housenumbers/",),
        downloads=(
            Download("train_32x32.mat", "md5:e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794),
            Download("test_32x32.mat", "md5:eb5a983be6a315427106f1b164d9cef3", 64_275_384),
        ),
    ),
    ImageSet(
        name="cifar10",
        layout="cifar",
        train=50_000,
        test=10_000,
        shape=_RGB32,
        label_names=_CIFAR10,
        folders=(
            "cifar-10-batches-bin",
            "CIFAR10/cifar-10-batches-bin",
            "cifar10/cifar-10-batches-bin",
            ".",
        ),
        files=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
        citation=_KRIZHEVSKY,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        downloads=(
            Download(
                "cifar-10-binary.tar.gz",
                "md5:c32a1d4ab5d03f1284b67883e8d87530",
                170_052_171,
                unpacked_folder="cifar-10-batches-bin",
            ),
        ),
        pickled_folder="cifar-10-batches-py",
    ),
    ImageSet(
        name="cifar100",
        layout="cifar",
        train=50_000,
        test=10_000,
        shape=_RGB32,
        label_names=_CIFAR100,
        folders=(
            "cifar-100-binary",
            "CIFAR100/cifar-100-binary",
            "cifar100/cifar-100-binary",
            ".",
        ),
        files=("train.bin", "test.bin"),
        citation=_KRIZHEVSKY,
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        downloads=(
            Download(
                "cifar-100-binary.tar.gz",
                "md5:03b5dce01913d631647c71ecec9e9cb8",
                168_513_733,
                unpacked_folder="cifar-100-binary",
            ),
        ),
        pickled_folder="cifar-100-python",
    ),
    ImageSet(
        name="mnist-m",
        layout="mnist-m",
        train=59_001,
        test=9_001,
        shape=_RGB32,
        label_names=_DIGITS,
        folders=("mnist_m", "MNIST-M", "mnist-m", "."),
        files=("mnist_m_train", "mnist_m_test"),
        citation="Ganin et al., Domain-adversarial training of neural networks, JMLR 2016",
        note="it has no address that can be fetched; unpack mnist_m.tar.gz from the page "
        "http://yaroslav.ganin.net by hand",
    ),
    # Its own test images have no labels; its validation images are what papers test on.
    ImageSet(
        name="tiny-imagenet",
        layout="tiny-imagenet",
        train=100_000,
        test=10_000,
        shape=(3, 64, 64),
        label_names=tuple(str(label) for label in range(200)),
        folders=(
            "tiny-imagenet-200",
            "tiny-imagenet/tiny-imagenet-200",
            "TinyImageNet/tiny-imagenet-200",
            ".",
        ),
        files=("wnids.txt", "val/val_annotations.txt"),
        citation="Le, Yang, Tiny ImageNet visual recognition challenge, Stanford CS 231N, 2015",
        note="unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip by hand",
    ),
)

SOURCES = {source.name: source for source in _SOURCES}


def find(name: str) -> ImageSet:
    """Return what is known of a set.

    Raises:
        DataError: there is no known set of that name.
    """
    if name not in SOURCES:
        raise DataError(
            f"There is no known data set {name!r}.",
            do=f"{did_you_mean(name, SOURCES, limit=20)}; or give the path of a file or folder",
        )
    return SOURCES[name]
