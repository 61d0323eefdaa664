"""A job: a process of one thread that makes one run of a table after the other.

It says how it goes along a line, and ends with the line: where the process that began it is gone,
it stops within a round, and the run goes on later from its checkpoint.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from fedkeel import config
from fedkeel.errors import FedkeelError
from fedkeel.experiment.execute import start
from fedkeel.experiment.prepare import Ingredients, gather, prepare
from fedkeel.experiment.progress import Silent
from fedkeel.records import RoundRecord

EVERY = 0.2
"""Seconds between a job's words on its progress."""

Word = tuple[str, Any, Any]
"""What a job says: (``begin``, rounds, done), (``row``, round, top1) or (``end``, how, why)."""

End = Literal["finished", "interrupted", "failed"]


class Say:
    """Sends words to the one who follows; where nobody is left to hear, the run is over."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def __call__(self, word: Word) -> None:
        """Send a word.

        Raises:
            KeyboardInterrupt: nobody hears it.
        """
        try:
            self._line.send(word)
        except OSError:
            raise KeyboardInterrupt from None


class Teller(Silent):
    """A run's watcher that says a word now and then; how it ends is said by the maker."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._last = 0.0

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Say how far the run is."""
        self._say(("begin", rounds, done))

    def row(self, row: RoundRecord) -> None:
        """Say a round, at most every `EVERY` seconds."""
        if time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            self._say(("row", row.round, None if row.test is None else row.test.top1))


class Maker:
    """Makes runs one after the other, and keeps the data of the last one for the next."""

    def __init__(self) -> None:
        self._key = ""
        self._ingredients: Ingredients | None = None

    def make(self, experiment: config.Experiment, folder: Path, told: Teller) -> End:
        """Make a run, or go on with it.

        Raises:
            FedkeelError: it cannot be made.
        """
        prepared = prepare(experiment, self._gather(experiment))
        result = start(prepared, folder, resume=True, watcher=told)
        if result.record.status != "finished":
            return "interrupted"
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        return "finished"

    def _gather(self, experiment: config.Experiment) -> Ingredients:
        parts = (experiment.data, experiment.partition, experiment.model)
        key = repr((experiment.seed, *(part.model_dump_json() for part in parts)))
        if key != self._key or self._ingredients is None:
            self._ingredients = None  # before the next one is loaded
            self._ingredients, self._key = gather(experiment), key
        return self._ingredients


def work(line: Connection, inherited: Sequence[Connection] = ()) -> None:
    """Make the runs that come along a line, until it ends: a job's process.

    Args:
        line: orders come along it, and words go back.
        inherited: lines of other jobs, which a fork leaves open here.
    """
    for other in inherited:
        other.close()  # or they would not end with the one who gave the work
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if hasattr(os, "setsid"):
        os.setsid()  # an interrupt from the keyboard is for the one who gave the work
    torch.set_num_threads(1)
    maker, say = Maker(), Say(line)
    while True:
        try:
            values, folder = line.recv()
            experiment = config.build(config.Experiment, values, "a table's cell")
            try:
                word: Word = ("end", maker.make(experiment, Path(folder), Teller(say)), "")
            except FedkeelError as error:
                word = ("end", "failed", error.what)
            say(word)
        except (EOFError, OSError, KeyboardInterrupt):
            return
