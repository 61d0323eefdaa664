"""What the user computes after a run must not ask the system for its memory again and again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the settings are those of the GNU C library"
)

SCRIPT = """
import resource
import torch
from fedkeel.engine.process.malloc import keeping_freed_memory

def page_faults():
    torch.ones(262144)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        torch.ones(262144)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with keeping_freed_memory():
    within = page_faults()
    with keeping_freed_memory():
        pass
    after_an_inner_run = page_faults()
print(within, after_an_inner_run, page_faults())
"""
"""Makes and frees a tensor of 256 pages a hundred times, in a run and after it."""


def test_in_a_run_and_after_it_freed_memory_is_used_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    within, after_an_inner_run, after = map(int, done.stdout.split())
    assert within < 2560
    assert after_an_inner_run < 2560
    assert after < 2560
