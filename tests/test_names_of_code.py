"""Every door by which a name in a file, or from a server, could become a call of foreign code.

Each test has a marker file that must not appear: a command writes it, or the import of a module.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fedkeel
from commands import EXPERIMENT, call, experiment
from fedkeel.base.named_code import VARIABLE, place_of
from fedkeel.config import load
from fedkeel.data.augment import named_transform
from fedkeel.errors import FedkeelError
from fedkeel.flower.node.local_data import read_local_data
from fedkeel.method.grammar import parse
from fedkeel.task.losses import make_loss
from fedkeel.task.metrics.base import TaskInfo
from fedkeel.task.metrics.registry import make_metric
from fedkeel.task.models import make

MINE = """\
import os, subprocess
from functools import partial
from os import popen, system
from subprocess import Popen
from types import MethodType

import torch
from torch import nn
from torch.nn import Linear
from torch.nn.functional import mse_loss

touch = partial(os.system, "touch marker")
running = partial(subprocess.run, ["touch", "marker"])
twofold = partial(partial(partial(os.popen), "touch marker"))
bound = MethodType(os.system, "touch marker")
evaluated = eval
opened = open

class Net(nn.Module):
    def __init__(self, classes, width=3):
        super().__init__()
        self.layer = nn.Linear(width, classes)

narrow = partial(Net, width=2)
plain = partial(Linear, in_features=2, out_features=2)
lazy = lambda classes: nn.Linear(2, classes)

def clean(folder) -> None:
    open("marker", "w").close()

def pure(x):
    open("marker", "w").close()

def loss(output, target):
    return (output[:, 0] - target).abs()

class Weighted:
    def __init__(self, weight):
        self.weight = weight
    def __call__(self, output, target):
        return self.weight * loss(output, target)
    def twice(self, output, target):
        return 2 * loss(output, target)

weighted = Weighted(2.0)
twice = weighted.twice
smooth = partial(nn.functional.huber_loss, reduction="none")
made = nn.L1Loss(reduction="none")

class Child(Popen):
    def __init__(self):
        pass
    __call__ = Popen.__init__

child = Child()
waiting = child.communicate

class Tool:
    __call__ = os.system

tool = Tool()
shell = partial(partial(tool), "touch marker")
"""

FOREIGN = [
    *("os:system", "posix:system", "subprocess:run", "subprocess:Popen", "os.path:exists"),
    *("builtins:exec", "builtins:eval", "builtins:open", "pathlib:Path", "runpy:run_path"),
    *("mine:system", "mine:popen", "mine:Popen", "mine:touch", "mine:running", "mine:evaluated"),
    *("mine:twofold", "mine:bound", "mine:child", "mine:waiting", "mine:tool", "mine:shell"),
    *("replaced:popen", "replaced:system", "slotted:popen", "kit.shell:popen", "kit.shell:system"),
    *("__main__:main", "src.fedkeel.records.files:write_text", "kit.nothing:Net"),
    *("mine:opened", "mine:os", "mine:__builtins__", "mine:__loader__"),
    *("numpy:fromfile", "numpy.lib.npyio:savetxt", "torch:load", "torch.hub:load", "torch.fx:wrap"),
    *("torch.serialization:load", "fedkeel.records.files:write_text", "fedkeel.cli:main"),
    *("rogue:Net", "rogue.deeper:Net", "code:Net", "torch.nn.utils:parameters_to_vector"),
    *("torch.nn:os", "torch.nn.functional:boolean_dispatch", "setuptools:setup", "pytest:main"),
]
"""What no setting may name. `rogue` is an installed package whose import writes the marker, and
`code` is a module of Python's own, as well as a file that comes with it."""

SLOTTED = """\
import os, sys

class Slotted:
    __slots__ = ()
    popen = staticmethod(os.popen)

sys.modules[__name__] = Slotted()
"""

ROGUE = "from pathlib import Path\nPath('marker').touch()\nfrom mine import Net\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the user's module, and with a package among the installed ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "replaced.py").write_text("import os, sys\nsys.modules[__name__] = os\n")
    (tmp_path / "slotted.py").write_text(SLOTTED)
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").write_text(
        "import os, sys\nsys.modules['kit.shell'] = shell = os\n"
    )
    (tmp_path / "src").symlink_to(Path(fedkeel.__file__).parents[1])
    package = tmp_path / "lib" / "site-packages" / "rogue"
    package.mkdir(parents=True)
    for file in ("__init__.py", "deeper.py"):
        (package / file).write_text(ROGUE)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delenv(VARIABLE, raising=False)
    yield tmp_path
    for name in ("kit.shell", "replaced", "slotted"):
        sys.modules.pop(name, None)  # no file of this folder says that they are its own


def _is_clean() -> bool:
    return not Path("marker").exists() and "rogue" not in sys.modules


INFO = TaskInfo(classes=2, target=(), scores=(2,))
ARGS = {
    "system": {"command": "touch marker"},
    "popen": {"cmd": "touch marker"},
    "run": {"args": ["touch", "marker"]},
    "Popen": {"args": ["touch", "marker"]},
    "open": {"file": "marker", "mode": "w"},
    "write_text": {"path": "marker", "text": ""},
    "savetxt": {"fname": "marker", "X": [1.0]},
}
"""With these a call would write the marker."""

DOORS: dict[str, Callable[[str], object]] = {
    "model": lambda name: make(name, (2,), 2, ARGS.get(name.partition(":")[2])),
    "loss": make_loss,
    "metric": lambda name: make_metric(name, INFO),
    "augment": named_transform,
    "method": lambda name: parse(f"fedavg+{name}"),
    "data of a node": lambda name: read_local_data(load("toy.toml"), name, 0),
}


def test_a_function_of_another_kind_is_not_called() -> None:
    """It is the user's own, and made for something else: a file may not call it."""
    with pytest.raises(FedkeelError, match=r"is not a class of torch\.nn\.Module") as caught:
        make("mine:clean", (2,), 2, {"folder": "runs"})
    assert caught.value.got == "a function that returns NoneType"
    experiment(Path())
    for door in ("loss", "metric", "augment", "data of a node"):
        with pytest.raises(FedkeelError, match="is not a function") as caught:
            DOORS[door]("mine:pure")
        assert caught.value.got == "a function of (x)"
    assert _is_clean()


@pytest.mark.parametrize("door", DOORS)
def test_what_is_not_the_users_is_never_called(door: str, here: Path) -> None:
    experiment(here)
    for name in FOREIGN:
        with pytest.raises(FedkeelError) as caught:
            DOORS[door](name)
        assert name in caught.value.what, name
        assert 1 < len(str(caught.value).splitlines()) <= 4, name
        assert _is_clean(), name


@pytest.mark.parametrize("command", ["check", "run", "compare", "tune", "doctor", "audit"])
def test_no_command_calls_it(command: str, here: Path) -> None:
    file = experiment(here, EXPERIMENT.replace("hidden = [8]", 'command = "touch marker"'))
    for name in ("os:system", "mine:system", "rogue:Net"):
        done = call(command, file, "-s", f"model.name={name}")
        assert (done.code, _is_clean()) == (2, True), done.err
    file = experiment(here)
    for setting in ("task.loss", "data.augment", "task.score", "method"):
        value = "rogue:Net" if setting != "method" else "fedavg+rogue:Net"
        done = call(command, file, "-s", f"{setting}={value}", "-s", f"compare.methods=[{value!r}]")
        assert (done.code, _is_clean()) == (2, True), (setting, done.err)


def test_an_export_does_not_call_it(here: Path) -> None:
    file = experiment(here, EXPERIMENT.replace("hidden = [8]", 'command = "touch marker"'))
    for name in ("os:system", "mine:system", "rogue:Net"):
        done = call("flower", "export", file, "--out", "app", "-s", f"model.name={name}")
        assert (done.code, _is_clean()) == (2, True), done.err


def test_what_a_user_writes_is_called() -> None:
    """Classes, functions and what is made of them, in the user's own modules."""
    for name in ("mine:Net", "mine:narrow", "mine:lazy"):
        assert make(name, (2,), 5).state_dict()
    assert make("mine:plain", (2,), 5).in_features == 2
    assert make("torch.nn:Linear", (2,), 5, {"in_features": 2, "out_features": 3}).bias is not None
    output, target = torch.tensor([[1.0], [5.0]]), torch.tensor([2.0, 2.0])
    for name, expected in {"loss": [1, 3], "weighted": [2, 6], "twice": [2, 6]}.items():
        assert make_loss(f"mine:{name}")(output, target).tolist() == expected
    assert make_loss("mine:smooth")(output[:, 0], target).tolist() == [0.5, 2.5]
    assert make_loss("mine:made")(output[:, 0], target).tolist() == [1, 3]
    assert make_metric("mine:loss", INFO).name == "loss"


def test_a_refusal_says_where_a_name_is_defined() -> None:
    with pytest.raises(FedkeelError, match=r"'mine' only imports 'Linear'") as caught:
        make("mine:Linear", (2,), 2, {"in_features": 2, "out_features": 2})
    assert caught.value.do == "write 'torch.nn.modules.linear:Linear'"
    with pytest.raises(FedkeelError, match=r"'mine' only imports 'mse_loss'") as caught:
        make_loss("mine:mse_loss")
    assert caught.value.do == "write 'torch.nn.functional:mse_loss'"


def test_a_callable_object_is_of_another_kind_too() -> None:
    with open("mine.py", "a") as file:
        file.write("class Cleaner:\n")
        file.write("    def __call__(self, folder) -> None:\n        clean(folder)\n")
        file.write("cleaner = partial(Cleaner(), folder='runs')\n")
    sys.modules.pop("mine", None)
    with pytest.raises(FedkeelError, match=r"is not a class of torch\.nn\.Module"):
        make("mine:cleaner", (2,), 2)
    assert _is_clean()


def test_a_module_that_is_loaded_is_of_the_place_of_its_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a script, which does not say how it was found."""
    module = ModuleType("loaded")
    monkeypatch.setitem(sys.modules, "loaded", module)
    assert place_of("loaded").whose == "own"
    for folder in ("lib/site-packages", sysconfig.get_path("scripts")):
        module.__file__ = str(here / folder / "loaded")
        assert place_of("loaded").whose == "package"
    assert place_of("").whose == "nobody"


def test_an_installed_package_is_named_by_the_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a file: the variable is set on the machine. Python's own cannot be named by it."""
    with pytest.raises(FedkeelError, match="installed package") as caught:
        make("rogue:Net", (2,), 2)
    assert caught.value.do is not None
    assert f"{VARIABLE}=rogue" in caught.value.do
    monkeypatch.setenv(VARIABLE, "os, rogue")
    with pytest.raises(FedkeelError, match="Python's own"):
        make("os:system", (2,), 2, ARGS["system"])
    assert _is_clean()
    with pytest.raises(FedkeelError, match="only imports 'Net'"):  # it is named, and imported
        make("rogue:Net", (2,), 2)


def test_a_file_with_the_name_of_a_module_of_pythons_is_the_users(here: Path) -> None:
    """Where it is in the working directory, and Python has not imported its own."""
    assert place_of("wave").whose == "standard"
    (here / "wave.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    assert place_of("wave").whose == "own"
    assert make("wave:Net", (2,), 2, {"in_features": 1, "out_features": 1}).in_features == 1
    (here / "os.py").touch()
    assert place_of("os").whose == "standard"
