"""Every test here fails where it would hang."""

from collections.abc import Iterator

import pytest

from toys import deadline


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with deadline(90):
        yield
