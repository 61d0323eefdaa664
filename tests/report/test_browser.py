"""The pages in a browser: readable on a phone, in the dark, without colours and without sight.

The rules are those of axe-core for WCAG 2 A and AA, and what it does not look at: the texts of
charts, sideways scrolling, the console.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import call
from report.browser import BROWSER, look_at

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine"),
]
DIGITS = ("--preset", "digits", "-q")
COMMANDS = {
    "report": (
        *("compare", *DIGITS, "-s", "rounds=4", "--methods", "fedavg,scaffold,fedprox+gcfed,local"),
        *("--seeds", "2", "--diagnose", "drift,forgetting"),
    ),
    "doctor": ("doctor", *DIGITS, "-s", "rounds=2"),
    "audit": ("audit", *DIGITS, "--attacks", "labels"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the results are."""
    return tmp_path_factory.mktemp("pages")


def page(folder: Path, name: str) -> str:
    """The page that a command writes."""
    if not (folder / name).exists():
        done = call(*COMMANDS[name], "--out", folder / name)
        assert done.code == 0, done.err
    (file,) = (folder / name).glob("*.html")
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [
        ("report", 420, True),
        ("report", 1400, False),
        ("doctor", 420, True),
        ("audit", 420, True),
    ],
)
def test_a_page_can_be_read_by_all(
    folder: Path, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    seen = look_at(page(folder, name), tmp_path, width=width, dark=dark)
    assert (seen.width, seen.dark) == (width, dark)
    assert seen.console == []
    assert seen.needed <= seen.width  # nothing is beside the page
    assert seen.violations == []
    assert seen.faint == []
    assert seen.untold == []
    assert seen.bare == 0
    if name != "audit":  # which has no charts
        assert seen.drawn > 0
        assert seen.texts > 20
    if name == "report":
        assert seen.lines
        for chart in seen.lines:
            dashes = dict(map(tuple, chart))
            assert len(set(dashes.values())) == len(dashes) == 4
