"""Each client by its name: its score with each method, what it gains, and whether that is shown.

A gain is of the score on the client's own examples after the last round, seed by seed, against the
model that the client trains alone (`local`) and against FedAvg. A gain or a loss over `local` is
*shown* if its p-value, corrected for all clients and methods of the table (Holm), is below 0.05,
and if it is larger than two standard errors of a share on so many examples: scores on few examples
are so coarse that seeds may agree by chance. So the step of such a score, 1 / examples, is added to
its spread over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from fedkeel.errors import counted, enumeration
from fedkeel.records.baselines import LOCAL
from fedkeel.records.paired import LEVEL, PairedDifference, holm, paired_difference
from fedkeel.records.score import MetricInfo
from fedkeel.records.statistics import Stat
from fedkeel.report.claims import MIN_SEEDS
from fedkeel.report.client_scores import ClientScores
from fedkeel.report.formatting import (
    MISSING,
    format_difference,
    format_score,
    format_signed,
    quoted,
)
from fedkeel.report.runs import MethodResults, RunResults
from fedkeel.report.text_table import TextTable

MOST_CLIENTS = 30
"""Clients up to which each is shown by its name."""

_LISTED = 6
"""Clients that a sentence names."""

ClientOutcome = Literal["gains", "loses", "open", "too few examples", "too few seeds"]

MARKS: dict[ClientOutcome, str] = {"gains": "▲", "loses": "▼"}
"""What stands beside a gain or a loss that is shown."""


@dataclass(frozen=True)
class ClientGain:
    """What a client gains by a method.

    Args:
        difference: seed by seed; above 0 the client gains, also where a lower score is better.
        score: what it gains of.
        p_value: that there is no difference, corrected; None where seeds are too few to tell.
        comparisons: number of gains that it is corrected for.
        noise: a smaller difference may come from the choice of the examples; 0 where the score is
            no share.
        least_noise: what that is when all examples of the client have been in its test part.
    """

    difference: PairedDifference
    score: MetricInfo
    p_value: float | None = None
    comparisons: int = 1
    noise: float = 0.0
    least_noise: float = 0.0

    @property
    def mean(self) -> float:
        """The mean gain over seeds."""
        return self.difference.stat.mean

    @property
    def outcome(self) -> ClientOutcome:
        """What the seeds show."""
        if self.p_value is None:
            return "too few seeds"
        if abs(self.mean) < self.noise and (self.p_value < LEVEL or self.difference.is_coarse):
            return "too few examples"
        if self.p_value >= LEVEL:
            return "open"
        return "gains" if self.mean > 0 else "loses"

    @property
    def more_seeds(self) -> int | None:
        """Further seeds that would show a gain of this mean and spread; None where none would."""
        needed = self.difference.seeds_needed(LEVEL / self.comparisons)
        if needed is None or self.p_value is None or abs(self.mean) < self.least_noise:
            return None
        return max(1, needed - len(self.difference.values))

    @property
    def mark(self) -> str:
        """``▲`` or ``▼`` where a gain or a loss is shown, else ``""``."""
        return MARKS.get(self.outcome, "")

    @property
    def text(self) -> str:
        """The mean gain with its sign, in points for a share."""
        return self._signed(self.mean)

    @property
    def interval_text(self) -> str:
        """The 95 % t-interval over seeds; "" for one seed."""
        interval = self.difference.interval
        if interval is None:
            return ""
        return f"[{self._signed(interval.low)}, {self._signed(interval.high)}]"

    def _signed(self, value: float) -> str:
        text = format_signed(self.score.scale * value, 1 if self.score.is_share else None)
        return text if text.startswith("−") or not text.strip("0.,") else f"+{text}"


@dataclass(frozen=True)
class ClientCell:
    """A client with a method.

    Args:
        score: on its own examples, over seeds; None where it has none.
        over_local: gain over the model that it trains alone; None where there is none.
        over_fedavg: gain over FedAvg's model.
    """

    score: Stat | None
    over_local: ClientGain | None
    over_fedavg: ClientGain | None


@dataclass(frozen=True)
class ClientLine:
    """A client with all methods.

    Args:
        name: its name, or its number.
        examples: that it is measured on, in the first run.
        cells: one for each method.
    """

    name: str
    examples: int
    cells: tuple[ClientCell, ...]

    @property
    def called(self) -> str:
        """Its name in a sentence, where a number alone could be anything."""
        return f"client {self.name}" if self.name.isdecimal() else self.name


@dataclass(frozen=True)
class EachClient:
    """All clients of a comparison by name, from the largest gain to the largest loss.

    Args:
        score: what is measured.
        methods: what is compared: of a method with personal models, these.
        lines: one for each client.
        seeds: the smallest number of seeds of a method.
        has_names: whether the data name the clients.
        is_held_out: whether no client is measured on what it is trained on.
    """

    score: MetricInfo
    methods: tuple[ClientScores, ...]
    lines: tuple[ClientLine, ...]
    seeds: int
    has_names: bool
    is_held_out: bool

    def __repr__(self) -> str:
        """Return the table, and what it shows in sentences."""
        return "\n".join([self.table().markdown(), *self.sentences])

    @cached_property
    def federated(self) -> list[int]:
        """Places of the methods that are not baselines."""
        return [i for i, m in enumerate(self.methods) if not m.method.summary.baseline]

    @property
    def has_local(self) -> bool:
        """Whether there is anything to gain over."""
        return any(cell.over_local for line in self.lines for cell in line.cells)

    @property
    def has_fedavg(self) -> bool:
        """Whether there is a gain over FedAvg."""
        return any(cell.over_fedavg for line in self.lines for cell in line.cells)

    @property
    def comparisons(self) -> int:
        """Gains over `local` that are tested together."""
        return sum(bool(g and g.p_value is not None) for line in self.lines for g in _gains(line))

    @property
    def sentences(self) -> list[str]:
        """For whom federation is worth it: what is shown, and what is open.

        Nothing where clients have no names or hold nothing out, or where the comparison lacks
        `local` or a method beside it.
        """
        if not (self.has_names and self.is_held_out and self.has_local and self.federated):
            return []
        shown = [self._gained(line) for line in self.lines]
        lost = [self._lost(line) for line in self.lines]
        decided = [a or b for a, b in zip(shown, lost, strict=True)]
        left = [line for line, text in zip(self.lines, decided, strict=True) if not text]
        return [self._shown(shown, lost), *self._open(left, is_all=len(left) == len(self.lines))]

    def _shown(self, gained: Sequence[str], lost: Sequence[str]) -> str:
        if self.seeds < MIN_SEEDS:
            few = "One seed shows" if self.seeds == 1 else f"{self.seeds} seeds show"
            return f"{few} of no client whether federation is worth it: run {MIN_SEEDS} or more."
        gains, losses = list(filter(None, gained)), list(filter(None, lost))
        texts = [f"federation is worth it for {enumeration(gains, _LISTED)}"] if gains else []
        texts += [enumeration(losses, _LISTED)] if losses else []
        shown = "; ".join(texts) or "no client is shown to gain or to lose by federation"
        when = "after the last round and beside training alone"
        return f"Over {self.seeds} seeds, {when}, {shown}."

    def _gained(self, line: ClientLine) -> str:
        """Return the largest gain that is shown, "" for none."""
        shown = [(g.mean, i, g) for i, g in self._of(line) if g.outcome == "gains"]
        if not shown:
            return ""
        _, place, best = max(shown, key=lambda item: item[0])
        text = f"{line.called} ({best.text}{self._points} with {self._method(place)}"
        worse = [(i, g) for i, g in self._of(line) if g.outcome == "loses"]
        if worse:
            text += f"; with {self._method(worse[0][0])} it loses {self._size(worse[0][1])}"
        return f"{text})"

    def _lost(self, line: ClientLine) -> str:
        """Return the loss that is shown of a client without a shown gain, "" for none."""
        gains = self._of(line)
        losses = [(i, g) for i, g in gains if g.outcome == "loses"]
        if not losses or any(g.outcome == "gains" for _, g in gains):
            return ""
        is_fedavg = [item for item in losses if self._record(item[0]) == "fedavg"]
        place, loss = (is_fedavg or sorted(losses, key=lambda item: item[1].mean))[0]
        text = f"{line.called} loses {self._size(loss)} with {self._method(place)}"
        others = [(g.mean, i, g) for i, g in gains if g.outcome != "loses"]
        if not others:
            return text + (" and with every other method" if len(gains) > 1 else "")
        _, place, best = max(others, key=lambda item: item[0])
        if best.mean >= 0:
            return f"{text} and none with {self._method(place)} ({best.text})"
        return f"{text}; with {self._method(place)} a loss is not shown ({best.text})"

    def _open(self, lines: Sequence[ClientLine], *, is_all: bool) -> list[str]:
        """Return a sentence on the clients for which nothing is shown; none without any."""
        if not lines:
            return []
        leading = self.leading
        gains = [(line, line.cells[leading].over_local) for line in lines]
        known = [(line, gain) for line, gain in gains if gain is not None]
        texts = [
            f"{line.called} ({gain.text}{self._points if place == 0 else ''})"
            for place, (line, gain) in enumerate(known)
        ]
        if not texts:
            return []
        begin = "Measured so far" if is_all else "Open for the others, measured so far"
        best = " (best on average)" if len(self.federated) > 1 else ""
        text = f"{begin} with {self._method(leading)}{best}: {enumeration(texts, _LISTED)}"
        return [f"{text}{self._needed(known)}."]

    def _needed(self, known: Sequence[tuple[ClientLine, ClientGain]]) -> str:
        """Return which of these would be shown first, and by how many more seeds."""
        if any(gain.p_value is None for _, gain in known):
            return ""
        seeds = [(gain.more_seeds, line.called) for line, gain in known if gain.more_seeds]
        if not seeds:
            return "; these are too small to be shown on so few examples"
        count, name = min(seeds)
        return f"; about {counted(count, 'more seed')} would show it for {name}"

    @cached_property
    def leading(self) -> int:
        """The place of the federated method with the largest mean gain, or the best mean score."""
        return max(self.federated or range(len(self.methods)), key=self._mean_gain)

    def _mean_gain(self, place: int) -> float:
        cells = [line.cells[place] for line in self.lines]
        if gains := [cell.over_local.mean for cell in cells if cell.over_local]:
            return statistics.fmean(gains)
        means = [self.score.sign * cell.score.mean for cell in cells if cell.score]
        return statistics.fmean(means) if means else -math.inf

    def _of(self, line: ClientLine) -> list[tuple[int, ClientGain]]:
        """Return the gains of federated methods over `local`, with the places of the methods."""
        gains = [(place, line.cells[place].over_local) for place in self.federated]
        return [(place, gain) for place, gain in gains if gain is not None]

    def _method(self, place: int) -> str:
        return quoted(self.methods[place].method.label)

    def _record(self, place: int) -> str:
        return self.methods[place].method.record.method

    def _size(self, gain: ClientGain) -> str:
        return format_difference(gain.mean, self.score)

    @property
    def _points(self) -> str:
        return f" {self.score.unit_of_difference}".rstrip()

    @property
    def notes(self) -> list[str]:
        """What a reader of the table has to know, one sentence each."""
        notes = [
            f"Each client on its own examples after the last round, {self.score.label} "
            f"over {counted(self.seeds, 'seed')}; of a method with personal models, these."
        ]
        if not self.is_held_out:
            notes.append(
                "Clients are measured on the examples that they are trained on, so training alone "
                "looks better than it is: set partition.holdout, in Python holdout=0.25 of "
                "fedkeel.from_clients."
            )
        if not self.has_local:
            return notes
        if self.seeds == 1:
            return [*notes, "One seed has no spread, so no interval, and shows no gain."]
        points = f", in {unit}" if (unit := self.score.unit_of_difference) else ""
        notes.append(
            f"Gain: over {LOCAL}, the model that the client trains alone{points}; in brackets the "
            "95 % t-interval over seeds, of each gain by itself"
            + (
                "; the chance of one example more or less is added to the spread."
                if self.score.step(1)
                else "."
            )
        )
        if self.seeds < MIN_SEEDS:
            return [*notes, f"Fewer than {MIN_SEEDS} seeds show no gain."]
        return [
            *notes,
            f"▲ gains, ▼ loses: shown over local, corrected for {self.comparisons} comparisons "
            "(Holm), and too large for the chance of so few examples; without a mark nothing is "
            "shown.",
        ]

    def table(self) -> TextTable:
        """Return the table for a terminal: scores of `local`, and gains over it."""
        alone = next((i for i, m in enumerate(self.methods) if _is_local(m.method)), None)
        shown = [i for i in range(len(self.methods)) if i != alone]
        unit = f"\n{self.score.unit}" if self.score.unit else ""
        gain = "\ngain" if self.has_local else unit
        first = [] if alone is None else [f"{LOCAL}{unit}"]
        headings = ["client", *first, *(f"{self.methods[i].method.label}{gain}" for i in shown)]
        rows = []
        for line in self.lines:
            places = [*([] if alone is None else [alone]), *shown]
            texts = (_cell_text(line.cells[place], self.score) for place in places)
            rows.append([f"{line.name}\n{counted(line.examples, 'example')}", *texts])
        return TextTable(headings, rows, notes=[" ".join(self.notes)], has_code=False)

    def to_json(self, label: str) -> list[dict[str, Any]]:
        """Return the clients of a method as plain values; shares are in [0, 1]."""
        place = next((i for i, m in enumerate(self.methods) if m.method.label == label), None)
        if place is None:
            return []
        return [
            {
                "client": line.name,
                "examples": line.examples,
                "score": cell.score.mean if cell.score else None,
                **_gain_json("local", cell.over_local),
                **_gain_json("fedavg", cell.over_fedavg),
                "outcome": cell.over_local.outcome if cell.over_local else None,
            }
            for line in self.lines
            for cell in [line.cells[place]]
        ]


def each_client(clients: Sequence[ClientScores]) -> EachClient | None:
    """Return all clients by name, None where they are many or not the same in all runs.

    Args:
        clients: the scores of a comparison, see `client_scores`.
    """
    own = {item.method.index: item for item in clients}  # personal models come after the global one
    methods = tuple(own.values())
    runs = [run for item in methods for run in item.method.runs]
    names = _names(runs)
    if not names:
        return None
    local = next((m for m in methods if _is_local(m.method)), None)
    fedavg = next((m for m in methods if m.method.record.method == "fedavg"), None)
    counts, share = _examples(runs[0], len(names)), _new_share(runs)
    made = EachClient(
        score=methods[0].score,
        methods=methods,
        lines=tuple(
            ClientLine(
                name,
                counts[k],
                tuple(_cell(m, k, counts[k], share, local, fedavg) for m in methods),
            )
            for k, name in enumerate(names)
        ),
        seeds=min(len(item.runs) for item in methods),
        has_names=bool(runs[0].record.partition.names),
        is_held_out=all(_holds_out(run) for run in runs),
    )
    made = replace(made, lines=_corrected(made.lines))
    place = made.leading

    def order(line: ClientLine) -> float:
        cell = line.cells[place]
        if cell.over_local is not None:
            return -cell.over_local.mean
        return math.inf if cell.score is None else -made.score.sign * cell.score.mean

    return replace(made, lines=tuple(sorted(made.lines, key=order)))


def _names(runs: Sequence[RunResults]) -> tuple[str, ...]:
    """Return the names of the clients, or numbers; none where they are not the same in all runs.

    Clients that a seed draws are others with each seed.
    """
    partitions = [run.record.partition for run in runs]
    first = partitions[0] if partitions else None
    if first is None or not 0 < first.clients <= MOST_CLIENTS:
        return ()
    if len({(p.clients, tuple(p.names)) for p in partitions}) > 1:
        return ()
    if first.names:
        return tuple(first.names)
    is_drawn_anew = len({p.settings.get("seed") for p in partitions}) > 1
    return () if is_drawn_anew else tuple(f"client {k}" for k in range(first.clients))


def _examples(run: RunResults, clients: int) -> list[int]:
    """Return how many examples each client is measured on."""
    scored = (row.per_client or row.personal for row in reversed(run.rows))
    columns: Mapping[str, Sequence[float | None]] = next(filter(None, scored), {})
    counts = [int(count or 0) for count in columns.get("examples", ())]
    return counts + [0] * (clients - len(counts))


def _new_share(runs: Sequence[RunResults]) -> float:
    """Return the share of its examples that each seed draws anew; 1 where all seeds have the same.

    Seeds that draw a quarter have seen all examples after four seeds at the earliest.
    """
    partitions = [run.record.partition for run in runs]
    share = partitions[0].settings.get("holdout")
    is_drawn_anew = len({p.settings.get("seed") for p in partitions}) > 1
    return float(share) if share and is_drawn_anew and partitions[0].held_out else 1.0


def _holds_out(run: RunResults) -> bool:
    return bool(run.record.partition.held_out) or run.record.partition.kind == "nodes"


def _is_local(method: MethodResults) -> bool:
    return method.record.method == LOCAL


def _cell(
    scores: ClientScores,
    client: int,
    examples: int,
    share: float,
    local: ClientScores | None,
    fedavg: ClientScores | None,
) -> ClientCell:
    """Return a client with a method; its gains are not tested yet."""
    return ClientCell(
        Stat.of(run.by_client.get(client) for run in scores.runs),
        _gain(scores, local, client, examples, share),
        _gain(scores, fedavg, client, examples, share),
    )


def _gain(
    scores: ClientScores,
    reference: ClientScores | None,
    client: int,
    examples: int,
    share: float,
) -> ClientGain | None:
    if reference is None or scores is reference:
        return None
    info = scores.score
    own, other = (
        {run.seed: run.by_client.get(client) for run in item.runs} for item in (scores, reference)
    )
    found = paired_difference(own, other, info.step(examples))
    if found is None:
        return None
    difference = replace(found, values=tuple(info.sign * value for value in found.values))
    seeds = len(difference.values)
    can_tell = seeds >= MIN_SEEDS and not any(
        item.method.summary.has_identical_runs for item in (scores, reference)
    )
    level = Stat.of([*own.values(), *other.values()])
    per_example = _share_error(level.mean if level and info.is_share else None)
    seen = examples * min(float(seeds), 1 / share)
    return ClientGain(
        difference,
        info,
        difference.p_value if can_tell else None,
        noise=per_example / math.sqrt(seen) if seen else 0.0,
        least_noise=per_example / math.sqrt(examples / share) if examples else 0.0,
    )


def _share_error(mean: float | None) -> float:
    """Return two standard errors of a share, times the root of the number of examples."""
    if mean is None:
        return 0.0
    level = min(1.0, max(0.0, mean))
    return 2 * math.sqrt(level * (1 - level))


def _gains(line: ClientLine) -> list[ClientGain | None]:
    return [cell.over_local for cell in line.cells]


def _corrected(lines: Sequence[ClientLine]) -> tuple[ClientLine, ...]:
    """Return the lines with the p-values of all gains over `local` corrected together."""
    gains = [gain for line in lines for gain in _gains(line) if gain and gain.p_value is not None]
    values = iter(holm([gain.p_value or 0.0 for gain in gains]))

    def corrected(cell: ClientCell) -> ClientCell:
        gain = cell.over_local
        if gain is None or gain.p_value is None:
            return cell
        return replace(cell, over_local=replace(gain, p_value=next(values), comparisons=len(gains)))

    return tuple(replace(line, cells=tuple(map(corrected, line.cells))) for line in lines)


def _cell_text(cell: ClientCell, score: MetricInfo) -> str:
    gain = cell.over_local
    if gain is None:
        return format_score(cell.score.mean, score, 1) if cell.score else MISSING
    return "\n".join(filter(None, (f"{gain.text} {gain.mark}".rstrip(), gain.interval_text)))


def _gain_json(name: str, gain: ClientGain | None) -> dict[str, float | None]:
    interval = gain.difference.interval if gain else None
    return {
        f"gain_over_{name}": gain.mean if gain else None,
        f"gain_over_{name}_low": interval.low if interval else None,
        f"gain_over_{name}_high": interval.high if interval else None,
    }
