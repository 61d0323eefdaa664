"""What records and report know of simulated attackers."""

from __future__ import annotations

from fedkeel.base.feature import Declaration, Entry
from fedkeel.features.attackers.settings import Adversary


class AttackersDeclaration(Declaration):
    """The table [adversary], who the attackers of a run are, and those of each round."""

    feature = "fedkeel.features.attackers.feature:Attackers"
    table = "adversary"
    settings_class = Adversary
    default = Adversary()
    in_short_runs = True
    meaning = "attackers among the clients."
    example = "kind='sign_flip', share=0.2"
    record_class = str
    record_meaning = "what simulated attackers do, and who they are, in words."
    label = "attackers"
    is_in_overview = True
    entries = (
        Entry(
            key="attackers",
            form=list[int],
            description="Those of `clients` that are simulated attackers; empty without any.",
            default=[],
            is_always_written=True,
        ),
    )

    @classmethod
    def text(cls, record: str) -> str:
        """Return what the attackers do and how many there are; the seed decides who they are."""
        return record.partition(":")[0]
