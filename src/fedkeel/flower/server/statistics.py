"""Asking the sites of a federation for statistics, one by one or in a secure sum."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedkeel.base.named_files import writing
from fedkeel.config import Experiment
from fedkeel.errors import ConfigError, RunError, TrainingError
from fedkeel.features.budget.policy import STATISTICS_KINDS, StatisticsKind
from fedkeel.features.secure.collector import Collector
from fedkeel.features.secure.participant import are_usable, threshold
from fedkeel.features.secure.primitives import SecureSumError, Words
from fedkeel.flower.data_on_nodes import is_on_nodes
from fedkeel.flower.protocol import DESCRIBE_DATA, Agreement, ClientRequest, NodeDescription
from fedkeel.flower.secure_protocol import (
    KEYS,
    SHARES,
    UNMASK,
    VECTOR,
    KeysReply,
    KeysRequest,
    NodeKeys,
    SharesReply,
    SharesRequest,
    UnmaskReply,
    UnmaskRequest,
    by_node,
    session_of,
    texts,
)
from fedkeel.flower.server.connection import NodeConnection
from fedkeel.flower.server.membership import ROOM, ClientData, Membership
from fedkeel.flower.server.placeholder import placeholder
from fedkeel.flower.server.secure_exchange import SecureExchange
from fedkeel.flower.server.serve import reported
from fedkeel.flower.server.traffic import TrafficRecord
from fedkeel.flower.statistics_protocol import (
    EXAMPLES,
    PLACES,
    STATISTICS,
    TOTALS,
    ColumnForm,
    Ints,
    PartName,
    StatisticsReply,
    StatisticsRequest,
    TotalsRequest,
    columns_of,
    whole_of_limbs,
)
from fedkeel.flower.value_cells import quantiles
from fedkeel.flower.wire import HEADER, TENSORS, WireError, unpack
from fedkeel.records.node_statistics import (
    ColumnStatistics,
    Counts,
    NodeStatistics,
    QuantileValue,
    SiteStatistics,
)
from fedkeel.runner.prepare import prepare
from fedkeel.tree import tensors

SHARES_OF_VALUES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles that are computed."""

LARGEST_NOISE = 64
"""Deviations of noise by which counts may be beyond the number of examples."""


def read_kinds(text: str, has_categories: bool = True) -> tuple[StatisticsKind, ...]:
    """Return the kinds that a text names, separated by commas; all where it is ``all``.

    Args:
        text: names of kinds.
        has_categories: whether a column has some; else all are all but these, which a site that
            has none need not allow.

    Raises:
        ConfigError: it names something else.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return tuple(k for k in STATISTICS_KINDS if has_categories or k != "categories")
    unknown = [name for name in names if name not in STATISTICS_KINDS]
    if unknown or not names:
        raise ConfigError(
            "There are no such statistics.",
            got=repr(unknown[0] if unknown else text),
            expected=f"all, or some of {', '.join(STATISTICS_KINDS)}",
        )
    return tuple(kind for kind in STATISTICS_KINDS if kind in names)


def report_statistics(grid: Grid, experiment: Experiment, kinds: str, out: Path) -> None:
    """Ask the sites of a federation for statistics, and write them into a folder.

    Args:
        grid: Flower's grid.
        experiment: of the federation.
        kinds: as `read_kinds` takes them.
        out: the folder.

    Raises:
        FedkeelError: too few sites have answered, or the data are not on the nodes.
    """
    with reported(out) as ended:
        statistics = collect(grid, experiment, read_kinds(kinds))
        with writing(f"{out} cannot be written to."):
            out.mkdir(parents=True, exist_ok=True)
            statistics.write(out)
        ended.append("finished")


def collect(grid: Grid, experiment: Experiment, kinds: Sequence[StatisticsKind]) -> NodeStatistics:
    """Return statistics of the sites of a federation.

    Args:
        grid: Flower's grid.
        experiment: of the federation; only its data and ``[flower]`` matter.
        kinds: what is asked for.

    Raises:
        ConfigError: the data are not on the nodes.
        RunError: the sites are not there, or none, or too few for a secure sum, have answered.
    """
    if not is_on_nodes(experiment):
        raise ConfigError(
            "Statistics of sites are of data that stay on the nodes.",
            got=f"data.source = {experiment.data.source!r}",
            expected="data.source = 'nodes'",
            do="fedkeel data inspect, or fedkeel doctor, looks at data that are here",
        )
    settings, clients = experiment.flower, experiment.partition.clients or 0
    connection = NodeConnection(grid, settings)
    membership = Membership(connection, settings, clients, DESCRIBE_DATA)
    needed = f"all {clients}, because only they have the data"
    membership.wait_for_clients(lambda count: count == clients, needed)
    descriptions = membership.descriptions()
    if experiment.data.normalize == "standardize":  # the sums for that are of a training
        settings_of_data = experiment.data.model_copy(update={"normalize": "none"})
        experiment = experiment.model_copy(update={"data": settings_of_data})
    prepared = prepare(experiment, placeholder(experiment, descriptions))
    agreement = Agreement.of(prepared)
    data = {
        client: ClientData(node.clients[0].train_examples, node.data_digest)
        for client, node in descriptions.items()
    }
    membership.require(data, agreement)
    first = descriptions[min(descriptions)]
    names, blank = prepared.setup.federation.names, prepared.setup.federation.data
    nodes = {
        node: _Site(client, str(names[client]), descriptions[client])
        for client, node in sorted(membership.node_by_client().items())
    }
    run = f"statistics-{secrets.token_hex(16)}"
    requests = {
        node: StatisticsRequest(
            run=run,
            round=0,
            agreement=agreement,
            data_digest=site.description.data_digest,
            lr=0.0,
            clients=(
                ClientRequest(
                    client=site.client,
                    steps_done=0,
                    state_round=0,
                    state_digest="",
                    checkpoint_round=0,
                ),
            ),
            kinds=tuple(kinds),
            classes=blank.classes if blank.has_labels else 0,
            columns=columns_of(
                site.description.columns,
                experiment.data,
                site.description.inputs,
                site.description.targets,
            ),
        )
        for node, site in nodes.items()
    }
    asking = _Asking(connection, nodes, requests, settings.secure_minimum)
    answers = asking.summed() if settings.secure_aggregation else asking.one_by_one()
    return NodeStatistics(
        name=experiment.name,
        kinds=tuple(kinds),
        is_secure=settings.secure_aggregation,
        label_names=first.labels,
        sites=answers.sites,
        total=answers.total,
        faults={reason: tuple(ids) for reason, ids in asking.traffic.faults.items()},
    )


@dataclass(frozen=True)
class _Site:
    """A site: its client's number, its name, and what its node says of its data."""

    client: int
    name: str
    description: NodeDescription

    @property
    def examples(self) -> int:
        """How many examples it says it has."""
        described = self.description.clients[0]
        return described.train_examples + described.test_examples


@dataclass(frozen=True)
class _Answers:
    """What the sites have told: each, and all together."""

    sites: tuple[SiteStatistics, ...]
    total: SiteStatistics


class _Asking:
    """Asks sites.

    Args:
        connection: how nodes are asked.
        sites: by node.
        requests: what each node is asked for.
        minimum: smallest number of sites in a secure sum, None for more than half.
    """

    def __init__(
        self,
        connection: NodeConnection,
        sites: Mapping[int, _Site],
        requests: Mapping[int, StatisticsRequest],
        minimum: int | None,
    ) -> None:
        self._connection, self._sites, self._requests = connection, sites, requests
        self._least = threshold(len(sites), minimum)
        self._layout = next(iter(requests.values())).layout
        self.traffic = TrafficRecord([])
        clients = {node: [site.client] for node, site in sites.items()}
        self._exchange = SecureExchange(connection, self.traffic, clients)
        self._replies: dict[int, StatisticsReply] = {}

    def one_by_one(self) -> _Answers:
        """Return the statistics of each site.

        Raises:
            RunError: no site has answered.
        """
        answers = self._asked(STATISTICS, self._requests)
        if not answers:
            raise RunError(
                "No site has answered with statistics.",
                got=self._faults() or "no reply",
                do="ask for fewer kinds (--kinds), or let each site consent in its policy: "
                "[statistics] kinds",
            )
        ordered = sorted(answers, key=lambda node: self._sites[node].client)
        sites = tuple(self._read([node], answers[node], self._sites[node].name) for node in ordered)
        summed = sum((answers[node] for node in ordered), np.zeros_like(answers[ordered[0]]))
        total = self._read(ordered, summed, "all")
        columns = tuple(
            replace(column, missing_between=_added([site.columns[i] for site in sites]))
            for i, column in enumerate(total.columns)
        )
        return _Answers(sites, replace(total, columns=columns))

    def summed(self) -> _Answers:
        """Return the statistics of all sites together, of which the server sees only the sum.

        Raises:
            TrainingError: too few nodes take part.
            RunError: the sum is not what it should be.
        """
        exchange = self._exchange
        keys = self._keys()
        self._check_sites(len(keys), self._least)
        first = next(iter(self._requests.values()))
        session, least = session_of(first), threshold(len(keys), self._least)
        public = {node: item.keys for node, item in keys.items()}
        collector = Collector(session, least, self._layout.size, public)
        every = tuple(item for _, item in sorted(keys.items()))
        to_share = {
            node: SharesRequest(run=first.run, round=first.round, node=str(node), keys=every)
            for node in keys
        }
        for node, reply in exchange.ask(SHARES, to_share, SharesReply):
            try:
                collector.take_shares(node, by_node(reply.shares), reply.commitments)
            except SecureSumError as error:
                exchange.fault(node, error.what)
        self._check_sites(len(collector.shared), least)
        requests = {
            node: TotalsRequest(
                **dict(self._requests[node]),
                node=str(node),
                shares=texts(collector.texts_for(node)),
                bound=texts(collector.commitments_for(node)),
            )
            for node in collector.shared
        }
        for node, words in self._asked(TOTALS, requests).items():
            collector.add(node, words)
        self._check_sites(len(collector.survivors), least)
        self._unmask(collector, first)
        try:
            words = collector.unmasked()
        except SecureSumError as error:
            raise RunError(
                "The sum of the sites' statistics cannot be unmasked.",
                got="; ".join(filter(None, [error.what, self._faults()])),
                do="see that the nodes stay connected, and ask again",
            ) from None
        there = sorted(collector.survivors, key=lambda node: self._sites[node].client)
        total = self._read(there, words, "all")
        if total.examples != sum(self._sites[node].examples for node in there):
            raise RunError(
                "The sum of the sites' statistics is not of the examples that it should be of.",
                got=total.examples,
                expected=sum(self._sites[node].examples for node in there),
                do="see what the nodes' logs say, and ask again",
            )
        sites = tuple(
            SiteStatistics(
                self._sites[node].name,
                self._sites[node].examples,
                self._replies[node].minimum,
                {str(kind): value for kind, value in self._replies[node].noise.items()},
            )
            for node in there
        )
        return _Answers(sites, total)

    def _faults(self) -> str:
        """Return why sites have not answered, each with its name."""
        names = {site.client: site.name for site in self._sites.values()}
        faults = self.traffic.faults.items()
        room = ROOM // max(len(faults), 1)
        return "; ".join(
            f"{', '.join(names[client] for client in clients)}: {reason:.{room}}"
            for reason, clients in faults
        )

    def _check_sites(self, count: int, minimum: int) -> None:
        """Refuse to go on with too few sites.

        Raises:
            TrainingError: they are too few.
        """
        if count < minimum:
            facts = [f"{count} of {len(self._sites)} sites", self._faults()]
            raise TrainingError(
                "A secure sum of statistics has too few sites.",
                got="; ".join(filter(None, facts)),
                expected=f"at least {minimum}",
                do="see that the sites' nodes are up and that their policies consent "
                "([statistics] kinds), and ask again",
            )

    def _keys(self) -> dict[int, NodeKeys]:
        requests = {
            node: KeysRequest(
                run=request.run,
                round=request.round,
                agreement=request.agreement,
                data_digest=request.data_digest,
                lr=request.lr,
                clients=request.clients,
                node=str(node),
            )
            for node, request in self._requests.items()
        }
        keys: dict[int, NodeKeys] = {}
        for node, reply in self._exchange.ask(KEYS, requests, KeysReply):
            item, others = reply.keys, [one.keys for one in keys.values()]
            if item is None or (item.node, item.clients) != (str(node), 1):
                self._exchange.fault(node, "sent no keys of its own")
            elif not are_usable(item.keys, others):
                self._exchange.fault(node, "sent keys that cannot be used")
            else:
                keys[node] = item
        return keys

    def _unmask(self, collector: Collector, first: StatisticsRequest) -> None:
        requests = {
            node: UnmaskRequest(
                run=first.run,
                round=first.round,
                node=str(node),
                survivors=tuple(map(str, collector.survivors)),
                dropped=tuple(map(str, collector.dropped)),
            )
            for node in collector.survivors
        }
        replies = self._exchange.ask(
            UNMASK, requests, UnmaskReply, "unmask", lambda: collector.is_open
        )
        for node, reply in replies:
            try:
                collector.take_revealed(node, reply.revealed)
            except SecureSumError as error:
                self._exchange.fault(node, error.what, "unmask")

    def _asked(self, kind: str, requests: Mapping[int, StatisticsRequest]) -> dict[int, Words]:
        """Return the numbers that nodes have sent, masked or not; the others get a fault."""
        contents = {
            node: RecordDict({HEADER: request.record()}) for node, request in requests.items()
        }
        answers: dict[int, Words] = {}
        silent = set(requests)
        for reply in self._connection.ask(contents, kind):
            silent.discard(reply.node)
            try:
                content = reply.checked()
                header = StatisticsReply.read(content)
                if header.run != requests[reply.node].run:
                    raise WireError("A reply belongs to another round or run.")
                vector = tensors(unpack(content, TENSORS, self._layout.spec))[VECTOR]
                words: Words = vector.numpy().view(np.uint64)
                if kind == STATISTICS:
                    self._check(self._sites[reply.node], header, words)
            except WireError as error:
                self._exchange.fault(reply.node, error.short())
                continue
            self._replies[reply.node], answers[reply.node] = header, words
        for node in silent:
            self._exchange.fault(node, "no reply before the deadline")
        return answers

    def _check(self, site: _Site, header: StatisticsReply, words: Words) -> None:
        """Refuse numbers that cannot be those of a site.

        Raises:
            WireError: they are of other examples than it has, or count more than these.
        """
        for (kind, _), part in self._layout.parts(words).items():
            counts = part[:1] if kind == "moments" else part
            most = site.examples + LARGEST_NOISE * max(header.noise.values(), default=0.0)
            if kind == EXAMPLES and int(part[0]) != site.examples:
                raise WireError("A site's statistics are of other examples than it has.")
            is_count = counts.min() >= 0 and counts.max() <= most
            if not is_count or (not header.noise and int(counts.sum()) > site.examples):
                raise WireError(f"A site counts more {kind} than it has examples, or fewer than 0.")

    def _read(self, nodes: Sequence[int], words: Words, name: str) -> SiteStatistics:
        """Return what the sum of some nodes' numbers says."""
        replies = [self._replies[node] for node in nodes]
        parts = self._layout.parts(words)
        variances = {
            kind: sum(reply.noise.get(kind, 0.0) ** 2 for reply in replies)
            for kind in self._layout.kinds
        }
        labels, examples = parts.get(("labels", -1)), int(parts[EXAMPLES, -1][0])
        hidden = None if any(variances.values()) else [reply.minimum - 1 for reply in replies]
        return SiteStatistics(
            name=name,
            examples=examples,
            minimum=max(reply.minimum for reply in replies),
            noise={kind: math.sqrt(value) for kind, value in variances.items() if value},
            labels=None if labels is None else _counts(labels),
            columns=tuple(
                _column(index, form, parts, examples, hidden)
                for index, form in enumerate(self._layout.columns)
            ),
        )


def _counts(part: Ints) -> Counts:
    return Counts(tuple(part[:-1].tolist()), int(part[-1]))


def _column(
    index: int,
    form: ColumnForm,
    parts: Mapping[PartName, Ints],
    examples: int,
    hidden: Sequence[int] | None,
) -> ColumnStatistics:
    """Return the statistics of a column.

    Args:
        index: of the column.
        form: of the column.
        parts: of an answer, or of a sum of answers.
        examples: of these sites.
        hidden: the largest count that each of them does not tell of; None where counts have noise.
    """
    missing, counts = parts.get(("missing", index)), parts.get(("categories", index))
    cells = parts.get(("quantiles", index))
    known, mean, deviation = _moments(parts.get(("moments", index)))
    found = () if cells is None else quantiles(cells, SHARES_OF_VALUES)
    return ColumnStatistics(
        name=form.name,
        categories=form.categories,
        missing=None if missing is None else int(missing[0]),
        missing_between=None
        if missing is None or hidden is None
        else _missing_between(int(missing[0]), examples, hidden),
        known=known,
        mean=mean,
        deviation=deviation,
        counts=None if counts is None else _counts(counts),
        quantiles=tuple(QuantileValue(q.share, q.value, q.low, q.high) for q in found),
    )


def _missing_between(told: int, examples: int, hidden: Sequence[int]) -> tuple[int, int]:
    """Return between which numbers the missing values of one site, or of a sum, are."""
    is_one, reach = len(hidden) == 1, sum(hidden)
    low = told if is_one and told < examples else told - reach
    high = told if is_one and told else told + reach
    return max(low, 0), min(high, examples)


def _added(columns: Sequence[ColumnStatistics]) -> tuple[int, int] | None:
    """Return between which numbers the missing values of a column are at all sites together."""
    ranges = [column.missing_between for column in columns if column.missing_between is not None]
    if len(ranges) < len(columns):
        return None
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)


def _moments(part: Ints | None) -> tuple[int | None, float | None, float | None]:
    """Return number, mean and deviation; the sums are exact, so nothing is lost by subtraction."""
    if part is None:
        return None, None, None
    count, limbs = int(part[0]), (len(part) - 1) // 2
    if count <= 0:
        return 0, None, None
    total, squares = (
        Fraction(whole_of_limbs(part[start : start + limbs]), 2**PLACES) for start in (1, 1 + limbs)
    )
    variance = squares / count - (total / count) ** 2
    return count, float(total / count), math.sqrt(max(float(variance), 0.0))
