"""Every test fails where it would hang."""

from collections.abc import Iterator

import pytest

from toys import deadline


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with deadline(120):
        yield
