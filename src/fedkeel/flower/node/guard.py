"""What a site's policy lets a node do: it is asked before anything is trained or sent."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedkeel.config import Run
from fedkeel.config.flower import smallest_count
from fedkeel.data.cohort import select
from fedkeel.data.dataset import Ints
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.rehearsal import SURVEY_PREFIX
from fedkeel.features.budget.accountant import Release, composed_epsilon
from fedkeel.features.budget.budget_account import Budget
from fedkeel.features.budget.feature import account_of, privacy_of
from fedkeel.features.budget.ledger import Ledger, Spent
from fedkeel.features.budget.legality import CLIENT_PARTS, EXAMPLE_PART
from fedkeel.features.budget.policy import Policy, PolicyError
from fedkeel.flower.node.secure_sums import with_noise
from fedkeel.flower.protocol import (
    DESCRIBE_DATA,
    EVALUATE,
    PERSONAL,
    PICTURES,
    ClientRequest,
    Request,
)
from fedkeel.flower.secure_protocol import KEYS, SHARES, UNMASK
from fedkeel.flower.statistics_protocol import STATISTICS, TOTALS
from fedkeel.method.compose import Plan
from fedkeel.method.grammar import parse
from fedkeel.method.part import Capability, Part
from fedkeel.method.parts.dpclient import clipped
from fedkeel.method.round_values import Reply

MESSAGES = {EVALUATE: "scores", PERSONAL: "personal", PICTURES: "pictures"}
"""What an answer to a request of a kind is called in a policy."""

DEVICE = "device"
"""What a policy calls how the node trains: on which device, and by which engine."""

OF_STATISTICS = frozenset({DESCRIBE_DATA, STATISTICS, TOTALS, KEYS, SHARES, UNMASK})
"""Types of the messages that statistics take."""

SETTLE = "change the experiment, or the policy of this site, if the site agrees to that"


@dataclass(frozen=True)
class Guard:
    """Enforces a policy on a node.

    The experiment is the one that the server has sent: what is checked here holds for the code of
    fedkeel, and for a server that runs it too.

    Args:
        policy: what the site allows.
        prepared: the run, as the node sees it.
    """

    policy: Policy
    prepared: Prepared

    def check_run(self, kind: str = "") -> None:
        """Refuse a run that the policy does not allow.

        Args:
            kind: type of the message that is to be answered.

        Raises:
            PolicyError: names what is asked for, and what is allowed.
        """
        if is_for_statistics(self.policy, kind):
            _check_secure_sums(self.policy, self.prepared.settings)
            return
        _check_methods(self.policy, self.prepared.plan)
        self._check_messages()
        _check_secure_sums(self.policy, self.prepared.settings)
        self._check_sums()
        self._check_own_bound()
        _check_unit(self.policy, self.prepared.settings)

    def check_plan(self, clients: Iterable[int]) -> None:
        """Refuse a run whose planned rounds would by themselves spend more than the policy allows.

        Args:
            clients: those that the node plays.

        Raises:
            PolicyError: says what they would spend.
        """
        if self.policy.epsilon is None or self.policy.delta is None:
            return
        sizes, times = self.prepared.setup.federation.sizes, self._planned_times()
        planned = [self._planned(k, int(times[k])) for k in sorted(clients) if sizes[k]]
        epsilon = composed_epsilon([item for item in planned if item[2]], self.policy.delta)
        if epsilon > self.policy.epsilon:
            raise PolicyError(
                "This run plans to spend more than the epsilon of this site.",
                got=f"{epsilon:.4g} in {self.prepared.settings.rounds} rounds, at delta "
                f"{self.policy.delta:g}",
                expected=f"{self.policy.epsilon:g} over all runs",
                do="plan fewer rounds or more noise",
            )

    def check_message(self, kind: str) -> None:
        """Refuse a request whose answer the policy does not let out.

        Raises:
            PolicyError: names it.
        """
        _check_kind(self.policy, kind)

    def lets_out(self, name: str) -> bool:
        """Return whether the policy lets something out without which a run can do."""
        return self.policy.messages is None or name in self.policy.messages

    def admit(self, setup: TrainingSetup, request: Request, item: ClientRequest) -> TrainingSetup:
        """Write into the ledger what training a client is going to spend, and return its setup.

        Noise and batches are drawn from a seed of this answer's own, that nobody else knows: a
        server that knows the run's seed could take the noise off, and one that asks for a round a
        second time would get the same noise on other numbers.

        Raises:
            PolicyError: the site would spend more than it allows.
            RunError: the ledger cannot be used.
        """
        if self.policy.epsilon is None:
            return setup
        ledger = Ledger(Path(self.policy.ledger))
        release, sigma, count = self._spending(item.client, item.steps_done)
        spending = Spent(
            run=request.run[:80],
            method=self.prepared.plan.expression,
            client=item.client,
            sampling=release.sampling,
            sampled=release.sampled,
            population=release.population,
            sigma=sigma,
            count=count,
        )
        if self._trusts_server:
            self._check_drawn(request.round, item.client)
            schedule = self._account.schedule
            plan = {"planned": schedule.rounds, "plan": request.agreement.experiment}
            in_a_pass = schedule.releases_of_clients(min(max(schedule.tree, 1), schedule.rounds))
            ledger.charge_run(
                spending.model_copy(update=plan), request.round, self.policy, in_a_pass
            )
            return setup
        ledger.charge(spending, self.policy)
        return replace(setup, seed=secrets.randbits(63))

    def protected(self, reply: Reply) -> Reply:
        """Return a reply with the site's own bound and noise on its update."""
        if self.policy.clip is None:
            return reply
        update = clipped(reply.update, self.policy.clip)
        if self.policy.sigma:
            update = with_noise(update, self.policy.sigma * self.policy.clip)
        return replace(reply, update=update)

    # --- what is refused -------------------------------------------------------------------------

    def _check_messages(self) -> None:
        for name in self._sent():
            _check_allowed(self.policy, name)

    def _sent(self) -> Iterator[str]:
        """What each answer of the run has beside the update, or the description of the node."""
        setup, spec = self.prepared.setup, self.prepared.spec
        if setup.federation.how.get("normalize") == "standardize":
            yield "sums"
        for kind in ("buffers", "diagnostics"):
            if any(path.startswith(f"{kind}/") for path in spec):
                yield kind
        parts = (path.removeprefix(SURVEY_PREFIX).removeprefix("uploads/") for path in spec)
        names = {part.name for part in self.prepared.plan.parts}
        yield from sorted({path.split("/")[0] for path in parts} & names)

    def _check_sums(self) -> None:
        min_clients = self.policy.min_clients
        if min_clients == 1:
            return
        if Capability.PER_CLIENT_UPDATES in self.prepared.plan.needs:
            raise PolicyError(
                "The method uses single clients' updates, and the policy of this site asks for "
                "sums.",
                got=f"method {self.prepared.plan.expression!r}",
                expected=f"sums of {min_clients} clients at least",
                do=SETTLE,
            )
        smallest = self._smallest_round()
        if smallest < min_clients:
            raise PolicyError(
                "A round may have too few clients for the policy of this site.",
                got=smallest,
                expected=f"{min_clients} at least",
                why="the quorum of the smallest cohort counts; one that is drawn by a key at the "
                "server may be of any size",
                do="raise cohort.clients or flower.quorum",
            )

    def _smallest_round(self) -> int:
        """Return the smallest number of clients with whose replies a round goes on."""
        cohort, sizes = self.prepared.cohort, self.prepared.setup.federation.sizes
        quorum, policy = self.prepared.settings.flower.quorum, self.prepared.plan.policy
        if policy is not None:
            return smallest_count(quorum, policy.updates_per_step())
        if cohort.sampling != "poisson" and not cohort.dropout:
            return smallest_count(quorum, cohort.size(len(sizes)))
        if self._are_cohorts_secret:
            return 0
        smallest = min(len(clients) for clients in self._cohorts())
        return smallest_count(quorum, smallest) if smallest else 0

    def _check_drawn(self, round: int, client: int) -> None:
        """Refuse a round whose cohort does not have a client, where the node knows the cohort.

        What sampling saves is counted, so a server may not ask whom it has not drawn.
        """
        settings, sizes = self.prepared.settings, self.prepared.setup.federation.sizes
        if self._are_cohorts_secret or not 0 <= round < settings.rounds:  # the ledger refuses it
            return
        drawn = select(self.prepared.cohort, sizes, settings.seed, round).clients
        if client not in drawn:
            raise PolicyError(
                "The server asks for a client that is not drawn in this round.",
                got=f"client {client} in round {round + 1}",
                expected=f"one of {drawn.tolist()[:8]}",
            )

    def _check_own_bound(self) -> None:
        """Refuse a run whose update cannot be clipped, or is not all that needs noise."""
        codec, more = self.prepared.plan.codec, list[str]()
        if self.policy.sigma:
            more += [name for name in self._sent() if name not in ("sums", "diagnostics")]
        if self.policy.clip is not None and codec is not None:
            more.append(f"an update that {codec.name} encodes")
        if more:
            raise PolicyError(
                "This site clips its update itself, and the run sends other things.",
                got=", ".join(more),
                expected="only an update, as it is",
                do=SETTLE,
            )

    # --- what is spent ---------------------------------------------------------------------------

    @property
    def _trusts_server(self) -> bool:
        """Whether the noise is the server's, which is then charged for the whole run at once."""
        return not self.policy.sigma and self.policy.unit == "client"

    @property
    def _account(self) -> Budget:
        budget = account_of(self.prepared)
        if budget is None:
            raise PolicyError("The run has no noise that the policy of this site could count.")
        return budget

    def _spending(self, client: int, done: int) -> tuple[Release, float, int]:
        """Return the releases, their noise and their number, of an answer or of a whole run."""
        if self.policy.sigma:
            return Release(), self.policy.sigma, 1
        budget = self._account
        schedule = budget.schedule
        if self._trusts_server:
            return (
                schedule.of_clients,
                budget.sigma,
                schedule.releases_of_clients(schedule.rounds),
            )
        n = int(schedule.sizes[client])
        return schedule.of_examples(n), budget.sigma, schedule.releases_of_round(n, done)

    def _planned(self, client: int, times: int) -> tuple[Release, float, int]:
        """Return what a client spends in all planned rounds, in so many of which it trains."""
        release, sigma, count = self._spending(client, 0)
        return release, sigma, count if self._trusts_server else count * times

    def _planned_times(self) -> Ints:
        """Return [C] in how many of the planned rounds each client may train."""
        size, rounds = len(self.prepared.setup.federation.sizes), self.prepared.settings.rounds
        if self._are_cohorts_secret or self.prepared.plan.policy is not None:
            return np.full(size, rounds)  # it may train from the model of each round
        times = np.zeros(size, dtype=np.int64)
        for clients in self._cohorts():
            times[clients] += 1
        return times

    @property
    def _are_cohorts_secret(self) -> bool:
        """Whether a key draws the cohorts, so that only the server knows them."""
        privacy = privacy_of(self.prepared.settings)
        return privacy is not None and privacy.key_file is not None

    def _cohorts(self) -> Iterator[Ints]:
        """Yield the clients that are to train in each of the planned rounds."""
        settings, sizes = self.prepared.settings, self.prepared.setup.federation.sizes
        for round in range(settings.rounds):
            yield select(self.prepared.cohort, sizes, settings.seed, round).clients


def is_for_statistics(policy: Policy, kind: str) -> bool:
    """Return whether an answer needs no more than what a policy says of statistics.

    Its rules of training do not matter then: methods, messages, and how many clients a round has.
    `secure_sums` does, with `min_clients` as the smallest number of sites in a sum. The steps of a
    secure sum tell nothing of a site without its masked numbers, and these are an answer of a kind
    of their own. A site that consents to no statistics answers only where it may train, too.
    """
    return bool(policy.statistics.kinds) and kind in OF_STATISTICS


def check_settings(policy: Policy, settings: Run, kind: str) -> None:
    """Refuse what the settings show already, before data are read and a model is built.

    Args:
        policy: what the site allows.
        settings: what the server asks for; the code that they name may be imported.
        kind: type of the message that is to be answered.

    Raises:
        PolicyError: names what is asked for, and what is allowed.
    """
    if is_for_statistics(policy, kind):
        _check_secure_sums(policy, settings)
        return
    _check_kind(policy, kind)
    _check_methods(policy, parse(settings.method, weights=settings.weights))
    _check_secure_sums(policy, settings)
    _check_unit(policy, settings)


def _check_kind(policy: Policy, kind: str) -> None:
    name = MESSAGES.get(kind)
    if name is not None:
        _check_allowed(policy, name)


def _check_allowed(policy: Policy, name: str) -> None:
    allowed = policy.messages
    if allowed is not None and name not in allowed:
        raise PolicyError(
            f"The policy of this site does not let {name!r} out.",
            expected=_named(allowed, "only the update"),
            do=SETTLE,
        )


def _check_methods(policy: Policy, plan: Plan) -> None:
    for part in plan.parts if policy.methods is not None else ():
        if not _is_allowed(part, policy.methods or ()):
            raise PolicyError(
                f"The policy of this site does not allow {part.name}.",
                got=f"method {plan.expression!r}",
                expected=_named(policy.methods or (), "only fedavg"),
                do=SETTLE,
            )


def _check_secure_sums(policy: Policy, settings: Run) -> None:
    flower, smallest = settings.flower, max(policy.min_clients, 2)
    if policy.secure_sums and (flower.secure_minimum or 0) < smallest:
        raise PolicyError(
            "The policy of this site asks for secure sums.",
            got=f"secure_aggregation = {str(flower.secure_aggregation).lower()}, "
            f"secure_minimum = {flower.secure_minimum}",
            expected=f"secure_minimum = {smallest} at least",
            do="set flower.secure_aggregation = true, and flower.secure_minimum",
        )


def _check_unit(policy: Policy, settings: Run) -> None:
    """Refuse a run without noise of the policy's unit, where the site adds none itself."""
    privacy = privacy_of(settings)
    if policy.epsilon is None or policy.sigma:
        return
    if privacy is None or privacy.unit != policy.unit:
        unit = "no [privacy]" if privacy is None else f"privacy.unit = {privacy.unit!r}"
        raise PolicyError(
            "The run has no noise that the policy of this site could count.",
            got=unit,
            expected=f"privacy.unit = {policy.unit!r}",
            do="add it to the experiment; or let the site clip and add noise itself: 'clip' "
            "and 'sigma' in its policy, with unit = 'client'",
        )


def _is_allowed(part: Part, allowed: tuple[str, ...]) -> bool:
    """Return whether a policy names a part, or the method that it belongs to."""
    if not type(part).__module__.startswith("fedkeel."):
        return f"{type(part).__module__}:{type(part).__qualname__}" in allowed
    names = {part.name, part.name.split(".")[0]}
    return bool(names & {*allowed, *CLIENT_PARTS, EXAMPLE_PART})


def _named(names: tuple[str, ...], nothing: str) -> str:
    return ", ".join(names) or nothing
