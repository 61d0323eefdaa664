"""One file of a run folder is damaged, or replaced by what a stranger could put there."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import tomli_w
import torch
from settings import OWN_MODULE, writable
from trial import Ended, arguments, attempt, command_ended, tally
from values import damage

from commands import EXPERIMENT, call, experiment

OWN = EXPERIMENT.replace('name = "mlp"', 'name = "own:Net"').replace(
    "[model.args]\nhidden = [8]\n", ""
)


class Evil:
    """What an unpickler would call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def make_runs(folder: Path) -> None:
    """Make a comparison of two finished runs, and a run that was interrupted."""
    (folder / "own.py").write_text(OWN_MODULE)
    file = experiment(folder, OWN)
    os.chdir(folder)
    for words in (
        ["compare", file, "--methods", "fedavg, scaffold", "--seeds", "1", "--out", "both", "-q"],
        ["run", file, "--out", "whole", "--quiet"],
    ):
        done = call(*words)
        assert done.code == 0, done.err
    shutil.copytree("whole", "half")
    half = Path("half")
    row = json.loads((half / "run.json").read_text())
    row["status"] = "interrupted"
    (half / "run.json").write_text(json.dumps(row))


COMMANDS = (
    ("whole", ["report", "whole"]),
    ("whole", ["predict", "whole", "new.csv"]),
    ("whole", ["export", "whole", "model.pt2"]),
    ("whole", ["run", "whole", "--resume", "--quiet"]),
    ("half", ["run", "half", "--resume", "--quiet"]),
    ("both", ["report", "both"]),
    ("both", ["compare", "toy.toml", "--methods", "fedavg, scaffold", "--out", "both", "-q"]),
)
"""The folder that a command reads, and the command."""


def one(number: int, seed: int, source: Path, marker: Path) -> Ended:
    """Make one trial."""
    draw = random.Random(f"{seed} {number}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        shutil.copytree(source, folder)
        os.chdir(folder)
        (folder / "new.csv").write_text("a,b,c,d,e,f\n1,2,3,4,5,6\n")
        read, words = draw.choice(COMMANDS)
        files = sorted(p for p in (folder / read).rglob("*") if p.is_file() and p.suffix != ".html")
        file = draw.choice(files)
        said = f"{' '.join(words[:2])}: {file.relative_to(folder)}: {spoil(file, marker, draw)}"
        done = call(*words)
        ended = command_ended(done.code, done.out, done.err)
    if ended is None:
        ended = Ended("the same", (done.out + done.err)[-600:])
    return Ended(ended.how, f"{said}\n{ended.detail}")


def spoil(file: Path, marker: Path, draw: random.Random) -> str:
    """Damage a file; return what was done in words."""
    data, way = file.read_bytes(), draw.randrange(10)
    if way == 0:
        file.unlink()
        return "deleted"
    if way == 1:
        cut = draw.randrange(len(data) + 1)
        file.write_bytes(data[:cut])
        return f"cut to {cut} of {len(data)} bytes"
    if way == 2 and data:
        place = draw.randrange(len(data))
        file.write_bytes(
            data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
        )
        return f"a bit of byte {place}"
    if way == 3:
        file.unlink()
        target = draw.choice(["/dev/zero", "/etc/passwd", "/nowhere", str(file)])
        file.symlink_to(target)
        return f"a link to {target}"
    if way == 4:
        file.unlink()
        file.mkdir()
        return "a folder"
    if way == 5:
        file.write_bytes(pickle.dumps(Evil(marker)))
        return "a pickle"
    if way == 6:
        torch.save({"w": torch.zeros(3), "e": Evil(marker)}, file)
        return "a file of torch.save"
    if way == 7:
        file.write_bytes(data + data)
        return "twice"
    if file.suffix == ".json":
        values = json.loads(data)
        said = damage(values, draw)
        file.write_text(json.dumps(values))
        return said
    if file.suffix == ".jsonl":
        rows = [json.loads(line) for line in data.decode().splitlines()]
        said = damage(rows, draw)
        file.write_text("\n".join(map(json.dumps, rows)) + "\n")
        return said
    if file.suffix == ".toml":
        values = tomllib.loads(data.decode())
        if draw.random() < 0.5:
            name = draw.choice(["os:system", "own:system", "subprocess:getoutput"])
            values["model"] = {"name": name, "args": {"command": f"touch {marker}"}}
            said = f"model.name = {values['model']['name']}"
        else:
            said = damage(values, draw)
        file.write_text(tomli_w.dumps(writable(values)))
        return said
    file.write_bytes(os.urandom(draw.randrange(1, 5000)))
    return "random bytes"


def main() -> int:
    """Make all trials."""
    options = arguments(200)
    torch.set_num_threads(1)

    def trials() -> Iterator[tuple[int, str, Ended]]:
        with tempfile.TemporaryDirectory() as name:
            source, marker = Path(name) / "source", Path(name) / "marker"
            source.mkdir()
            os.environ["XDG_STATE_HOME"] = str(Path(name) / "state")
            made = attempt(lambda: make_runs(source) or Ended("the same"))
            if not made.good:
                raise SystemExit(made.detail)
            for number in range(options.first, options.first + options.trials):
                ended = attempt(lambda n=number: one(n, options.seed, source, marker), marker)
                yield number, ended.detail.split("\n")[0], ended

    return tally("damaged files", options, trials()).show()


if __name__ == "__main__":
    sys.exit(main())
