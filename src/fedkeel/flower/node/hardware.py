"""Where a node trains, and by which engine: its operator's choice, within the site's policy.

The server's settings only wish: what a machine has, and who may use it, is known where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast

from fedkeel import config
from fedkeel.engine.choose.device import available_gpus, missing_gpu
from fedkeel.errors import ConfigError, RunError
from fedkeel.features.budget.policy import Policy, PolicyError

NodeEngine = Literal["auto", "sequential", "vectorized"]

ENGINES = ("auto", "sequential", "vectorized")
"""Engines that an operator may choose; ``auto`` is ``vectorized`` on a GPU, else ``sequential``."""

CPU = "cpu"


@dataclass(frozen=True)
class NodePlace:
    """Where a node trains a run.

    Args:
        devices: names such as ``cpu`` and ``cuda:0``; several share the node's clients.
        engine: ``sequential`` or ``vectorized``.
        may_be_cpu: whether the node may train on the processor after all: where a GPU is not worth
            it, does not bear the model, or has too little memory.
    """

    devices: tuple[str, ...] = (CPU,)
    engine: Literal["sequential", "vectorized"] = "sequential"
    may_be_cpu: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether the node trains as a simulation with the `sequential` engine, bit for bit."""
        return self.engine == "sequential" and self.on_cpu

    @property
    def on_cpu(self) -> bool:
        """Whether it is on the processor."""
        return self.devices[0] == CPU


PLAIN = NodePlace()
"""The processor, with the bits of a simulation."""


@dataclass(frozen=True)
class Hardware:
    """What the operator of a node has chosen.

    Args:
        devices: ``auto``, or names such as ``cpu``, ``cuda`` and ``cuda:1``.
        engine: one of `ENGINES`.
    """

    devices: tuple[str, ...] = ("auto",)
    engine: NodeEngine = "auto"

    @classmethod
    def read(cls, values: Mapping[str, object]) -> Self:
        """Return the choice that the keys ``device`` and ``engine`` of a configuration make.

        Raises:
            ConfigError: they name no device, or one twice, or no engine of a node.
        """
        engine = str(values.get("engine", "auto"))
        if engine not in ENGINES:
            raise ConfigError(
                "A node has no such engine.",
                got=f"engine = {engine!r}",
                expected=", ".join(ENGINES),
            )
        words = str(values.get("device", "auto"))
        devices = tuple(word.strip() for word in words.split(","))
        is_known = devices == ("auto",) or all(
            re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) for name in devices
        )
        if not is_known or len({name.partition(":")[0] for name in devices}) > 1:
            raise ConfigError(
                "A node has no such device.",
                got=f"device = {words!r}",
                expected="auto, cpu, cuda, or names such as cuda:0, with commas between several",
            )
        _refuse_repeated(devices)
        return cls(devices, cast(NodeEngine, engine))

    def place(self, wish: config.Engine, policy: Policy | None = None) -> NodePlace:
        """Return where a run is trained.

        Args:
            wish: the engine of the experiment. By default it decides whether a GPU is used: not
                where the processor, or the reference, is asked for.
            policy: the site's own, which may name the devices.

        Raises:
            ConfigError: the operator names a device twice.
            PolicyError: the policy does not allow the operator's device, or leaves none.
            RunError: there is no such GPU.
        """
        allowed = None if policy is None else policy.devices
        gpus = [name for name in available_gpus() if _is_allowed(name, allowed)]
        devices = self._auto(wish, gpus) if self.devices == ("auto",) else self._named(gpus)
        refused = [name for name in devices if not _is_allowed(name, allowed)]
        if refused:
            raise PolicyError(
                "The policy of this site does not allow the device on which the node would train.",
                got=", ".join(refused),
                expected=", ".join(allowed or ()) or "no device",
                do="change 'devices' in the policy, or start the node with another --device",
            )
        on_cpu = devices[0] == CPU
        engine: NodeEngine = self.engine
        if engine == "auto":
            engine = "sequential" if on_cpu else "vectorized"
        may_be_cpu = on_cpu or (self.devices == ("auto",) and _is_allowed(CPU, allowed))
        return NodePlace(tuple(devices), engine, may_be_cpu)

    def _auto(self, wish: config.Engine, gpus: Sequence[str]) -> list[str]:
        """Return the first GPU that may be used, where the experiment does not ask for another."""
        wants_cpu = wish.device == CPU or (wish.kind == "sequential" and wish.device != "cuda")
        return [CPU] if wants_cpu or not gpus else [gpus[0]]

    def _named(self, gpus: Sequence[str]) -> list[str]:
        """Return the devices that the operator names.

        Raises:
            ConfigError: ``cuda`` is one that is named as well.
            RunError: there is no such GPU.
        """
        there = available_gpus()
        if self.devices[0] != CPU and not there:
            raise missing_gpu("start the node with --device auto or cpu")
        names = [(gpus or there)[0] if name == "cuda" else name for name in self.devices]
        _refuse_repeated(names)
        missing = [name for name in names if name != CPU and name not in there]
        if missing:
            raise RunError(
                f"There is no device {missing[0]!r} on this node.",
                expected=f"among {', '.join(there)}",
                do="start the node with a --device that is there, or with --device auto",
            )
        return names


def _is_allowed(name: str, allowed: Sequence[str] | None) -> bool:
    """Return whether a policy lets a node train on a device; ``cuda`` stands for any GPU."""
    return allowed is None or name in allowed or name.partition(":")[0] in allowed


def _refuse_repeated(devices: Sequence[str]) -> None:
    """Refuse a device that is named twice: two processes would share its memory."""
    if len(set(devices)) < len(devices):
        raise ConfigError(
            "A node is to train on the same device twice.",
            got=f"device = {', '.join(devices)}",
            expected="each device once",
            why="two processes would share its memory, and be no faster",
        )
