"""Make the pictures of the gallery from real runs.

Call it by `python docs/images/screenshots.py [NAME ...]`, without a name for all.

Each picture is a part of a page that a command writes. The commands run in `build/gallery`, where
finished runs are kept, so that a second call only takes the pictures. Needs Chromium.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageChops

HERE = Path(__file__).resolve().parent
RUNS = HERE.parents[1] / "build" / "gallery"


@dataclass(frozen=True)
class Picture:
    """A part of a page.

    Args:
        command: what writes the page, without `fedkeel`.
        page: the file, in `build/gallery`.
        shown: CSS selectors of the parts of the page that are kept; all others are hidden.
        height: pixels of the window; the white below the content is cut off.
    """

    command: str
    page: str
    shown: tuple[str, ...]
    height: int = 1200


DIGITS = "compare --preset digits --out digits"
DIAGNOSE = (
    "compare --preset digits --methods fedavg,scaffold,gradma "
    "--diagnose drift,forgetting,conflict --out diagnosed"
)

PICTURES = {
    "headline": Picture(DIGITS, "digits/report.html", ("header.top", "#results"), height=800),
    "report": Picture(DIGITS, "digits/report.html", ("header.top", "#results"), height=1500),
    "curves": Picture(DIGITS, "digits/report.html", ("#curves",), height=690),
    "labels": Picture(DIGITS, "digits/report.html", ("#data",)),
    "cost": Picture(DIGITS, "digits/report.html", ("#cost",)),
    "diagnostics": Picture(DIAGNOSE, "diagnosed/report.html", ("#diagnostics",), height=840),
    "doctor": Picture(
        "doctor --preset digits --out doctor",
        "doctor/doctor.html",
        ("header.top", "#findings", "#advice"),
    ),
    "audit": Picture(
        "audit --preset digits --out audit", "audit/audit.html", ("#attacks",), height=700
    ),
}


def main(names: Sequence[str]) -> None:
    """Make the pictures of the given names, of all without one."""
    RUNS.mkdir(parents=True, exist_ok=True)
    for name in names or PICTURES:
        picture = PICTURES[name]
        command = [sys.executable, "-m", "fedkeel", *picture.command.split()]
        subprocess.run(command, cwd=RUNS, check=True)
        print(take(picture, HERE / f"{name}.png"))


def take(picture: Picture, file: Path) -> Path:
    """Write what Chromium shows of the kept parts, 1,100 pixels wide, and return the file."""
    keep = ", ".join(f":is({one})" for one in picture.shown)
    style = (
        f"<style>main > *:not({keep}), header.top:not({keep}), footer "
        "{ display: none !important }"
        "main > * { border: 0 !important; margin-top: 0 !important }</style>"
    )
    page = RUNS / picture.page
    part = page.with_name("part.html")
    part.write_text(page.read_text("utf-8").replace("</head>", style + "</head>", 1), "utf-8")
    browser = ("chromium", "--headless", "--no-sandbox", "--hide-scrollbars")
    how = (f"--window-size=1100,{picture.height}", "--virtual-time-budget=4000")
    subprocess.run([*browser, *how, f"--screenshot={file}", part.as_uri()], check=True)
    image = Image.open(file).convert("RGB")
    white = Image.new("RGB", image.size, image.getpixel((0, 0)))
    _, _, _, bottom = ImageChops.difference(image, white).getbbox() or (0, 0, 0, image.height)
    image = image.crop((0, 0, image.width, min(bottom + 24, image.height)))
    image.quantize(128).save(file, optimize=True)
    return file


if __name__ == "__main__":
    main(sys.argv[1:])
