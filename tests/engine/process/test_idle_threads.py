"""Where torch was loaded first, a sleeping team of threads lets its idle threads sleep soon too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from each import each

CODE = """
import os, threading
import {first}
import {second}
from fedkeel.engine.process.idle_threads import let_idle_threads_sleep
from fedkeel.engine.process.numerics import use_numerics

torch.set_num_threads({threads})
for _ in range(2):
    before = os.listdir("/proc/self/task")
    let_idle_threads_sleep()
    assert torch.get_num_threads() == {threads}
    print(len(os.listdir("/proc/self/task")) - len(before), end=" ")
if os.fork() == 0:  # a fork has none of the team, and trains as ever
    let_idle_threads_sleep()
    with use_numerics("float32"):
        assert float(torch.ones(1 << 17).sum()) == 1 << 17
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system tells no threads")
@each(
    ("first", "threads", "said", "expected"),
    [
        ("torch", 2, {}, "3 0 0"),
        ("torch", 1, {}, "0 0 0"),
        ("torch", 2, {"GOMP_SPINCOUNT": "5"}, "0 0 0"),
        ("torch", 2, {"OMP_WAIT_POLICY": "active"}, "0 0 0"),
        ("fedkeel", 2, {}, "0 0 0"),
    ],
)
def test_a_team_sleeps_where_torch_was_loaded_first(
    first: str, threads: int, said: dict[str, str], expected: str
) -> None:
    second = "fedkeel" if first == "torch" else "torch"
    code = CODE.format(first=first, second=second, threads=threads)
    ours = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    environment = {k: v for k, v in os.environ.items() if k not in ours} | said
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == expected
