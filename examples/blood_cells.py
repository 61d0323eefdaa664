"""Detection with five laboratories as clients: where are the cells in images of blood?

    python examples/blood_cells.py FOLDER [--quick] [--out RUNS]

FOLDER holds the BCCD set in the layout of Pascal VOC: `JPEGImages/NAME.jpg`, `Annotations/NAME.xml`
and `ImageSets/Main/{trainval,test}.txt`. The 364 images come from one source. So the laboratories
are made up: the images are sorted by how blue they are, as laboratories stain differently, and cut
into five parts. The detector is small, without anchors (after CenterNet: Zhou et al., 2019): each
cell of a grid says whether the centre of a cell of blood lies in it, of which kind, and its box.
"""

import argparse
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import fedkeel as fk
from fedkeel.task.metrics.base import PooledMetric

KINDS = ("RBC", "WBC", "Platelets")
CORNERS = ("xmin", "ymin", "xmax", "ymax")
WIDTH, HEIGHT, STRIDE = 160, 120, 8  # pixels, a quarter of the originals; pixels of a grid cell
ROWS, COLUMNS = HEIGHT // STRIDE, WIDTH // STRIDE
MOST = 40  # boxes of an image at most, found or true
Examples = tuple[np.ndarray, dict[str, np.ndarray]]


def read(folder: Path, part: str) -> Examples:
    """Return images [N, 3, 120, 160], and boxes [N, 40, 5] with their number [N].

    A box is its kind, its centre (x, y), its width and its height, in cells of the grid.
    """
    names = (folder / "ImageSets" / "Main" / f"{part}.txt").read_text(encoding="ascii").split()
    images, boxes, counts = [], np.zeros((len(names), MOST, 5), dtype=np.float32), []
    for name, of_image in zip(names, boxes, strict=True):
        image = Image.open(folder / "JPEGImages" / f"{name}.jpg").convert("RGB")
        images.append(np.asarray(image.resize((WIDTH, HEIGHT))))
        found = []
        for cell in ElementTree.parse(folder / "Annotations" / f"{name}.xml").iter("object"):
            corners = [float(cell.find("bndbox").find(key).text) for key in CORNERS]
            left, top, right, bottom = np.array(corners) - (1, 1, 0, 0)  # pixels count from 1
            if right > left + 1 and bottom > top + 1:  # two boxes of the set have no area
                size = np.array([image.width, image.height]) / (COLUMNS, ROWS)
                low, high = np.array([left, top]) / size, np.array([right, bottom]) / size
                found.append([KINDS.index(cell.find("name").text), *(low + high) / 2, *high - low])
        of_image[: len(found)] = found[:MOST]
        counts.append(min(len(found), MOST))
    x = np.stack(images).transpose(0, 3, 1, 2).astype(np.float32) / 255 - 0.5
    return x, {"boxes": boxes, "count": np.array(counts)}


def laboratories(x: np.ndarray, y: dict[str, np.ndarray], count: int = 5) -> dict[str, Examples]:
    """Return the examples sorted by how much more blue than red they are, in equal parts."""
    order = np.argsort((x[:, 2] - x[:, 0]).mean(axis=(1, 2)))
    return {
        f"laboratory {k + 1}": (x[rows], {name: array[rows] for name, array in y.items()})
        for k, rows in enumerate(np.array_split(order, count))
    }


def layer(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
    return [conv, nn.GroupNorm(4, outputs), nn.ReLU()]


class Detector(nn.Module):
    """Maps [B, 7, 15, 20] of images: a score of each kind, then offsets and logarithms of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *layer(3, 16, 2), *layer(16, 24, 2), *layer(24, 48, 2), *layer(48, 48, 1)
        )
        self.out = nn.Conv2d(48, len(KINDS) + 4, 1)
        nn.init.constant_(self.out.bias[: len(KINDS)], -3.0)  # most grid cells hold no centre

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


def detection_loss(maps: Tensor, y: Mapping[str, Tensor]) -> Tensor:
    """Return [B]: the focal loss of the centres, and the absolute error of the boxes."""
    kind, centre, size = y["boxes"].split((1, 2, 2), dim=2)
    is_box = torch.arange(MOST, device=maps.device) < y["count"][:, None]  # [B, 40]
    cell = centre.floor()
    place = (cell[..., 1] * COLUMNS + cell[..., 0]).long()  # [B, 40] of the grid's 300 cells
    scores, boxes = maps.flatten(2).split((len(KINDS), 4), dim=1)

    at = kind[..., 0].long() * ROWS * COLUMNS + place
    truth = (
        torch.zeros_like(scores).flatten(1).scatter_add(1, at, is_box.to(maps.dtype)).clamp(max=1)
    )
    loss = F.binary_cross_entropy_with_logits(scores.flatten(1), truth, reduction="none")
    chance = torch.sigmoid(scores.flatten(1))
    miss = torch.where(truth > 0, 1 - chance, chance)
    focal = (miss**2 * torch.where(truth > 0, 1.0, 0.5) * loss).sum(dim=1)

    boxes = boxes.gather(2, place[:, None].expand(-1, 4, -1)).transpose(1, 2)  # [B, 40, 4]
    goal = torch.cat([centre - cell, size.clamp(min=0.1).log()], dim=2)
    error = ((boxes - goal).abs().sum(dim=2) * is_box).sum(dim=1)
    return (focal + error) / y["count"].clamp(min=1)


def found_boxes(maps: Tensor) -> Tensor:
    """Return [B, 40, 6]: kind, score, and corners of the highest peaks of the score maps."""
    scores = torch.sigmoid(maps[:, : len(KINDS)])
    is_peak = F.max_pool2d(scores, 3, stride=1, padding=1) == scores
    score, at = (scores * is_peak).flatten(1).topk(MOST)
    kind, place = at // (ROWS * COLUMNS), at % (ROWS * COLUMNS)
    boxes = maps[:, len(KINDS) :].flatten(2).gather(2, place[:, None].expand(-1, 4, -1))
    cell = torch.stack([place % COLUMNS, place // COLUMNS], dim=1)
    centre, half = cell + boxes[:, :2], boxes[:, 2:].exp() / 2
    columns = [kind[:, None], score[:, None], centre - half, centre + half]
    return torch.cat(columns, dim=1).transpose(1, 2)


def found_and_true(maps: Tensor, y: Mapping[str, Tensor]) -> Tensor:
    """Return [B, 440]: what `mean_average_precision` keeps of each image."""
    boxes = y["boxes"].clone()
    boxes[torch.arange(MOST) >= y["count"].cpu()[:, None]] = -1  # no kind
    return torch.cat([found_boxes(maps).flatten(1), boxes.flatten(1)], dim=1)


def mean_average_precision(kept: Tensor) -> float:
    """Return the mean over kinds of the average precision at an overlap (IoU) of 0.5.

    It is the area under the curve of precision, made not to rise, over recall (Pascal VOC 2010).
    """
    images = kept.numpy()
    found, true = (
        images[:, : 6 * MOST].reshape(-1, MOST, 6),
        images[:, 6 * MOST :].reshape(-1, MOST, 5),
    )
    true = np.concatenate(
        [true[..., :1], true[..., 1:3] - true[..., 3:] / 2, true[..., 1:3] + true[..., 3:] / 2],
        axis=2,
    )
    precisions = [average_precision(found, true, kind) for kind in range(len(KINDS))]
    return float(np.nanmean(precisions)) if len(images) else float("nan")


def average_precision(found: np.ndarray, true: np.ndarray, kind: int) -> float:
    """Return the average precision of a kind, NaN where no image has it."""
    scores, hits, total = [], [], 0
    for of_image, truth in zip(found, true, strict=True):
        truth = truth[truth[:, 0] == kind, 1:]
        total += len(truth)
        is_free = np.ones(len(truth), dtype=bool)
        chosen = of_image[of_image[:, 0] == kind]
        for row in chosen[np.argsort(-chosen[:, 1], kind="stable")]:
            overlap = np.where(is_free, overlaps(row[2:], truth), 0.0)
            is_hit = len(truth) > 0 and overlap.max() >= 0.5
            if is_hit:
                is_free[overlap.argmax()] = False
            scores.append(row[1])
            hits.append(is_hit)
    if total == 0:
        return float("nan")
    hit = np.array(hits, dtype=bool)[np.argsort(-np.array(scores), kind="stable")]
    precision = hit.cumsum() / np.arange(1, len(hit) + 1)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float(best_from_here[hit].sum() / total)


def overlaps(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the common area over the joint area of a box and others [n, 4]."""
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    common = sides.clip(min=0).prod(axis=1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    return common / ((box[2:] - box[:2]).prod() + area - common)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Print the table, and return the mean average precision of each method, by seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="one round and one seed")
    parser.add_argument("--out", type=Path, help="folder of the runs, which can be continued")
    given = parser.parse_args(arguments)
    rounds, seeds = (1, 1) if given.quick else (40, 2)

    comparison = fk.compare(
        ["centralised", "fedavg", "fedprox(mu=0.01)"],
        task=fk.Task(
            Detector,
            loss=detection_loss,
            metrics=[PooledMetric("mAP", found_and_true, mean_average_precision, unit="%")],
        ),
        clients=fk.from_clients(laboratories(*read(given.folder, "trainval"))),
        test=read(given.folder, "test"),
        rounds=rounds,
        seeds=seeds,
        local=fk.Local(lr=0.003, epochs=1, batch_size=8, optimiser="adamw"),
        evaluation=fk.Evaluation(every=rounds),
        out=given.out,
    )
    scores: dict[str, list[float]] = {}
    for result in comparison.results:
        scores.setdefault(result.record.method, []).append(result.last)

    print("| method | mAP at an overlap of 0.5 |\n| --- | --- |")
    for name, values in scores.items():
        print(f"| {name} | {np.mean(values):.1%} ± {np.std(values):.1%} |")
    return scores


if __name__ == "__main__":
    main()
