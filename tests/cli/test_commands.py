"""Every command does what it says: results on standard output, all else on standard error."""

from __future__ import annotations

import json
import math
import os
import pty
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from commands import EXECUTABLE, call, run, shell
from each import each
from fedkeel.config import load
from fedkeel.method.registry import REGISTRY
from fedkeel.records.folder import RunFolder
from fedkeel.version import __version__

COMMANDS = ["run", "compare", "tune", "methods", "check", "data", "report"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- run ------------------------------------------------------------------------------------------


def test_run_as_json(folder: Path) -> None:
    done = call("run", "toy.toml", "--out", "out", "--json")
    assert done.code == 0
    found = done.json
    rows = RunFolder(folder / "out").rows()
    assert set(found) >= {"run_dir", "rounds", "best", "last", "bytes_up", "bytes_down"}
    assert (found["run_dir"], found["rounds"], found["status"]) == ("out", 4, "finished")
    assert found["last"] == rows[-1].test["accuracy"]
    assert found["best"] == max(row.test["accuracy"] for row in rows)
    assert found["bytes_up"] == sum(sum(row.bytes_up.values()) for row in rows)
    assert found["bytes_down"] == sum(sum(row.bytes_down.values()) for row in rows)
    assert "fedavg seed 0" in done.err
    assert "report  out/report.html" in done.err


def test_run_as_a_table(folder: Path) -> None:
    done = call("run", "toy.toml")
    assert done.code == 0
    assert "fedavg" in done.out
    assert "best" in done.out
    assert "runs/toy" in done.err
    assert sorted(p.name for p in (folder / "runs" / "toy").iterdir()) == [
        "checkpoint",
        "config.toml",
        "model-best.safetensors",
        "model.safetensors",
        "pictures.safetensors",
        "report.html",
        "rounds.jsonl",
        "run.json",
    ]


def test_settings_of_the_command_line_are_laid_over_the_file(folder: Path) -> None:
    words = ("-s", "rounds=2", "-s", "local.lr=0.01", "--set", "method=fedprox(mu=0.5)")
    assert call("run", "toy.toml", *words, "-s", "name=try", "--quiet").code == 0
    settings = load(folder / "runs" / "try" / "config.toml")
    assert (settings.rounds, settings.local.lr, settings.method) == (2, 0.01, "fedprox(mu=0.5)")
    assert RunFolder(folder / "runs" / "try").read_run().local.startswith("SGD, lr 0.01")


def test_a_run_folder_is_an_experiment_too(folder: Path) -> None:
    """Running it again repeats the run; running its folder reads it."""
    first = call("run", "toy.toml", "--out", "one", "--json")
    again = call("run", "one/config.toml", "--out", "two", "--json")
    assert again.code == 0
    assert {**first.json, "run_dir": ""} == {**again.json, "run_dir": ""}
    before = (folder / "one" / "rounds.jsonl").stat().st_mtime_ns
    read = call("run", "one", "--json")
    assert read.json == first.json
    assert "taken from an earlier run" in read.err
    assert (folder / "one" / "rounds.jsonl").stat().st_mtime_ns == before


def test_quiet_is_quiet(folder: Path) -> None:
    done = call("run", "toy.toml", "--out", "out", "--quiet", "--json")
    assert "seed 0" not in done.err
    assert done.json["rounds"] == 4


def test_training_that_cannot_go_on_ends_with_1(folder: Path) -> None:
    (folder / "diverges.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))\n"
    )
    words = ("-s", "model.name=diverges:net", "-s", "model.args={}", "-s", "local.lr=1e4")
    done = call("run", "toy.toml", *words, "--out", "out", "--json")
    assert done.code == 1
    assert done.out == ""
    lines = done.err.splitlines()
    assert lines[-3].startswith("TrainingError: Training diverged in round ")
    assert lines[-1].startswith("  do   lower local.lr")
    assert RunFolder(folder / "out").read_run().status == "failed"


# --- compare --------------------------------------------------------------------------------------


def test_compare(folder: Path) -> None:
    words = ("compare", "toy.toml", "--methods", "fedavg, fedprox(mu=0.1)+gcfed", "--seeds", "2")
    done = call(*words, "--json")
    assert done.code == 0
    assert [row["method"] for row in done.json] == ["fedavg", "fedprox(mu=0.1)+gcfed"]
    assert all(row["seeds"] == 2 for row in done.json)
    assert (folder / "runs" / "toy-compare" / "report.html").stat().st_size > 100_000
    assert done.err.count("test ") == 4
    table = call(*words)
    assert "fedprox(mu=0.1)+gcfed" in table.out
    assert table.err.count("taken from an earlier run") == 4


def test_compare_takes_methods_and_seeds_from_the_file(folder: Path) -> None:
    with (folder / "toy.toml").open("a") as file:
        file.write('\n[compare]\nmethods = ["fedgh", "fednova"]\nseeds = 1\n')
    done = call("compare", "toy.toml", "--json", "--quiet")
    assert [(row["method"], row["seeds"]) for row in done.json] == [("fedgh", 1), ("fednova", 1)]


def test_compare_says_what_failed_and_finishes_the_rest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedkeel.method.parts.fedprox import FedProx

    def explode(self: FedProx, params: dict, step: object) -> dict:
        return {k: v * float("inf") for k, v in params.items()}

    monkeypatch.setattr(FedProx, "penalty_gradient", explode)
    done = call("compare", "toy.toml", "--methods", "fedprox,fedavg", "--seeds", "1", "--json")
    assert done.code == 1
    found = [(row["method"], row["unfinished"]) for row in done.json]
    assert found == [("fedprox", 1), ("fedavg", 0)]
    assert "failed  fedprox, seed 0: Training diverged in round 1" in done.err
    done = call("compare", "toy.toml", "--methods", "fedprox", "--seeds", "1", "--json")
    assert (done.code, done.out) == (1, "")
    assert "No run of the comparison could be finished." in done.err


# --- methods --------------------------------------------------------------------------------------


def test_methods_as_json() -> None:
    done = call("methods", "--json")
    assert (done.code, done.err) == (0, "")
    assert [one["name"] for one in done.json] == list(REGISTRY)
    for one in done.json:
        assert isinstance(one["paper"], str)
        assert isinstance(one["roles"], list)
        assert isinstance(one["needs"], list)
    roles = {one["name"]: one["roles"] for one in done.json}
    assert (
        roles["scaffold"] == ["gradient transform", "client state", "upload"] or roles["scaffold"]
    )
    assert roles["fedavg"] == []


def test_methods_as_a_table() -> None:
    done = call("methods")
    assert done.code == 0
    assert all(name in done.out for name in REGISTRY)
    assert "combine with '+'" in done.out


def test_one_expression() -> None:
    done = call("methods", "fedprox(mu=0.25)+gcfed")
    assert "method   fedprox(mu=0.25)+gcfed" in done.out
    assert "0.25" in done.out
    found = call("methods", "fedprox+gcfed", "--json").json
    assert [part["name"] for part in found] == ["fedprox", "gcfed.local", "gcfed.global"]
    assert all({"name", "paper", "roles", "needs"} <= set(part) for part in found)
    assert "combines with" in done.out
    entries = call("methods", "fedprox+gcfed", "--bibtex").out
    assert entries.count("@") == 2
    assert "li2020fedprox" in entries


def test_a_method_without_a_paper_has_nothing_to_cite(folder: Path) -> None:
    shutil.copy(Path(__file__).parents[2] / "examples" / "own_method.py", folder / "uncited.py")
    done = call("methods", "uncited:Agreement", "--bibtex")
    assert (done.out, done.code) == ("", 0)
    assert "uncited:Agreement names no paper" in done.err


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("fedavg", "scaffold", "fedgc", "dpsgd", "mime")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in REGISTRY
    ],
)
def test_every_method_can_be_described(name: str) -> None:
    done = call("methods", name)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{name}: ")
    for words in ("The order of a round", "Sent and kept", "measured on", "Partners", "Citation"):
        assert words in done.out


# --- check ----------------------------------------------------------------------------------------


def test_check_trains_and_writes_nothing(folder: Path) -> None:
    before = contents(folder)
    done = call("check", "toy.toml", "-s", "method=scaffold")
    assert (done.code, done.err) == (0, "")
    assert "everything fits together; nothing was trained" in done.out
    assert "2.00 x model (model 368 bytes, scaffold 368 bytes)" in done.out
    assert contents(folder) == before


def test_check_as_json(folder: Path) -> None:
    found = call("check", "toy.toml", "-s", "method=scaffold", "--json").json
    assert found["status"] == "checked"
    assert found["estimate"]["client_state"] == 368
    assert found["bytes_total"] == 4 * 5 * 4 * 368
    done = call("run", "toy.toml", "-s", "method=scaffold", "--json", "--quiet").json
    assert done["bytes_up"] + done["bytes_down"] == found["bytes_total"]


def test_check_hints_at_columns_of_large_numbers(folder: Path) -> None:
    rows = "\n".join(f"{i % 7},{1000 + 50 * i},{i % 2}" for i in range(60))
    (folder / "own.csv").write_text(f"age,dose,label\n{rows}\n")
    words = ("check", "toy.toml", "-s", "data.source=own.csv")
    words = (*words, "-s", "partition.kind=iid", "-s", "partition.clients=8")
    words = (*words, "-s", "partition.alpha=unset", "-s", "partition.min_size=unset")
    assert "column 'dose' goes up to 3,950" in call(*words).out
    assert "warning" not in call(*words, "-s", "data.normalize=standardize").out


def test_check_hints_at_one_class_alone(folder: Path) -> None:
    (folder / "own.csv").write_text("age,label\n" + "".join(f"{i % 7},well\n" for i in range(60)))
    words = ("check", "toy.toml", "-s", "data.source=own.csv")
    words = (*words, "-s", "partition.kind=iid", "-s", "partition.clients=8")
    done = call(*words).out
    assert "all training examples have the label 'well'" in done
    assert "one class\n" in done


# --- data -----------------------------------------------------------------------------------------


def test_data_list() -> None:
    found = call("data", "list", "--json").json
    digits = next(one for one in found if one["name"] == "digits")
    assert (digits["classes"], tuple(digits["shape"])) == (10, (1, 8, 8))
    table = call("data", "list")
    assert (table.code, table.err) == (0, "")
    assert all(one["name"] in table.out for one in found)


def test_data_get(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, progress: object) -> Path:
        progress(0, 10_000_000, "a.gz")
        progress(10_000_000, 10_000_000, "a.gz")
        progress(5_000_000, None, "b.gz")
        return Path("somewhere") / name

    monkeypatch.setattr("fedkeel.data.read.download.get", fetch)
    done = call("data", "get", "mnist")
    assert done.code == 0
    assert done.err.splitlines() == [
        "a.gz: 0.0 MB of 10.0 MB",
        "b.gz: 5.0 MB",
        "mnist  somewhere/mnist",
    ]


def test_data_inspect(folder: Path) -> None:
    found = call("data", "inspect", "toy.toml", "--json").json
    assert len(found["sizes"]) == 12
    assert [sum(row) for row in found["histogram"]] == found["sizes"]
    assert found["kind"] == "dirichlet"
    table = call("data", "inspect", "toy.toml", "-s", "partition.clients=7")
    assert (table.code, table.err) == (0, "")
    assert "7 clients of" in table.out


# --- report ---------------------------------------------------------------------------------------


def test_a_hint_is_no_progress(folder: Path) -> None:
    """With --quiet nothing said that all examples have one label."""
    rows = "".join(f"{i % 7},{i % 3},only\n" for i in range(300))
    Path("one.csv").write_text("a,b,label\n" + rows)
    given = ("-s", "data.source=one.csv")
    done = call("run", "toy.toml", *given, "--out", "one", "--quiet", "--json")
    assert done.code == 0, done.err
    assert done.err.startswith("warning: all training examples have the label 'only'")
    assert json.loads(done.out)["warnings"][0].startswith("all training examples have the label")


def test_a_strangers_names_move_no_cursor(folder: Path) -> None:
    assert call("run", "toy.toml", "--out", "a", "--quiet").code == 0
    bad = "x\x1b]0;owned\x07\u202e[red]"
    record = json.loads((folder / "a" / "run.json").read_text())
    record |= {"name": bad, "method": bad, "status": "failed", "message": bad}
    (folder / "a" / "run.json").write_text(json.dumps(record))
    for options in ([], ["--markdown"]):
        done = call("report", "a", "--out", "page.html", *options)
        assert done.code == 0
        for shown in (done.out, done.err):
            assert not any(c in shown for c in "\x1b\x07\u202e")
        assert r"x\x1b]0;owned\x07\u202e[red]" in "".join(done.out.split())


def test_report(folder: Path) -> None:
    assert call("run", "toy.toml", "--out", "a", "--quiet").code == 0
    words = ("--methods", "fedgh", "--seeds", "1", "-s", "weights=method", "--out", "b")
    assert call("compare", "toy.toml", *words).code == 0
    done = call("report", "a", "b", "--out", "page.html", "--target", "0.3")
    assert done.code == 0
    assert "fedavg" in done.out
    assert "fedgh" in done.out
    told = (
        "fedavg weights clients by size; fedgh weights them equally. "
        "Set `weights` to compare fairly."
    )
    claim = (
        "Nothing can be said against `fedavg` yet: there are fewer than 3 different runs with the "
        "same seeds."
    )
    assert (
        done.err == f"{claim}\n{told}\nreport  page.html\n"
    )  # the page's warning, where the table is
    pasted = call("report", "a", "b", "--out", "page.html", "--markdown")
    assert pasted.out.endswith(f"\n{told}\n")
    page = (folder / "page.html").read_text()
    assert "fedavg" in page
    assert "fedgh" in page
    Path("all/deep").mkdir(parents=True)
    Path("a").rename("all/deep/a")
    lost = call("report", "all")
    assert (lost.code, lost.err.splitlines()[-1]) == (2, "  do   give what is in it, e.g. all/*/*")
    Path("b").rename("all/deep/b")
    assert "e.g. all/deep/b" in call("report", "all").err
    Path("all/deep/a").rename("a")
    (folder / "a" / "report.html").unlink()
    rows = call("report", "a", "--json").json
    assert [row["method"] for row in rows] == ["fedavg"]
    assert call("report", "a", "--markdown").out.startswith("| method | best % | last % |")
    assert (folder / "a" / "report.html").exists()


# --- presets, help, version -----------------------------------------------------------------------


def test_a_preset(folder: Path) -> None:
    words = ("--preset", "digits", "-s", "rounds=1")
    done = call("run", *words, "--json", "--quiet", "-s", "engine.kind=sequential")
    assert done.code == 0
    assert done.json["run_dir"] == "runs/digits"
    assert "digits" in call("check", *words).out


@each("words", [(), *[(name,) for name in COMMANDS], ("data", "get")])
def test_help(words: tuple[str, ...]) -> None:
    done = call(*words, "--help")
    assert done.code == 0
    assert "Usage: fedkeel" in done.out
    assert "\\" not in done.out  # typer escapes brackets, as in \\[required]
    assert done.err == ""


def test_version() -> None:
    done = call("--version")
    first, facts = done.out.splitlines()
    assert (done.code, first) == (0, __version__)
    assert f"torch {version('torch')}" in facts


def test_the_environment_for_a_bug_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_DATA", str(Path.home() / "data"))
    monkeypatch.setenv("FEDKEEL_SECRET_KEY", "hidden")
    done = call("doctor", "--environment")
    assert done.code == 0, done.err
    facts = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert facts["fedkeel"].startswith(__version__)
    assert (facts["torch"], facts["FEDKEEL_DATA"]) == (version("torch"), "~/data")
    assert "hidden" not in done.out


def test_a_shell_completes_commands() -> None:
    """What the script of a shell asks for is answered with names of commands."""
    asked = {"_FEDKEEL_COMPLETE": "complete_bash", "COMP_WORDS": "fedkeel pre", "COMP_CWORD": "1"}
    words = [sys.executable, "-m", "fedkeel"]
    done = subprocess.run(
        words, env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["predict"]


# --- processes ------------------------------------------------------------------------------------


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "fedkeel", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (found.stdout.splitlines()[0], found.stderr) == (__version__, "")


def test_the_installed_command(folder: Path) -> None:
    done = shell("run", "toy.toml", "--json", folder=folder)
    assert done.code == 0, done.err
    assert done.json["rounds"] == 4
    assert "Warning" not in done.err


def test_a_reader_that_has_had_enough_is_no_error(folder: Path) -> None:
    words = f"{EXECUTABLE} methods --json | head -c 100; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(
        ["bash", "-c", words], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert (found.stderr, len(found.stdout)) == ("", 100)
    assert found.returncode in (0, 1)


def test_lines_where_there_is_no_terminal(folder: Path) -> None:
    done = run("run", "toy.toml", folder=folder)
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    assert "\r" not in done.out + done.err
    assert "seed 0" not in done.out
    first, second = done.err.splitlines()[:2]
    assert first == "preparing data, model and engine"
    assert second.startswith("fedavg seed 0: ")


@pytest.mark.slow
def test_bars_on_a_terminal_stay_out_of_the_results(folder: Path) -> None:
    ours, theirs = pty.openpty()
    command = [EXECUTABLE, "run", "toy.toml", "--json", "-s", "rounds=30"]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment
    )
    os.close(theirs)
    shown = bytearray()
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out)["rounds"] == 30
    assert b"\x1b[" in shown
    assert b"30/30" in shown or b"/30" in shown


def test_scores_that_are_not_finite_have_no_number(folder: Path) -> None:
    """JSON has no word for them; the table and the page do without."""
    (folder / "wild.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(6, 4)\n"
        "    def forward(self, x):\n"
        "        scores = super().forward(x)\n"
        "        return scores if self.training else scores * float('nan')\n"
    )
    own = ("-s", "model.name=wild:Net", "-s", "model.args={}")
    done = call("compare", "toy.toml", "--methods", "fedavg", "--seeds", "2", *own, "--json")
    assert done.code == 0
    assert done.json[0]["seeds"] == 2
    assert all(
        math.isnan(row.test["loss"])
        for f in (folder / "runs/toy-compare").iterdir()
        if f.is_dir()
        for row in RunFolder(f).rows()
    )
    assert call("run", "toy.toml", *own, "--out", "out").code == 0
    assert call("run", "out").code == 0
