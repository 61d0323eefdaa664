"""A node's end of a federation that misbehaves, as its configuration says, in chosen rounds."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedkeel.flower.apps import client_app
from fedkeel.flower.protocol import Request

WAYS = ("good", "late", "full", "forgets", "dies@keys", "dies@shares", "dies@unmask")
"""Ways that leave the reply as it is."""


def bad(message: Message, context: Context, go_on) -> Message:  # type: ignore[no-untyped-def]
    """Misbehave: ``bad="names:0 late:2"`` of the node's configuration says how, in which round.

    ``dies@keys:1`` dies at the message ``train.keys`` of round 1.
    """
    node, kind = dict(context.node_config), message.metadata.message_type
    ways = dict(word.split(":")[::-1] for word in str(node.get("bad", "")).split())
    if kind.startswith("train."):
        header = json.loads(str(message.content["header"]["values"]))
        if ways.get(str(header["round"])) == f"dies@{kind.removeprefix('train.')}":
            os.kill(os.getpid(), signal.SIGKILL)
    if kind not in ("train", "train.masked"):
        return go_on(message, context)
    round = Request.read(message.content).round
    way, memory = ways.get(str(round), "good"), Path(str(node["state"])) / f"{node['partition-id']}"
    memory.mkdir(parents=True, exist_ok=True)
    (memory / f"began-{round}").touch()
    if "slow" in node:
        wait_for_steps(Path(str(node["slow"])))
    if way == "hangs":
        (memory / "pid.new").write_text(str(os.getpid()))
        (memory / "pid.new").rename(memory / "pid")  # a test that sees the file finds it whole
        time.sleep(10_000)
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "full":  # the disk takes no more from this process
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
    if way == "forgets":
        for file in Path(str(node["state"])).rglob("*.safetensors"):
            file.unlink()
    reply = go_on(message, context)
    if way == "late":
        time.sleep(float(str(node["late"])))
    if way == "again":
        return Message(pickle.loads((memory / "reply").read_bytes()), reply_to=message)
    if round == 0:
        (memory / "reply").write_bytes(pickle.dumps(reply.content))
    return Message(damaged(reply.content, way), reply_to=message)


def wait_for_steps(rows: Path, steps: int = 3) -> None:
    """Wait until the server has made some more steps: ``slow="FILE"`` names its rows."""

    def count() -> int:
        return rows.read_bytes().count(b"\n") if rows.exists() else 0

    first, end = count(), time.monotonic() + 120
    while count() < first + steps and time.monotonic() < end:
        time.sleep(0.1)


def damaged(content: RecordDict, way: str) -> RecordDict:
    """Return a reply that is wrong in some way."""
    if way in WAYS or not any(key.startswith("tensors-") for key in content):
        return content
    name = next(key for key in content if key.startswith("tensors-"))
    record = content[name]
    path = next(iter(record))
    arrays = {key: array.numpy() for key, array in record.items()}
    if way == "shape":
        arrays[path] = arrays[path].reshape(-1)[:-1]
    elif way == "names":
        arrays["../../etc/passwd"] = arrays.pop(path)
    elif way == "nan":
        arrays[path] = np.full_like(arrays[path], np.nan)
    elif way == "infinity":
        arrays[path] = np.full_like(arrays[path], np.inf)
    elif way == "huge":
        arrays = {key: array * 1e6 for key, array in arrays.items()}
    elif way == "type":
        arrays[path] = arrays[path].astype(np.float16)
    made = {key: Array(np.ascontiguousarray(array)) for key, array in arrays.items()}
    if way == "pickle":
        made[path] = Array(
            dtype="object", shape=(1,), stype="numpy.ndarray", data=pickle.dumps(os.getcwd)
        )
    if way == "long":
        made[path] = Array(
            dtype=made[path].dtype,
            shape=made[path].shape,
            stype=made[path].stype,
            data=made[path].data + bytes(100_000),
        )
    return RecordDict({**content, name: ArrayRecord(made)})


def app(file: Path) -> ClientApp:
    """The app of a node that may misbehave."""
    return client_app(file, mods=[bad])
