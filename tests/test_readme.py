"""The code of the README and of the first pages of the documentation runs."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import fedkeel as fk
from commands import call
from fedkeel.method.registry import REGISTRY, find_recipe
from fedkeel.runner.loop import Result
from fedkeel.task.losses import LOSSES
from fedkeel.task.metrics.registry import METRICS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_PAGES = ROOT / "docs" / "getting-started"

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x)
"""


def block(language: str, number: int = 0, text: str = README) -> str:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[number]


def page(name: str) -> str:
    return (FIRST_PAGES / f"{name}.md").read_text(encoding="utf-8")


def test_the_example_is_the_one_that_is_tested() -> None:
    example = (ROOT / "examples" / "own_model_and_data.py").read_text(encoding="utf-8")
    assert example.split('"""\n\n', 1)[1] == block("python")
    lines = [line for line in block("python").splitlines() if line.strip()]
    assert len(lines) <= 15


def test_the_experiment_runs_and_its_model_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_net", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(120, 3)), random.choice(["well", "ill"], 120)
    lines = [
        f"{a},{b},{c},{label},{'north' if i % 9 >= 3 else 'south'},Pat {i // 3}"
        for i, ((a, b, c), label) in enumerate(zip(x, y, strict=True))
    ]
    Path("hospital.csv").write_text("\n".join(["age,dose,size,label,hospital,patient", *lines]))
    Path("my_net.py").write_text(NET)
    Path("experiment.toml").write_text(block("toml", 0, page("own-data")))
    done = call("run", "experiment.toml", "-s", "rounds=2", "-s", "engine.kind=sequential", "-q")
    assert done.code == 0, done.err
    assert "fedprox" in done.out
    exec(block("python", 1, page("own-data")), {})
    assert capsys.readouterr().out.strip() in ("['ill']", "['well']")
    monkeypatch.delitem(sys.modules, "my_net")


def test_the_story_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands, on tables of other patients."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "heart_model", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    story = README.split("## Four hospitals")[1].split("\n## ")[0]
    new, compare, predict = re.findall(r"^    fedkeel (.*)$", story, re.MULTILINE)
    random = np.random.default_rng(0)
    tables = re.findall(r"--data (\S+)", new)
    assert len(tables) == 4
    rows = [f"{random.integers(30, 70)},{random.normal():.3f}" for _ in range(40)]
    for table in tables:
        told = [f"{row},{random.choice(['no', 'yes'])}" for row in rows]
        Path(table).write_text("\n".join(["age,pressure,ill", *told]))
    Path("new.csv").write_text("\n".join(["age,pressure", *rows[:2]]))
    done = call(*new.split())
    assert done.code == 0, done.err
    assert "4 clients" in done.out + done.err
    less = ("--seeds", "2", "-s", "rounds=2", "--jobs", "1")
    done = call(*compare.split(), *less)
    assert done.code == 0, done.err
    assert Path("runs/heart-compare/report.html").exists()
    verb, pattern, table = predict.split()
    (run,) = Path().glob(pattern)
    done = call(verb, str(run), table)
    assert done.code == 0, done.err
    shown = re.findall(r"^    (prediction,.*)$", story, re.MULTILINE)
    assert done.out.splitlines()[:1] == shown
    assert len(done.out.splitlines()) == 3
    (ditto,) = Path().glob("runs/heart-compare/ditto-seed0-*")
    assert call(verb, str(ditto), table, "--client", "Hungary").code == 0
    monkeypatch.delitem(sys.modules, "heart_model", raising=False)


def test_the_first_pages_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(block("python", 0, page("own-data")), names)
    assert capsys.readouterr().out.endswith("% of the test set\n")
    result, module = names["result"], names["module"]
    assert isinstance(result, Result)
    assert isinstance(module, nn.Module)
    assert all(torch.equal(module.state_dict()[k], v) for k, v in result.params.items())
    exec(block("python", 0, page("simulation")), {})
    assert "scaffold" in capsys.readouterr().out
    guide = (ROOT / "docs" / "guides" / "callbacks.md").read_text(encoding="utf-8")
    exec(block("python", 0, guide), {})
    assert capsys.readouterr().out.startswith("[(0, ")


def test_the_home_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    code = block("python", 0, home).replace("rounds=30", "rounds=2").replace("seeds=3", "seeds=2")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    exec(code, {"__name__": "__main__"})
    assert "fedprox(mu=0.1)+gcfed" in Path("report.html").read_text("utf-8")


def test_the_guide_on_searches_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "guides" / "tune.md").read_text(encoding="utf-8")
    exec(block("python", 0, guide), {})
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith("|")
    assert [row.split()[0] for row in rows[-2:]] == ["fedavg", "fedprox"]
    assert (tmp_path / "runs" / "search" / "tune.json").exists()


def test_the_readme_calls_methods_of_a_study() -> None:
    (line,) = re.findall(r"^`study = fk\.Simulation.*$", README, re.MULTILINE)
    called = re.findall(r"`(?:study)?\.(\w+)", line)
    assert called == ["run", "compare", "tune", "doctor", "audit", "check"]
    assert all(callable(getattr(fk.Simulation, name)) for name in called)


def test_the_guide_on_tasks_runs() -> None:
    guide = (ROOT / "docs" / "guides" / "tasks.md").read_text(encoding="utf-8")
    torch.manual_seed(0)  # the guide gives a module, which has been initialised
    names: dict[str, object] = {}
    for source in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(source, names)
    task, result, clients = names["task"], names["result"], names["clients"]
    assert isinstance(result, Result)
    assert result.best == min(value for _, value in result.scores()) < 0.2
    assert isinstance(task, fk.Task)
    assert isinstance(clients, fk.Federation)
    again = fk.run(
        "fedavg",
        task=task,
        clients=clients,
        test=names["hospital"](9, 4),
        rounds=1,
        local=fk.Local(lr=0.1, epochs=1),
    )  # type: ignore[operator]
    assert [info.name for info in again.record.task.metrics] == ["miss", "mae", "loss"]
    listed = re.findall(r"`([a-z_0-9]+)`", guide.split("## Targets")[1].split("Numbers [N]")[0])
    known = {*LOSSES, *METRICS, "top3"}
    assert set(listed) <= known
    assert set(LOSSES) <= set(listed)


def test_two_commands_do_everything() -> None:
    block = README.split("## Two commands")[1].split("\n## ")[0]
    commands = [line.split("#")[0].strip() for line in block.splitlines() if line[:4] == "    "]
    assert commands == ["make demo", "make test"]
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert "pip install ." in README
    assert "\n    pip install .\n" in index


def test_the_citation_is_of_this_project() -> None:
    """The keys that CFF 1.2.0 requires, and what pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(cff)
    assert (cff["title"], cff["abstract"]) == (project["name"], project["description"])
    assert (cff["license"], cff["keywords"]) == (project["license"], project["keywords"])
    assert all(set(author) == {"name"} for author in cff["authors"])
    named = [{"name": author["name"]} for author in project["authors"]]
    assert cff["authors"] == named


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 120
    assert len(re.findall(r"```(?:python|toml)\n", README)) == 1
    assert README.index("pip install .") < README.index("make demo") < README.index("fedkeel new")
    assert len(re.findall(r"!\[", README)) == 1


def test_every_method_is_named_and_every_name_is_there() -> None:
    guide = (ROOT / "docs" / "guides" / "which-method.md").read_text(encoding="utf-8")
    assert "docs/guides/which-method.md#all-methods-by-family" in README
    rows = guide.split("| family | methods |")[1].split("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)[`.]", row)}
    assert {name for name in named if find_recipe(name) is None} == set()
    assert set(REGISTRY) - named == set()
