"""A server may set values: names of code and of places stay those that are installed on the node.

Each message goes to the node's app as Flower would hand it over, with the settings that a server
sends. A marker file shows what was imported or called, and must not appear.
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

from commands import EXPERIMENT, experiment
from each import each
from fedkeel import config
from fedkeel.config.code_names import CODE, PLACES
from fedkeel.flower.apps import client_app
from fedkeel.flower.protocol import DESCRIBE, EVALUATE
from in_process_grid import InProcessGrid

MARK = "from pathlib import Path\nPath('marker').touch()\n"

MINE = f"""\
{MARK}from os import system
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, width=4, path=""):
        super().__init__()
        self.layer = nn.Linear(6, classes)
        if path:
            open("marker", "w").close()

    def forward(self, x):
        return self.layer(x)

def loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a node's app."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", "here")  # so that the app answers in this process
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    experiment(tmp_path)
    return tmp_path


def ask(settings: str, policy: str | None = None, kind: str = DESCRIBE) -> str:
    """Return why a node does not answer, "" where it does."""
    InProcessGrid({})  # gives this process an identity
    node: dict[str, str | int | float] = {"partition-id": 0, "num-partitions": 2, "state": "state"}
    if policy is not None:
        Path("policy.toml").write_text(policy)
        node["policy"] = str(Path("policy.toml").absolute())
    context = Context(1, 1, node, RecordDict(), {"settings": settings})
    app = client_app(Path("toy.toml"))
    reply = app(Message(RecordDict(), 1, kind, ttl=60.0), context)
    return reply.error.reason if reply.has_error() else ""


SYSTEM = 'model.name=os:system; model.args={command="touch marker"}'
NOTHING = "methods = []\nmessages = []\ncode = []\n"


@each("policy", [None, NOTHING])
@each(
    ("settings", "key"),
    [
        (SYSTEM, "model.name"),
        ("local.train=mine:clean", "local.train"),
        ("model.name=mine:Net; model.args={}", "model.name"),
        ("model.name=subprocess:run; model.args={args=['touch', 'marker']}", "model.name"),
        ("model.name=hf:somebody/net; model.args={}", "model.name"),
        ("task.loss=mine:loss", "task.loss"),
        ("task.metrics=['accuracy', 'mine:loss']", "task.metrics"),
        ("task.score=mine:loss", "task.score"),
        ("data.augment=mine:loss", "data.augment"),
        ("method=fedavg+mine:Net", "method"),
        ("data.source=/etc/passwd", "data.source"),
        ("data.source=['toy.npz', 'mine.py']", "data.source"),
        ("data.test=other.npz", "data.test"),
        ("data.text={tokenizer='somebody/t'}", "data.text.tokenizer"),
        ("privacy={epsilon=1.0, delta=0.01, key_file='mine.py'}", "privacy.key_file"),
        ("system={devices='mine.py'}", "system.devices"),
        ("system={availability='trace', trace='mine.py'}", "system.trace"),
        ("track.tensorboard_folder=elsewhere", "track.tensorboard_folder"),
        ("engine={kind='ray', address='10.0.0.7:6379'}", "engine.address"),
    ],
)
def test_names_of_code_and_places_are_the_nodes_own(
    settings: str, key: str, policy: str | None
) -> None:
    """With a policy and without one, and before anything is imported or built."""
    reason = ask(settings, policy)
    assert reason.startswith("PolicyError: The server ")
    assert key in reason
    assert not Path("marker").exists()
    assert "mine" not in sys.modules


def test_a_server_sets_values() -> None:
    for settings in ("rounds=2; local.lr=0.5", "model.args.hidden=[3]; method=fedprox(mu=0.5)"):
        assert ask(settings) == ""
    for settings in ("data.augment=none; task.loss=mse", "model={name='logistic', args={}}"):
        assert "PolicyError" not in ask(settings)


def test_code_of_the_app_is_used_with_other_values(here: Path) -> None:
    """But not with other texts, which its class may take for paths."""
    own = EXPERIMENT.replace('"mlp"', '"mine:Net"').replace("hidden = [8]", "width = 3")
    experiment(here, own)
    assert ask("model.args.width=5") == ""
    Path("marker").unlink()
    assert "model.args.path" in ask("model.args.path=/secret")
    assert "'mine:system'" in ask("model.name=mine:system; model.args={command='touch marker'}")
    assert not Path("marker").exists()


def test_a_policy_names_more_code() -> None:
    settings = "model={name='mine:Net', args={}}"
    assert ask(settings, "code = ['mine:Net']\n") == ""
    Path("marker").unlink()
    del sys.modules["mine"]
    assert "'mine:loss'" in ask("task.loss=mine:loss", "code = ['mine:Net']\n")
    assert not Path("marker").exists()


@pytest.mark.parametrize(
    ("policy", "settings", "kind", "reason"),
    [
        ("messages = ['sums']", "", EVALUATE, "does not let 'scores' out"),
        ("methods = ['fedprox']", "method=scaffold", DESCRIBE, "does not allow scaffold"),
        ("secure_sums = true", "", DESCRIBE, "asks for secure sums"),
        ("epsilon = 1.0\ndelta = 0.01", "", DESCRIBE, "no noise"),
    ],
)
def test_the_policy_is_asked_before_a_model_is_built(
    here: Path, policy: str, settings: str, kind: str, reason: str
) -> None:
    experiment(here, EXPERIMENT.replace('"mlp"', '"mine:Net"').replace("hidden = [8]", ""))
    assert reason in ask(settings, policy, kind)
    assert "mine" not in sys.modules
    assert not Path("marker").exists()


VALUES = {
    *("name", "track.project", "track.group", "engine.devices", "system.classes"),
    *("data.label", "data.client", "data.drop", "data.categories", "data.labels"),
    *(
        "partition.holdout_by",
        "cohort.new_clients",
        "data.text.column",
        "model.args",
        "model.head",
        "model.lora.layers",
        "model.lora.train",
    ),
    *("model.others", "model.others.args", "model.others.head", "model.others.clients"),
    *("compare.methods", "tune.space", "tune.method"),
}
"""Settings that hold texts which name neither code nor a place: columns, labels, layers, devices;
or, those of comparisons and searches, are read as the settings that they stand for."""


def _texts(kind: type[config.Settings], before: str = "") -> set[str]:
    """The keys of settings that take any text."""
    found: set[str] = set()
    for name, field in kind.model_fields.items():
        waiting: list[object] = [field.annotation]
        while waiting:
            one = waiting.pop()
            if typing.get_origin(one) is typing.Literal:
                continue
            waiting += typing.get_args(one)
            if isinstance(one, type) and not isinstance(one, types.GenericAlias):
                if issubclass(one, config.Settings):
                    found |= _texts(one, f"{before}{name}.")
                elif one is str:
                    found.add(before + name)
            elif one is typing.Any:
                found.add(before + name)
    return found


def test_every_setting_with_a_text_is_known_to_be_code_a_place_or_a_value() -> None:
    """A new one has to be looked at: a server may set it."""
    assert _texts(config.Experiment) == {*CODE, *PLACES, *VALUES}
