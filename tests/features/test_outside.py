"""A feature of another package: a carbon account, without a line of it in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedkeel

DECLARATION = '''
from dataclasses import dataclass

from fedkeel.base.feature import Declaration, Entry, Figure, Option
from fedkeel.base.settings import Settings


class Carbon(Settings):
    """The carbon account.

    Args:
        grams_per_second: of the machine that trains.
        grams_per_mb: of the network.
    """

    grams_per_second: float = 0.02
    grams_per_mb: float = 0.0


@dataclass(frozen=True)
class CarbonRecord:
    """What the account counts with."""

    grams_per_second: float


class CarbonDeclaration(Declaration):
    feature = "carbon.feature:CarbonAccount"
    table, settings_class, record_class = "carbon", Carbon, CarbonRecord
    meaning = "the carbon account; None counts nothing."
    options = (Option("--grams", "carbon.grams_per_second", "Grams of CO2 a second."),)
    figures = (
        Figure(
            "carbon_grams", "carbon", "g CO2", "Grams of CO2 of a run.", better="low",
            of_run="sum", progress="{:.2g} g CO2", tracked="carbon/grams", tile="Carbon",
            chart="Grams of CO2", footnote="an estimate from seconds and bytes.",
        ),
        Figure("carbon_total", "carbon so far", "g CO2", "Grams of CO2 since the first round."),
    )
    entries = (
        Entry("carbon_sources", list[str], "What the grams are of.", default=[]),
        Entry("carbon_unit", str, "Of the grams.", default="g", is_always_written=True),
    )
'''
FEATURE = """
from dataclasses import replace

import numpy as np
from carbon.declaration import CarbonRecord

from fedkeel.runner.feature import Feature
from fedkeel.runner.feature_hooks import Hooks


class Account(Hooks):
    def __init__(self, settings):
        self.settings, self.total = settings, 0.0

    def timed(self, row):
        sent = sum(row.bytes_up.values()) + sum(row.bytes_down.values())
        grams = self.settings.grams_per_mb * sent / 1e6
        grams += self.settings.grams_per_second * sum(row.seconds.values())
        self.total += grams
        added = {"carbon_grams": grams, "carbon_total": self.total}
        if sent:
            added["carbon_sources"] = ["machine", "network"]
        return replace(row, features={**row.features, **added})

    def state(self):
        return {"carbon/total": np.array(self.total)}

    def restore(self, arrays, rows):
        self.total = float(arrays["carbon/total"])


class CarbonAccount(Feature):
    def record(self, prepared):
        return CarbonRecord(self.settings.grams_per_second)

    @classmethod
    def warnings(cls, prepared):
        feature = prepared.feature(cls)
        few = feature is not None and feature.settings.grams_per_mb == 0.0
        return ["carbon.grams_per_mb is 0: the network is not counted"] if few else []

    def hooks(self, prepared):
        return Account(self.settings)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder, and in it the installed package."""
    info = tmp_path / "site" / "carbon-1.0.dist-info"
    package = tmp_path / "site" / "carbon"
    for made in (info, package):
        made.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carbon\nVersion: 1.0\n")
    point = "carbon = carbon.declaration:CarbonDeclaration"
    (info / "entry_points.txt").write_text(f"[fedkeel.features]\n{point}\n")
    (package / "__init__.py").write_text("")
    (package / "declaration.py").write_text(DECLARATION)
    (package / "feature.py").write_text(FEATURE)
    return tmp_path


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the package among the installed ones."""
    paths = [str(folder / "site"), str(Path(fedkeel.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    call = [sys.executable, *words]
    return subprocess.run(
        call, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with the package among the installed ones."""
    return python(folder, "-m", "fedkeel", *words)


def test_a_package_adds_a_carbon_account(folder: Path) -> None:
    """A table, an option, a column, a chart, a warning, and a sum that survives a resume."""
    given = ("--preset", "digits", "--grams", "50", "-s", "rounds=2", "--out", "out")
    made = command(folder, "run", *given)
    assert made.returncode == 0, made.stderr
    assert "carbon" in made.stdout
    assert "g CO2" in made.stderr
    assert "carbon.grams_per_mb is 0" in made.stderr
    further = command(folder, "run", "out", "--resume", "--rounds", "4", "--json")
    assert further.returncode == 0, further.stderr
    rows = [json.loads(line) for line in (folder / "out" / "rounds.jsonl").read_text().splitlines()]
    grams = [row["carbon_grams"] for row in rows]
    assert len(grams) == 5
    assert grams == pytest.approx([50 * sum(row["seconds"].values()) for row in rows])
    assert rows[-1]["carbon_total"] == pytest.approx(sum(grams))
    assert [row.get("carbon_sources") for row in rows] == [None] + [["machine", "network"]] * 4
    assert {row["carbon_unit"] for row in rows} == {"g"}
    assert json.loads(further.stdout)["carbon_grams"] == pytest.approx(grams[-1])
    record = json.loads((folder / "out" / "run.json").read_text())
    assert record["carbon"] == {"grams_per_second": 50.0}
    page = (folder / "out" / "report.html").read_text()
    assert 'id="figure-feature_carbon_grams"' in page
    assert "Carbon" in page
    without = command(folder, "run", "--preset", "digits", "-s", "rounds=1", "--out", "plain")
    assert without.returncode == 0, without.stderr
    plain = (folder / "plain" / "rounds.jsonl").read_text()
    assert "carbon_grams" not in plain
    assert "carbon_sources" not in plain


def test_a_feature_needs_another_that_is_not_installed(folder: Path) -> None:
    file = folder / "site" / "carbon" / "declaration.py"
    line = '    table, settings_class, record_class = "carbon", Carbon, CarbonRecord\n'
    assert line in DECLARATION
    file.write_text(DECLARATION.replace(line, f'{line}    needs = ("power",)\n'))
    refused = command(folder, "check", "--preset", "digits")
    assert refused.returncode == 2
    assert "The feature [carbon] needs the feature [power]." in " ".join(refused.stderr.split())


IN_PYTHON = """
import fedkeel as fk
from carbon.declaration import Carbon
from torch import nn

x, y = [[float(i % 3), 1.0] for i in range(30)], [i % 3 for i in range(30)]
shared = {
    "task": fk.Task(nn.Linear(2, 3)), "clients": fk.iid(x, y, clients=3), "test": (x, y),
    "rounds": 2, "local": fk.Local(lr=0.1, epochs=1),
}
study = fk.Simulation(**shared, carbon=Carbon(grams_per_second=50.0))
assert "carbon=Carbon(grams_per_second=50.0)" in repr(study)
for result in (study.run("fedavg"), fk.run("fedavg", **shared, carbon={"grams_per_second": 50.0})):
    assert result.rows[-1].features["carbon_total"] > 0
assert "carbon_total" not in fk.run("fedavg", **shared).rows[-1].features
try:
    fk.run("fedavg", **shared, carbon=3)
except fk.FedkeelError as error:
    print(error)
"""


def test_its_settings_are_an_argument_in_python(folder: Path) -> None:
    (folder / "study.py").write_text(IN_PYTHON)
    made = python(folder, "study.py")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("'carbon' is not a fedkeel.Carbon.")
