"""Peers and fedkeel side by side: python benchmarks/compare.py A B --engines auto workers

Runs each recipe of recipes.py with every contestant in turn, several times over, each in the
environment that peers/make.sh made for it. Every measurement is a line of a file and is not made
again, so the script can be stopped and started; `--minutes` stops it by itself, with exit code 3
while there is more to do. Ratios are taken within one repetition, because machines drift. pfl and
fluke run in all their settings once, and in the best of these from then on. Memory is measured in a
run of its own. `--go` names one such comparison: a new name measures everything anew.
`--table` prints what a go has found, as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import RECIPES, load

HERE = Path(__file__).resolve().parent
CORES = os.cpu_count() or 1
Row = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """Somebody who runs recipes.

    Args:
        name: in tables.
        peer: script and environment.
        settings: command lines to choose from; the first run shows which is best.
        methods: the methods it has.
    """

    name: str
    peer: str
    settings: tuple[str, ...] = ("",)
    methods: tuple[str, ...] = ("fedavg",)


def contestants(peers: list[str], engines: list[str], gpu: bool) -> list[Contestant]:
    """Return everybody asked for, the machine's own rate first."""
    many, one = f"--processes {CORES}", "--processes 1"
    device = " --device cuda" if gpu else ""
    both = ("fedavg", "scaffold")
    in_one = (one, f"{one} --threads {CORES}")
    known = [
        Contestant("plain, 1 process", "plain", (one,)),
        Contestant(f"plain, {CORES} processes", "plain", (many,)),
        Contestant("pfl", "pfl", (one,) if gpu else (*in_one, many), both),
        Contestant("Flower", "flower", (many,)),
        Contestant("fluke", "fluke", (one,) if gpu else in_one, both),
    ]
    known = [c for c in known if c.peer in peers and not (gpu and c.name.endswith(" processes"))]
    known += [Contestant(f"fedkeel {e}", "fedkeel", (f"--engine {e}",), both) for e in engines]
    rate = Contestant("matmul", "matmul", (one if gpu else many,), both)
    return [
        Contestant(c.name, c.peer, tuple((s + device).strip() for s in c.settings), c.methods)
        for c in (rate, *known)
    ]


class Book:
    """The file of measurements, and those of one go in it."""

    def __init__(self, path: Path, go: str) -> None:
        self.path, self.go = path, go
        text = path.read_text() if path.exists() else ""
        self.rows = [row for row in map(json.loads, text.splitlines()) if row["go"] == go]

    def find(self, **wanted: Any) -> list[Row]:
        """Return the rows that have all the given values."""
        return [r for r in self.rows if all(r.get(k) == v for k, v in wanted.items())]

    def add(self, row: Row) -> None:
        row = {"go": self.go, **row}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def best(self, recipe: str, contestant: str) -> str | None:
        """Return the setting with the shortest round in the first repetition, None without one."""
        rows = self.find(recipe=recipe, contestant=contestant, repeat=0, memory=False)
        done = {row["setting"]: seconds(row) for row in rows if "error" not in row}
        return min(done, key=lambda setting: done[setting]) if done else None


def seconds(row: Row) -> float:
    """Seconds of a round, the first apart, brought to the recipe's mean number of examples."""
    if "rate" in row:  # of the machine, which has no rounds
        return 0.0
    return sum(row["seconds"]) / sum(row["examples"]) * row["examples_a_round"]


def measure(key: Row, peer: str, command: list[str], limit: float) -> Row:
    """Run one script in its environment, and return the row with what it printed.

    Beside that: the seconds of it all, and how many cores other work kept busy meanwhile.
    """
    python = HERE / ".envs" / ("plain" if peer == "matmul" else peer) / "bin" / "python"
    whole = [
        str(python),
        str(HERE / "peers" / f"run_{peer}.py"),
        key["recipe"],
        *command,
    ]
    began, busy, own = time.perf_counter(), *spent()
    process = subprocess.Popen(
        whole,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, said = process.communicate(timeout=limit)
        failed = (said.strip().splitlines() or ["failed"])[-1] if process.returncode else ""
        values = {"error": failed} if failed else json.loads(out.splitlines()[-1])
    except subprocess.TimeoutExpired:
        values = {"error": f"not done after {limit:.0f} s"}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            process.communicate()
    wall = time.perf_counter() - began
    busy, own = (after - before for after, before in zip(spent(), (busy, own), strict=True))
    values |= {
        "wall": round(wall, 2),
        "machine": machine(),
        "at": time.strftime("%F %R"),
    }
    if peer != "flower":  # Ray's actors are not counted as its own
        values["elsewhere"] = round((busy - own) / wall, 2)
    return key | values


def spent() -> tuple[float, float]:
    """Return seconds that all cores were busy, and those of this process's finished children."""
    times = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, *interrupts = map(int, times[:8])
    busy = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy, used.ru_utime + used.ru_stime


def machine() -> str:
    """Name the hardware."""
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
            return f"{text.split(':')[1].strip()}, {CORES} cores, {memory:.0f} GiB"
    return platform.processor()


def wanted(
    names: list[str], people: list[Contestant], repeats: int, book: Book
) -> Iterator[tuple[Row, Contestant]]:
    """Yield every measurement in the order in which they are made.

    What is best is known only when the first repetition has been made, so ask for one after the
    other.
    """
    for name in names:
        able = [c for c in people if RECIPES[name].method in c.methods]
        for repeat in range(repeats):
            for c in able:
                for setting in c.settings if repeat == 0 else [book.best(name, c.name)]:
                    if setting is not None:
                        yield row(name, c, repeat, setting), c
        for c in able:
            setting = book.best(name, c.name)  # what could be run at all has one
            if setting is not None and c.peer != "matmul":
                yield row(name, c, 0, setting, memory=True), c


def row(recipe: str, c: Contestant, repeat: int, setting: str, memory: bool = False) -> Row:
    """Return what names a measurement."""
    return {
        "recipe": recipe,
        "contestant": c.name,
        "repeat": repeat,
        "setting": setting,
        "memory": memory,
    }


def run(given: argparse.Namespace, people: list[Contestant], book: Book) -> int:
    """Make what is missing; return the exit code."""
    deadline = time.monotonic() + 60 * given.minutes
    for key, contestant in wanted(given.recipes, people, given.repeats, book):
        if book.find(**key) or (given.only and key["memory"] != (given.only == "memory")):
            continue
        if time.monotonic() > deadline:
            return 3
        recipe = RECIPES[key["recipe"]]
        load(recipe.data)  # so that making them is in nobody's time and memory
        rounds = given.rounds or recipe.rounds
        if contestant.peer == "flower":
            rounds = min(rounds, recipe.few + 1)
        command = key["setting"].split()
        if contestant.peer != "matmul":
            command += ["--rounds", str(rounds)] + ["--memory"] * key["memory"]
        done = measure(key, contestant.peer, command, given.limit)
        book.add(done)
        found = done.get("error") or ("memory" if key["memory"] else done.get("rate"))
        text = f"{seconds(done):.4f} s a round" if found is None else found
        who = f"{key['recipe']:8} {key['contestant']:20} {key['repeat']} {key['setting']:30}"
        print(who, text, flush=True)
    return 0


class Found:
    """What a go has found out about one recipe, as cells of tables."""

    def __init__(self, book: Book, recipe: str, names: list[str]) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.peaks: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        for name in names:
            key = {"recipe": recipe, "contestant": name}
            best = book.find(**key, setting=book.best(recipe, name))
            timed = [row for row in best if not row["memory"] and "error" not in row]
            self.rows[name] = sorted(timed, key=lambda row: row["repeat"])
            for row in best:
                if "peak_mb" in row:
                    self.peaks[name] = row["peak_mb"]
            failed = [row["error"] for row in book.find(**key) if "error" in row]
            if failed:
                self.errors[name] = failed[0]
        rates = book.find(recipe=recipe, contestant="matmul")
        self.rates = {row["repeat"]: row["rate"] for row in rates if "rate" in row}

    def round(self, name: str) -> str:
        """Median seconds of a round."""
        if not self.rows[name]:
            return "failed" if name in self.errors else ""
        middle = statistics.median(map(seconds, self.rows[name]))
        return f"{middle:.4f}" if middle < 0.1 else f"{middle:.3f}"

    def ratio(self, name: str, to: str) -> str:
        """How many times as long `name`'s round is as that of `to`."""
        theirs = {row["repeat"]: seconds(row) for row in self.rows[name]}
        ours = {row["repeat"]: seconds(row) for row in self.rows[to]}
        return spread([theirs[r] / ours[r] for r in theirs.keys() & ours.keys()])

    def share(self, name: str) -> str:
        """Share of the machine's matrix-product rate that a whole round reaches."""
        shares = []
        for row in self.rows[name]:
            rate = row["multiply_adds"] * row["examples_a_round"] / seconds(row)
            if row["repeat"] in self.rates:
                shares.append(rate / self.rates[row["repeat"]])
        return spread(shares)

    def peak(self, name: str) -> str:
        """The largest memory."""
        return str(self.peaks.get(name, ""))

    def gpu_peak(self, name: str) -> str:
        """The largest memory on a GPU."""
        return self._middle(name, "gpu_peak_mb", ".0f")

    def start(self, name: str) -> str:
        """Preparation and the first round."""
        return " + ".join(self._middle(name, key, ".2f") for key in ("start", "first"))

    def accuracy(self, name: str) -> str:
        """Accuracy after so many rounds."""
        return f"{self._middle(name, 'accuracy', '.3f')} ({self._middle(name, 'rounds', '.0f')})"

    def setting(self, name: str) -> str:
        """The setting that was best."""
        return self.rows[name][0]["setting"].replace("--", "")

    def _middle(self, name: str, key: str, form: str) -> str:
        return format(statistics.median(row[key] for row in self.rows[name]), form)


def spread(values: list[float]) -> str:
    """Format median, smallest and largest."""
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values)
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(book: Book) -> None:
    """Print everything that the go has found."""
    names = [n for n in dict.fromkeys(r["contestant"] for r in book.rows) if n != "matmul"]
    peers = [name for name in names if not name.startswith("fedkeel")]
    ours = [name for name in names if name.startswith("fedkeel")]
    names = peers + ours
    found = {
        name: Found(book, name, names) for name in dict.fromkeys(r["recipe"] for r in book.rows)
    }
    every = [row for f in found.values() for rows in f.rows.values() for row in rows]
    versions = sorted({f"{row['peer']} {row['version']}" for row in every})
    commits = sorted({row["commit"] for row in every if "commit" in row})
    times = sorted(row["at"] for row in every)
    rates = [rate / 1e9 for f in found.values() for rate in f.rates.values()]
    devices = sorted({row["device"] for row in every} - {"cpu"})
    machines = sorted({row["machine"] for row in every})
    print(f"{', '.join(devices + machines)}; {times[0]} to {times[-1]};")
    print(f"{', '.join(versions)}; fedkeel at {', '.join(commits)};")
    print(f"matrix products: {spread(rates)} thousand million multiply-adds a second;")
    copied = [row["bandwidth"] / 1e9 for row in book.rows if "bandwidth" in row]
    if copied:
        print(f"copies: {spread(copied)} GB a second, read and written;")
    others = sum(row.get("elsewhere", 0) > 0.1 for row in every)
    print(f"other work took more than a tenth of a core during {others} of {len(every)} runs.\n")
    grid("Seconds of a round", found, names, Found.round)
    for our in ours:
        title = f"Rounds, as multiples of {our}: median (smallest to largest)"
        grid(title, found, peers, lambda f, name, our=our: f.ratio(name, our))
    grid("Share of the measured matrix-product rate", found, names, Found.share)
    grid("Largest memory of all processes together, MB", found, names, Found.peak)
    if devices:
        grid("Largest memory on the GPU, MB", found, names, Found.gpu_peak)
    grid("Seconds before the first round + of the first round", found, names, Found.start)
    grid("Test accuracy (after so many rounds)", found, names, Found.accuracy)
    grid("Best setting", found, names, Found.setting)
    for recipe, f in found.items():
        for name, error in f.errors.items():
            print(f"{recipe}, {name}: {error}")


def grid(title: str, found: dict[str, Found], names: list[str], cell: Callable[..., str]) -> None:
    """Print recipes as rows and contestants as columns."""
    print(f"{title}\n\n| recipe | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for recipe, f in found.items():
        cells = [cell(f, n) if f.rows[n] or cell is Found.round else "" for n in names]
        print(f"| {recipe} | {' | '.join(cells)} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", help="names in recipes.py")
    parser.add_argument("--peers", nargs="*", default=["plain", "pfl", "flower", "fluke"])
    parser.add_argument(
        "--engines", nargs="*", default=["auto"], help="kind[:parallel_clients=..,workers=..]"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="instead of the recipes' own")
    parser.add_argument("--go", default="first")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--limit", type=float, default=900, help="seconds for one measurement")
    parser.add_argument("--only", choices=["times", "memory"], help="times need a quiet machine")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    path = given.results or HERE / "results" / ("gpu.jsonl" if given.gpu else "cpu.jsonl")
    path.parent.mkdir(exist_ok=True)
    book = Book(path, given.go)
    if given.table and not book.rows:
        raise SystemExit(f"nothing has been measured under the name {given.go!r} in {path}")
    if given.table:
        table(book)
        return
    people = contestants(given.peers, given.engines, given.gpu)
    raise SystemExit(run(given, people, book))


if __name__ == "__main__":
    main()
