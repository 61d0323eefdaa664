"""What records and report know of virtual time."""

from __future__ import annotations

from fedkeel.base.feature import Declaration, Entry, Figure
from fedkeel.features.time.settings import System
from fedkeel.records.rows import Count, Finite


class SystemDeclaration(Declaration):
    """The table [system], the time of each round, and how old the updates in it were."""

    feature = "fedkeel.features.time.feature:VirtualTime"
    table = "system"
    settings_class = System
    in_short_runs = True
    places = ("devices", "trace")
    meaning = "how long clients take, in virtual time; None counts no time."
    example = "speed='lognormal', sigma=1.0"
    figures = (
        Figure(
            key="virtual_seconds",
            heading="to target",
            unit="hours",
            description="Virtual time at the end of the round, since the beginning of the run; not "
            "there where no time is counted.",
            better="low",
            of_run="target",
            per_unit=3600.0,
            progress="{:.3g} virtual hours",
            time="virtual time",
        ),
    )
    entries = (
        Entry(
            key="staleness",
            form=list[Count],
            description="For each of `clients`, the steps that the server had made since it sent "
            "the client the model; not there where the server waits.",
            default=[],
        ),
        Entry(
            key="staleness_seconds",
            form=list[Finite],
            description="The same in seconds: of virtual time in a simulation, else of real time.",
            default=[],
        ),
    )
