"""Settings of local training: its amount, the local optimiser and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedkeel.base.settings import Kinds, Settings


class Schedule(Kinds):
    """How the local learning rate changes; r counts rounds from 0, T rounds in all.

    Args:
        kind: ``constant``; ``cosine`` lr * (f + (1 - f) (1 + cos(pi r / T)) / 2);
            ``exponential`` lr * decay^r; ``piecewise`` lr * factors[i] from round milestones[i] on.
        over: whether lr changes from round to round (``rounds``), or from local step to local step
            (``steps``): in step s = 0..S-1 of round r, r is then r + s / S.
        warmup: W, rounds in which lr rises evenly to its whole: lr * (r + 1) / (W + 1) in round r.
            ``cosine`` and ``exponential`` begin after them, with r - W and T - W in place of r and
            T. With over = "steps" it rises in each step, by 1 / S in place of 1, and W may have a
            fraction.
        final: f of ``cosine``.
        decay: factor for each round of ``exponential``.
        milestones: rounds at which ``piecewise`` changes, ascending.
        factors: factor on lr from that round on, one for each entry of `milestones`.
        cycle: c; with c < 1 each round begins at its whole lr, and in step s = 0..S-1 lr is times
            1 - (1 - c) s / S, so that it falls evenly within the round.
    """

    kind: Literal["constant", "cosine", "exponential", "piecewise"] = "constant"
    over: Literal["rounds", "steps"] = "rounds"
    warmup: float = Field(0.0, ge=0.0)
    final: float = Field(0.0, ge=0.0)
    decay: float = Field(1.0, gt=0.0, le=1.0)
    milestones: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    cycle: float = Field(1.0, ge=0.0, le=1.0)

    belongs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "final": ("cosine",),
        "decay": ("exponential",),
    }
    renamed: ClassVar[Mapping[str, str]] = {"at": "milestones"}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if len(self.milestones) != len(self.factors):
            raise ValueError("'milestones' and 'factors' must have the same length")
        if list(self.milestones) != sorted(self.milestones):
            raise ValueError("'milestones' must ascend")
        if any(f <= 0 for f in self.factors):
            raise ValueError("'factors' must be > 0")
        if (self.kind == "piecewise") != bool(self.milestones):
            raise ValueError(
                "'milestones' and 'factors' belong to kind = 'piecewise', which needs them"
            )
        return self

    def factor(self, time: float, rounds: int, unit: float = 1.0) -> float:
        """Return what lr is multiplied with.

        Args:
            time: rounds since the start of the run, with a fraction within a round.
            rounds: T.
            unit: rounds from one change of lr to the next.
        """
        if time < self.warmup:
            return (time + unit) / (self.warmup + unit)
        since, length = time - self.warmup, rounds - self.warmup
        if self.kind == "cosine":
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * since / length)) / 2
        if self.kind == "exponential":
            return math.pow(self.decay, since)
        if self.kind == "piecewise":
            steps = zip(self.milestones, self.factors, strict=True)
            passed = [factor for milestone, factor in steps if time >= milestone]
            return passed[-1] if passed else 1.0
        return 1.0

    def step_factors(self, round: int, steps: int, rounds: int) -> tuple[float, ...]:
        """Return the lr of each local step over the lr of its round; () for 1 in all steps.

        Args:
            round: rounds completed before this one.
            steps: S, local steps of the round.
            rounds: T.
        """
        if self.over == "rounds" and self.cycle == 1.0:
            return ()
        falling = [1.0 - (1.0 - self.cycle) * step / steps for step in range(steps)]
        if self.over == "rounds":
            return tuple(falling)
        of_round = self.factor(round, rounds)
        times = (round + step / steps for step in range(steps))
        factors = (self.factor(time, rounds, 1 / steps) / of_round for time in times)
        return tuple(a * b for a, b in zip(factors, falling, strict=True))


class Local(Settings):
    """Local training: its amount in epochs or in steps, and the local optimiser.

    Args:
        lr: learning rate, > 0.
        epochs: passes over the client's examples; give this or `steps`.
        steps: number of local steps; give this or `epochs`.
        batch_size: B, or ``"all"`` for one batch of all local examples.
        accumulate: number of mini-batches of B whose gradient makes one step, so that a step has as
            many times B examples and needs the memory of B. The gradient is the mean over the
            examples. A pass's last step has what is left.
        sampling: for `steps`: ``continue`` goes on where the client's last round stopped,
            reshuffling after each pass (GradMA's I); ``random`` draws each batch anew without
            replacement (FedGC's B); ``poisson`` draws each example by itself with probability B / N
            in each step, so that B is the expected number and a batch may be empty. That is for
            `dpsgd`, whose account then gains by the sampling.
        drop_last: drop a pass's short last batch ``never``, ``always``, or only if it has a
            ``single`` example, which batch normalisation cannot take. A client's only batch stays.
        optimiser: ``sgd``, ``adam`` or ``adamw``, as in torch.optim.
        keep_state: whether a client goes on with the optimiser's state that its last round left,
            which stays at the client; otherwise the state starts anew in every round.
        momentum: rho in [0, 1) of ``sgd``.
        nesterov: Nesterov's form of the momentum.
        betas: of ``adam`` and ``adamw``: how much of the mean gradient and of the mean squared
            gradient stays in each step, both in [0, 1).
        eps: of ``adam`` and ``adamw``: added to the root of the mean squared gradient, > 0.
        weight_decay: of ``sgd`` and ``adam`` added to the gradient as weight_decay * parameter,
            before momentum; of ``adamw`` each step takes off lr * weight_decay * parameter. Where
            it is not given, 0.01 for ``adamw``, as in torch, and else 0. Not where no gradient ever
            reaches a parameter, as in torch.optim. A step that leaves out a layer that others go
            through has a gradient of 0 for it; torch leaves that layer as it is.
        clip_norm: largest norm of a step's gradient over the whole model, > 0; a longer gradient is
            shortened as by torch.nn.utils.clip_grad_norm_. It acts after all that the method does
            to the gradient, and before weight decay. None clips nothing.
        schedule: change of lr over rounds or steps.
        train: ``package.module:function`` of a function of your own that takes the place of the
            local steps, see `fedkeel.LocalTraining`. It is told of the settings above, and those
            that it does not read have no effect. None for fedkeel's own steps.
    """

    lr: float = Field(gt=0.0)
    epochs: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)
    batch_size: int | Literal["all"] = 32
    accumulate: int = Field(1, ge=1)
    sampling: Literal["continue", "random", "poisson"] = "continue"
    drop_last: Literal["never", "single", "always"] = "never"
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    keep_state: bool = False
    momentum: float = Field(0.0, ge=0.0, lt=1.0)
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    clip_norm: float | None = Field(None, gt=0.0)
    schedule: Schedule = Schedule()
    train: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: object) -> object:
        """Give AdamW torch's weight decay where none is given."""
        if isinstance(values, Mapping) and values.get("optimiser") == "adamw":
            return {"weight_decay": 0.01, **values}
        return values

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either 'epochs' or 'steps'")
        if self.steps is None and self.sampling != "continue":
            raise ValueError(f"sampling = {self.sampling!r} is for 'steps', and these are 'epochs'")
        if self.sampling == "poisson" and (self.batch_size == "all" or self.accumulate > 1):
            raise ValueError(
                "sampling = 'poisson' needs a 'batch_size', which is expected, and no 'accumulate'"
            )
        if self.batch_size != "all" and self.batch_size < 1:
            raise ValueError("'batch_size' must be >= 1 or \"all\"")
        if self.batch_size == "all" and self.accumulate > 1:
            raise ValueError("'accumulate' needs a 'batch_size', and this is \"all\" examples")
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("'nesterov' needs 'momentum' > 0")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"'betas' must be two numbers in [0, 1); got {list(self.betas)}")
        return self

    @model_validator(mode="after")
    def _fits_optimiser(self) -> Self:
        adaptive = self.optimiser != "sgd"
        for name in ("betas", "eps") if not adaptive else ("momentum", "nesterov"):
            if getattr(self, name) != type(self).model_fields[name].default:
                owners = "'sgd'" if adaptive else "'adam' and 'adamw'"
                more = "; its momentum is betas[0]" if name == "momentum" else ""
                raise ValueError(
                    f"{name!r} is for optimiser {owners}, and this is {self.optimiser!r}{more}"
                )
        return self

    @property
    def piece_size(self) -> int:
        """Examples of which a step's gradient is taken at a time; 0 for all at once."""
        return 0 if self.batch_size == "all" or self.accumulate == 1 else self.batch_size

    @property
    def examples_per_step(self) -> int | Literal["all"]:
        """The number of examples of a step, unless a pass has fewer left."""
        return "all" if self.batch_size == "all" else self.batch_size * self.accumulate
