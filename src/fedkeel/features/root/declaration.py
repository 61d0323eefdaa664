"""What records and report know of examples at the server."""

from __future__ import annotations

from fedkeel.base.feature import Declaration
from fedkeel.features.root.settings import Root


class RootDeclaration(Declaration):
    """The table [root], the server's own examples."""

    feature = "fedkeel.features.root.feature:RootExamples"
    table = "root"
    settings_class = Root
    places = ("file",)
    in_short_runs = True
    meaning = "examples at the server; None for none."
    example = "examples=100"
    record_class = str
    record_meaning = "where the server's own examples come from, and how many there are, in words."
    label = "server's examples"
