"""The settings of the data: where they come from, and how they are divided among clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedkeel.base.settings import Kinds, Settings

CONTROL_CHARACTERS = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r"}
"""What a backslash and a letter become in a text, and how they are written."""


class Text(Settings):
    """How a column of text becomes tokens.

    Args:
        column: name of the column; None takes the only one that holds text.
        tokenizer: name or folder of a tokenizer of transformers.
        length: number of tokens T of each example; longer text is cut, shorter text padded.
    """

    column: str | None = None
    tokenizer: str | None = None
    length: int = Field(128, ge=1)


class Data(Settings):
    """Where the examples come from and how they are made ready.

    Args:
        source: a known name (``fedkeel data list``), a path to a file or folder, or several of
            either, which are joined; or ``hf:NAME``, a data set of Hugging Face by its name, or by
            the folder that ``save_to_disk`` wrote.
        test: path of the test data where `source` is a path; None takes `test_fraction`.
        test_fraction: share of the examples set aside for testing where no test set exists.
        public: path of a file, as that of `test`, of inputs that all clients have, for methods such
            as ``fedmd``.
        public_fraction: share of the training examples that is public in place of a file: no client
            gets it as its own.
        shape: (channels, height, width) that every image is brought to; None keeps the source's.
        normalize: ``"source"`` uses the published mean and deviation of a known image set and
            leaves other numbers as they are; ``"standardize"`` brings each column, or each channel
            (the first axis of an input [C, T] or [C, H, W]), to mean 0 and deviation 1 by the
            training examples of all clients; ``"client"`` does so at each client by its own;
            ``"pixels"`` does so with each single number of an input, as FedProx's recipe for MNIST;
            ``"none"`` leaves images in [0, 1]. Inputs of categories stay 0 and 1.
        channels: ``"last"`` where the channels are the last axis of an input, as in series [T, C]
            of T steps; for `normalize` of ``"standardize"`` or ``"client"``. ``"first"`` takes the
            first axis.
        augment: random changes while training. ``"crop_flip"`` pads images by 4, crops at random
            and mirrors half of them; ``"my_transforms:flip"`` is a function of your own, (inputs,
            targets, numpy generator) -> (inputs, targets) of a batch.
        label: name of the label column or array in a file of one's own. Names are kept as a CSV
            file writes them: 1E2 and 100 are two.
        target: what that column holds: ``"label"``, the name of a class; or ``"quantity"``, a
            number that is predicted (regression).
        missing_targets: what becomes of quantities that are NaN in an array [N, D] of several: not
            known. ``"refuse"`` ends with an error; ``"leave_out"`` counts only the known ones of an
            example, in the losses ``mse``, ``l1``, ``huber`` and ``poisson`` and the metrics
            ``mae``, ``rmse`` and ``r2``. Other losses refuse them; a metric of your own gets NaN.
        client: name of the client column or array, None where there is none; as for `label`.
        drop: columns of a CSV or Parquet file that are not inputs, such as an identifier. Of
            several sources only some need to have them.
        categories: columns of tables that hold categories and no numbers, such as ``["sex"]``; each
            category becomes an input of 0 or 1. With their names, ``{sex = ["f", "m"]}``, others
            are refused; without, they are those of the training files.
        missing: what becomes of a value that is missing in a table: an empty cell, ``NA``, ``?``
            and the like, a column that a file does not have, a category that is not known.
            ``"refuse"`` ends with an error; ``"mean"`` takes the mean of the training examples of
            all clients, of categories the share of each; ``"indicator"`` does so and adds an input
            that is 1 where the value was missing, for each column with gaps in training.
        limit: at most so many training examples of each source, drawn at random; for quick trials.
        labels: names of the labels in their order, where `source` is ``"nodes"``: every node of a
            federation has data of its own, see ``fedkeel flower``.
        text: how text becomes tokens, of ``hf:NAME``; None of other inputs.
    """

    source: str | tuple[str, ...]
    test: str | None = None
    test_fraction: float = Field(0.2, gt=0.0, lt=1.0)
    public: str | None = None
    public_fraction: float | None = Field(None, gt=0.0, lt=1.0)
    shape: tuple[int, int, int] | None = None
    normalize: Literal["source", "standardize", "client", "pixels", "none"] = "source"
    channels: Literal["first", "last"] = "first"
    augment: str = "none"
    label: str = "label"
    target: Literal["label", "quantity"] = "label"
    missing_targets: Literal["refuse", "leave_out"] = "refuse"
    client: str | None = None
    drop: tuple[str, ...] = ()
    categories: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    missing: Literal["refuse", "mean", "indicator"] = "refuse"
    limit: int | None = Field(None, ge=1)
    labels: tuple[str, ...] = ()
    text: Text | None = None

    @field_validator("source", "test", "public")
    @classmethod
    def _is_readable(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for path in (value,) if isinstance(value, str) else value or ():
            if not CONTROL_CHARACTERS.keys().isdisjoint(path):
                raise ValueError(
                    f"the path {path!r} has a control character, such as a line break, in it: "
                    "write a path with \\ as r'C:\\new' in Python, as 'C:\\new' in TOML, or with /"
                )
        return value

    @field_validator("augment")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in ("none", "crop_flip") and ":" not in value:
            raise ValueError(
                f"there is no 'augment' {value!r}: take 'none', 'crop_flip', or the import path "
                "of a function such as 'my_transforms:flip'"
            )
        return value

    @field_validator("categories", mode="before")
    @classmethod
    def _as_tuples(cls, value: object) -> object:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, Mapping):
            return value
        return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}

    @model_validator(mode="after")
    def _has_use_for_channels(self) -> Self:
        if self.channels == "last" and self.normalize not in ("standardize", "client"):
            raise ValueError(
                '\'channels\' = "last" is for normalize = "standardize" or "client", which '
                f"take a mean of each channel, and it is {self.normalize!r}"
            )
        return self

    @model_validator(mode="after")
    def _has_quantities_to_miss(self) -> Self:
        if self.missing_targets != "refuse" and self.target == "label" and self.source != "nodes":
            raise ValueError('\'missing_targets\' = "leave_out" is for target = "quantity"')
        return self

    @property
    def categories_of(self) -> dict[str, tuple[str, ...]]:
        """The names of the categories of each column of them, empty where they are not given."""
        if isinstance(self.categories, dict):
            return self.categories
        return dict.fromkeys(self.categories, ())

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources as a tuple, also where there is one."""
        return (self.source,) if isinstance(self.source, str) else self.source


class Partition(Kinds):
    """How the training set is divided among clients.

    Args:
        kind: ``iid``; ``dirichlet`` (per class, with minimum size, as FedLab and NIID-Bench);
            ``dirichlet_gradma`` (per class, unbalanced, two random examples first);
            ``dirichlet_prior`` (a class prior for each client, as FedDyn); ``classes`` (k classes
            for each client); ``source`` or ``source_class`` (one client for each joined source, or
            for each class of each source); ``client`` (as the data's client column says);
            ``nodes`` (each node of a federation is a client and has data of its own).
        clients: number of clients; not for ``source``, ``source_class`` and ``client``, where the
            data decides.
        alpha: concentration of the Dirichlet kinds, > 0; small is strongly non-IID.
        min_size: smallest number of examples of a client, for ``dirichlet``.
        classes_per_client: k, for ``classes``.
        sizes: ``equal``, ``power`` (log-normal with deviation `sigma`), or one number of examples
            for each client; for ``iid``, ``classes`` and ``dirichlet_prior``.
        sigma: deviation of the logarithm of the size, for ``power``.
        holdout: share of each client's examples kept aside to evaluate that client on.
        holdout_by: name of the column or array that says what belongs together, such as
            ``patient``: whatever is kept aside, for `holdout` and for testing
            (`data.test_fraction`), is kept aside in whole groups of one value. It is not an input.
            Of several sources each has groups of its own.
        stratify: whether `holdout` keeps the share of each class, and at least one example of each
            that a client has two of; with `holdout_by` as nearly as whole groups allow. A test set
            is always drawn so.
        seed: seed of the partition; None takes the run's seed.
    """

    kind: Literal[
        "iid",
        "dirichlet",
        "dirichlet_gradma",
        "dirichlet_prior",
        "classes",
        "source",
        "source_class",
        "client",
        "nodes",
    ] = "iid"
    clients: int | None = Field(None, ge=1)
    alpha: float | None = Field(None, gt=0.0)
    min_size: int = Field(1, ge=1)
    classes_per_client: int = Field(1, ge=1)
    sizes: Literal["equal", "power"] | tuple[int, ...] = "equal"
    sigma: float = Field(2.0, gt=0.0, le=1e6)
    holdout: float = Field(0.0, ge=0.0, lt=1.0)
    holdout_by: str | None = Field(None, min_length=1)
    stratify: bool = False
    seed: int | None = Field(None, ge=0)

    belongs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "alpha": ("dirichlet", "dirichlet_gradma", "dirichlet_prior"),
        "min_size": ("dirichlet",),
        "classes_per_client": ("classes",),
        "sizes": ("iid", "classes", "dirichlet_prior"),
    }

    @model_validator(mode="after")
    def _complete(self) -> Self:
        is_in_data = self.kind in ("source", "source_class", "client")
        if not is_in_data and self.clients is None:
            raise ValueError(f"kind {self.kind!r} needs 'clients', the number of clients")
        if is_in_data and self.clients is not None:
            raise ValueError(f"kind {self.kind!r} takes the clients from the data; drop 'clients'")
        if self.kind.startswith("dirichlet") and self.alpha is None:
            raise ValueError(f"kind {self.kind!r} needs 'alpha' > 0")
        if isinstance(self.sizes, tuple) and len(self.sizes) != self.clients:
            raise ValueError(f"'sizes' has {len(self.sizes)} entries for {self.clients} clients")
        if self.sigma != type(self).model_fields["sigma"].default and self.sizes != "power":
            raise ValueError("'sigma' is for sizes = \"power\"")
        if self.stratify and not self.holdout:
            raise ValueError("'stratify' needs 'holdout', the share that is held out")
        return self
