"""A site's own policy: what it lets a server ask of it, in all runs together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from fedkeel.base.named_files import expanded, read_regular
from fedkeel.base.settings import Settings
from fedkeel.config.toml import build, parse
from fedkeel.errors import ConfigError, FedkeelError

StatisticsKind = Literal["labels", "missing", "categories", "moments", "quantiles"]
"""What a site may be asked to count; see `StatisticsPolicy`."""

STATISTICS_KINDS: tuple[StatisticsKind, ...] = get_args(StatisticsKind)


class PolicyError(FedkeelError):
    """A server asks for more than the policy of a site allows."""

    def short(self) -> str:
        """Return the error in one line, for the server."""
        facts = [f"got {self.got}"] if self.got is not None else []
        facts += [f"allowed {self.expected}"] if self.expected is not None else []
        return " ".join([self.what, "; ".join(facts)]).strip()


class StatisticsPolicy(Settings):
    """What a site counts for a server that asks for statistics; see the guide to Flower.

    Args:
        kinds: what it answers, nothing where it is empty: ``labels``, examples of each label;
            ``missing``, missing values of each column; ``categories``, examples of each category;
            ``moments``, mean and deviation of each column of numbers; ``quantiles``, their counts
            in cells. A request for more is refused as a whole.
        minimum: smallest count that is sent. A smaller one is counted as none, or with others.
        epsilon: of noise that is added to the counts, for all `kinds` together, > 0. It protects
            each example, and is charged to the ledger where the policy has an epsilon of its own.
            ``moments`` have no such noise.
    """

    kinds: tuple[StatisticsKind, ...] = ()
    minimum: int = Field(10, ge=1)
    epsilon: float | None = Field(None, gt=0.0)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if len(set(self.kinds)) < len(self.kinds):
            raise ValueError("'kinds' names a kind twice")
        if self.epsilon is not None and "moments" in self.kinds:
            raise ValueError(
                "'epsilon' is of counts, and 'moments' are none: leave them out of 'kinds'"
            )
        return self


class Policy(Settings):
    """What a site allows. What a policy does not name, it does not limit.

    Args:
        epsilon: the largest epsilon of the site, over all runs together, > 0. A run then needs
            noise: `[privacy]` of the same unit, or `sigma` below.
        delta: its delta, in (0, 1).
        unit: whom the limit protects: a single ``example`` of the site, by noise that is drawn
            here; or the ``client``, all the site's examples, by noise that the server adds to the
            sum (the site then trusts the server), or by `sigma`.
        min_clients: smallest number of clients in a round that the server may go on with.
        secure_sums: whether the server may see only sums: the run then needs
            `flower.secure_aggregation` with a `secure_minimum` of at least `min_clients`, to which
            the nodes hold each other.
        methods: parts that a method may have; ``fedavg`` has none, so it is always allowed. Parts
            that add the noise of `[privacy]` are allowed too.
        messages: what the site sends beside the update, the training loss and numbers of examples:
            ``scores``, ``personal``, ``pictures``, ``sums``, ``buffers``, ``diagnostics``,
            ``device``, where and by which engine the site trains, and the names of parts that send
            something.
        code: import paths, ``package.module:Name``, that a server may name beside those in the app
            that is installed here: of a model, a loss, a metric, an augmentation, a training or a
            part.
        devices: where the site trains: ``cpu``, ``cuda`` for any GPU, or names such as ``cuda:1``.
        clip: the site's own bound on the norm of each update that it sends, > 0.
        sigma: the site's own noise on each update, in units of `clip`; it is of unit ``client``,
            and needs no trust in the server.
        ledger: file in which the site's spending is kept, beside the policy or at a path.
        statistics: what the site counts for a server that asks for statistics.
    """

    epsilon: float | None = Field(None, gt=0.0)
    delta: float | None = Field(None, gt=0.0, lt=1.0)
    unit: Literal["client", "example"] = "example"
    min_clients: int = Field(1, ge=1)
    secure_sums: bool = False
    methods: tuple[str, ...] | None = None
    messages: tuple[str, ...] | None = None
    code: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None
    clip: float | None = Field(None, gt=0.0)
    sigma: float = Field(0.0, ge=0.0)
    ledger: str = Field("ledger.json", min_length=1)
    statistics: StatisticsPolicy = StatisticsPolicy()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name in self.devices or ():
            if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
                raise ValueError(f"'devices' has {name!r}, which is not like 'cpu' or 'cuda:0'")
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError("give both 'epsilon' and 'delta', or neither")
        if self.sigma and self.clip is None:
            raise ValueError("'sigma' needs 'clip', in units of which it is")
        if self.sigma and self.epsilon is not None and self.unit == "example":
            raise ValueError(
                "'sigma' is noise on a whole update: set unit = 'client', which protects each "
                "example too"
            )
        if self.epsilon is not None and self.statistics.kinds:
            if self.unit == "client":
                raise ValueError(
                    "'statistics' have noise that protects an example, and unit = 'client' asks "
                    "for more: leave their 'kinds' out"
                )
            if self.statistics.epsilon is None:
                raise ValueError("'statistics' needs an 'epsilon' where the site counts its own")
        return self


def read_policy(path: Path) -> Policy:
    """Read a policy from a TOML file; the place of its ledger becomes a whole path.

    Raises:
        ConfigError: it cannot be read, or holds a setting that cannot be used.
    """
    try:
        text = read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            "The policy of this site cannot be read.",
            got=f"{path}: {reason}",
            why="without it nothing is answered",
            do="check the path",
        ) from None
    policy = build(Policy, parse(text, str(path)), str(path))
    ledger = path.absolute().parent / expanded(policy.ledger)
    return policy.model_copy(update={"ledger": str(ledger)})
