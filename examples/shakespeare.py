"""Language with 99 roles of Shakespeare as clients: which character comes next?

    python examples/shakespeare.py FOLDER [--quick] [--out RUNS]

FOLDER holds `input.txt`, the "tiny Shakespeare" of char-rnn: speeches that empty lines divide, each
after a line with its role. A role that says 2,000 characters or more is a client: the first 80 % of
its speeches are for training, the rest for the test.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import fedkeel as fk

LENGTH = 64
Examples = tuple[np.ndarray, np.ndarray]


def read(folder: Path, at_least: int = 2000) -> dict[str, str]:
    """Return what each role says, one speech after the other."""
    speeches: dict[str, list[str]] = {}
    for block in (folder / "input.txt").read_text(encoding="ascii").split("\n\n"):
        role, _, speech = block.strip().partition(":\n")
        if speech:
            speeches.setdefault(role, []).append(speech)
    texts = {role: "\n".join(lines) for role, lines in speeches.items()}
    return {role: text for role, text in texts.items() if len(text) >= at_least}


def examples(text: str, alphabet: str) -> Examples:
    """Return sequences [N, 64] of characters, and at each place the next one."""
    codes = np.array([alphabet.index(character) for character in text])
    starts = np.arange(0, len(codes) - LENGTH, LENGTH)
    return tuple(codes[starts[:, None] + np.arange(LENGTH) + shift] for shift in (0, 1))


class Block(nn.Module):
    """Causal attention and two layers, with what enters added to what they say."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(h)).unflatten(-1, (3 * self.heads, -1)).transpose(-2, -3)
        q, k, v = parts.chunk(3, dim=-3)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(seen.transpose(-2, -3).flatten(-2))
        return h + self.narrow(F.gelu(self.wide(self.norm2(h))))


class Transformer(nn.Module):
    """Scores [B, T, V] of the next character at each place of B texts."""

    def __init__(self, characters: int, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.place[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def perplexity_of_pairs(train: Examples, test: Examples, characters: int) -> float:
    """Return the perplexity of counting which character follows which, each pair once more."""
    counts = np.ones((characters, characters))
    np.add.at(counts, tuple(part.ravel() for part in train), 1)
    chances = counts / counts.sum(axis=1, keepdims=True)
    return float(np.exp(-np.log(chances[test[0], test[1]]).mean()))


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Print the table, and return the perplexity of each method, by seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="two rounds and one seed")
    parser.add_argument("--out", type=Path, help="folder of the runs, which can be continued")
    given = parser.parse_args(arguments)
    rounds, seeds = (2, 1) if given.quick else (30, 2)

    texts = read(given.folder)
    alphabet = "".join(sorted(set("".join(texts.values()))))
    train = {role: examples(t[: len(t) * 4 // 5], alphabet) for role, t in texts.items()}
    late = [examples(t[len(t) * 4 // 5 :], alphabet) for t in texts.values()]
    test = tuple(np.concatenate(parts) for parts in zip(*late, strict=True))
    early = tuple(np.concatenate(parts) for parts in zip(*train.values(), strict=True))

    comparison = fk.compare(
        ["centralised", "fedavg", "fedavg+momentum"],
        task=fk.Task(
            lambda: Transformer(len(alphabet)),
            loss="token_cross_entropy",
            metrics=["perplexity", "token_accuracy"],
        ),
        clients=fk.from_clients(train, tokens=True),
        test=test,
        rounds=rounds,
        seeds=seeds,
        clients_per_round=min(10, len(train)),
        local=fk.Local(lr=0.003, epochs=1, batch_size=16, optimiser="adamw"),
        evaluation=fk.Evaluation(every=rounds),
        out=given.out,
    )
    scores = {"pairs of characters": [perplexity_of_pairs(early, test, len(alphabet))]}
    for result in comparison.results:
        scores.setdefault(result.record.method, []).append(result.last)

    print("| predictor | perplexity |\n| --- | --- |")
    for name, values in scores.items():
        print(f"| {name} | {np.mean(values):.2f} ± {np.std(values):.2f} |")
    return scores


if __name__ == "__main__":
    main()
