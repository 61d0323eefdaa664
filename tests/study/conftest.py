"""Every test here fails where it would hang."""

from collections.abc import Iterator

import pytest

from toys import deadline


@pytest.fixture(autouse=True)
def _watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    with deadline(600 if request.node.get_closest_marker("slow") else 90):
        yield
