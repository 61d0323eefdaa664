"""One thread for all: toys are too small for more, and threads that wait for a busy core cost."""

import gc
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from fedkeel.base.settings import warn_once

# The same examples in every run: a fault is found by who makes it, not by the next one.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Leave modules and tests out of collections of garbage: a twelfth of the time went there."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the key of run folders away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    """Let each test see the warnings that a process gives once."""
    warn_once.cache_clear()


_elsewhere: set[str] = set()
"""Names of modules that are known not to lie in a test's folder: looking at each takes a while."""


@pytest.fixture(autouse=True)
def _forget_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a test imported from its folders: the next one may use the same name."""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - _elsewhere:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]
        else:
            _elsewhere.add(name)
