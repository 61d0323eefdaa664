"""The colours of methods can be seen, and told apart by colour-blind readers."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from fedkeel.report import palette

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
VISION = {
    "normal": np.eye(3),
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
}


def linear(colour):
    share = np.array([int(n) / 255 for n in palette.triplet(colour).split(",")])
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def contrast(one, two):
    light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, two))
    return (light[1] + 0.05) / (light[0] + 0.05)


def oklab(rgb):
    cone = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(lab) @ np.cbrt(np.array(cone) @ rgb)


PAGES = [(0, palette.LIGHT_PAGE), (1, palette.DARK_PAGE)]


@pytest.mark.parametrize(("side", "page"), PAGES)
def test_colours_of_methods_stand_out_from_the_page(side, page):
    assert min(contrast(tone[side], page) for tone in palette.METHODS) >= 3.0
    assert contrast(palette.INK[side], page) >= 12.0
    assert contrast(palette.MUTED[side], page) >= 4.5


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("side", [0, 1])
def test_colours_of_methods_stay_apart(side, vision):
    seen = [
        oklab(np.clip(np.array(VISION[vision]) @ linear(tone[side]), 0, 1))
        for tone in palette.METHODS
    ]
    nearest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))
    assert 100 * nearest >= 7.0


def test_every_colour_has_one_counterpart():
    pairs = (
        *palette.METHODS,
        *palette.RAMP,
        palette.INK,
        palette.MUTED,
        palette.GRID,
        palette.HEAT,
    )
    assert len(palette.dark_counterparts()) == len(pairs) + 1  # and the page


def test_eight_methods_differ_without_colour():
    assert len({palette.line_style(i) for i in range(8)}) == 8
    assert len({palette.mark(i) for i in range(8)}) == 8
    css = (Path(palette.__file__).parent / "page.css").read_text(encoding="utf-8")
    assert all(f"line.{name} {{" in css for name in palette.LINE_STYLES if name != "solid")
    assert all(f".dot.{name}" in css for name, _ in palette.MARKS if name != "frame")


def test_methods_beyond_the_eighth_differ_by_their_line():
    looks = {(palette.method_colour(i), palette.line_style(i)) for i in range(32)}
    assert len(looks) == 32


def test_and_by_the_mark_before_their_name():
    looks = {(palette.method_colour(i), palette.mark(i)) for i in range(32)}
    assert len(looks) == 32
