"""Segmentation with three microscopes as clients: which pixels are nuclei?

    python examples/segmentation.py FOLDER [--quick] [--out RUNS]

FOLDER holds `images/ID.png`, `labels/ID.png` (0 is background) and `domains.csv` (columns image_id
and domain): the images of the Data Science Bowl 2018 (Caicedo et al., 2019). Two clients have grey
fluorescence images of different size, in which nuclei are bright; one has stained tissue, in which
they are dark. Images are halved in size and cut to 64 x 64 pixels around the middle.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import fedkeel as fk

SIZE = 64
Examples = tuple[np.ndarray, np.ndarray]


def read(folder: Path) -> dict[str, Examples]:
    """Return the images [N, 3, 64, 64] in [-0.5, 0.5] and the masks [N, 64, 64] of each domain."""
    with (folder / "domains.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    domains: dict[str, Examples] = {}
    for name in sorted({row["domain"] for row in rows}):
        ids = [row["image_id"] for row in rows if row["domain"] == name]
        images = [cut(Image.open(folder / "images" / f"{i}.png").convert("RGB")) for i in ids]
        masks = [cut(Image.open(folder / "labels" / f"{i}.png")) > 0 for i in ids]
        x = np.stack(images).transpose(0, 3, 1, 2).astype(np.float32) / 255 - 0.5
        domains[name] = x, np.stack(masks).astype(np.int64)
    return domains


def cut(image: Image.Image) -> np.ndarray:
    """Return every second pixel of the middle 128 x 128."""
    left, top = (image.width - 2 * SIZE) // 2, (image.height - 2 * SIZE) // 2
    return np.asarray(image)[top : top + 2 * SIZE : 2, left : left + 2 * SIZE : 2]


def split(domains: dict[str, Examples], seed: int) -> tuple[dict[str, Examples], ...]:
    """Return 70 % of the images of each domain for training, and 30 % for the test."""
    train, test = {}, {}
    for name, (x, y) in domains.items():
        order = np.random.default_rng(seed).permutation(len(x))
        cut = len(x) * 3 // 10
        test[name] = x[order[:cut]], y[order[:cut]]
        train[name] = x[order[cut:]], y[order[cut:]]
    return train, test


def block(inputs: int, outputs: int) -> nn.Sequential:
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net of two levels (Ronneberger et al., 2015), with group normalisation: 30,081 numbers.

    Batch normalisation would mix the statistics of the three microscopes.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 4 * width)
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [B, 1, H, W] of images [B, 3, H, W]."""
        skipped = []
        for level in self.down:
            x = level(x)
            skipped.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for level in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = level(torch.cat([x, skipped.pop()], dim=1))
        return self.out(x)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Print the table, and return the Dice coefficient by method and domain, of each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="one round and one seed")
    parser.add_argument("--out", type=Path, help="folder of the runs, which can be continued")
    given = parser.parse_args(arguments)
    rounds, seeds = (1, 1) if given.quick else (10, 3)

    domains = read(given.folder)
    scores: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        train, test = split(domains, seed)
        comparison = fk.compare(
            ["local", "centralised", "fedavg", "scaffold"],
            task=fk.Task(UNet, loss="bce", metrics=["dice", "iou"]),
            clients=fk.from_clients(train, test=test),
            rounds=rounds,
            seed=seed,
            seeds=1,
            local=fk.Local(lr=0.1, epochs=1, batch_size=8, momentum=0.9),
            evaluation=fk.Evaluation(every=rounds),
            out=given.out and given.out / f"split-{seed}",
        )
        for result in comparison.results:  # of `local`, each domain's own model
            of_method = scores.setdefault(result.record.method, {})
            # `per_client` is of the global model; of a method with personal models, see `personal`
            for domain, value in zip(train, result.rows[-1].per_client["dice"], strict=True):
                of_method.setdefault(domain, []).append(value)

    print(f"| Dice | {' | '.join(domains)} |\n| --- |{' --- |' * len(domains)}")
    for name, of_domain in scores.items():
        cells = [f"{np.mean(v):.1%} ± {np.std(v):.1%}" for v in of_domain.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    return scores


if __name__ == "__main__":
    main()
