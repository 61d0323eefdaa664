"""Memory of a round over a large frozen transformer with adapters: python benchmarks/frozen_base.py

Eight clients train adapters of rank 8 beside a frozen base, a decoder of 24 blocks (302 million
parameters, 1.2 GB in float32), for one round of one step. While it runs, all processes of the run
are watched: the proportional memory of a process counts shared pages by how many share them, so the
sum counts the base once however many workers read it. On a GPU it prints the allocator's peak too:

    python benchmarks/frozen_base.py --device cuda
    python benchmarks/frozen_base.py --devices cuda:0 cuda:1
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.base.memory import format_bytes

CLIENTS, LENGTH, TOKENS = 8, 16, 512


class Adapted(nn.Module):
    """A linear layer that is frozen, with an adapter of low rank.

    Args:
        inputs: width of the inputs.
        outputs: width of the outputs.
        rank: of the adapter.
    """

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(requires_grad=False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.base(x) + self.up(self.down(x))
        return outputs


class Block(nn.Module):
    """A block of a transformer with attention to what came before.

    Args:
        width: of a token.
        heads: of attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2)).requires_grad_(False)
        self.into, self.out = Adapted(width, 3 * width), Adapted(width, width)
        self.wide, self.narrow = Adapted(width, 4 * width), Adapted(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens [B, T, width]."""
        parts = self.into(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        q, k, v = (part.transpose(-3, -2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(-3, -2).flatten(-2))
        between: Tensor = self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))
        return x + between


class Decoder(nn.Module):
    """A decoder whose last layer alone is trained beside its adapters.

    Args:
        blocks: number of blocks.
        width: of a token.
    """

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width).requires_grad_(requires_grad=False)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(blocks)))
        self.last = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the token after each text, [B, TOKENS]."""
        scores: Tensor = self.last(self.blocks(self.tokens(x))[:, -1])
        return scores


class Watch:
    """Looks a few times a second at the memory of this process and its children."""

    def __init__(self) -> None:
        self.most = self.most_of_one = self.processes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        own = os.getpid()
        while not self._ended.wait(0.3):
            children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
            sizes = [_proportional(process) for process in (str(own), *children)]
            self.most = max(self.most, sum(sizes))
            self.most_of_one = max(self.most_of_one, *sizes)
            self.processes = max(self.processes, len(sizes))


def _proportional(process: str) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 0


def main() -> None:
    """Make the round and print what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--devices", nargs="+", help="such as cuda:0 cuda:1, or cpu cpu")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    given = parser.parse_args()
    random = torch.Generator().manual_seed(0)
    count = CLIENTS * given.batch
    x = torch.randint(TOKENS, (count, LENGTH), generator=random)
    data = fk.dataset(x, x[:, 0], tokens=True)
    rows = np.arange(count).reshape(CLIENTS, given.batch)
    where = {"device": given.device} if given.devices is None else {"devices": given.devices}
    began = time.perf_counter()
    with Watch() as watch:
        result = fk.run(
            task=fk.Task(partial(Decoder, given.blocks, given.width)),
            clients=fk.federation(data, list(rows)),
            test=fk.dataset(x[:4], x[:4, 0], tokens=True),
            method="fedavg",
            rounds=1,
            local=fk.Local(lr=0.01, steps=1, batch_size=given.batch),
            engine=fk.Engine(kind="vectorized", parallel_clients=given.parallel, **where),
        )
    model, engine = result.record.model, result.record.engine
    every = sum(t.numel() for t in result.module.values())
    print(f"parameters: {every:,}, of which {model.parameters:,} are trained and sent")
    print(f"base: {format_bytes(4 * (every - model.parameters))}")
    print(f"engine: {engine.workers} processes {engine.devices or engine.device} {engine.reasons}")
    print(f"most memory of {watch.processes} processes together: {format_bytes(watch.most)}")
    print(f"most memory of one: {format_bytes(watch.most_of_one)}")
    if torch.cuda.is_available():
        print(f"GPU: {format_bytes(torch.cuda.max_memory_allocated())} in this process")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
