"""``fedkeel flower``, as a user runs it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.common.config import parse_config_args

from commands import EXECUTABLE, Process, call, experiment, rows, shell
from fedkeel.config import load
from fedkeel.errors import RunError
from fedkeel.flower.local import keys, watcher
from fedkeel.flower.local.processes import FlowerProcesses, free_port, quoted
from fedkeel.flower.node import hardware, resident
from fedkeel.flower.node.hardware import Hardware
from fedkeel.records.folder import RunFolder
from fedkeel.version import __version__
from toys import eventually, living

HOSPITALS = Path(__file__).parents[2] / "examples" / "three_hospitals"
SECURE = ("-s", "flower.secure_aggregation=true")


def hospital(file: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    lines = ["a,b,diagnosis"]
    for number in range(40):
        x = random.normal(size=2) + 2 * (number % 2)
        lines.append(f"{x[0]:.4f},{x[1]:.4f},{('benign', 'malignant')[number % 2]}")
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.processes
def test_up_with_data_of_its_own_on_each_node(tmp_path: Path) -> None:
    """The hospitals' own experiment, with two small ones; nothing is left running."""
    files = [hospital(tmp_path / f"{i}.csv", i) for i in range(2)]
    words = ["flower", "up", HOSPITALS / "experiment.toml", "--out", "run", "--json"]
    words += ["-s", "rounds=1", "-s", "partition.clients=2", "-s", 'task.metrics=["auroc"]']
    words += [word for file in files for word in ("--data", file.name)]
    done = shell(*words, folder=tmp_path, seconds=240)
    assert done.code == 0, done.err
    assert done.json["status"] == "finished"
    assert (done.json["rounds"], done.json["faults"]) == (1, {})
    assert done.json["bytes_up"] > 0
    assert (tmp_path / "run" / "report.html").exists()
    record = RunFolder(tmp_path / "run").read_run()
    assert record.engine.kind == "flower"
    assert record.partition.sizes == [32, 32]
    assert re.search(r"round 1/1, test AUROC [0-9.]+ %", done.err)
    assert living(tmp_path) == []


@pytest.mark.processes
def test_a_supernode_that_is_killed_is_missed_at_once(toy: Path, tmp_path: Path) -> None:
    """Each round waited for it, up to its deadline or the minute that Flower takes to notice."""
    words: list[object] = ["flower", "up", toy, "--out", "run", "--nodes", "2", "-s", "rounds=3"]
    running = Process(*words, "-s", "flower.quorum=0.1", folder=tmp_path)
    out = tmp_path / "run"
    assert eventually(lambda: rows(out) >= 2, 240)
    (pid,) = FlowerProcesses(out / "flower", []).find("node-1", "flower-supernode")
    os.kill(pid, signal.SIGKILL)
    done = running.wait(300)
    assert done.code == 0, done.err
    assert "the SuperNode node-1 has ended" in done.err
    last = RunFolder(out).rows()[-1]
    assert all(client % 2 == 0 for client in last.clients)
    assert any(client % 2 for clients in last.faults.values() for client in clients)
    assert "no reply before the deadline" not in last.faults


@pytest.mark.processes
def test_nothing_outlives_a_command_that_is_killed(toy: Path, tmp_path: Path) -> None:
    """Neither `up` nor `node`, which cannot do anything about it, leaves a process behind."""
    out, long = tmp_path / "run", ["-s", "rounds=1000"]
    up = Process("flower", "up", toy, "--out", out, "--nodes", "1", *long, folder=tmp_path)
    assert eventually(lambda: rows(out) >= 2, 240)
    assert len(living(out)) >= 6
    up.send(signal.SIGKILL)
    assert eventually(lambda: not living(out), 60), living(out)
    assert RunFolder(out).read_run().status == "running"
    home = tmp_path / "node"
    with FlowerProcesses(tmp_path / "link", []) as link:
        words = [EXECUTABLE, "flower", "node", "--insecure", "--superlink", link.address]
        variables = {**link.environment, "HOME": str(home), "FLWR_HOME": str(home / "flwr")}
        words += ["--port", str(free_port())]
        node = subprocess.Popen(words, env=variables, stderr=subprocess.DEVNULL)
        try:
            assert eventually(lambda: any("flower-superexec" in w for w in living(home)), 120)
        finally:
            node.kill()
            node.wait()
        assert eventually(lambda: not living(home), 60), living(home)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("method=momentum+gradma.s", "which takes one"),
        ("model.name=transformer", "transformer"),
        ("cohort.clients=1000", "1000"),
    ],
)
def test_what_cannot_run_is_refused_before_a_process_starts(
    toy: Path, tmp_path: Path, setting: str, words: str
) -> None:
    done = call("flower", "up", toy, "--out", tmp_path / "run", "-s", setting)
    assert done.code == 2
    assert words in done.err
    assert not (tmp_path / "run").exists()


def test_keys_of_fewer_nodes_are_made_anew(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is gone on with has as many nodes as this time are asked for."""

    def begun(federation: FlowerProcesses) -> None:
        assert federation.secure
        assert not federation.keys.exists()
        raise RunError("as far as this test goes")

    monkeypatch.setattr(FlowerProcesses, "__enter__", begun)
    keys.make(tmp_path / "run" / "flower" / "keys", ["127.0.0.1"], 2)
    done = call("flower", "up", toy, "--out", tmp_path / "run", "--nodes", "3", "--secure")
    assert "as far as this test goes" in done.err


def test_a_second_one_in_the_folder_is_refused(toy: Path, tmp_path: Path) -> None:
    """It would take the database, the keys and the processes of the first."""
    place = tmp_path / "run" / "flower"
    place.mkdir(parents=True)
    (place / "superlink.db").write_text("of the first")
    hold = "import sys; from pathlib import Path; from fedkeel.records.folder import RunFolder\n"
    hold += "with RunFolder(Path(sys.argv[1])).alone(): print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdin
        assert first.stdout
        assert first.stdout.readline()
        done = call("flower", "up", toy, "--out", tmp_path / "run", "--resume")
        first.stdin.close()
    assert "being written by another process" in done.err
    assert (place / "superlink.db").exists()


def test_what_a_killed_command_left_running_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SuperLink and nodes would go on for ever."""
    before, now = FlowerProcesses(tmp_path / "a", []), FlowerProcesses(tmp_path / "a", [])
    other = FlowerProcesses(tmp_path / "ab", [])
    for one in (before, other):
        one.start("node-7", [sys.executable, "-c", "import signal; signal.pause()"])
    monkeypatch.setattr(FlowerProcesses, "start_link", lambda federation: None)
    with now:
        assert not before.is_alive("node-7")
        assert other.is_alive("node-7")
    other.stop("node-7")


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGHUP])
def test_a_polite_kill_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: signal.Signals
) -> None:
    """A terminal that closes is one; nohup lets it pass."""
    words = [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(FlowerProcesses, "start_link", lambda one: one.start("node-0", words))
    running = FlowerProcesses(tmp_path, [])
    before = signal.signal(kill, signal.SIG_DFL)  # nohup may hold for these tests, too
    try:
        with pytest.raises(SystemExit, match=str(128 + kill)), running:
            signal.raise_signal(kill)
        assert running.find() == []
        assert signal.getsignal(kill) == signal.SIG_DFL
        signal.signal(kill, signal.SIG_IGN)
        with running:
            signal.raise_signal(kill)
    finally:
        signal.signal(kill, before)


def test_an_interrupt_while_processes_are_ended_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever presses Ctrl-C twice means the same thing."""
    words = [sys.executable, "-c", "import signal; signal.pause()"]
    running, stop, before = (
        FlowerProcesses(tmp_path, []),
        FlowerProcesses.stop,
        signal.getsignal(signal.SIGINT),
    )

    def interrupted(federation: FlowerProcesses, name: str) -> None:
        signal.raise_signal(signal.SIGINT)
        stop(federation, name)

    monkeypatch.setattr(FlowerProcesses, "start_link", lambda one: one.start("superlink", words))
    monkeypatch.setattr(FlowerProcesses, "stop", interrupted)
    with running:
        running.start("node-0", words)
    assert running.find() == []
    assert signal.getsignal(signal.SIGINT) == before


def test_an_interrupt_while_a_process_is_started_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits until somebody has written down that the process is there."""
    words = [sys.executable, "-c", "import signal; signal.pause()"]
    started: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen

    def interrupted(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        process = begin(command, **more)
        if command == words:  # and not the process that watches it
            started.append(process)
            signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(FlowerProcesses, "start_link", lambda one: one.start("superlink", words))
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), FlowerProcesses(tmp_path, []):
            pytest.fail("it began")
    finally:
        signal.signal(signal.SIGINT, before)
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.processes
def test_ctrl_c_ends_after_the_round_and_another_one_goes_on(
    toy: Path, patience: float, tmp_path: Path
) -> None:
    words = ["flower", "up", toy, "--nodes", "2", "--out", "run", "-s", "rounds=200"]
    words += ["-s", "stop.patience=6", "-s", "stop.min_delta=0.99"]  # which ends it after round 6
    running, out = Process(*words, folder=tmp_path), tmp_path / "run"
    assert eventually(lambda: rows(out) >= 2, 9 * patience)
    running.send(signal.SIGINT)
    done = running.wait(9 * patience)
    assert done.code == 130, done.err
    assert "stopping after this round" in done.err
    assert "to go on: --resume" in done.err
    record, count = RunFolder(out).read_run(), rows(out)
    assert (record.status, record.message) == ("interrupted", "stopped on request")
    assert count < 7
    assert living(tmp_path) == []
    done = shell(*words, "--resume", "--json", folder=tmp_path, seconds=18 * patience)
    assert done.code == 0, done.err
    assert (done.json["status"], done.json["rounds"]) == ("finished", 6)
    assert done.json["message"].startswith("ended early after round 6:")
    assert "ended early after round 6:" in done.err
    assert living(tmp_path) == []


def test_export_writes_a_whole_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = experiment(tmp_path)
    (tmp_path / "my_net.py").write_text("import my_layers\n\nclass Net(my_layers.Wide): ...\n")
    (tmp_path / "my_layers.py").write_text("import my_pack\nfrom torch.nn import Linear as Wide\n")
    (tmp_path / "my_losses.py").write_text("import test_my\n\ndef error(output, target): ...\n")
    (tmp_path / "test_my.py").write_text("")  # Flower would leave it out
    pack = tmp_path / "my_pack"
    (pack / "inner" / "__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "weights.npz", "inner/__init__.py", "inner/__pycache__/x.py"):
        (pack / name).write_text("")
    (tmp_path / "my_notes").mkdir()  # a folder that an import finds, without code
    (pack / "inner" / "deep.py").write_text("import json, my_deep, my_notes\nfrom . import other\n")
    (tmp_path / "my_deep.py").write_text("import my_net\n")
    elsewhere = tmp_path / "elsewhere" / "my_score.py"
    elsewhere.parent.mkdir()
    elsewhere.write_text("def score(output, target): ...\n")
    monkeypatch.syspath_prepend(elsewhere.parent)
    words = ["-s", "model.name=my_net:Net", "-s", "data.augment=my_losses:error"]
    words += ["-s", "task.metrics=['my_score:score']"]
    done = call("flower", "export", file, "--out", "app", *words)
    assert done.code == 0, done.err
    missing = re.findall("the module '(.+)' is not in the app: install it everywhere", done.err)
    assert missing == ["my_score", "test_my"]
    app = tmp_path / "app"
    found = sorted(str(p.relative_to(app)) for p in app.rglob("*") if p.is_file())
    assert found == [
        "README.md",
        "federation/__init__.py",
        "federation/client.py",
        "federation/experiment.toml",
        "federation/server.py",
        "for-it/Dockerfile",
        "for-it/fedkeel-node.service",
        "for-it/fedkeel-superlink.service",
        "for-it/node.html",
        "for-it/server.html",
        "my_deep.py",
        "my_layers.py",
        "my_losses.py",
        "my_net.py",
        "my_pack/__init__.py",
        "my_pack/inner/__init__.py",
        "my_pack/inner/deep.py",
        "pyproject.toml",
    ]
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "federation.server:app",
        "clientapp": "federation.client:app",
    }
    assert load(app / "federation" / "experiment.toml").model.name == "my_net:Net"
    readme = (app / "README.md").read_text()
    for words in (
        "--enable-supernode-auth",
        "--ssl-certfile",
        "--root-certificates",
        "--auth-supernode-private-key",
        "flwr supernode register",
        "flwr run",
        "export FEDKEEL_MODULES=my_score",
        "export FEDKEEL_MODULES=test_my",
        "resume=true",
        f"fedkeel-{__version__}-py3-none-any.whl[flower]",
        "Better, each site makes its own key",
    ):
        assert words in readme
    assert "fedkeel[flower]==" not in readme
    assert "$" not in readme.replace("$ ", "")
    assert "--insecure" not in readme
    again = call("flower", "export", file, "--out", "app")
    assert again.code == 2
    assert "is not empty" in again.err


def readme(tmp_path: Path, name: str, *words: str) -> str:
    out = tmp_path / name
    file = HOSPITALS / "experiment.toml" if name.startswith("own") else experiment(tmp_path)
    done = call("flower", "export", file, "--out", out, *(x for w in words for x in ("-s", w)))
    assert done.code == 0, done.err
    assert ("engine.devices is ignored" in done.err) == any("devices" in word for word in words)
    return (out / "README.md").read_text()


def test_the_readme_of_an_app_has_the_experiments_numbers(tmp_path: Path) -> None:
    """It was written for three nodes, whatever their number, and called any number a client's."""
    own = readme(tmp_path, "own", "partition.clients=5", 'engine.devices=["cuda:0"]')
    assert "--nodes 5 --out keys" in own
    assert re.findall(r"register keys/node-(\d+)\.pub", own) == ["0", "1", "2", "3", "4"]
    assert "'partition-id=0 num-partitions=5 " in own
    assert ' data="/path/to/file.csv"' in own
    assert "`partition-id` is the client's number, from 0 to 4" in own
    many = readme(tmp_path, "own-many", "partition.clients=40")
    assert many.count("supernode register") == 10
    assert "up to `keys/node-39.pub`" in many
    shared = readme(tmp_path, "shared")
    assert "--nodes 3 --out keys" in shared
    assert "`partition-id` is the node's number, from 0 to 2" in shared
    assert "data=" not in shared
    for text in (own, shared):
        assert 'state="~/.fedkeel/state"' in text
        assert "started again within a minute" in text
        assert "--port 9095" in text
        assert 'device="cpu"' in text


def test_an_app_asks_for_the_minor_version_of_flower_that_is_here(tmp_path: Path) -> None:
    """Flower turns others away, and another one was installed on a machine that came later."""
    text = readme(tmp_path, "app")
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    wanted = next(w for w in project["project"]["dependencies"] if w.startswith("flwr"))
    here = metadata.version("flwr").split(".")
    assert wanted == f"flwr=={here[0]}.{here[1]}.*"
    assert f'"{wanted}"' in text


def test_mistakes_are_said_in_four_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = experiment(tmp_path)
    (tmp_path / "taken").write_text("a file, and no folder")
    for words, said in (
        (["up", file, "--out", "taken"], "taken/flower cannot be written to"),
        (["up", file, "--data", "x.csv"], "set data.source = 'nodes', data.labels = "),
        (["up", file, "--data", "x.csv"], "[partition] to kind = 'nodes', clients = 1"),
        (["stats", file, "--data", "x.csv"], "set data.source = 'nodes', data.labels = "),
        (["export", file, "--out", "app", "--data", "x.csv"], "set data.source = 'nodes', "),
        (["up", HOSPITALS / "experiment.toml"], "--data goes with"),
        (["up", HOSPITALS / "experiment.toml", "--data", "x.csv"], "expected 3 times --data"),
        (["up", HOSPITALS / "experiment.toml", *3 * ["--data", "x.csv"]], "no file or folder"),
        (["export", file, "--out", "app", *SECURE, "-s", "method=fedgh"], "fedgh cannot be run"),
        (["export", file, "--out", "app", "-s", "flower.secure_norm=1.0"], "secure_norm"),
        (["export", file, "--out", "app", "-s", "flower.quorum=0"], "flower.quorum"),
        (["export", file, "--out", "app", "-s", "method=fedavgg"], "did you mean 'fedavg'"),
        (["export", file, "--out", "app", "-s", "model.name=mpl"], "did you mean 'mlp'"),
        (["export", file, "--out", "app", "-s", "model.name=nowhere:Net"], "nowhere"),
        (["export", file, "--out", "app", "-s", "data.source=nodes"], "partition.kind"),
    ):
        done = call("flower", *words)
        assert done.code == 2
        assert said in done.err
        assert len(done.err.strip().splitlines()) <= 4
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(("module", "package"), [("flwr", "flwr"), ("Crypto", "pycryptodome")])
def test_a_package_of_the_extra_that_is_missing(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    done = call("flower", "keys", "--host", "localhost", "--nodes", "1")
    assert done.code == 2
    assert f"A federation needs {package}." in done.err
    assert "fedkeel[flower]" in done.err


@pytest.mark.parametrize(
    "text",
    ["/data/a b.csv", '/data/"x".csv', "/data/it's.csv", "/data/\N{GRINNING FACE}=1", "C:\\x"],
)
def test_flower_reads_what_is_quoted_for_it(text: str) -> None:
    assert parse_config_args([f"a=1 data={quoted(text)} b=2"]) == {"a": 1, "data": text, "b": 2}


@pytest.mark.parametrize("text", ["both ' and \"", "two\nlines"])
def test_what_flower_cannot_be_told_is_refused(text: str) -> None:
    with pytest.raises(RunError, match="cannot hold this text"):
        quoted(text)


def test_a_module_with_the_name_of_the_apps_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package hid it: every node ended in an error of Python's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "federation.py").write_text(
        "from torch import nn\n\n\ndef model():\n    return nn.Linear(64, 10)\n"
    )
    words = ("--preset", "digits", "-s", "model.name=federation:model")
    done = call("flower", "export", *words, "--out", "app")
    assert done.code != 0
    assert "give the file another name than federation.py" in done.err
    assert not (tmp_path / "app").exists()


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("flower", "keys", "--host", "localhost", "--nodes", "2")
    assert done.code == 0, done.err
    assert (tmp_path / "keys" / "node-1.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    assert done.out == ""


def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> str:
    """Return the configuration with which ``flower node`` starts a SuperNode."""
    found: list[list[str]] = []
    monkeypatch.setattr(resident, "FOLDER", tmp_path / "resident")
    monkeypatch.setenv(watcher.NAME, "a federation that is watched")
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which the command changes
    monkeypatch.setattr(os, "execvp", lambda file, argv: found.append(argv))
    done = call("flower", "node", "--insecure", *words)
    assert done.code == 0, done.err
    (argv,) = found
    assert argv[:2] == ["flower-supernode", "--insecure"]
    return argv[argv.index("--node-config") + 1] if "--node-config" in argv else ""


def test_a_node_is_started_with_the_device_of_its_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ("--node-config", "partition-id=0")
    assert started(monkeypatch, tmp_path, *config) == "partition-id=0"
    chosen = started(monkeypatch, tmp_path, *config, "--device", "cpu", "--engine", "vectorized")
    read = parse_config_args([chosen])
    assert read == {"partition-id": 0, "device": "cpu", "engine": "vectorized"}
    assert Hardware.read(read) == Hardware(("cpu",), "vectorized")


def test_a_device_that_is_not_there_or_not_allowed_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execvp", lambda *words: pytest.fail("it was started"))
    monkeypatch.setattr(hardware, "available_gpus", list)
    (tmp_path / "policy.toml").write_text('devices = ["cuda"]\n')
    policy = ("--policy", str(tmp_path / "policy.toml"))
    cases = [
        (("--device", "cuda"), "There is no GPU that torch can use."),
        (("--device", "gpu"), "A node has no such device."),
        (("--engine", "ray"), "A node has no such engine."),
        (("--device", "cpu", *policy), "The policy of this site does not allow the device"),
    ]
    for words, reason in cases:
        done = call("flower", "node", "--insecure", *words)
        assert done.code != 0
        assert reason in done.err
    monkeypatch.chdir(tmp_path)
    up = call("flower", "up", experiment(tmp_path), "--device", "cuda:1")
    assert up.code != 0
    assert "There is no GPU that torch can use." in up.err
    assert not (tmp_path / "runs").exists()
