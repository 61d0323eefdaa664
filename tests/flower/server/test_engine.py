"""What the engine of a federation does with replies that are late, lost, doubled or outliers."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from rich.console import Console
from torch import Tensor

from fedkeel import config
from fedkeel.config.flower import smallest_count
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import RunError, TrainingError
from fedkeel.flower.server import serve as server
from fedkeel.flower.server.engine import NodeClients
from fedkeel.flower.server.serve import LinesWithFaults
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, changed, header_of, make_nodes, run_on_nodes
from toys import MARK, Net, federation, prepared, same

QUICK = config.Flower(deadline_seconds=0.3, poll_seconds=0.01, quorum=0.2, enough=1.0)


def run(method: str = "scaffold", **more: object) -> Prepared:
    made = prepared(method, dtype="float64", clients=federation(3), per_round=3, **more)
    return replace(made, settings=made.settings.model_copy(update={"flower": QUICK}))


def forget(root: Path, client: int) -> None:
    for file in root.rglob(f"client-{client:08d}/*"):
        file.unlink()


def edited_in(round: int, edit):  # type: ignore[no-untyped-def]
    """Bend the reply of one round."""

    def edit_reply(kind: str, reply: RecordDict) -> RecordDict | None:
        if kind == "train" and header_of(reply)["round"] == round:
            return edit(reply)
        return reply

    return edit_reply


def one_node_per_client(made: Prepared, root: Path) -> InProcessGrid:
    """A node for each client; the node of client k is 10**9 + 7 k."""
    return InProcessGrid(make_nodes(made, root, nodes=made.population.clients))


@pytest.mark.parametrize(
    "method",
    ["scaffold", *(pytest.param(m, marks=pytest.mark.slow) for m in ("feddyn", "fedcurv"))],
)
def test_where_the_server_holds_a_sum_one_loss_begins_all_anew(tmp_path: Path, method: str) -> None:
    """The round after it is the first round of the method, from the model that there is."""
    made = run(method, rounds=3)
    grid = one_node_per_client(made, tmp_path)
    grid.edits[10**9 + 14] = edited_in(0, lambda reply: forget(tmp_path, 1) or reply)
    result = run_on_nodes(made, grid, tmp_path / "run")
    faults = [row.faults for row in result.rows[1:]]
    assert faults == [{}, {"lost its client state; the method begins anew": [1]}, {}]
    assert [row.clients for row in result.rows[1:]] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    from fedkeel.records.folder import RunFolder

    saved = RunFolder(tmp_path / "run").load()
    assert saved is not None
    assert saved.arrays["nodes/state_round"].tolist() == [3, 3, 3]
    files = sorted(p.name for p in tmp_path.rglob("client-00000000/*"))
    assert files[-1] == "round-00000003.safetensors"


def test_a_round_whose_clients_have_all_lost_it_is_a_round(tmp_path: Path) -> None:
    """They have answered. Asking them again would bring nothing back, and no run would end."""
    made = run("scaffold", rounds=4, cohort=config.Cohort(clients=3))
    grid = one_node_per_client(made, tmp_path)

    def wiped(reply: RecordDict) -> RecordDict:
        for client in range(3):
            forget(tmp_path, client)
        return reply

    grid.edits[10**9 + 14] = edited_in(0, wiped)
    rows = run_on_nodes(made, grid).rows[1:]
    assert [row.clients for row in rows] == [[0, 1, 2], [], [0, 1, 2], [0, 1, 2]]
    assert rows[1].faults == {"lost its client state; the method begins anew": [0, 1, 2]}


class Killed(BaseException):
    """Ends a run at once: nothing more is saved."""


def test_a_kill_after_the_method_began_anew_finds_the_state_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes were told that nothing of theirs counts any more, and removed all of it."""
    made = run("scaffold", rounds=6)
    engine = made.settings.engine.model_copy(update={"checkpoint_seconds": 1e9})
    made = replace(made, settings=made.settings.model_copy(update={"engine": engine}))
    train = NodeClients.train

    def ends(at: int, error: BaseException) -> None:
        def trains(self, message, *more):  # type: ignore[no-untyped-def]
            if message.round == at:
                raise error
            return train(self, message, *more)

        monkeypatch.setattr(NodeClients, "train", trains)

    def made_at(root: Path, kill: int) -> Result:
        grid = one_node_per_client(made, root)
        ends(2, TrainingError("stopped, with everything saved"))
        with pytest.raises(TrainingError):
            run_on_nodes(made, grid, root / "run")
        forget(root, 1)
        ends(kill, Killed())
        if kill < 6:
            with pytest.raises(Killed):
                run_on_nodes(made, grid, root / "run", resume=True)
            monkeypatch.setattr(NodeClients, "train", train)
        return run_on_nodes(made, grid, root / "run", resume=True)

    whole, killed = made_at(tmp_path / "whole", 9), made_at(tmp_path / "killed", 4)
    assert [row.clients for row in killed.rows[1:]] == [row.clients for row in whole.rows[1:]]
    assert killed.rows[3].faults == {"lost its client state; the method begins anew": [1]}
    assert all(torch.equal(killed.params[k], whole.params[k]) for k in whole.params)


def test_after_the_loss_the_servers_sum_is_that_of_the_clients(tmp_path: Path) -> None:
    """SCAFFOLD's c is the mean of the c_k again, which makes its fixed point right."""
    from safetensors.torch import load_file

    from fedkeel.records.folder import RunFolder

    made = run("scaffold", rounds=4)
    grid = one_node_per_client(made, tmp_path)
    grid.edits[10**9 + 14] = edited_in(0, lambda reply: forget(tmp_path, 1) or reply)
    run_on_nodes(made, grid, tmp_path / "run")
    saved = RunFolder(tmp_path / "run").load()
    assert saved is not None
    own = [load_file(next(tmp_path.rglob(f"client-{k:08d}/round-00000004.*"))) for k in range(3)]
    for name in made.server.params:
        mean = sum(one[f"scaffold/c/{name}"] for one in own) / 3
        held = torch.from_numpy(saved.arrays[f"server/memory/scaffold/c/{name}"])
        assert torch.allclose(held, mean, rtol=0, atol=1e-14)
        assert held.abs().max() > 0


@pytest.mark.parametrize("method", ["moon", pytest.param("gradma.w", marks=pytest.mark.slow)])
def test_where_there_is_no_sum_the_client_begins_anew_alone(tmp_path: Path, method: str) -> None:
    made = run(method, rounds=2)
    grid = one_node_per_client(made, tmp_path)
    grid.edits[10**9 + 14] = edited_in(0, lambda reply: forget(tmp_path, 1) or reply)
    result = run_on_nodes(made, grid)
    assert result.rows[2].faults == {"lost its client state, and began anew": [1]}
    assert result.rows[2].clients == [0, 1, 2]


def test_a_late_client_keeps_what_the_server_believes_in(tmp_path: Path) -> None:
    """Its state of the round that did not count is not used: as if it had not trained."""
    made = run("scaffold", rounds=3)
    grid = one_node_per_client(made, tmp_path)
    grid.edits[10**9 + 14] = edited_in(1, lambda reply: None)
    late = run_on_nodes(made, grid)
    assert late.rows[2].dropped == [2]
    assert late.rows[2].faults == {"no reply before the deadline": [2]}
    assert late.rows[3].clients == [0, 1, 2]
    assert late.rows[3].faults == {}


def test_a_second_run_of_the_same_settings_leaves_the_first_ones_state_alone(
    tmp_path: Path,
) -> None:
    """It begins while the first one is in its second round, and ends after one round.

    It is in a process of its own: in one process, a second run would wait for the first.
    """
    made = run("scaffold", rounds=3)

    class Ends(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if any(header_of(one.content)["round"] for one in messages):
                raise ConnectionError("after one round")
            return super().push_messages(messages)

    def run_of_one_round() -> None:
        with pytest.raises(RunError, match="after one round"):
            run_on_nodes(made, Ends(make_nodes(made, tmp_path, nodes=3)))

    def second(reply: RecordDict) -> RecordDict:
        with warnings.catch_warnings():  # the thread that asks Flower is the parent's alone
            warnings.simplefilter("ignore", DeprecationWarning)
            process = multiprocessing.get_context("fork").Process(target=run_of_one_round)
            process.start()
        process.join()
        assert process.exitcode == 0
        return reply

    grid = one_node_per_client(made, tmp_path)
    grid.edits[10**9 + 14] = edited_in(1, second)
    assert same_but_bytes(run_on_nodes(made, grid), start(made))


def test_a_node_that_comes_back_under_another_id_takes_part_again(tmp_path: Path) -> None:
    """Flower gives a new id to a SuperNode without a key that is started anew."""
    made = run("scaffold", rounds=3)
    grid = one_node_per_client(made, tmp_path)

    def gone(reply: RecordDict) -> None:
        grid.nodes[5] = grid.nodes.pop(10**9 + 14)

    grid.edits[10**9 + 14] = edited_in(0, gone)
    result = run_on_nodes(made, grid)
    assert [row.clients for row in result.rows[1:]] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    assert [row.faults for row in result.rows[2:]] == [{}, {}]


def test_enough_replies_end_a_round(tmp_path: Path) -> None:
    """Over-selection: three are asked, two count."""
    made = run("fedavg", rounds=2)
    quick = QUICK.model_copy(update={"enough": 0.6, "quorum": 0.6, "deadline_seconds": 30.0})
    made = replace(made, settings=made.settings.model_copy(update={"flower": quick}))
    grid, began = one_node_per_client(made, tmp_path), time.monotonic()
    grid.edits[10**9 + 14] = lambda kind, reply: None if kind == "train" else reply
    result = run_on_nodes(made, grid)
    assert time.monotonic() - began < quick.deadline_seconds
    assert [row.clients for row in result.rows[1:]] == [[0, 1], [0, 1]]
    assert result.rows[1].faults == {"not needed: enough had replied": [2]}
    assert result.rows[1].dropped == [2]


class Twice(InProcessGrid):
    """Hands every reply over twice, and once more the next time."""

    def pull_messages(self, message_ids):  # type: ignore[no-untyped-def]
        numbers = list(message_ids)
        found = [m for number in numbers for m in self._replies.get(number, [])]
        return found + found


def test_replies_that_come_twice_count_once(tmp_path: Path) -> None:
    made = run("fedavg")
    grid = Twice(make_nodes(made, tmp_path))
    assert same_but_bytes(run_on_nodes(made, grid), start(made))


def same_but_bytes(a, b) -> bool:  # type: ignore[no-untyped-def]
    for row in (*a.rows, *b.rows):
        row.bytes_down.clear()
        row.bytes_up.pop("evaluation", None)
    return same(a, b)


def test_a_share_of_the_clients_is_not_one_more_by_rounding() -> None:
    """0.56 of 25 clients are 14, and 0.07 of 100 are 7."""
    cases = [(0.56, 25), (0.07, 100), (0.5, 3), (1.0, 7)]
    assert [smallest_count(share, count) for share, count in cases] == [14, 7, 2, 7]
    assert all(smallest_count(n / d, d) == n for d in range(1, 300) for n in range(1, d + 1))


class Fails(Net):
    """Raises in training for marked examples."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and bool((x[:, 0] == MARK).any()):
            raise ArithmeticError("this example is marked")
        return Net.forward(self, x)


def test_a_client_that_fails_in_a_survey_takes_nobody_with_it(tmp_path: Path) -> None:
    """The others of its node answer as they would without it."""
    made = prepared("mime", Fails, clients=federation(4, marked=2), per_round=4, rounds=2)
    made = replace(made, settings=made.settings.model_copy(update={"flower": QUICK}))
    result = run_on_nodes(made, InProcessGrid(make_nodes(made, tmp_path, nodes=1)))
    for row in result.rows[1:]:
        assert row.clients == [0, 1, 3]
        assert list(row.faults.values()) == [[2], [2]]
    assert "this example is marked" in (tmp_path / "0" / "node.log").read_text()


def test_an_answer_to_a_survey_that_is_not_like_the_others_is_left_out(tmp_path: Path) -> None:
    """It would be the mean of all: the others go on as they would without it."""
    made = run("mime", rounds=1)
    found = []
    for factor in (1e9, float("nan")):
        grid = one_node_per_client(made, tmp_path / f"{factor}")
        grid.edits[10**9 + 7] = partial(surveyed, factor)
        found.append(run_on_nodes(made, grid))
    far, nothing = found
    assert far.rows[1].clients == nothing.rows[1].clients == [0, 1, 2]
    ((words, who),) = far.rows[1].faults.items()
    assert words.startswith("survey: an answer of mime ")
    assert words.endswith(" times as large as the median")
    assert who == [1]
    assert all(torch.equal(far.params[k], nothing.params[k]) for k in far.params)


def surveyed(factor: float, kind: str, reply: RecordDict) -> RecordDict:
    return scaled(reply, factor) if kind == "train.survey" else reply


def test_who_is_silent_in_a_survey_is_written_down(tmp_path: Path) -> None:
    """The answer is then the mean of the others, which is another result than with all."""
    made = run("mime", rounds=2)
    grid = one_node_per_client(made, tmp_path)
    grid.edits[10**9 + 7] = lambda kind, reply: None if kind == "train.survey" else reply
    for row in run_on_nodes(made, grid).rows[1:]:
        assert row.faults == {"survey: no reply before the deadline": [1]}
        assert row.clients == [0, 1, 2]


def test_nobody_who_answers_a_survey_is_no_quorum(tmp_path: Path) -> None:
    """It was said that training had diverged."""
    made = run("mime", rounds=2)
    grid = one_node_per_client(made, tmp_path)
    for node in grid.nodes:
        grid.edits[node] = lambda kind, reply: None if kind == "train.survey" else reply
    with pytest.raises(TrainingError, match="Round 1 has no quorum"):
        run_on_nodes(made, grid)


def test_no_quorum_stops_with_the_state_saved(tmp_path: Path) -> None:
    made = run("scaffold", rounds=3)
    quick = QUICK.model_copy(update={"quorum": 0.6})
    made = replace(made, settings=made.settings.model_copy(update={"flower": quick}))
    grid = one_node_per_client(made, tmp_path)
    for node in (10**9, 10**9 + 7):
        grid.edits[node] = edited_in(1, lambda reply: None)
    with pytest.raises(TrainingError, match="Round 2 has no quorum") as error:
        run_on_nodes(made, grid, tmp_path / "run")
    assert len(error.value.lines()) <= 4
    grid.edits.clear()
    result = run_on_nodes(made, grid, tmp_path / "run", resume=True)
    assert result.record.status == "finished"
    here = start(made)
    assert all(torch.equal(result.params[k], here.params[k]) for k in here.params)


def scaled(reply: RecordDict, factor: float) -> RecordDict:
    (name,) = [key for key in reply if key.startswith("tensors-")]
    arrays = {k: Array(a.numpy() * factor) for k, a in reply[name].items()}
    return RecordDict({**reply, name: ArrayRecord(arrays)})


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1e6, "an update 1e+06 times as large as the median"),
        (float("inf"), "sent NaN or infinity"),
        (float("nan"), "sent NaN or infinity"),
    ],
)
def test_what_is_not_like_the_others_is_left_out(tmp_path: Path, factor: float, words: str) -> None:
    made = run("fedavg", rounds=2, cohort=config.Cohort(clients=3))
    grid = one_node_per_client(made, tmp_path)
    grid.edits[10**9 + 7] = edited_in(0, lambda reply: scaled(reply, factor))
    result = run_on_nodes(made, grid)
    first = result.rows[1]
    assert (first.clients, first.excluded) == ([0, 2], [1])
    ((found, who),) = first.faults.items()
    assert who == [1]
    assert found == words or found.endswith("times as large as the median")
    assert result.rows[2].clients == [0, 1, 2]
    assert all(bool(v.isfinite().all()) for v in result.params.values())


@pytest.mark.parametrize(
    ("number", "lie", "words"),
    [
        ("loss", -3e29, " times as large as the median"),
        ("loss", 1e308, " times as large as the median"),
        ("loss", float("nan"), "sent NaN or infinity"),
        ("fedgc.cgc.active", 1e308, " times as large as the median"),
    ],
)
def test_a_number_for_the_record_is_screened_too(
    tmp_path: Path, number: str, lie: float, words: str
) -> None:
    """It was recorded and plotted as it came, as the mean of all clients."""
    made = run("fedgc", rounds=2, cohort=config.Cohort(clients=3))
    grid = one_node_per_client(made, tmp_path)

    def lies(reply: RecordDict) -> RecordDict:
        reply["diagnostics-1"][number] = lie
        return reply

    grid.edits[10**9 + 7] = edited_in(0, lies)
    first, second = run_on_nodes(made, grid).rows[1:]
    ((reason, who),) = first.faults.items()
    assert who == [1]
    assert reason.endswith(words)
    assert (first.clients, first.excluded) == ([0, 2], [1])
    assert first.train_loss is not None
    assert 0.0 < first.train_loss < 10.0
    assert 0.0 <= first.diagnostics["fedgc.cgc.active"] <= 1.0
    assert second.clients == [0, 1, 2]


@pytest.mark.parametrize(("method", "stage"), [("scaffold", ""), ("mime", "survey: ")])
def test_a_damaged_header_leaves_its_client_out(tmp_path: Path, method: str, stage: str) -> None:
    """It ended the whole run in a traceback, and the record went on to say that it runs."""
    made = run(method, rounds=2)
    grid = one_node_per_client(made, tmp_path)

    def damaged(kind: str, reply: RecordDict) -> RecordDict:
        if kind != ("train.survey" if stage else "train") or header_of(reply)["round"] != 0:
            return reply
        (name,) = [key for key in reply if key.startswith("tensors-")]
        record = dict(reply[name])
        path, one = next(iter(record.items()))
        data = one.data[:10] + one.data[10:128].replace(b"}", b"]") + one.data[128:]
        record[path] = Array(one.dtype, one.shape, one.stype, data)
        return RecordDict({**reply, name: ArrayRecord(record)})

    grid.edits[10**9 + 14] = damaged
    result = run_on_nodes(made, grid, tmp_path / "run")
    assert result.record.status == "finished"
    assert result.rows[2].faults == {}
    ((words, who),) = result.rows[1].faults.items()
    assert words.startswith(f"{stage}The tensor ")
    assert "has another shape or type" in words
    assert who == [2]


def test_more_work_than_was_asked_for_is_not_believed(tmp_path: Path) -> None:
    """A client cannot give itself more weight."""
    made = run("fedavg", rounds=1)
    grid = one_node_per_client(made, tmp_path)

    def greedy(reply: RecordDict) -> RecordDict:
        (client,) = header_of(reply)["clients"]
        return changed(reply, clients=[{**client, "examples": 10**9}])

    grid.edits[10**9] = edited_in(0, greedy)
    row = run_on_nodes(made, grid).rows[1]
    assert row.clients == [1, 2]
    assert list(row.faults.values()) == [[0]]


HOSTILE = "\x1b[2J\x1b]0;title\x07\r\u202e\x9b1m\nround 9: all is well"


@pytest.mark.parametrize("kind", ["status", "error", "tensor", "survey"])
def test_what_a_node_says_moves_no_cursor(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could clear the screen of who follows the run, or write a line that is not there."""
    made = run("mime" if kind == "survey" else "fedavg", rounds=1)
    grid = one_node_per_client(made, tmp_path)

    def says(asked: str, reply: RecordDict) -> RecordDict:
        if kind == "survey" and asked == "train.survey":
            raise RunError(HOSTILE)
        if asked != "train":
            return reply
        if kind == "error":
            raise RunError(HOSTILE)
        if kind == "tensor":
            (name,) = [key for key in reply if key.startswith("tensors-")]
            arrays = {k: Array(a.dtype, a.shape, HOSTILE, a.data) for k, a in reply[name].items()}
            return RecordDict({**reply, name: ArrayRecord(arrays)})
        (client,) = header_of(reply)["clients"]
        return changed(reply, clients=[{**client, "status": HOSTILE}])

    grid.edits[10**9] = says
    row = run_on_nodes(made, grid, tmp_path / "run").rows[1]
    assert all(words.isprintable() for words in row.faults)
    reason = next(words for words, who in row.faults.items() if who == [0])
    assert "\\x1b[2J" in reason
    with LinesWithFaults(Console(force_terminal=True)) as display:
        display.begin("run", 1, 0)
        display.row("run", row)
    assert f"round 1: {reason}: clients [0]" in capsys.readouterr().out.split("\n")


def test_a_full_disk_does_not_hide_why_a_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flower").mkdir()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def ends(*_: object) -> None:
        raise TrainingError("It diverged.")

    monkeypatch.setattr(server, "serve", ends)
    monkeypatch.setattr(server, "write_text", full)
    with pytest.raises(TrainingError, match="It diverged"):
        server.serve_and_report(None, None, server.RunOptions(tmp_path))


def test_a_run_of_one_kind_is_not_gone_on_with_by_another(tmp_path: Path) -> None:
    made = run("scaffold", rounds=2)
    grid = one_node_per_client(made, tmp_path)
    quick = QUICK.model_copy(update={"quorum": 1.0})
    made = replace(made, settings=made.settings.model_copy(update={"flower": quick}))
    grid.edits[10**9] = edited_in(1, lambda reply: None)
    with pytest.raises(TrainingError):
        run_on_nodes(made, grid, tmp_path / "run")
    with pytest.raises(RunError, match="clients' state that this engine needs"):
        start(made, tmp_path / "run", resume=True)


def test_other_terms_are_refused_by_the_node(tmp_path: Path) -> None:
    made, other = run("fedavg"), run("fedprox")
    grid = one_node_per_client(made, tmp_path)
    grid.nodes[10**9] = replace(grid.nodes[10**9], prepared=other)
    row = run_on_nodes(made, grid).rows[1]
    assert row.clients == [1, 2]
    assert "another experiment" in next(iter(row.faults))
