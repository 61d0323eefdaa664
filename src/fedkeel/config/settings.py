"""The settings of a run, as frozen values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from fedkeel.base.settings import Settings
from fedkeel.config.data import Data, Partition
from fedkeel.config.feature_tables import with_tables
from fedkeel.config.flower import Flower
from fedkeel.config.local import Local
from fedkeel.config.search_space import Space
from fedkeel.config.task import TaskSettings
from fedkeel.errors import ConfigError

Weights = Literal["examples", "processed", "uniform"]
"""How clients count: by examples owned, by examples processed this round, or equally."""

ChosenWeights = Literal["examples", "processed", "uniform", "method"]
"""What a user may set: one of `Weights`, or what the method's parts state."""

Precision = Literal["float32", "tf32", "bf16", "bf16-mixed"]
"""What the factors of products are rounded to: nothing, 10 bits or 7."""

Buffers = Literal["refuse", "average", "local"]
"""What happens to a model's buffers, such as the running statistics of batch normalisation."""


def _is_plain(value: object) -> bool:
    """Return whether a value is finite, and can be written as TOML and as JSON."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | str) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _recordable(args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a network, or refuse those that TOML or JSON cannot hold."""
    for name, value in args.items():
        if not _is_plain(value):
            raise ValueError(
                f"the argument {name!r} is {value!r}: give finite numbers, text, truth values, "
                "or lists and tables of these"
            )
    return args


class Lora(Settings):
    """Low-rank adapters: only they are trained and sent.

    Args:
        rank: their rank, >= 1.
        alpha: their scale is alpha / rank; None takes twice the rank.
        dropout: dropout before them, in [0, 1).
        layers: names, or ends of names, of the layers that get one, such as ``["query", "value"]``;
            empty takes those that `peft` knows for the network.
        train: names of layers that are trained and sent as a whole, such as a new classifier.
        merged: whether the matrices of the layers are sent and may change too, so that `flora` can
            merge adapters into them. Other methods train them.
    """

    rank: int = Field(8, ge=1)
    alpha: float | None = Field(None, gt=0.0)
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    layers: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    merged: bool = False

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave `merged` out where it is not set: keys of runs of before stay as they were."""
        values: dict[str, Any] = write(self)
        return {k: v for k, v in values.items() if k != "merged" or v}


class OtherModel(Settings):
    """A network that some clients have in place of that of `[model]`.

    Args:
        name: as ``model.name``.
        args: as ``model.args``.
        head: as ``model.head``.
        clients: the clients that have it, by their numbers or names.
        share: share of all clients that have it, in (0, 1), drawn by the run's seed among those
            that no list names; in place of `clients`.
    """

    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    head: str | None = None
    clients: tuple[int | str, ...] = ()
    share: float | None = Field(None, gt=0.0, lt=1.0)

    @field_validator("args")
    @classmethod
    def _can_be_recorded(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Refuse dates, infinity and objects, which TOML or JSON cannot hold."""
        return _recordable(args)

    @model_validator(mode="after")
    def _has_clients(self) -> Self:
        """Refuse a network of no clients, and one of clients given twice."""
        if bool(self.clients) == (self.share is not None):
            raise ValueError("give the clients that have the network, or their share: one of both")
        return self


class Model(Settings):
    """The network.

    Args:
        name: a known name (see `fedkeel.task.models`); an import path ``package.module:Class``;
            ``hf:NAME``, of transformers; or ``timm:NAME``.
        args: keyword arguments of the network, beyond the input shape and the number of classes
            that known networks get by themselves: finite numbers, text, truth values, and lists
            and tables of these.
        head: name of the classifier sub-module; None takes the module that owns the last parameter.
        buffers: ``refuse`` a model with buffers, ``average`` them like parameters, or keep them
            ``local`` to each client.
        lora: low-rank adapters; None trains the network itself.
        others: networks that some clients have in place of this one, by name, see `OtherModel`;
            for methods in which clients share no parameters, such as ``fedproto``.
    """

    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    head: str | None = None
    buffers: Buffers = "refuse"
    lora: Lora | None = None
    others: dict[str, OtherModel] = Field(default_factory=dict)

    @field_validator("args")
    @classmethod
    def _can_be_recorded(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Refuse dates, infinity and objects, which TOML or JSON cannot hold."""
        return _recordable(args)

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave `others` out where all clients have one network, as in the runs of before."""
        values: dict[str, Any] = write(self)
        return {k: v for k, v in values.items() if k != "others" or v}


Sampling = Literal["uniform", "examples", "fixed", "poisson", "in_turn", "power_of_choice", "oort"]
"""How the clients of a round are chosen."""

_ONLY_FOR: Mapping[str, Sampling] = {
    "candidates": "power_of_choice",
    "exploration": "oort",
    "preferred_seconds": "oort",
    "slowness_exponent": "oort",
}


class Cohort(Settings):
    """Who takes part in a round.

    Args:
        participation: share of the clients in each round, in (0, 1]; all where nothing is given.
            The number of clients is rounded; 2.5 becomes 2, 3.5 becomes 4.
        clients: number of clients in each round, in place of `participation`.
        sampling: ``uniform`` without replacement; ``examples``: without replacement, with
            probability in proportion to the number of examples; ``fixed``: drawn uniformly once,
            the same clients in every round; ``poisson``: each client by itself with probability
            K / C, so that K is the expected number and a round may have none; ``in_turn``:
            every client once before anyone comes again, in an order that is drawn anew for each
            such pass, whose last round has those that are left; or by what is known of the clients'
            losses, see the guide on real time: ``power_of_choice`` or ``oort``.
        dropout: probability that a selected client does not report, in [0, 1).
        new_clients: number of clients that no round selects, drawn once; or their names (of clients
            without names their numbers), such as ``["north"]``: their scores show what a
            client gets that joins later. All else here counts only the other clients.
        candidates: for ``power_of_choice``, d: how many clients are asked for their loss in each
            round; None for twice those of a round, as far as there are so many.
        exploration: for ``oort``, share of a round's clients that have never trained, in the first
            round, in [0, 1]; None for 0.9. It falls by 2 % a round, down to 0.2.
        preferred_seconds: for ``oort`` where time is counted, T: a client whose round takes t > T
            seconds counts (T / t) ** `slowness_exponent` times as much; None for the median of all
            clients.
        slowness_exponent: for ``oort``, see there, >= 0; None for 2.
    """

    participation: float | None = Field(None, gt=0.0, le=1.0)
    clients: int | None = Field(None, ge=1)
    sampling: Sampling = "uniform"
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    new_clients: int | tuple[str, ...] | tuple[int, ...] = 0
    candidates: int | None = Field(None, ge=1)
    exploration: float | None = Field(None, ge=0.0, le=1.0)
    preferred_seconds: float | None = Field(None, gt=0.0)
    slowness_exponent: float | None = Field(None, ge=0.0)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.participation is not None and self.clients is not None:
            raise ValueError("give 'participation' or 'clients', not both")
        if isinstance(self.new_clients, int) and self.new_clients < 0:
            raise ValueError("'new_clients' must be at least 0")
        for name, sampling in _ONLY_FOR.items():
            if getattr(self, name) is not None and self.sampling != sampling:
                raise ValueError(f"'{name}' is only for sampling = {sampling!r}")
        return self

    @property
    def new_count(self) -> int:
        """Number of clients that no round selects."""
        return self.new_clients if isinstance(self.new_clients, int) else len(self.new_clients)

    @property
    def by_losses(self) -> bool:
        """Whether the clients of a round depend on losses, and not only on the seed."""
        return self.sampling in ("power_of_choice", "oort")

    def decisive(self) -> dict[str, Any]:
        """Return the settings that decide who takes part."""
        names = {name for name, sampling in _ONLY_FOR.items() if self.sampling != sampling}
        return self.model_dump(mode="json", exclude=names)

    def size(self, population: int) -> int:
        """Return K, the number of clients selected in each round of `population` clients.

        With `poisson` sampling it is the expected number.

        Raises:
            ConfigError: nobody, or more clients than there are.
        """
        if self.new_count and self.new_count >= population:
            raise ConfigError(
                "cohort.new_clients leaves nobody to train.",
                got=f"{self.new_count} of {population} clients",
                expected=f"at most {population - 1}",
            )
        population -= self.new_count
        if self.clients is not None:
            if self.clients > population:
                raise ConfigError(
                    "cohort.clients asks for more clients than there are.",
                    got=self.clients,
                    expected=f"1..{population}",
                )
            return self.clients
        share = 1.0 if self.participation is None else self.participation
        count = round(share * population)
        if count == 0:
            raise ConfigError(
                "cohort.participation selects nobody.",
                got=f"{share} of {population} clients",
                expected=f"more than {0.5 / population:g}",
                do="raise it, or give a number: cohort.clients = 1",
            )
        return count


class Evaluation(Settings):
    """When and how the global model is evaluated.

    Args:
        every: evaluate after every so many rounds; the last round is always evaluated.
        batch_size: examples in one forward pass, at most: convolutions on a processor take 100.
            None takes as many as keep what lies between the layers within 512 MB, at most 1,000.
        clients_every: evaluate every client's own examples (those held out, where the partition
            holds some out) after every so many rounds; 0 does so after the last round only.
        target: score for "rounds to target", a share in (0, 1] of accuracy; None takes
            `stop.target`.
        model: which model is judged: the ``global`` one, on the test set; or the ``personal`` one
            of each client, on its own examples, all clients together. ``auto`` is ``personal``
            where the method keeps parameters at the client, so that no global model is whole.
    """

    every: int = Field(1, ge=1)
    batch_size: int | None = Field(None, ge=1)
    clients_every: int = Field(0, ge=0)
    target: float | None = Field(None, allow_inf_nan=False)
    model: Literal["auto", "global", "personal"] = "auto"

    def clients_are_due(self, round: int, is_end: bool) -> bool:
        """Return whether clients are scored after a round, which may be the end of the run."""
        return is_end or (self.clients_every > 0 and round % self.clients_every == 0)


class Engine(Settings):
    """What runs the clients. Results do not depend on it, but for `dtype` and `precision`.

    Args:
        kind: ``sequential``, one client after the other, the definition of correct; ``workers``,
            the same in several processes, with the same bits; ``vectorized``, by recorded steps and
            side by side, the same up to rounding; ``ray``, what ``workers`` does in Ray actors,
            on several machines where there is a cluster; or ``auto``, one of the first three by a
            rule of the experiment and the machine, the same for all runs of a comparison.
        workers: number of processes; None takes one for each core, as far as there are clients.
        parallel_clients: about how many clients a process of ``vectorized`` trains side by side; 1
            trains them one after the other by traced steps; None takes a number by a rule. For
            ``ray`` the same, but None trains as ``workers`` does, with the same bits.
        parallel_runs: how many runs of a study, such as the seeds of one method, ``vectorized``
            trains side by side, at most; 1 trains each by itself; None takes a number by a rule.
        device: where ``vectorized`` trains: on the processor (``cpu``), on a GPU (``cuda``), or
            ``auto``: on a GPU where there is one, but for short runs of kind ``auto``.
            ``sequential`` trains on a GPU only with ``cuda``. Dropout draws other
            numbers on a GPU. For nodes of a federation it is a wish: see the guide to Flower.
        devices: devices of this machine over which ``vectorized`` spreads the clients of a round,
            with a process for each: such as ``["cuda:0", "cuda:1"]``, or ``all`` for each GPU that
            torch finds; a device may be named twice. It stands in place of `device` and `workers`,
            and kind ``auto`` takes ``vectorized`` then.
        address: of a Ray cluster, such as ``10.0.0.7:6379``, or ``auto`` for one that runs on this
            machine; None starts Ray on this machine.
        dtype: type of parameters and inputs.
        precision: what the factors of products and convolutions are rounded to, whose sums stay
            float32: ``float32``, nothing; ``tf32``, on a GPU 10 bits of 23; ``bf16``, beside that 7
            bits on a processor, where it has instructions for it. ``bf16-mixed`` computes the
            network in bfloat16 where `torch.autocast` holds that to be safe, with parameters,
            losses and all that methods do in float32. Results depend on it.
        checkpoint_seconds: save after a round when so many seconds have passed since the last save;
            0 saves after every round.
        state: where the clients' state lives: in ``memory``; on ``disk``, in a file of the run
            folder; or ``auto``: on disk where it would take more than `memory_gb`.
        memory_gb: the most memory that the state of clients and server may take. None takes what
            is free, and for ``auto`` 1 GB for the clients'.
        client_models: which models a finished run leaves where each client has its own, as in
            `local`, `fedper` and `ditto`: ``all``; ``none``; or ``auto``, all where they take
            256 MB at most together. Each is a file ``models/CLIENT.safetensors`` in the run folder.
    """

    kind: Literal["auto", "sequential", "workers", "vectorized", "ray"] = "auto"
    workers: int | None = Field(None, ge=1)
    parallel_clients: int | None = Field(None, ge=1)
    parallel_runs: int | None = Field(None, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: Literal["all"] | tuple[str, ...] | None = None
    address: str | None = None
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "float32"
    checkpoint_seconds: float = Field(20.0, ge=0.0)
    state: Literal["auto", "memory", "disk"] = "auto"
    memory_gb: float | None = Field(None, gt=0.0, le=1e9)
    client_models: Literal["auto", "all", "none"] = "auto"

    renamed: ClassVar[Mapping[str, str]] = {"chunk": "parallel_clients"}
    renamed_values: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kind": {"vectorised": "vectorized"}
    }

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.address is not None and self.kind != "ray":
            raise ValueError(f"'address' is for kind 'ray', and this is kind {self.kind!r}")
        if self.device == "cuda" and self.kind in ("workers", "ray"):
            raise ValueError(
                f"'cuda' is for kinds 'vectorized' and 'sequential', and this is kind {self.kind!r}"
            )
        if self.dtype == "float64" and self.precision != "float32":
            raise ValueError(f"'{self.precision}' is for dtype 'float32', and this is 'float64'")
        self._check_devices()
        return self

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        if self.kind not in ("auto", "vectorized"):
            raise ValueError(f"'devices' is for kind 'vectorized', and this is kind {self.kind!r}")
        if self.device != "auto" or self.workers is not None:
            other = "workers" if self.device == "auto" else "device"
            raise ValueError(
                f"'devices' and '{other}' are both given: 'devices' has a process for each device"
            )
        if self.devices == "all":
            return
        if not self.devices:
            raise ValueError("'devices' names no device")
        for name in self.devices:
            if name != "cpu" and not re.fullmatch(r"cuda:\d{1,3}", name):
                raise ValueError(
                    f"'devices' has {name!r}, which is neither 'cpu' nor like 'cuda:0'"
                )
        if len({name.partition(":")[0] for name in self.devices}) > 1:
            raise ValueError(
                "'devices' mixes processors and GPUs, whose results differ by rounding: which "
                "clients train where is not the same in each run"
            )


class Compare(Settings):
    """What ``fedkeel compare`` runs.

    Args:
        methods: expressions, one run for each and each seed.
        seeds: number of seeds; the first is the run's own seed.
    """

    methods: tuple[str, ...] = ()
    seeds: int = Field(3, ge=1)


class RunSettings(Settings):
    """The settings of one run, whatever data and model it is given, without those of features.

    Args:
        name: name of the run folder, of at most 200 characters.
        method: expression of the method, e.g. ``"fedprox(mu=0.1)+gcfed"``.
        rounds: T, the number of rounds, at most 10^9.
        seed: seed of the initial model, the partition, the cohorts and the batches.
        weights: how clients count in the mean. ``method`` takes what the method's parts state, and
            ``examples`` where they state nothing. None is ``method`` for one run, and ``examples``
            for every method of a comparison or a search.
        local: local training.
        cohort: participation.
        evaluation: when the global model is evaluated.
        engine: what runs the clients.
        flower: how rounds are run in a Flower federation.
    """

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    method: str = "fedavg"
    rounds: int = Field(ge=1, le=10**9)
    seed: int = Field(0, ge=0, le=2**32 - 1)
    weights: ChosenWeights | None = None
    local: Local
    cohort: Cohort = Cohort()
    evaluation: Evaluation = Evaluation()
    engine: Engine = Engine()
    flower: Flower = Flower()


if TYPE_CHECKING:

    class Run(RunSettings):
        """The settings of one run, with a table for each feature."""

else:
    Run = with_tables(RunSettings, "Run", __name__)


class Experiment(Run):
    """All settings of a run, a comparison or a search.

    Args:
        data: the examples.
        partition: their division among clients.
        model: the network.
        task: what is minimised, and what is measured.
        compare: methods and seeds of a comparison.
        tune: what is searched for good settings, and what it is chosen by.
    """

    data: Data
    partition: Partition
    model: Model
    task: TaskSettings = TaskSettings()
    compare: Compare = Compare()
    tune: Space = Space()

    @model_validator(mode="after")
    def _scaled_clients_train(self) -> Self:
        kind = "source" if self.data.client is None else "client"
        if self.data.normalize == "client" and self.partition.kind not in (kind, "nodes"):
            raise ValueError(
                f'normalize = "client" needs partition.kind = {kind!r} here, and it is '
                f"{self.partition.kind!r}: who is standardised apart has to train apart"
            )
        return self
