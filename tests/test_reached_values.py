"""A key sees every value that a user's code can reach, and says where it cannot."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import importlib
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np
import pydantic
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.base.fingerprint import reached_values
from fedkeel.base.fingerprint.reached_values import Description, describe_value
from fedkeel.errors import RunError
from fedkeel.runner.start import start
from fedkeel.runner.warnings import find_warnings
from fedkeel.task.network import Network
from toys import Net, federation, forget, held, prepared, same


@dataclass
class Config:
    scale: float
    inner: list[dict[str, float]] = field(default_factory=list)


class Model(pydantic.BaseModel):
    scale: float
    _private: int = pydantic.PrivateAttr(1)


class Slots:
    __slots__ = ("__hidden", "scale")

    def __init__(self, scale: float) -> None:
        self.scale, self.__hidden = 0.0, scale


class Choice(enum.Enum):
    LOW = 2.0
    HIGH = 3.0


class Point(NamedTuple):
    scale: float


class Named(dict[str, float]):
    pass


class Reduced:
    """Leaves its number out where it is pickled."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __getstate__(self) -> dict[str, float]:
        return {}


def cached(scale: float) -> Callable[[], float]:
    @functools.lru_cache
    def get() -> float:
        return scale

    return get


def with_default(scale: float) -> Callable[..., float]:
    return lambda *, by=scale: by


def with_attribute(scale: float) -> Callable[[], float]:
    def get() -> float:
        return get.scale  # type: ignore[attr-defined, no-any-return]

    get.scale = scale  # type: ignore[attr-defined]
    return get


def made_class(scale: float) -> type:
    return type("Made", (), {"scale": scale})


def of_a_library(scale: float) -> Callable[..., object]:
    @torch.no_grad()  # whose function holds this one, under its name
    def get() -> float:
        return scale

    return get


WAYS: dict[str, Callable[[float], object]] = {
    "SimpleNamespace": lambda v: types.SimpleNamespace(scale=v),
    "argparse": lambda v: argparse.Namespace(scale=v),
    "dataclass": Config,
    "a list in a dataclass": lambda v: Config(1.0, [{"scale": v}]),
    "pydantic": lambda v: Model(scale=v),
    "slots": Slots,
    "enum": Choice,
    "named tuple": Point,
    "subclass of dict": lambda v: Named(scale=v),
    "ordered dict": lambda v: collections.OrderedDict(scale=v),
    "default dict": lambda v: collections.defaultdict(lambda: v),
    "deque": lambda v: collections.deque([v]),
    "set": lambda v: {"a", "b", v},
    "bytes": lambda v: bytearray([int(v)]),
    "array": lambda v: np.array([None, v], dtype=object),
    "masked array": lambda v: np.ma.masked_greater(np.ones(3) * 2.5, v),
    "number of numpy": np.float32,
    "tensor in a dict": lambda v: {"weight": torch.full((2,), v)},
    "module": lambda v: nn.ModuleDict({"act": nn.LeakyReLU(v)}),
    "generator": lambda v: torch.Generator().manual_seed(int(v)),
    "distribution": lambda v: torch.distributions.Normal(0.0, v),
    "what is not pickled": Reduced,
    "path": lambda v: Path(f"weights-{v}.pt"),
    "class": made_class,
    "default": with_default,
    "attribute of a function": with_attribute,
    "cache": cached,
    "closure within a library's": of_a_library,
    "bound method": lambda v: Config(v).__repr__,
    "partial": lambda v: functools.partial(pow, exp=v),
    "key of a dict": lambda v: {v: 1},
    "order of a dict": lambda v: dict.fromkeys(sorted("ab", reverse=v > 2)),
    "type": lambda v: [(), [], {}][int(v) - 2],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_number_is_seen_wherever_it_is_held(way: str) -> None:
    described = [describe_value(WAYS[way](v)) for v in (2.0, 2.0, 3.0)]
    assert described[0] == described[1] != described[2]
    assert not any(d.unseen for d in described)


ARGS = types.SimpleNamespace(scale=2.0)
TABLE = {"scale": 2.0}


class Uses:
    """Names what stands in its file, and an attribute of its class."""

    SCALE: ClassVar[float] = 2.0

    def __call__(self) -> float:
        return self.SCALE * self.scaled(1.0)

    @property
    def two(self) -> float:
        return 2.0 * ARGS.scale

    @staticmethod
    def scaled(x: float) -> float:
        return helper(x)


def helper(x: float) -> float:
    return sum(by * x for by in (TABLE["scale"],))


@pytest.mark.parametrize("change", ["args", "table", "class attribute"])
def test_globals_and_class_attributes_are_seen(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = describe_value(Uses())
    assert describe_value(Uses()) == before
    if change == "args":
        monkeypatch.setattr(ARGS, "scale", 3.0)
    elif change == "table":
        monkeypatch.setitem(TABLE, "scale", 3.0)
    else:
        monkeypatch.setattr(Uses, "SCALE", 3.0)
    assert describe_value(Uses()) != before


READS = """
import json
from pathlib import Path
SCALE = json.loads(Path("scale.json").read_text())
"""

MODULES = {
    "net.py": """
import json
import settings
from inner import constants
from torch import nn
from settings import chosen

def by_name(): return settings.SCALE
def by_dots(): return constants.deep.SCALE
def taken(): return chosen.scale
def late():
    import later
    return later.SCALE
def late_from():
    from inner.constants import deep
    return deep.SCALE
def whole(): return vars(settings)["SCALE"]
def of_library(): return json.dumps(1)
def beside(): return 1
""",
    "settings.py": f"{READS}import types\nchosen = types.SimpleNamespace(scale=SCALE)\n",
    "later.py": READS,
    "inner/__init__.py": "",
    "inner/constants.py": "from inner import deep\n",
    "inner/deep.py": READS,
}
"""Files whose numbers stand in another file."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    forget(tmp_path)


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        *((name, True) for name in ("by_name", "by_dots", "taken", "late", "late_from", "whole")),
        *((name, False) for name in ("of_library", "beside")),
    ],
)
def test_values_in_the_user_s_modules_are_seen(here: Path, name: str, seen: bool) -> None:
    described = []
    for number in (2.0, 2.0, 3.0):
        (here / "scale.json").write_text(str(number))
        forget(here)
        function = getattr(importlib.import_module("net"), name)
        described.append(describe_value(function))
        function()  # what it imports is loaded from now on
        assert describe_value(function) == described[-1]
    assert described[0] == described[1]
    assert (described[1] != described[2]) == seen


@pytest.mark.parametrize("name", ["by_name", "by_dots", "late_from"])
def test_empty_values_and_tensors_of_a_module_are_seen(here: Path, name: str) -> None:
    """They are false, or neither true nor false, and differ nevertheless."""
    (here / "scale.json").write_text("1.0")
    function = getattr(importlib.import_module("net"), name)
    module = importlib.import_module("inner.deep" if name != "by_name" else "settings")
    digests = []
    for value in (False, None, 0, torch.zeros(2), torch.ones(2), torch.ones(2)):
        module.SCALE = value
        digests.append(describe_value(function).digest)
    assert len(set(digests)) == 5
    assert digests[-2] == digests[-1]


SCRIPT = """
import enum, types, functools
from torch import nn, relu
from fedkeel.base.fingerprint.reached_values import describe_value
WORDS = {"one", "two", "three", "four"}
KINDS = {nn.ReLU, nn.GELU, nn.Tanh}
class Mode(enum.Flag): A = 1; B = 2
class Held:
    __slots__ = ("a",)
    def __init__(self): self.a = {Mode.A: frozenset("xyz")}
def other(x): return x in {"p", "q", "r"} or one(x)
def one(x): return [other, WORDS, KINDS, relu][0](x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.held, self.fc = Held(), nn.Linear(2, 2)
        nn.init.zeros_(self.fc.weight), nn.init.zeros_(self.fc.bias)
        self.again = [self, lambda: self, functools.partial(one, Mode.B)]
    def forward(self, x): return one(self.fc(x))
"""


def test_a_description_is_the_same_in_every_process(here: Path) -> None:
    """Whatever the order of sets, and wherever objects lie."""
    (here / "script.py").write_text(SCRIPT)
    described = describe_value(importlib.import_module("script").Net())
    code = "import script; print(script.describe_value(script.Net()).digest)"
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    child = run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"})
    assert child.stdout.strip() == described.digest
    assert described.unseen == ()


def test_of_a_lock_nothing_counts() -> None:
    assert describe_value(threading.Lock()) == describe_value(threading.Lock()) != Description("")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("w") as log:
        described = describe_value(Config(1.0, [{"a": log}]), "loss")  # type: ignore[dict-item]
        assert described.unseen == ("loss.inner[0]['a'] (TextIOWrapper)",)
        assert describe_value(lambda: log.write("a")).unseen[0].endswith(".log (TextIOWrapper)")
    assert describe_value(iter(range(3))).unseen == ()
    assert describe_value(n for n in range(3)).unseen == ("generator",)


def test_what_is_too_large_or_too_deep_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    assert describe_value(nested, "deep").unseen[0].endswith("(nested too deeply)")
    monkeypatch.setattr(reached_values, "LARGEST", 1000)
    assert describe_value([[n] for n in range(400)]).unseen == ()
    assert describe_value({"many": [[n] for n in range(600)]}).unseen == (
        "['many'][499] (more than 1,000 values)",
    )


def test_a_long_chain_of_functions_is_followed() -> None:
    scope: dict[str, Any] = {"__name__": "__main__", "END": 1}
    lines = [f"def f{n}(): return f{n + 1}()" for n in range(500)]
    exec("\n".join([*lines, "def f500(): return END"]), scope)
    before = describe_value(scope["f0"])
    scope["END"] = 2
    assert describe_value(scope["f0"]) != before
    assert before.unseen == ()


def logged_loss(log: IO[str]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert not log.closed
        return nn.functional.cross_entropy(z, y, reduction="none")

    return loss


def test_a_run_that_cannot_be_known_is_never_taken_for_another(tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("a") as log:
        loss = logged_loss(log)
        first, second = prepared(loss=loss, rounds=1), prepared(loss=loss, rounds=1)
        assert first.key != second.key
        warning = [w for w in find_warnings(first) if "made anew" in w]
        assert len(warning) == 1
        assert "log (TextIOWrapper)" in warning[0]
        start(first, tmp_path / "run")
        with pytest.raises(RunError, match="holds another run") as raised:
            start(second, tmp_path / "run")
        assert raised.value.why is not None
        assert "log (TextIOWrapper)" in raised.value.why
        two = [compared(loss, tmp_path / "compared") for _ in range(2)]
        assert len(two[1].results) == 1
        assert len(list((tmp_path / "compared").glob("fedavg-*"))) == 2
    assert not find_warnings(prepared())


def compared(loss: Any, out: Path) -> fk.Comparison:
    return fk.compare(
        "fedavg",
        task=fk.Task(Net, loss=loss),
        clients=federation(),
        test=held(20),
        rounds=1,
        seeds=1,
        local=fk.Local(lr=0.1, epochs=1),
        engine=fk.Engine(kind="sequential"),
        out=out,
        progress=False,
    )


class Configured(Net):
    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.config.scale * super().forward(x)  # type: ignore[attr-defined, no-any-return]


def test_a_run_with_another_number_is_another_run(tmp_path: Path) -> None:
    def ready(scale: float) -> Any:
        make = functools.partial(Configured, types.SimpleNamespace(scale=scale))
        return prepared(model=make, rounds=1)

    first = start(ready(0.01), tmp_path / "run")
    with pytest.raises(RunError, match="holds another run"):
        start(ready(5.0), tmp_path / "run")
    assert same(first, start(ready(0.01), tmp_path / "run"))


def test_torch_s_own_modules_are_described_by_more_than_their_repr() -> None:
    def described(heads: int) -> str:
        return Network(nn.Sequential(nn.MultiheadAttention(6, heads), nn.Linear(6, 3))).describe()

    assert described(2) == described(2) != described(3)


PART = """
import json
from pathlib import Path
from dataclasses import dataclass
from typing import ClassVar
from fedkeel.method.roles import Penalty
SETTINGS = json.loads(Path("scale.json").read_text())
@dataclass(frozen=True)
class Pull(Penalty):
    name: ClassVar[str] = "pull_it"
    paper: ClassVar[str] = ""
    pull = 0.0
    def penalty_gradient(self, params, step):
        return {k: SETTINGS * v for k, v in params.items()}
"""


def test_values_that_a_user_s_method_reaches_are_seen(here: Path) -> None:
    (here / "my_part.py").write_text(PART)
    keys = []
    for number in (2.0, 2.0, 3.0):
        (here / "scale.json").write_text(json.dumps(number))
        forget(here)
        keys.append(prepared("my_part:Pull").key)
    assert keys[0] == keys[1] != keys[2]
