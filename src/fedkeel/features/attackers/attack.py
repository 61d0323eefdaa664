"""Who the attackers of a run are, and what they do to their updates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedkeel.base.rng import generator, torch_seed
from fedkeel.data.federation import Federation
from fedkeel.errors import ConfigError, counted
from fedkeel.features.attackers.collusion import joint_update
from fedkeel.features.attackers.poison import poisoned
from fedkeel.features.attackers.settings import ALONE, Adversary
from fedkeel.method.context import Ints
from fedkeel.method.round_values import Replies
from fedkeel.tree import Tree

MANY = 12
"""Attackers that are listed by number, at most."""


def attackers(settings: Adversary, clients: int, seed: int) -> Ints:
    """Return the attackers of a run, ascending.

    A share of the clients is rounded and drawn from the stream (seed, "adversary").

    Raises:
        ConfigError: a client does not exist, or the share means no client or all clients.

    >>> attackers(Adversary(kind="sign_flip", share=0.3), 10, seed=0).tolist()
    [2, 3, 6]
    """
    if settings.kind == "none":
        return np.zeros(0, dtype=np.int64)
    if settings.clients:
        if max(settings.clients) >= clients:
            raise ConfigError(
                "adversary.clients names a client that does not exist.",
                got=max(settings.clients),
                expected=f"numbers from 0 to {clients - 1}",
            )
        return np.array(sorted(settings.clients), dtype=np.int64)
    share = settings.share or 0.0
    count = round(share * clients)
    if not 0 < count < clients:
        raise ConfigError(
            f"adversary.share makes {'nobody' if count == 0 else 'everybody'} an attacker.",
            got=f"{share:g} of {counted(clients, 'client')}",
            expected=f"a share that is rounded to 1..{clients - 1} clients",
            do="give another share, or adversary.clients",
        )
    return np.sort(generator(seed, "adversary").choice(clients, count, replace=False))


@dataclass(frozen=True)
class Attack:
    """The attackers of a run, and what they do.

    Args:
        settings: the attack.
        attackers: their numbers, ascending.
        seed: seed of the run.
    """

    settings: Adversary
    attackers: Ints
    seed: int

    @property
    def description(self) -> str:
        """What the attackers do, and who they are, in words."""
        settings = self.settings
        kind = (
            settings.kind.replace("_", " ")
            if settings.kind not in ("alie", "ipm")
            else (settings.kind.upper())
        )
        factor = "" if settings.strength is None else f", factor {settings.strength:g}"
        if settings.kind == "backdoor":
            factor = f" to label {settings.target}{factor}"
        first = ", ".join(map(str, self.attackers[:MANY]))
        more = f" and {len(self.attackers) - MANY} more" if len(self.attackers) > MANY else ""
        return f"{kind}{factor}, by {counted(len(self.attackers), 'client')}: {first}{more}"

    def poison(self, federation: Federation) -> Federation:
        """Return the federation with the attackers' examples as they train on them."""
        return poisoned(federation, self.settings, self.attackers, self.seed)

    def among(self, clients: Ints) -> Ints:
        """Return the positions of the attackers among clients."""
        return np.flatnonzero(np.isin(clients, self.attackers))

    def lies_alone(self, client: int) -> bool:
        """Whether a client is an attacker that changes its update without knowing another one."""
        is_attacker = client in self.attackers
        return is_attacker and self.settings.changes_updates and self.settings.kind in ALONE

    def change(self, update: Tree, round: int, client: int) -> Tree:
        """Return what an attacker sends in place of its update, where it needs no other one.

        Args:
            update: of the attacker, as it would have sent it.
            round: rounds completed before this one.
            client: its number.
        """
        kind, factor = self.settings.kind, self.settings.strength or 1.0
        if kind == "gaussian":
            return _noise_like(update, factor, torch_seed(self.seed, "attack", round, client))
        sign = -1.0 if kind == "sign_flip" else 1.0
        return {name: sign * factor * tensor for name, tensor in update.items()}

    def apply(self, replies: Replies, round: int) -> None:
        """Write what the attackers of a cohort send over their rows of the replies.

        Where an attacker's update is not finite it stays so. Attackers that have to know honest
        updates send their own where there are fewer than two that are finite.

        Args:
            replies: of the cohort; single updates, not sums.
            round: rounds completed before this one.
        """
        rows = self.among(replies.clients)
        rows = rows[replies.finite[rows]]
        if not self.settings.changes_updates:
            return
        if self.settings.kind in ALONE:
            for row in rows:
                update = {name: tensor[row].clone() for name, tensor in replies.update.items()}
                sent = self.change(update, round, int(replies.clients[row]))
                _write(replies, row, sent)
        else:
            is_honest = replies.finite.copy()
            is_honest[self.among(replies.clients)] = False
            honest = np.flatnonzero(is_honest)
            honest = honest[np.argsort(replies.clients[honest])]
            if len(honest) < 2 or not len(rows):
                return
            index = torch.from_numpy(honest)
            known = {name: tensor[index] for name, tensor in replies.update.items()}
            sent = joint_update(self.settings, known, len(rows))
            for row in rows:
                _write(replies, row, sent)


def _write(replies: Replies, row: int, update: Tree) -> None:
    for name, tensor in update.items():
        replies.update[name][row] = tensor
    replies.finite[row] = all(bool(tensor.isfinite().all()) for tensor in update.values())


def _noise_like(update: Tree, factor: float, seed: int) -> Tree:
    """Return Gaussian noise whose root mean square is `factor` times that of an update."""
    square = sum(float(tensor.double().square().sum()) for tensor in update.values())
    count = sum(tensor.numel() for tensor in update.values())
    deviation = factor * (square / max(count, 1)) ** 0.5
    source = torch.Generator().manual_seed(seed)
    return {
        name: deviation
        * torch.randn(tensor.shape, generator=source, dtype=tensor.dtype).to(tensor.device)
        for name, tensor in update.items()
    }
