"""The machine's rate of matrix products: python run_matmul.py - [--processes 2] [--rounds 9]

Multiply-adds a second of float32 products of 1024 x 1024 matrices (4096 x 4096 on a GPU), in as
many processes at once as asked for. A round is 40 products in each process; the rate is that of the
median round. Of a GPU also the bytes a second of a large copy, read and written ones together.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time

from harness import arguments

SIDES, PRODUCTS = {"cpu": 1024, "cuda": 4096}, 40
COPIED = 2**30


def multiply(barrier, threads: int, rounds: int, device: str, seconds) -> None:
    """Time rounds that begin in all processes at once."""
    import torch

    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    side = SIDES[device]
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    for _ in range(PRODUCTS):
        out = a @ b
    for _ in range(rounds):
        float(out[0, 0])  # waits for a GPU
        barrier.wait()
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.matmul(a, b, out=out)
        float(out[0, 0])
        seconds.put(time.perf_counter() - began)


def bandwidth(rounds: int) -> float:
    """Bytes a second that a GPU reads and writes in copying them."""
    import torch

    one = torch.randn(COPIED // 4, device="cuda")
    other, seconds = torch.empty_like(one), []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        other.copy_(one)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * COPIED / statistics.median(seconds[1:])


def main() -> None:
    given = arguments(__doc__)
    context = multiprocessing.get_context("spawn")
    barrier, seconds = context.Barrier(given.processes), context.Queue()
    rounds = given.rounds or 9
    setting = (barrier, given.threads, rounds, given.device, seconds)
    workers = [context.Process(target=multiply, args=setting) for _ in range(given.processes)]
    for worker in workers:
        worker.start()
    spent = [seconds.get() for _ in range(rounds * given.processes)]
    for worker in workers:
        worker.join()
    products = PRODUCTS * given.processes
    values = {
        "peer": "matmul",
        "recipe": given.recipe,
        "processes": given.processes,
        "threads": given.threads,
        "rate": products * SIDES[given.device] ** 3 / statistics.median(spent),
    }
    if given.device == "cuda":
        values["bandwidth"] = bandwidth(rounds)
    print(json.dumps(values))


if __name__ == "__main__":
    main()
