"""The settings of virtual time: how fast clients are, and when they are there."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fedkeel.base.settings import Settings


class DeviceClass(Settings):
    """A kind of device that some of the clients have.

    Args:
        share: share of the clients, in (0, 1]; the shares of all classes add up to 1.
        speed: how many times as fast as a device of speed 1 it computes, > 0.
        mbit_down: its connection from the server, in 10^6 bits a second; None as all others.
        mbit_up: its connection to the server, likewise.
    """

    share: float = Field(gt=0.0, le=1.0)
    speed: float = Field(1.0, gt=0.0)
    mbit_down: float | None = Field(None, gt=0.0)
    mbit_up: float | None = Field(None, gt=0.0)


class System(Settings):
    """How long clients take, in virtual time. No clock of this machine is read.

    A client's round takes the time to receive the message, to compute, and to send its reply.
    Results depend on it only where somebody is left out, or where the server does not wait.

    Args:
        speed: how fast devices compute: all ``equal``, or ``lognormal``: exp(sigma z) with z
            standard normal, so that the median is 1. Devices of a class vary around its speed.
        sigma: of ``lognormal``, >= 0.
        jitter: deviation of the logarithm of a client's computing time from round to round, >= 0.
        step_seconds: seconds of a local step at speed 1. None counts the multiply-adds of the
            method's own steps and divides them by `multiply_adds`.
        multiply_adds: multiply-adds in a second at speed 1.
        mbit_down: connection of a client from the server, in 10^6 bits a second; None takes no
            time.
        mbit_up: connection of a client to the server, likewise.
        mbit_sigma: deviation of the logarithm of both from client to client, >= 0.
        classes: kinds of devices by name, see `DeviceClass`; clients are divided among them at
            random.
        devices: CSV file with a row for each client: ``client``, its number, and any of ``speed``,
            ``mbit_down`` and ``mbit_up``, in place of what is drawn.
        availability: when clients can be reached: ``always``; ``diurnal``, `hours_on` a day from an
            hour of each client's own; ``sessions`` of random lengths, with means of `hours_on` and
            of `hours_off` between them; or as a ``trace`` says. What a client has not sent when it
            leaves is lost.
        hours_on: of ``diurnal``, below 24, and ``sessions``.
        hours_off: of ``sessions``.
        trace: CSV file of the ``trace``: ``client``, ``start`` and ``end`` in seconds, a row for
            each time that a client is there. It is repeated from its last end on.
        enough: share of the selected clients whose replies end a round, in (0, 1]. With less than 1
            (over-selection) the first to reply count. Without effect where the server does not
            wait.
        deadline_seconds: longest time of a round; who has not replied by then is left out. None
            waits for all that will reply.
    """

    speed: Literal["equal", "lognormal"] = "equal"
    sigma: float = Field(1.0, ge=0.0, le=10.0)
    jitter: float = Field(0.0, ge=0.0, le=10.0)
    step_seconds: float | None = Field(None, gt=0.0)
    multiply_adds: float = Field(1e9, gt=0.0)
    mbit_down: float | None = Field(None, gt=0.0)
    mbit_up: float | None = Field(None, gt=0.0)
    mbit_sigma: float = Field(0.0, ge=0.0, le=10.0)
    classes: dict[str, DeviceClass] = Field(default_factory=dict)
    devices: str | None = None
    availability: Literal["always", "diurnal", "sessions", "trace"] = "always"
    hours_on: float = Field(8.0, gt=0.0)
    hours_off: float = Field(16.0, gt=0.0)
    trace: str | None = None
    enough: float = Field(1.0, gt=0.0, le=1.0)
    deadline_seconds: float | None = Field(None, gt=0.0)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.trace is not None) != (self.availability == "trace"):
            raise ValueError("'trace' and availability 'trace' need each other")
        if self.availability == "diurnal" and self.hours_on >= 24.0:
            raise ValueError("'hours_on' of a day has to be below 24")
        total = sum(kind.share for kind in self.classes.values())
        if self.classes and abs(total - 1.0) > 1e-6:
            raise ValueError(f"the shares of 'classes' add up to {total:g}, and not to 1")
        return self

    @property
    def leaves_out(self) -> bool:
        """Whether who takes part depends on time, and not only on the cohort."""
        return (
            self.availability != "always" or self.enough < 1.0 or self.deadline_seconds is not None
        )
