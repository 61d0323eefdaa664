"""Check every pair of methods that can be combined: hours of work that may be interrupted.

    python docs/check_pairs.py                       # every pair
    python docs/check_pairs.py fedprox gcfed fedgh   # pairs among these
    python docs/check_pairs.py --workers 4 --out FILE

Each result is one JSON line. A pair whose result the file has, made by the same code, is not
checked again. CI checks a fixed sample of pairs (tests/study/conformance/test_pairs.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import combinations
from pathlib import Path

import fedkeel
from fedkeel.config import Weights
from fedkeel.conformance import check_method
from fedkeel.engine.process.affinity import core_count
from fedkeel.method.legality import WEIGHTS, verdict
from fedkeel.method.registry import REGISTRY

Job = tuple[str, Weights | None]


def jobs(names: Sequence[str]) -> Iterator[Job]:
    """Yield every pair that can be combined, with weights where the papers' differ."""
    for one, other in combinations(names, 2):
        found = verdict(one, other)
        if found.legal or found.code == WEIGHTS:
            yield f"{one}+{other}", None if found.legal else "examples"


def code() -> str:
    """Return the digest of the package's code."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(fedkeel.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def checked(out: Path, digest: str) -> dict[str, str]:
    """Return what failed, "" for nothing, of every pair that the file has of this code.

    A line that was being written when the script was killed is taken away.
    """
    if not out.exists():
        return {}
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        out.write_text("".join(lines), encoding="utf-8")
    rows = [json.loads(line) for line in lines]
    return {row["method"]: row["failure"] for row in rows if row["code"] == digest}


def check(job: Job) -> dict[str, object]:
    """Check one pair; whatever it raises is its failure."""
    begin = time.perf_counter()
    try:
        check_method(*job)
        failure = ""
    except Exception as error:  # a failure is a result here
        failure = str(error)
    seconds = round(time.perf_counter() - begin, 2)
    return {"method": job[0], "weights": job[1], "failure": failure, "seconds": seconds}


def main(words: Sequence[str] | None = None) -> int:
    """Check what is left to check; return 1 where a pair has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="pairs among these only")
    parser.add_argument("--out", type=Path, default=Path("runs/pairs.jsonl"), metavar="FILE")
    parser.add_argument("--workers", type=int, default=core_count(), metavar="N")
    given = parser.parse_args(words)
    unknown = set(given.methods) - set(REGISTRY)
    if unknown:
        parser.error(f"no such method: {', '.join(sorted(unknown))}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    digest = code()
    known = checked(given.out, digest)
    wanted = list(jobs(given.methods or list(REGISTRY)))
    left = [job for job in wanted if job[0] not in known]
    print(f"{len(wanted)} pairs, {len(wanted) - len(left)} of them checked before", flush=True)
    failed = {method: known[method] for method, _ in wanted if known.get(method)}
    context = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
    with (
        given.out.open("a", encoding="utf-8") as file,
        ProcessPoolExecutor(given.workers, mp_context=context) as pool,
    ):
        try:
            futures: list[Future[dict[str, object]]] = [pool.submit(check, job) for job in left]
            for count, future in enumerate(as_completed(futures), start=1):
                row = future.result()
                file.write(json.dumps({**row, "code": digest}) + "\n")
                file.flush()
                if row["failure"]:
                    failed[str(row["method"])] = str(row["failure"])
                state = f"{'FAILED' if row['failure'] else 'passes'}  {row['seconds']} s"
                print(f"{count}/{len(left)}  {row['method']}  {state}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print(f"stopped; the same command goes on from {given.out}")
            return 130
    for method, failure in failed.items():
        print(f"\n{method}\n{failure}")
    print(f"\n{len(wanted) - len(failed)} of {len(wanted)} pairs pass every check")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
