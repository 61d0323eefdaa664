"""A model that is handed out is trained: each client's own can be had, and no half trained one."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import fedkeel as fk
from commands import call
from fedkeel.records.client_models import client_files

NAMES = ("north", "a/b", "..", "Süd")
RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.normal(size=(5, 3))


def site(k: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Examples of a client; each numbers its classes in its own way."""
    x = RANDOM.normal(size=(80, 5))
    return x, ((x @ WEIGHTS).argmax(axis=1) + k) % 3


SITES = {name: site(k) for k, name in enumerate(NAMES)}


class Net(nn.Module):
    """Two layers with batch normalisation between them."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.body = nn.Linear(5, 12)
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.norm(self.body(x))))


def trained(method: str, norm: bool = False, **own: Any) -> Any:
    return fk.run(
        method,
        task=fk.Task(lambda: Net(norm), buffers="local" if norm else "refuse"),
        clients=fk.from_clients(SITES),
        test=SITES["north"],
        rounds=3,
        local=fk.Local(lr=0.5, epochs=2, batch_size=10),
        engine=fk.Engine(dtype="float64", **{"kind": "sequential", **own.pop("engine", {})}),
        progress=False,
        **own,
    )


def accuracy(state: dict[str, torch.Tensor], name: str, norm: bool) -> float:
    net = Net(norm).double()
    net.load_state_dict(state)
    x, y = SITES[name]
    with torch.no_grad():
        return float((net.eval()(torch.from_numpy(x)).argmax(1).numpy() == y).mean())


FAST = (("fedper", "sequential"), ("fedbn", "vectorized"), ("finetune", "sequential"))
FAST = (*FAST, ("fedproto", "sequential"), ("ditto", "vectorized"), ("ifca", "sequential"))
FAST = (*FAST, ("fedamp", "vectorized"))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(method, kind, marks=() if (method, kind) in FAST else pytest.mark.slow)
        for method in (
            *("local", "fedper", "fedbabu", "fedproto", "fedbn", "ditto", "finetune", "fedala"),
            *("ifca", "fedamp"),
        )
        for kind in ("sequential", "vectorized")
    ],
)
def test_a_clients_own_model_has_the_accuracy_that_is_reported(
    tmp_path: Path, method: str, kind: str
) -> None:
    norm = method == "fedbn"
    result = trained(method, norm, engine={"kind": kind})
    row = result.rows[-1]
    reported = (row.personal or row.per_client)["accuracy"]
    for name, expected in zip(NAMES, reported, strict=True):
        assert accuracy(result.client_model(name), name, norm) == pytest.approx(expected)
    written = trained(method, norm, engine={"kind": kind}, out=tmp_path / "run")
    again = trained(method, norm, engine={"kind": kind}, out=tmp_path / "run")
    for name in NAMES:
        for state in (written.client_model(name), again.client_model(name)):
            assert all(torch.equal(state[k], v) for k, v in result.client_model(name).items())
    loaded = fk.load(tmp_path / "run", model=lambda: Net(norm), client="a/b")
    x, y = SITES["a/b"]
    assert (loaded.predict(x).values.numpy() == y).mean() == pytest.approx(reported[1])
    if result.record.client_parameters:
        for refused in (result.state_dict, again.state_dict, result.best_state_dict):
            with pytest.raises(fk.FedkeelError, match=r"no single model(.|\n)*client_model"):
                refused()
        with pytest.raises(fk.FedkeelError, match=r"no single model(.|\n)*client='north'"):
            fk.load(tmp_path / "run", model=lambda: Net(norm))
        assert not list((tmp_path / "run").glob("model*.safetensors"))
    else:
        assert result.state_dict()


def test_what_a_client_cannot_have_is_said(tmp_path: Path) -> None:
    result = trained("fedper", cohort=fk.Cohort(clients=1), out=tmp_path)
    took_part = {k for row in result.rows for k in (row.clients or [])}
    (absent, *_) = [name for k, name in enumerate(NAMES) if k not in took_part]
    with pytest.raises(fk.FedkeelError, match="has not taken part"):
        result.client_model(absent)
    with pytest.raises(fk.FedkeelError, match=r"no client 'nort'(.|\n)*north"):
        result.client_model("nort")
    file = next((tmp_path / "models").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    (damaged,) = [n for n, f in zip(NAMES, client_files(NAMES), strict=True) if f[7:] == file.name]
    for taken in (result.client_model, lambda name: fk.load(tmp_path, model=Net, client=name)):
        with pytest.raises(fk.FedkeelError, match="changed since the run ended"):
            taken(damaged)
    for method, kept in (("knnper", "auto"), ("fedavg", "all"), ("fedper", "none")):
        result = trained(method, engine={"client_models": kept})
        with pytest.raises(fk.FedkeelError, match=r"left no client(.|\n)*client_models"):
            result.client_model("north")


def test_a_callback_is_given_no_half_trained_model() -> None:
    class Takes(fk.Callback):
        def on_round_end(self, row: Any, model: Any) -> None:
            model.state_dict()

    with pytest.raises(fk.FedkeelError, match="There is no single model"):
        trained("fedper", callbacks=[Takes()])


def test_files_are_safe_for_any_name() -> None:
    names = ["a", "A", "b", "x" * 300, "CON", "__1", "/etc/passwd", "a\\b", "ü" * 40, " ", ".git"]
    files = client_files(names)
    assert len({file.lower() for file in files}) == len(names)
    for file in files:
        folder, name = file.split("/")
        assert folder == "models"
        assert len(name) < 150
        assert not set(name) & set('\\:*?"<>|\0')
        assert not name.startswith(".")
    assert files[2] == "models/b.safetensors"


def test_the_commands_take_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("data.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["site", "a", "b", "kind"])
        for i in range(120):
            k, a = i % 2, RANDOM.normal()
            kind = "up" if (a > 0) == (k == 0) else "down"  # the two sites disagree
            out.writerow(
                [("north", "south")[k], f"{a + 5 * k:.5f}", f"{RANDOM.normal():.5f}", kind]
            )
    Path("run.toml").write_text(
        'method = "fedper"\nrounds = 6\n[data]\nsource = "data.csv"\nlabel = "kind"\n'
        'client = "site"\nnormalize = "client"\n[partition]\nkind = "client"\nholdout = 0.25\n'
        '[model]\nname = "mlp"\nargs = { hidden = [8] }\n[local]\nlr = 0.3\nepochs = 4\n'
        'batch_size = 8\n[engine]\nkind = "sequential"\n'
    )
    assert call("run", "run.toml", "--out", "run").code == 0
    rows = list(csv.DictReader(Path("data.csv").read_text(encoding="utf-8").splitlines()))
    for name in ("north", "south"):
        mine = [row for row in rows if row["site"] == name]
        with Path("new.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["a", "b"], *([row["a"], row["b"]] for row in mine)])
        done = call("predict", "run", "new.csv", "--client", name)
        assert done.code == 0, done.err
        answers = [row["prediction"] for row in csv.DictReader(done.out.splitlines())]
        right = np.mean([a == row["kind"] for a, row in zip(answers, mine, strict=True)])
        assert right > 0.9
        assert done.err == f"model   that of client {name!r}\n"
        assert call("export", "run", f"{name}.pt2", "--client", name).code == 0
    before = Path("new.csv").read_bytes()
    taken = call("predict", "run", "new.csv", "--client", name, "--out", "new.csv").err
    assert "--out is the file of the rows." in taken
    assert Path("new.csv").read_bytes() == before
    refused = call("predict", "run", "new.csv")
    assert refused.code != 0
    assert "--client 'north'" in refused.err


def test_the_commands_say_which_model_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 4},{RANDOM.normal():.3f},{('up', 'down')[i // 4 % 2]}" for i in range(80)]
    Path("data.csv").write_text("\n".join(["site,a,kind", *lines]), encoding="utf-8")
    Path("run.toml").write_text(
        'method = "ditto"\nrounds = 1\n[data]\nsource = "data.csv"\nlabel = "kind"\n'
        'client = "site"\n[partition]\nkind = "client"\n[model]\nname = "mlp"\n'
        "args = { hidden = [2] }\n[local]\nlr = 0.1\nepochs = 1\n"
        '[engine]\nkind = "sequential"\n'
    )
    assert call("run", "run.toml", "--out", "run").code == 0
    others = "the global one; 4 clients have models of their own: --client NAME, such as '0'"
    assert call("predict", "run", "data.csv").err == f"model   {others}\n"
    assert f"model   {others}\n" in call("export", "run", "model.pt2").err
    own = call("predict", "run", "data.csv", "--client", "2").err
    assert own.startswith("model   that of client '2'\nwarning: data.csv: ")
    assert " of 80 rows are of another client than '2', as the column 'site' says: " in own
    rows = [lines[i] for i in range(2, 80, 4)]
    Path("mine.csv").write_text("\n".join(["site,a,kind", *rows, ",0.1,up"]), encoding="utf-8")
    mine = call("predict", "run", "mine.csv", "--client", "2").err
    assert mine == "model   that of client '2'\n"
    model = fk.load("run", client="1")
    assert "20 of 21 rows" in model.predict("mine.csv").warnings[0]
    assert fk.load("run").predict("data.csv").warnings == ()
    assert call("run", "run.toml", "--out", "shared", "-s", "method=fedavg").code == 0
    assert call("predict", "shared", "data.csv").err == ""
