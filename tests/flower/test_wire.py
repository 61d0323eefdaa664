"""What was received is taken only as it was expected: by name, shape, type and size."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from each import each
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.flower.protocol import Agreement, Request, TrainingReply
from fedkeel.flower.server.replies import read_states
from fedkeel.flower.wire import (
    FORMAT,
    HEADER,
    PLACES,
    SCORES,
    STATES,
    Header,
    WireError,
    numbers,
    of_client,
    pack,
    read_sums,
    sums_record,
    unpack,
)
from fedkeel.task.metrics.base import SumMetric, TaskInfo
from fedkeel.task.metrics.metric_set import MetricSet
from fedkeel.task.metrics.registry import METRICS, metric
from in_process_grid import across, with_header

STATE = {
    "a": {"w": torch.arange(6, dtype=torch.float64).reshape(2, 3), "n": torch.tensor(3)},
    "b": {"flag": torch.tensor([True, False]), "empty": torch.zeros(0, 4)},
}
SPEC = specs_of(STATE)


def sent(**changes: Array) -> RecordDict:
    record = pack(STATE)
    for path, array in changes.items():
        record[path.replace("__", "/")] = array
    return across(RecordDict({"t": record}))


def test_there_and_back_with_the_same_bits_and_order() -> None:
    found = unpack(sent(), "t", SPEC)
    assert list(specs_of(found)) == list(SPEC)
    assert specs_of(found) == SPEC
    assert torch.equal(found["a"]["w"], STATE["a"]["w"])
    assert found["a"]["n"].item() == 3
    assert found["b"]["flag"].tolist() == [True, False]
    found["a"]["w"].add_(1.0)  # memory of its own


KINDS = [bool, np.uint8, np.int8, np.int32, np.int64, np.float16, np.float32, np.float64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any type, shape and order of axes, and of any bits: NaN and -0.0 among them."""
    shape, kind = draw(st.lists(st.integers(0, 4), max_size=4)), draw(st.sampled_from(KINDS))
    array = np.zeros(shape, kind)
    bits = draw(st.binary(min_size=array.nbytes, max_size=array.nbytes))
    if array.size:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(bits, np.uint8) & (
            1 if kind is bool else 255
        )
    return torch.from_numpy(array).permute(draw(st.permutations(range(len(shape)))))


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@given(st.lists(tensors(), min_size=1, max_size=3), st.booleans())
def test_any_tensor_arrives_with_its_bits(made: list[torch.Tensor], by_columns: bool) -> None:
    """An app of one's own may send columns after columns."""
    state = {f"{i}": {"w": tensor} for i, tensor in enumerate(made)}
    record = pack(state)
    if by_columns:
        record = ArrayRecord(
            {f"{i}/w": Array(tensor.numpy().copy("F")) for i, tensor in enumerate(made)}
        )
    found = unpack(across(RecordDict({"t": record})), "t", specs_of(state))
    for i, tensor in enumerate(made):
        assert bits_of(found[f"{i}"]["w"]) == bits_of(tensor)
        assert found[f"{i}"]["w"].is_contiguous()


@given(tensors(), st.data())
def test_what_is_cut_or_longer_is_refused(made: torch.Tensor, data: st.DataObject) -> None:
    bits = Array(made.contiguous().numpy()).data
    more = data.draw(st.binary(min_size=1, max_size=20))
    for other in (bits[: data.draw(st.integers(0, len(bits) - 1))], bits + more):
        array = Array(str(made.numpy().dtype), tuple(made.shape), "numpy.ndarray", other)
        content = RecordDict({"t": ArrayRecord({"w": array})})
        with pytest.raises(WireError, match="another shape or type"):
            unpack(content, "t", specs_of({"w": made}))


W = np.arange(6, dtype=np.float64).reshape(2, 3)
ONE = {"w": TensorSpec((2, 3), torch.float64)}


@each(
    ("array", "match"),
    [
        (Array(W.reshape(3, 2)), "another shape or type"),
        (Array(W.astype(np.float32)), "another shape or type"),
        (
            Array("float64", (2, 3), "numpy.ndarray", pickle.dumps(os.getcwd)),
            "another shape or type",
        ),
        (Array("float64", (2, 3), "numpy.ndarray", b""), "another shape or type"),
        (
            Array("float64", (2, 3), "numpy.ndarray", b"PK\x03\x04" + bytes(50)),
            "another shape or type",
        ),
        (Array("float64", (2, 3), "numpy.ndarray", Array(W).data + b"x"), "another shape or type"),
        (Array("float64", (2, 3), "numpy.ndarray", Array(W).data[:-1]), "another shape or type"),
        (
            Array("float64", (2, 3), "numpy.ndarray", Array(W).data + bytes(9999)),
            "another shape or type",
        ),
        (Array("float64", (2, 3), "torch", Array(W).data), "another shape or type"),
    ],
)
def test_other_arrays_are_refused(array: Array, match: str) -> None:
    with pytest.raises(WireError, match=match):
        unpack(sent(a__w=array), "t", SPEC)


def raw(data: bytes) -> Array:
    return Array("float64", (2, 3), "numpy.ndarray", data)


def headed(text: str) -> Array:
    """An array whose description is this text."""
    line = text.encode().ljust(117) + b"\n"
    size = len(line).to_bytes(2, "little")
    return raw(np.lib.format.magic(1, 0) + size + line + W.tobytes())


HONEST = "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }"


@each(
    "text",
    [
        "{",
        HONEST[:-1],
        "(" + HONEST[1:],
        "{[]: 1}",
        "{1: 0, 'a': 0}",
        HONEST.replace("'<f8'", "('f8',)"),
        HONEST.replace("'<f8'", "[1]"),
        HONEST.replace("'<f8'", "'<8f'"),
        HONEST.replace("(2, 3)", "(2, -3)"),
        HONEST.replace("(2, 3)", "(2, True)"),
        HONEST.replace("(2, 3)", "(2 3)"),
        HONEST.replace("(2, 3)", "(, )"),
        HONEST.replace("(2, 3)", f"({'9' * 400}, 3)"),
        HONEST.replace("}", "'''}"),
        "-" * 4000 + "1",
        "(" * 3000,
        "\0",
    ],
)
def test_a_damaged_header_is_refused_whatever_numpy_makes_of_it(text: str) -> None:
    """numpy's reader raised TokenError, TypeError, IndexError, RecursionError, SyntaxError."""
    with pytest.raises(WireError, match="another shape or type"):
        unpack(sent(a__w=headed(text)), "t", SPEC)


def test_one_bit_of_a_header_makes_another_one_or_none() -> None:
    data = Array(W).data
    assert torch.equal(unpack(sent(a__w=raw(data)), "t", SPEC)["a"]["w"], torch.from_numpy(W))
    for bit in range(8 * (len(data) - W.nbytes)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            unpack(RecordDict({"t": ArrayRecord({"w": raw(bytes(flipped))})}), "t", ONE)


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "evaluated"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (mark,)

    import io

    stream = io.BytesIO()
    np.save(stream, np.array([Evil()] * 6, dtype=object).reshape(2, 3), allow_pickle=True)
    with pytest.raises(WireError, match="another shape or type"):
        unpack(sent(a__w=Array("float64", (2, 3), "numpy.ndarray", stream.getvalue())), "t", SPEC)
    assert not mark.exists()


def test_a_header_is_not_believed_about_its_size() -> None:
    """What claims a gigabyte of numbers is refused before any memory is taken for them."""
    head = np.lib.format.magic(1, 0)
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000,), }"
    text += b" " * (117 - len(text)) + b"\n"
    data = head + len(text).to_bytes(2, "little") + text + bytes(48)
    with pytest.raises(WireError, match="another shape or type"):
        unpack(sent(a__w=Array("float64", (2, 3), "numpy.ndarray", data)), "t", SPEC)


def test_other_names_are_refused() -> None:
    content = sent()
    more = RecordDict({"t": ArrayRecord({**content["t"], "../../x": Array(W)})})
    with pytest.raises(WireError, match="other tensors"):
        unpack(more, "t", SPEC)
    fewer = RecordDict({"t": ArrayRecord({k: v for k, v in content["t"].items() if k != "a/n"})})
    with pytest.raises(WireError, match="other tensors"):
        unpack(fewer, "t", SPEC)
    with pytest.raises(WireError, match="no tensors"):
        unpack(content, "u", SPEC)
    with pytest.raises(WireError, match="no tensors"):
        unpack(RecordDict({"t": MetricRecord({"a": 1})}), "t", SPEC)


RESULT = {"client": 1, "status": "ok", "steps": 2, "examples": 3, "state_digest": ""}
GOOD = {"run": "r", "round": 1, "clients": [RESULT]}


def test_headers() -> None:
    found = TrainingReply.read(across(with_header(RecordDict(), GOOD)))
    (client,) = found.clients
    assert (client.client, client.steps, found.round) == (1, 2, 1)


def test_a_learning_rate_crosses_with_the_same_bits() -> None:
    """A header is JSON, whose numbers are decimal."""
    random = np.random.default_rng(0)
    agreement = Agreement(experiment="e", model="m")
    for lr in [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, *random.random(100).tolist()]:
        sent = Request(agreement=agreement, data_digest="d", lr=lr, clients=())
        assert Request.read(across(RecordDict({HEADER: sent.record()}))).lr == lr


@each(
    "change",
    [
        {"round": "1"},
        {"round": 1.5},
        {"round": None},
        {"clients": 1},
        {"clients": [1]},
        {"clients": [{**RESULT, "steps": 1.5}]},
        {"clients": [{**RESULT, "steps": True}]},
        {"clients": [{**RESULT, "status": 1}]},
        {"clients": [{**RESULT, "more": 1}]},
        {"clients": [{"status": "ok"}]},
        {"more": 1},
    ],
)
def test_other_headers_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(WireError):
        TrainingReply.read(across(with_header(RecordDict(), {**GOOD, **change})))


@each("values", ["", "{", "[1]", "null", "[" * 10_000, "{}", 1, b"{}"])
def test_a_damaged_header_is_refused(values: str | int | bytes) -> None:
    record = ConfigRecord({"format": FORMAT, "values": values})
    with pytest.raises(WireError, match="is wrong"):
        TrainingReply.read(across(RecordDict({HEADER: record})))


@pytest.mark.parametrize("version", [FORMAT + 1, str(FORMAT)])
def test_another_version_is_refused(version: int | str) -> None:
    content = with_header(RecordDict(), GOOD)
    content[HEADER]["format"] = version
    with pytest.raises(WireError, match="another version"):
        TrainingReply.read(content)


def test_no_header() -> None:
    with pytest.raises(WireError, match="no header"):
        Header.read(RecordDict())


def test_numbers() -> None:
    content = across(RecordDict({"n": MetricRecord({"loss": float("nan"), "x": 2})}))
    found = numbers(content, "n", {"loss", "x"})
    assert found["x"] == 2.0
    assert found["loss"] != found["loss"]
    for expected in ({"loss"}, {"loss", "x", "y"}):
        with pytest.raises(WireError):
            numbers(content, "n", expected)
    with pytest.raises(WireError):
        numbers(RecordDict({"n": MetricRecord({"loss": [1.0]})}), "n", {"loss"})


def test_sums_are_sent_with_their_places_where_most_are_0() -> None:
    few = torch.zeros(5000, dtype=torch.float64)
    few[[0, 7, 4999]] = torch.tensor([1.5, float("nan"), -2.0], dtype=torch.float64)
    for sums in (few, torch.arange(4.0, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)):
        content = across(RecordDict({"s": sums_record(sums)}))
        torch.testing.assert_close(
            read_sums(content, "s", len(sums)), sums, rtol=0, atol=0, equal_nan=True
        )
    assert len(sums_record(few)[STATES]) == 3
    for places in ([0, 5000], [-1, 3], [7, 7], [8, 7], [0.5, 2.0], [float("nan"), 1.0], [0, 1, 2]):
        record = MetricRecord({PLACES: places, STATES: [1.0, 2.0]})
        with pytest.raises(WireError):
            read_sums(across(RecordDict({"s": record})), "s", 5000)
    with pytest.raises(WireError):
        read_sums(across(RecordDict({"s": MetricRecord({PLACES: [1, 2]})})), "s", 5000)


@pytest.mark.parametrize("claim", [1e9, -1.0, float("nan")])
def test_counts_of_a_score_are_those_of_so_many_examples(claim: float) -> None:
    """A claim of more would outweigh all others."""
    f1 = METRICS["macro_f1"](TaskInfo((2,), (), 2))
    own = metric(lambda output, y: output, name="own")
    loss = SumMetric("loss", lambda output, y: output)
    names = ("macro_f1", "own", "loss")
    metrics = MetricSet((f1, own, loss), (), (6, 2, 1), (), "macro_f1", names)
    honest = [3.0, 3.0, 2.0, 4.0, 2.0, 3.0, -7.0, 5.0, 0.5]
    for sums in (honest, [claim, *honest[1:]], [*honest[:7], claim, honest[8]]):
        record = MetricRecord({STATES: sums})
        content = across(RecordDict({of_client(SCORES, 0): record}))
        if sums is honest:
            assert read_states(content, 0, 6, metrics)[0].tolist() == honest
            continue
        with pytest.raises(WireError, match=r"not a share|do not fit the number of examples"):
            read_states(content, 0, 6, metrics)
