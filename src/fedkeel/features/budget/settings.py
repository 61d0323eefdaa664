"""The settings of differential privacy: the budget, whom it protects, and what is clipped."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from fedkeel.base.settings import Settings


class Privacy(Settings):
    """The budget of differential privacy. A run whose planned rounds do not fit gets more noise.

    The noise is calibrated for all planned rounds. A method that names its own noise, such as
    ``dpclient(sigma=1.0)`` or ``dpsgd(sigma=1.0)``, keeps it: the run then ends before the first
    round that would overrun the budget.

    Args:
        epsilon: the largest epsilon of the run, > 0.
        delta: its delta, in (0, 1); it should be less than 1 over the number of clients, or of a
            client's examples.
        unit: whom the guarantee is for: a whole ``client`` with all its examples, or a single
            ``example`` of a client.
        clip: largest norm of a client's update, or of an example's gradient, over the whole model.
        quantile: of unit ``client``: share of the updates that are to be no longer than the bound,
            in (0, 1); the bound begins at `clip` and follows it. None keeps the bound.
        noise: of unit ``client``: ``independent`` in each round; or, by a ``tree`` over the rounds
            of a pass in which every client comes once, shared among rounds (DP-FTRL): it needs no
            cohorts drawn by chance: cohort.sampling = ``in_turn``.
        accountant: which account of the library `dp-accounting` counts: ``pld``, the tighter one,
            or ``rdp``; ``auto`` is ``pld`` where it knows the sampling, and ``rdp`` for cohorts or
            batches of a fixed size.
        key_file: of unit ``client``: a file of secret random bytes, only at the server, from which
            noise and cohorts are drawn; without it, whoever knows the run's seed can compute both.
    """

    epsilon: float = Field(gt=0.0)
    delta: float = Field(gt=0.0, lt=1.0)
    unit: Literal["client", "example"] = "client"
    clip: float = Field(1.0, gt=0.0)
    quantile: float | None = Field(None, gt=0.0, lt=1.0)
    noise: Literal["independent", "tree"] = "independent"
    accountant: Literal["auto", "pld", "rdp"] = "auto"
    key_file: str | None = None

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out noise that is independent: keys of runs of before stay as they were."""
        values: dict[str, Any] = write(self)
        return {k: v for k, v in values.items() if (k, v) != ("noise", "independent")}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.quantile is not None and self.unit == "example":
            raise ValueError("'quantile' is for unit 'client', and this is unit 'example'")
        if self.noise == "tree" and (self.unit == "example" or self.quantile is not None):
            raise ValueError("'noise' by a tree is for unit 'client', without 'quantile'")
        if self.key_file is not None and self.unit == "example":
            raise ValueError("'key_file' is for unit 'client', whose noise the server draws")
        return self
