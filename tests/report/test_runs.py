import dataclasses

import pytest

from fedkeel.errors import RunError
from fedkeel.records.run_record import Environment, PartRecord
from fedkeel.report.alerts import differences
from fedkeel.report.runs import load_runs


def test_seeds_of_a_method_are_grouped_in_the_order_given(make, tmp_path):
    folders = make.comparison(tmp_path, {"fedgc": {}, "fedavg": {}}, rounds=3)
    entries = load_runs(folders)
    assert [entry.label for entry in entries] == ["fedgc", "fedavg"]
    assert [entry.index for entry in entries] == [0, 1]
    assert entries[0].summary.seeds == (0, 1, 2)
    assert entries[0].runs[0].summary.target == 0.85
    assert differences(entries) == []


def test_paths_and_folders_are_both_taken_and_a_run_counts_once(make, tmp_path):
    folder = make.save(tmp_path, make.record(), make.rows(rounds=2))
    (entry,) = load_runs([folder, folder.path])
    assert [run.folder for run in entry.runs] == ["fedavg-s0"]


def test_one_method_with_several_settings_is_several_groups(make, tmp_path):
    folders = []
    for alpha in (0.1, 0.5):
        record = make.record(name=f"a{alpha}", key=f"k{alpha}")
        partition = dataclasses.replace(record.partition, settings={"alpha": alpha})
        folders.append(
            make.save(
                tmp_path, dataclasses.replace(record, partition=partition), make.rows(rounds=2)
            )
        )
    entries = load_runs(folders)
    assert [entry.label for entry in entries] == ["fedavg · alpha 0.1", "fedavg · alpha 0.5"]
    assert (
        "The methods differ in alpha: 0.1 (fedavg · alpha 0.1); 0.5 (fedavg · alpha 0.5)."
    ) in differences(entries)


@pytest.mark.parametrize(
    ("key", "one", "other", "difference"),
    [
        ("evaluation.every", "1", "25", "evaluation.every: 1 (fedavg); 25 (scaffold)."),
        ("partition.seed", "5", None, "partition.seed: 5 (fedavg); – (scaffold)."),
        (
            "local.drop_last",
            '"never"',
            '"always"',
            "local.drop_last: never (fedavg); always (scaffold).",
        ),
        (
            "data.augment",
            '"none"',
            '"crop_flip"',
            "data.augment: none (fedavg); crop_flip (scaffold).",
        ),
        (
            "engine.precision",
            '"float32"',
            '"bf16"',
            "engine.precision: float32 (fedavg); bf16 (scaffold).",
        ),
        ("local.schedule.at", "[3]", "[4]", "local.schedule.at: 3 (fedavg); 4 (scaffold)."),
        ("local.lr", "0.1", "0.2", None),  # a main fact: local training
        ("engine.workers", "1", "2", None),
    ],
)
def test_settings_that_the_main_facts_do_not_cover(make, tmp_path, key, one, other, difference):
    table, _, name = key.rpartition(".")
    folders = []
    for method, value in (("fedavg", one), ("scaffold", other)):
        folder = make.save(tmp_path, make.record(method), make.rows(rounds=2))
        rest = "" if value is None else f"[{table}]\n{name} = {value}\n"
        (folder.path / "config.toml").write_text(f'method = "{method}"\nrounds = 60\n{rest}')
        folders.append(folder)
    sentences = differences(load_runs(folders))
    expected = [] if difference is None else [f"The methods differ in {difference}"]
    assert [sentence for sentence in sentences if name in sentence] == expected


def test_one_name_with_several_models_or_versions_is_several_groups(make, tmp_path):
    one, two, three = (make.record("fedavg", seed, name=f"r{seed}") for seed in range(3))
    two = dataclasses.replace(two, model=dataclasses.replace(two.model, parameters=39))
    three = dataclasses.replace(three, environment=Environment(fedkeel="0.0.9"))
    entries = load_runs(
        [make.save(tmp_path, run, make.rows(rounds=2)) for run in (one, two, three)]
    )
    assert [entry.summary.seeds for entry in entries] == [(0,), (1,), (2,)]
    assert entries[1].label == "fedavg · model parameters 39 · version 0.1.0"
    labels = [entry.label for entry in entries]
    sentences = differences(entries)
    assert (
        f"The methods differ in model parameters: 250,000 ({labels[0]} and {labels[2]}); "
        f"39 ({labels[1]})."
    ) in sentences
    assert (
        f"The methods differ in version: 0.1.0 ({labels[0]} and {labels[1]}); 0.0.9 ({labels[2]})."
    ) in sentences


def test_a_method_whose_code_has_changed_is_several_groups(make, tmp_path):
    """Each version has one seed, and their settings are the same."""
    folders = []
    for seed, code in enumerate(("aaaaaaaa1", "bbbbbbbb2")):
        own = make.record("mine:A", seed, parts=[PartRecord("a", code=code)])
        folders.append(make.save(tmp_path, own, make.rows(rounds=2)))
    folders.append(make.save(tmp_path, make.record("fedavg"), make.rows(rounds=2)))
    entries = load_runs(folders)
    labels = ["mine:A · code aaaaaa", "mine:A · code bbbbbb", "fedavg"]
    assert [entry.label for entry in entries] == labels
    sentence = (
        "The code of mine:A changed between runs: version aaaaaa ran on 2026-11-21, version bbbbbb "
    )
    assert sentence in " ".join(differences(entries))
    assert "The code" not in " ".join(differences(load_runs(folders[1:])))


def test_the_same_seed_twice_is_never_two_seeds(make, tmp_path):
    records = [make.record(name=name, key=name) for name in ("one", "two")]
    entries = load_runs([make.save(tmp_path, record, make.rows(rounds=2)) for record in records])
    assert [entry.label for entry in entries] == ["fedavg · one", "fedavg · two"]


def test_every_difference_is_a_sentence(make, tmp_path):
    one = make.record("fedavg", 0)
    two = make.record("fedgc", 1, local="SGD, lr 0.1", rounds=3, target=0.5, weights="uniform")
    three = make.record("fedgh", 0, data=dataclasses.replace(one.data, fingerprint="beef"))
    folders = [make.save(tmp_path, record, make.rows(rounds=2)) for record in (one, two, three)]
    sentences = " ".join(differences(load_runs(folders)))
    for word in (
        "local training",
        "rounds",
        "fedavg and fedgh weight clients by size; fedgc weights them equally.",
        "seeds",
        "fingerprint",
        "target",
    ):
        assert f"{word}" in sentences
    assert "The methods differ in seeds: 0 (fedavg and fedgh); 1 (fedgc)." in sentences


def test_the_target_can_be_given(make, tmp_path):
    folder = make.save(tmp_path, make.record(), make.rows(rounds=30))
    (entry,) = load_runs([folder], target=0.5)
    reached = entry.runs[0].summary.rounds_to_target
    assert reached is not None
    assert 3 <= reached <= 8


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("finished", "finished"),
        ("failed", "failed after 2 of 60 rounds"),
        ("interrupted", "interrupted, 2 of 60 rounds"),
        ("running", "not finished when this page was written, 2 of 60 rounds"),
    ],
)
def test_the_state_in_words(make, tmp_path, status, words):
    folder = make.save(tmp_path, make.record(status=status), make.rows(rounds=2))
    (entry,) = load_runs([folder])
    assert entry.runs[0].state == words
    assert entry.summary.unfinished == (status != "finished")


def test_nothing_to_report_is_an_error_with_advice(tmp_path):
    with pytest.raises(RunError, match="no run to report"):
        load_runs([])
    with pytest.raises(RunError, match="not a run folder"):
        load_runs([tmp_path])
