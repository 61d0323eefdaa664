"""Attackers in runs: who they are, that every engine has the same ones, and what they do."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

import fedkeel as fk
from fedkeel.config import load
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError, DataError, RunError
from fedkeel.features.attackers import collusion
from fedkeel.features.attackers.attack import Attack, attackers
from fedkeel.features.attackers.feature import adversary_of
from fedkeel.features.attackers.settings import KNOWING
from fedkeel.flower.node.configuration import make_node
from fedkeel.flower.server.serve import RunOptions, serve
from fedkeel.method.round_values import Replies
from fedkeel.records.rows import RoundRecord
from fedkeel.report.page_content import overview
from fedkeel.report.runs import load_runs, main_settings
from fedkeel.runner.engines import may_be_on_gpu
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.runner.warnings import find_warnings
from fedkeel.study.doctor.runs import short_settings
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import prepared, same

PRESET = Path(str(files("fedkeel.config").joinpath("presets/digits.toml")))
TWO = (1, 4)


def ran(
    kind: str = "none", method: str = "fedavg", engine: str = "sequential", **options: object
) -> Result:
    """A run with two attackers among six clients, five of which take part in a round."""
    return start(under(kind, method, engine, **options))


def under(
    kind: str, method: str = "fedavg", engine: str = "sequential", **options: object
) -> Prepared:
    who = {} if kind == "none" else {"clients": TWO}
    fields = fk.Adversary.model_fields.keys() - {"kind", "clients"}
    given = {key: options.pop(key) for key in fields & options.keys()}
    adversary = fk.Adversary(kind=kind, **who, **given)
    workers = {"workers": 2} if engine == "workers" else {}
    return prepared(
        method,
        adversary=adversary,
        **{"per_round": 5, "rounds": 2, "dtype": "float64", "kind": engine, **workers, **options},
    )


def test_a_share_is_drawn_by_the_seed() -> None:
    half = fk.Adversary(kind="alie", share=0.5)
    first = attackers(half, 100, seed=0)
    assert len(set(first.tolist())) == 50
    np.testing.assert_array_equal(first, attackers(half, 100, seed=0))
    assert first.tolist() != attackers(half, 100, seed=1).tolist()
    assert attackers(fk.Adversary(kind="ipm", clients=(7, 2)), 8, seed=0).tolist() == [2, 7]


@pytest.mark.parametrize(("share", "who"), [(0.04, "nobody"), (0.96, "everybody")])
def test_a_share_that_is_nobody_or_everybody_is_refused(share: float, who: str) -> None:
    with pytest.raises(ConfigError, match=who):
        attackers(fk.Adversary(kind="mimic", share=share), 10, seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "ipm"}, "who the attackers are"),
        ({"kind": "ipm", "share": 0.1, "clients": (1,)}, "who the attackers are"),
        ({"share": 0.1}, "what the attackers do"),
        ({"kind": "ipm", "clients": (1, 1)}, "different numbers"),
        ({"kind": "ipm", "share": 1.0}, "less than 1"),
    ],
)
def test_settings_that_say_too_little_or_too_much(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fk.Adversary(**values)


def test_the_rows_name_the_attackers_of_the_cohort_and_the_key_knows_them() -> None:
    honest, lying = ran(), ran("sign_flip")
    assert [row.attackers for row in honest.rows] == [[]] * 3
    for row in lying.rows[1:]:
        assert row.attackers == sorted(set(row.clients) & set(TWO))
    assert any(row.attackers for row in lying.rows)
    keys = {r.record.key for r in (honest, lying, ran("sign_flip", factor=2.0))}
    assert len(keys) == 3
    assert lying.record.adversary == "sign flip, factor 1, by 2 clients: 1, 4"
    assert main_settings(lying.record)["attackers"] == "sign flip, factor 1, by 2 clients"


def test_rows_of_a_server_that_does_not_wait_name_the_attackers() -> None:
    result = ran("label_flip", "fedbuff(buffer=3)", rounds=6)
    for row in result.rows[1:]:
        assert row.attackers == sorted(set(row.clients) & set(TWO))
    assert any(row.attackers for row in result.rows)


def test_a_row_is_read_as_it_was_written_and_a_wrong_list_is_refused() -> None:
    for row in ran("sign_flip").rows:
        assert RoundRecord.from_json(json.loads(row.line())) == row
    assert json.loads(RoundRecord(1).line())["attackers"] == []
    with pytest.raises(ValueError, match="attackers"):
        RoundRecord.from_json({"round": 1, "attackers": ["first"]})


def test_the_page_says_what_attackers_do(tmp_path: Path) -> None:
    start(under("sign_flip"), tmp_path / "run")
    (said,) = [item for item in overview(load_runs([tmp_path / "run"])) if "attackers" in item]
    assert said == "attackers: sign flip, factor 1, by 2 clients"
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["adversary"] == f"{said.removeprefix('attackers: ')}: 1, 4"
    assert "features" not in record


def test_a_round_with_more_attackers_than_a_defence_withstands() -> None:
    def told(method: str, clients: int, attackers: list[int]) -> list[str]:
        adversary = fk.Adversary(kind="sign_flip", clients=attackers)
        ready = prepared(method, per_round=clients, adversary=adversary)
        return [text for text in find_warnings(ready) if "attacker" in text]

    assert told("trimmed_mean(beta=0.2)", 5, [3]) == []
    assert told("trimmed_mean(beta=0.2)", 5, [3, 4]) == [
        "trimmed_mean(beta=0.2) withstands 1 of 5 clients, and a round may have 2 attackers "
        "([adversary]): use 10 clients or more, or set beta = 0.4"
    ]
    (text,) = told("median", 3, [1, 2, 3, 4])
    assert text.startswith("median withstands 1 of 3 clients, and a round may have 3 attackers")


def test_short_runs_of_a_comparison_have_the_attackers_too() -> None:
    settings = under("sign_flip").settings
    assert adversary_of(short_settings(settings)) == adversary_of(settings)


def test_the_server_looks_at_updates_on_the_processor() -> None:
    assert may_be_on_gpu(under("none"))
    assert not may_be_on_gpu(under("label_flip"))


@pytest.mark.parametrize("kind", ["gaussian", "min_max", "label_flip"])
def test_workers_have_the_bits_of_the_sequential_engine(kind: str) -> None:
    attacked = ran(kind, "multikrum(beta=0.4, keep=4)")
    assert same(attacked, ran(kind, "multikrum(beta=0.4, keep=4)", "workers"))


@pytest.mark.parametrize("kind", ["alie"])
def test_the_vectorized_engine_keeps_single_updates_for_them(kind: str) -> None:
    """FedAvg needs only their sum, which it would leave otherwise."""
    attacked, plain = ran(kind, engine="vectorized"), ran(engine="vectorized")
    reference = ran(kind)
    assert same_up_to_rounding(attacked, reference)
    assert not same_up_to_rounding(attacked, plain)


def same_up_to_rounding(a: Result, b: Result) -> bool:
    return all(torch.allclose(a.params[k], b.params[k], rtol=0.0, atol=1e-11) for k in a.params)


# ---- what they send -----------------------------------------------------------------------------


def test_flipped_labels_are_those_that_attackers_train_on() -> None:
    honest, lying = under("none").setup.federation, under("label_flip").setup.federation
    for k in range(len(honest)):
        before, after = (f.data.labels[f.client(k)] for f in (honest, lying))
        np.testing.assert_array_equal(after, 2 - before if k in TWO else before)


def test_a_trigger_is_stamped_on_the_chosen_share_and_gets_the_target() -> None:
    honest = under("none").setup.federation
    lying = under("backdoor", target=1, poisoned=0.5, trigger=2).setup.federation
    value = float(honest.data.x.max())
    for k in range(len(honest)):
        rows = honest.client(k)
        stamped = (lying.data.x[rows, -2:] == value).all(dim=1).numpy()
        assert stamped.sum() == (round(0.5 * len(rows)) if k in TWO else 0)
        assert (lying.data.labels[rows][stamped] == 1).all()
        assert torch.equal(lying.data.x[rows][~stamped], honest.data.x[rows][~stamped])
        labels = (f.data.labels[rows][~stamped] for f in (lying, honest))
        np.testing.assert_array_equal(*labels)


def test_an_example_of_two_clients_is_not_poisoned() -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 5)), np.arange(6) % 3
    shared = fk.federation(fk.dataset(x, y), [np.array([0, 1, 2]), np.array([2, 3, 4, 5])])
    adversary = fk.Adversary(kind="label_flip", clients=(1,))
    with pytest.raises(DataError, match="an honest client has, too"):
        prepared(adversary=adversary, clients=shared, per_round=2)


def test_the_success_of_a_backdoor_is_in_the_rows() -> None:
    """The attackers' updates are multiplied by 4, so that the mean follows them."""
    success = []
    for method in ("fedavg", "multikrum(beta=0.4, keep=3)"):
        options = {"target": 2, "factor": 4.0, "rounds": 8, "per_round": 6, "trigger": 2}
        result = ran("backdoor", method, **options)
        success.append(result.rows[-1].test["attack_success"])
        names = [metric.name for metric in result.record.task.metrics]
        assert names.index("attack_success") == len(names) - 2
    assert success[0] > 0.9
    assert success[1] < success[0]


def replies_of(honest: int = 5, seed: int = 0) -> Replies:
    """Replies of two attackers, 0 and 1, and of honest clients."""
    count = 2 + honest
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 5)))
    update = {"w": rows[:, :4].clone(), "b": rows[:, 4].clone()}
    ones = np.ones(count, dtype=np.int64)
    return Replies(np.arange(count), ones, ones, ones.astype(np.bool_), update, {}, {})


def flat(replies: Replies) -> np.ndarray:
    return np.concatenate([replies.update["w"], replies.update["b"][:, None]], axis=1)


def sent(replies: Replies, round: int = 0, **settings: object) -> np.ndarray:
    """The updates [K, D] after the attack."""
    Attack(fk.Adversary(clients=(0, 1), **settings), np.array([0, 1]), 0).apply(replies, round)
    return flat(replies)


@pytest.mark.parametrize(("kind", "sign"), [("sign_flip", -1.0), ("scaling", 1.0)])
def test_attacks_that_multiply(kind: str, sign: float) -> None:
    before, after = flat(replies_of()), sent(replies_of(), kind=kind, factor=3.0)
    np.testing.assert_array_equal(after[:2], sign * 3.0 * before[:2])
    np.testing.assert_array_equal(after[2:], before[2:])


def test_noise_has_the_size_of_the_update_and_differs_by_client_and_round() -> None:
    def noise(round: int) -> np.ndarray:
        replies = replies_of()
        replies.update["w"] = torch.ones(7, 4000).double()
        return sent(replies, round, kind="gaussian", factor=2.0)

    first, again, later = noise(0), noise(0), noise(1)
    assert np.sqrt((first[0] ** 2).mean()) == pytest.approx(2.0, rel=0.05)
    np.testing.assert_array_equal(first, again)
    assert len({float(row[0]) for row in (*first[:2], *later[:2])}) == 4


def test_byzfl_sends_the_same() -> None:
    """ALIE there goes along the standard deviations, in the paper and here against them."""
    oracle = np.load(Path(__file__).parents[2] / "oracles" / "byzfl_attacks_a.npz")
    alie, ipm = (float(oracle[f"hp.{name}_tau"]) for name in ("alie", "ipm"))
    for n in range(int(oracle["n_cases"])):
        rows = {"w": torch.from_numpy(oracle[f"case{n}.honest"])}
        pairs = {
            "inner_product_manipulation": collusion.inner_product_manipulation(rows, ipm),
            "sign_flipping": collusion.inner_product_manipulation(rows, 1.0),
            "a_little_is_enough": collusion.little_is_enough(rows, -alie),
            "mimic": collusion.mimic(rows),
        }
        for name, found in pairs.items():
            np.testing.assert_allclose(found["w"], oracle[f"case{n}.{name}"], atol=1e-12)


@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
@pytest.mark.parametrize("kind", ["min_max", "min_sum"])
def test_attackers_are_as_far_as_the_others_and_no_farther(kind: str, direction: str) -> None:
    honest = flat(replies_of(seed=3))[2:]
    after = sent(replies_of(seed=3), kind=kind, direction=direction)
    np.testing.assert_array_equal(after[0], after[1])
    between = ((honest[:, None] - honest[None]) ** 2).sum(axis=2)
    from_attacker = ((honest - after[0]) ** 2).sum(axis=1)
    if kind == "min_max":
        assert from_attacker.max() == pytest.approx(between.max(), rel=1e-12)
    else:
        assert from_attacker.sum() == pytest.approx(between.sum(axis=1).max(), rel=1e-12)
    mean = honest.mean(axis=0)
    along = {"std": honest.std(axis=0, ddof=1), "unit": mean, "sign": np.sign(mean)}[direction]
    moved = mean - after[0]
    assert moved @ along == pytest.approx(np.linalg.norm(moved) * np.linalg.norm(along))


def test_attackers_that_know_too_little_send_their_own() -> None:
    after = sent(replies_of(honest=1), kind="alie")
    np.testing.assert_array_equal(after, flat(replies_of(honest=1)))


def test_an_update_that_is_no_number_is_not_counted_and_not_hidden() -> None:
    replies = replies_of()
    replies.update["w"][3] = torch.nan
    replies.finite[3] = False
    known = np.delete(flat(replies_of())[2:], 1, axis=0)
    after = sent(replies, kind="ipm")
    np.testing.assert_allclose(after[0], -0.5 * known.mean(axis=0), rtol=1e-12)
    huge = replies_of()
    sent(huge, kind="scaling", factor=1.7e308)
    assert huge.finite.tolist()[2:] == [True] * 5
    assert huge.finite.tolist()[:2] == np.isfinite(flat(huge)[:2]).all(axis=1).tolist()
    assert not huge.finite[:2].all()


# ---- where they do not fit ----------------------------------------------------------------------


def test_an_encoded_update_is_not_changed() -> None:
    with pytest.raises(ConfigError, match="does not fit 'topk'"):
        under("sign_flip", "topk")
    under("label_flip", "topk")


@pytest.mark.parametrize("kind", ["label_flip", "sign_flip", "gaussian", "scaling", "backdoor"])
def test_a_lying_node_sends_what_a_simulated_attacker_does(tmp_path: Path, kind: str) -> None:
    run = under(kind, per_round=4)
    remote = run_on_nodes(run, InProcessGrid(make_nodes(run, tmp_path)))
    local = start(run)
    for row in (*remote.rows, *local.rows):
        row.bytes_down.clear()
        row.bytes_up.pop("evaluation", None)
    assert same(remote, local)
    assert not same_up_to_rounding(local, ran(per_round=4))


def test_seeds_with_other_attackers_are_runs_of_one_method(tmp_path: Path) -> None:
    """The data that they begin with are the same, whoever changes some of them."""
    for seed in range(3):
        attack = fk.Adversary(kind="backdoor", share=0.3)
        start(prepared(adversary=attack, seed=seed, rounds=1), tmp_path / str(seed))
    (method,) = load_runs([tmp_path / str(seed) for seed in range(3)])
    assert len({run.record.adversary for run in method.runs}) > 1
    start(prepared(rounds=1), tmp_path / "honest")
    honest = load_runs([tmp_path / "honest"])[0].record.data.fingerprint
    assert {run.record.data.fingerprint for run in method.runs} == {honest}


@pytest.mark.parametrize("kind", ["alie", "mimic"])
def test_nodes_cannot_know_what_others_send(tmp_path: Path, kind: str) -> None:
    assert kind in KNOWING
    settings = fk.Adversary(kind=kind, share=0.3)
    experiment = load(PRESET, []).model_copy(update={"adversary": settings})
    with pytest.raises(RunError, match="a federation of nodes"):
        make_node(experiment, {"partition-id": 0, "num-partitions": 1, "state": str(tmp_path)})
    with pytest.raises(RunError, match="a federation of nodes"):
        serve(InProcessGrid({}), experiment, RunOptions(tmp_path))
