"""What a reader must know before the numbers: states, differences, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedkeel.errors import counted
from fedkeel.records.rows import NOT_NEEDED
from fedkeel.report.formatting import percent, without_folders
from fedkeel.report.runs import Entry, differences
from fedkeel.report.summary import finite

GREW = 10.0
"""How many times the untrained model's loss a last loss is taken to have blown up from."""


ROUNDS, RISE = 5, 0.02
"""After so many rounds accuracy is to have risen by so much, or nothing was learnt."""


def alerts(entries: Sequence[Entry]) -> list[str]:
    """Return what a reader must know before the numbers: states, differences, lost updates."""
    told = []
    for entry in entries:
        for run in entry.runs:
            if run.early or not run.finished:
                why = f" {without_folders(run.record.message)}" if run.record.message else ""
                told.append(f"{entry.label}, seed {run.record.seed}: {run.state}.{why}")
    told += [*unlike(entries), *went_wrong(entries)]
    found = [hint for entry in entries for run in entry.runs for hint in run.record.warnings]
    return told + [f"{one[0].upper()}{one[1:]}." for one in dict.fromkeys(found)]


def unlike(entries: Sequence[Entry]) -> list[str]:
    """Return what keeps a comparison from being like for like, one sentence each."""
    return [f"Not like for like. {one}" for one in differences(entries)]


def went_wrong(entries: Sequence[Entry]) -> list[str]:
    """Return what went wrong in runs that went on all the same."""
    told = []
    for entry in entries:
        told += [
            *_losses(entry),
            *_blown_up(entry),
            *_idle(entry),
            *_faults(entry),
            *_partial(entry),
        ]
    return told


def _losses(entry: Entry) -> list[str]:
    found = sum(run.summary.losses_not_finite for run in entry.runs)
    if not found:
        return []
    of = sum(len(run.rows) for run in entry.runs)
    return [f"{entry.label}: a loss was not finite in {found:,} of {of:,} rounds."]


def _blown_up(entry: Entry) -> list[str]:
    """Return which runs ended far above the loss that they began with."""
    told = []
    for run in entry.runs:
        losses = [finite(row.test.loss) for row in run.rows if row.test is not None]
        first, last = (losses[0], losses[-1]) if losses else (None, None)
        if first and last and last > GREW * first > 0:
            told.append(
                f"{entry.label}, seed {run.record.seed}: training blew up. The last test loss is "
                f"{last:,.4g}, of the untrained model {first:,.4g}: a lower local.lr may help."
            )
    return told


def _idle(entry: Entry) -> list[str]:
    """Return which runs are at best where the untrained model was."""
    told = []
    for run in entry.runs:
        found = [(row.round, row.test.top1) for row in run.rows if row.test is not None]
        scores = [score for _, one in found if (score := finite(one)) is not None]
        if len(scores) < 2 or found[0][0] or found[-1][0] < ROUNDS:
            continue
        if max(scores[1:]) < scores[0] + RISE < 1:
            told.append(
                f"{entry.label}, seed {run.record.seed}: nothing was learnt in {found[-1][0]:,} "
                f"rounds. The best accuracy is {percent(max(scores[1:]))} %, of the untrained "
                f"model {percent(scores[0])} %: is local.lr too high, or much too low?"
            )
    return told


def _faults(entry: Entry) -> list[str]:
    """Return what went wrong in a federation of nodes, most often first."""
    rounds, clients = Counter[str](), dict[str, set[int]]()
    rows = [row for run in entry.runs for row in run.rows]
    for row in rows:
        for words, own in row.faults.items():
            if not words.endswith(NOT_NEEDED):  # as was asked for
                rounds[words] += 1
                clients.setdefault(words, set()).update(own)
    told = []
    for words, count in rounds.most_common(3):
        named = sorted(clients[words])
        some = ", ".join(map(str, named[:8])) + (" and others" if len(named) > 8 else "")
        whose = f" ({'client' if len(named) == 1 else 'clients'} {some})" if named else ""
        of = counted(len(rows), "round")
        told.append(f"{entry.label}: {words}, in {count:,} of {of}{whose}.")
    if len(rounds) > 3:
        told.append(f"{entry.label}: {len(rounds) - 3} other faults are in rounds.jsonl.")
    return told


def _partial(entry: Entry) -> list[str]:
    """Return how many scores are of fewer examples than others, for a node was away."""
    told = []
    for run in entry.runs:
        counts = [row.test.examples for row in run.rows if row.test is not None]
        most = max(counts, default=0)
        few = [count for count in counts if count < most]
        if few:
            told.append(
                f"{entry.label}, seed {run.record.seed}: {len(few):,} of {len(counts):,} scores "
                f"are of fewer examples than the others, {min(few):,} of {most:,} at the least: "
                "they are not of the same clients."
            )
    return told
