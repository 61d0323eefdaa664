"""A site's ledger: what it has spent of its privacy in all runs, in a small file.

A spending is written, and is on the disk, before what it is for is computed. So a kill at any
moment leaves a ledger that counts at least what has been sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedkeel.base.named_files import RECORD_BYTES, read_regular
from fedkeel.base.settings import Settings
from fedkeel.errors import ConfigError, RunError
from fedkeel.features.budget.accountant import Release, Sampling, composed_epsilon
from fedkeel.features.budget.policy import Policy, PolicyError
from fedkeel.records.files import SEAL, is_intact, parse_json, sealed, synchronise, write_bytes
from fedkeel.records.lock import waited_for

FORMAT, READABLE = 3, (1, 2, 3)
"""Version of the file that is written, and those that are read."""


class Spent(Settings):
    """Releases of one kind in one run.

    Args:
        run: the server's name for the run.
        method: its method.
        client: which client of the run the site is.
        sampling: as in `Release`.
        sampled: as in `Release`.
        population: as in `Release`.
        sigma: deviation of the noise in units of the bound.
        count: number of releases.
        at: time of the last of them.
        planned: number of rounds of a run that is charged as a whole, 0 where each answer is.
        plan: digest of the experiment that such a run has.
        next_round: the first of its rounds that the client has not answered, nor any later one.
        epsilon: of each release, with a delta of 0, where it is of counts and not of a sum with
            Gaussian noise, which has a `sigma`; else 0.
    """

    run: str
    method: str
    client: int
    sampling: Sampling
    sampled: float
    population: int
    sigma: float
    count: int
    at: str = ""
    planned: int = 0
    plan: str = ""
    next_round: int = 0
    epsilon: float = 0.0

    @property
    def release(self) -> Release:
        """The kind of release."""
        return Release(self.sampling, self.sampled, self.population)

    @property
    def kind(self) -> tuple[object, ...]:
        """What two spendings have in common that are counted together."""
        of_run = self.run, self.method, self.plan, self.planned
        return *of_run, self.client, self.release, self.sigma, self.epsilon


@dataclass(frozen=True)
class Ledger:
    """The ledger of a site.

    Args:
        file: where it is; it is made with the first spending.
    """

    file: Path

    def read(self) -> tuple[Spent, ...]:
        """Return everything that was spent, by run.

        Raises:
            RunError: it cannot be read, or is damaged.
        """
        try:
            values = parse_json(read_regular(self.file, RECORD_BYTES))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise self._damaged(error) from None
        if not isinstance(values, dict) or SEAL not in values or not is_intact(values):
            raise self._damaged("it is not as it was written")
        if values.get("format") not in READABLE:
            raise self._damaged(f"format {values.get('format')!r}, and this version has {FORMAT}")
        try:
            return tuple(Spent.model_validate(item) for item in values["spent"])
        except (KeyError, TypeError, ValidationError) as error:
            raise self._damaged(type(error).__name__) from None

    def charge(self, spending: Spent, policy: Policy) -> float:
        """Write what an answer spends, and return the epsilon of the site with it.

        Args:
            spending: what is to be sent.
            policy: has the limit.

        Raises:
            PolicyError: with it the site would have spent more than its policy allows; nothing is
                written.
            RunError: the ledger cannot be read or written.
        """
        with self._locked():
            before = self.read()
            return self._charge(before, [_with_more(before, spending)], policy, "answer")

    def charge_once(self, spendings: Sequence[Spent], policy: Policy) -> float:
        """Write what some releases spend that are the same whenever they are asked for.

        Those that are in the ledger already are paid for.

        Raises:
            PolicyError: as for `charge`.
            RunError: the ledger cannot be read or written.
        """
        with self._locked():
            before = self.read()
            paid = {entry.kind for entry in before}
            entries = list(before)
            for spending in spendings:
                if spending.kind not in paid:
                    entries = _with_more(entries, spending)
            return self._charge(before, [entries], policy, "answer")

    def charge_run(self, plan: Spent, round: int, policy: Policy, again: int = 1) -> float:
        """Write what an answer to a round of a planned run spends; return the site's epsilon.

        The first answer is charged with all planned rounds. They pay for one answer to each round,
        in the order of the rounds. The server chooses the run's name and may use it again, so an
        answer to an earlier round, or to another plan, is charged anew: an earlier round
        without any gain by sampling, or as a second run of this plan, whichever costs less.

        Args:
            plan: the run, with `planned` and the `count` of its releases.
            round: which of its rounds is answered, from 0.
            policy: has the limit.
            again: number of releases of one more answer: where noise is shared by a tree, an update
                is in several sums of it.

        Raises:
            PolicyError: as for `charge`; or the plan has no such round.
            RunError: the ledger cannot be read or written.
        """
        if not 0 <= round < plan.planned:
            raise PolicyError(
                "The server asks for a round that its plan does not have.",
                got=f"round {round + 1}",
                expected=f"one of {plan.planned}",
            )
        plan = plan.model_copy(update={"next_round": round + 1})
        with self._locked():
            before = self.read()
            charged = next((entry for entry in before if entry.kind == plan.kind), None)
            if charged is None:
                return self._charge(before, [_with_more(before, plan)], policy, "run")
            if round >= charged.next_round:
                paid = plan.model_copy(update={"count": 0})
                return self._charge(before, [_with_more(before, paid)], policy, "answer")
            single = vars(Release()) | {"count": again, "next_round": charged.next_round}
            ways = [_with_more(before, plan.model_copy(update=single))]
            if plan.release != Release():
                ways.append(_with_more(before, plan))
            return self._charge(before, ways, policy, "answer")

    def _charge(
        self, before: Sequence[Spent], ways: Sequence[Sequence[Spent]], policy: Policy, what: str
    ) -> float:
        """Write the cheapest of some ledgers in place of the one before; return its epsilon."""
        totals = [epsilon_of(entries, policy) for entries in ways]
        total = min(totals)
        if policy.epsilon is not None and total > policy.epsilon:
            raise PolicyError(
                "The epsilon of this site is spent.",
                got=f"{epsilon_of(before, policy):.4g}, and {total:.4g} with this {what}",
                expected=f"{policy.epsilon:g} over all runs",
                do="raise 'epsilon' in the site's policy, if the site agrees to that",
            )
        self._write(ways[totals.index(total)])
        return total

    def _write(self, entries: Sequence[Spent]) -> None:
        values: dict[str, Any] = {"format": FORMAT, "spent": [e.model_dump() for e in entries]}
        text = json.dumps(sealed(values), indent=1)
        try:
            write_bytes(self.file, text.encode(), mode=0o600)
            synchronise(self.file.parent)
        except OSError as error:
            raise RunError(
                "The ledger of this site cannot be written.",
                got=f"{self.file}: {error.strerror}",
                why="what is not written down is not sent",
                do="make room, or give its folder to the user who runs the node",
            ) from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep the site's other processes from charging meanwhile; the lock ends with a kill."""
        lock = self.file.with_name(f".{self.file.name}.lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(waited_for(lock))
            except OSError as error:
                raise RunError(
                    "The ledger of this site cannot be locked.",
                    got=f"{lock}: {error.strerror}",
                    why="two answers at a time could be counted as one",
                    do="put it on a disk of the node's own, where the node may write",
                ) from None
            yield

    def _damaged(self, reason: object) -> RunError:
        return RunError(
            "The ledger of this site cannot be used.",
            got=f"{self.file}: {reason}",
            why="nobody knows what the site has spent, so nothing more is sent",
            do="restore it from a backup; a new one starts at 0, as if nothing had been spent",
        )


def _with_more(before: Sequence[Spent], spending: Spent) -> list[Spent]:
    """Return the entries of a ledger with one more spending, added to that of its kind."""
    place = next((i for i, e in enumerate(before) if e.kind == spending.kind), len(before))
    count = spending.count + sum(entry.count for entry in before[place : place + 1])
    now = datetime.now(UTC).isoformat(timespec="seconds")
    entries = list(before)
    entries[place : place + 1] = [spending.model_copy(update={"count": count, "at": now})]
    return entries


def epsilon_of(entries: Sequence[Spent], policy: Policy) -> float:
    """Return the epsilon of releases together, at the policy's delta.

    A site that plays several clients is counted as if all of them had the same examples. Epsilons
    of counts, which have a delta of 0, are added to that of the noisy sums.
    """
    delta = policy.delta
    if delta is None:
        raise PolicyError("A policy without a delta has no account.")
    of_counts = math.fsum(entry.epsilon * entry.count for entry in entries)
    sums = [(e.release, e.sigma, e.count) for e in entries if not e.epsilon]
    return of_counts + composed_epsilon(sums, delta)


@dataclass(frozen=True)
class RunSpent:
    """What one run has cost.

    Args:
        run: the server's name for the run.
        method: its method.
        sigmas: noise of its releases, in units of their bounds; empty of statistics.
        count: number of its releases.
        at: time of the last one.
        epsilon: of only this run.
        total: of this run and all runs above.
    """

    run: str
    method: str
    sigmas: tuple[float, ...]
    count: int
    at: str
    epsilon: float
    total: float


def statement(entries: Sequence[Spent], policy: Policy) -> list[RunSpent]:
    """Return what each run has cost, in the order in which they began.

    Raises:
        ConfigError: the policy has no limit, so that nothing is counted.
    """
    if policy.delta is None:
        raise ConfigError(
            "The policy has no limit, so that nothing is counted.",
            do="give it 'epsilon' and 'delta'",
        )
    costs = []
    before: list[Spent] = []
    for run in dict.fromkeys(entry.run for entry in entries):
        of_run = [entry for entry in entries if entry.run == run]
        before += of_run
        costs.append(
            RunSpent(
                run=run,
                method=", ".join(dict.fromkeys(entry.method for entry in of_run)),
                sigmas=tuple(sorted({entry.sigma for entry in of_run if not entry.epsilon})),
                count=sum(entry.count for entry in of_run),
                at=max(entry.at for entry in of_run),
                epsilon=epsilon_of(of_run, policy),
                total=epsilon_of(before, policy),
            )
        )
    return costs
