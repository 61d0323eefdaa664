"""Every test here fails where it would hang."""

from collections.abc import Callable, Iterator

import pytest
import torch

from toys import deadline


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with deadline(90):
        yield


@pytest.fixture
def keep_threads() -> Iterator[Callable[[int], None]]:
    """Set the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
