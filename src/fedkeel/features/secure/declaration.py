"""What records and report know of secure sums."""

from __future__ import annotations

from fedkeel.base.feature import Declaration


class SecureSumsDeclaration(Declaration):
    """Sums of which a server sees no single update: asked for by flower.secure_aggregation."""

    feature = "fedkeel.features.secure.feature:SecureAggregation"
    table = "secure_sums"
    meaning = "the server sees sums over the nodes only, as flower.secure_aggregation says."
    record_class = str
    record_meaning = "in a federation of nodes, of how many nodes each sum is, in words."
    label = "secure sums"

    @classmethod
    def text(cls, record: str) -> str:
        """Return of how many nodes each sum is."""
        return record
