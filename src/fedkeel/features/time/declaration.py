"""What records and report know of virtual time."""

from __future__ import annotations

from fedkeel.base.feature import Declaration
from fedkeel.features.time.settings import System


class SystemDeclaration(Declaration):
    """The table [system]."""

    feature = "fedkeel.features.time.feature:VirtualTime"
    table = "system"
    settings_class = System
    in_short_runs = True
    places = ("devices", "trace")
    meaning = "how long clients take, in virtual time; None counts no time."
    example = "speed='lognormal', sigma=1.0"
