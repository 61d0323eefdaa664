"""`fedkeel new` writes an experiment that runs at once, and says what it has seen."""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from commands import call
from fedkeel import config
from fedkeel.cli import app
from fedkeel.cli.common import COMMAND_GROUPS, default_folder
from fedkeel.data.read.survey import survey_tables
from fedkeel.data.read.tables import read_table
from fedkeel.errors import DataError

COLUMNS = (
    *("patient_id", "age", "sex", "dose", "note", "visit"),
    *("outcome", "hospital", "cost"),
)


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """120 patients of three hospitals, in the current folder."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    with Path("patients.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(COLUMNS)
        for i in range(120):
            age, sex = random.normal(60, 10), "fm"[i % 2]
            out.writerow(
                [
                    *(i, f"{age:.1f}", sex, "?" if i % 7 == 0 else i % 5, f"note {i}"),
                    *("2024-01-31", "ill" if age > 60 else "healthy"),
                    *(("north", "south", "east")[i % 3], f"{3000 + 100 * age:.1f}"),
                ]
            )
    return tmp_path


def settings(name: str) -> dict[str, dict[str, object]]:
    """What the experiment file holds."""
    return tomllib.loads(Path(f"{name}.toml").read_text(encoding="utf-8"))


def test_a_column_of_patients_is_named_for_the_hold_out(patients: Path) -> None:
    rows = [f"P{i // 2},{i % 7},{'ill' if i % 3 else 'healthy'}" for i in range(120)]
    Path("visits.csv").write_text("\n".join(["patient,dose,outcome", *rows]))
    done = call("new", "visits", "--data", "visits.csv", "--label", "outcome")
    assert (
        "60 different texts; where rows of one belong together, set partition.holdout" in done.out
    )


def test_free_text_is_left_out_with_what_takes_it(patients: Path) -> None:
    rows = [f"{i},no fever on day {i},{'ill' if i % 3 else 'well'}" for i in range(40)]
    Path("notes.csv").write_text("\n".join(["dose,text,state", *rows]))
    done = call("new", "notes", "--data", "notes.csv", "--label", "state")
    told = " ".join(done.out.split())
    assert done.code == 0
    assert "left out text: 40 different texts; of a table with free text make a data set" in told
    with pytest.raises(DataError, match=r"no column that can be an input.\n.*text: 40 diff") as e:
        survey_tables([Path("notes.csv")], "state", drop=["dose"])
    assert "[data.text]" in str(e.value)
    assert "docs/guides/hugging-face.md, A table with text" in str(e.value)
    with pytest.raises(DataError, match="column 'text' holds text") as e:
        read_table(Path("notes.csv"), config.Data(source="notes.csv", label="state"))
    assert "[data.text]" in str(e.value)


def test_labels_of_hospitals(patients: Path) -> None:
    words = ("--data", "patients.csv", "--label", "outcome", "--client", "hospital")
    done = call("new", "heart", *words)
    assert done.code == 0, done.err
    assert settings("heart")["data"] == {
        "source": "patients.csv",
        "label": "outcome",
        "client": "hospital",
        "drop": ["patient_id", "note", "visit"],
        "normalize": "standardize",
        "missing": "indicator",
        "test_fraction": 0.2,
        "categories": {"sex": ["f", "m"]},
    }
    held = {"kind": "client", "holdout": 0.25, "stratify": True}
    assert settings("heart")["partition"] == held
    assert settings("heart")["evaluation"] == {"model": "personal"}
    methods = ["local", "centralised", "fedavg", "scaffold", "ditto"]
    assert settings("heart")["compare"] == {"methods": methods, "seeds": 5}
    assert "2 classes: healthy, ill" in done.out
    assert "patient_id: another whole number in each row" in done.out
    assert "dose has gaps" in done.out
    notes = dict(
        line.split(maxsplit=1) for line in done.out.replace("held out", "held").splitlines()
    )
    assert notes["trained"] == "72 examples (60%) are trained on"
    assert notes["held"] == (
        "24 examples (20%), 25% of each client's examples that the test set leaves "
        "(partition.holdout); models are judged on them"
    )
    of_test = "24 examples (20%) of all clients together (data.test_fraction)"
    assert f"test set  {of_test}\n" in done.out
    assert "fedkeel run heart.toml" in done.err
    assert "fedkeel compare heart.toml" in done.err
    result = call("run", "heart.toml", "--json", "-q", "-s", "rounds=3")
    assert result.code == 0, result.err
    assert result.json["last"] > 0.6  # the age decides, so guessing would be a half


def test_training_alone_is_judged_on_a_hospitals_own_patients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hospital calls the classes otherwise, so one model for all is no better than chance."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(1)
    with Path("patients.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["hospital", "age", "outcome"])
        for i in range(240):
            age, hospital = random.normal(60, 10), ("north", "south")[i % 2]
            out.writerow([hospital, f"{age:.2f}", "ab"[(age > 60) ^ (i % 2)]])
    words = ("--data", "patients.csv", "--label", "outcome", "--client", "hospital")
    assert call("new", "heart", *words).code == 0
    done = call("compare", "heart.toml", "-q", "--json", "-s", 'compare.methods=["local","fedavg"]')
    assert done.code == 0, done.err
    best = {row["method"]: row["best"] for row in done.json}
    assert best["local"] > 0.9
    assert best["fedavg"] < 0.7
    assert "So federation gains" not in done.err
    assert "So federation loses on the clients' own examples" in done.err
    (sentence,) = [line for line in done.err.splitlines() if line.startswith("Over 5 seeds, ")]
    for hospital in ("north", "south"):
        assert re.search(rf"{hospital} loses [2-6][0-9]\.[0-9] points with `fedavg`", sentence)
    (row,) = [row for row in done.json if row["method"] == "fedavg"]
    assert {client["outcome"] for client in row["each_client"]} == {"loses"}


def test_a_quantity_is_learned_whatever_its_scale(patients: Path) -> None:
    words = ("--data", "patients.csv", "--label", "cost", "--client", "hospital")
    assert call("new", "cost", *words, "--drop", "dose").code == 0
    found = settings("cost")
    assert (found["data"]["target"], found["task"]["loss"]) == ("quantity", "mse")
    result = call("run", "cost.toml", "--json", "-q", "-s", "rounds=12")
    assert result.code == 0, result.err
    assert result.json["last"] < 500  # mean absolute error; the costs deviate by 1,000


def test_tables_of_clients_of_which_one_lacks_a_column(patients: Path) -> None:
    with Path("patients.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for hospital in ("north", "south"):
        few = [row for row in rows if row["hospital"] == hospital]
        for row in few if hospital == "south" else ():
            del row["age"]
        with Path(f"{hospital}.csv").open("w", newline="", encoding="utf-8") as file:
            out = csv.DictWriter(file, few[0])
            out.writeheader()
            out.writerows(few)
    words = ("--data", "north.csv", "--data", "south.csv", "--label", "outcome")
    done = call("new", "two", *words, "--drop", "hospital")
    assert done.code == 0, done.err
    assert settings("two")["partition"]["kind"] == "source"
    assert "age, dose have gaps" in done.out
    assert call("run", "two.toml", "-q", "-s", "rounds=1").code == 0


def test_a_network_that_is_too_narrow_is_told_what_an_example_has(patients: Path) -> None:
    words = ("--data", "patients.csv", "--label", "outcome", "--client", "hospital")
    assert call("new", "heart", *words).code == 0
    text = Path("heart_model.py").read_text()
    Path("narrow.py").write_text(text.replace("nn.Linear(inputs, hidden)", "nn.Linear(4, hidden)"))
    done = call("check", "heart.toml", "-s", "model.name=narrow:Net")
    assert done.code == 2
    assert done.err.splitlines()[-1] == (
        "  do   give the first layer 6 inputs: 3 columns of numbers + one column of 2 categories + "
        "one gap indicator"
    )


def test_a_known_set_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("new", "2nd-try", "--data", "digits").code == 0
    assert settings("2nd-try")["partition"]["kind"] == "dirichlet"
    assert settings("2nd-try")["model"]["name"] == "_2nd_try_model:Net"
    assert settings("2nd-try")["data"]["test_fraction"] == 0.2
    assert call("check", "2nd-try.toml").code == 0
    none = call("check", "2nd-try.toml", "-s", "data.test_fraction=0")
    assert none.code == 2
    assert "  do   write a small share, such as 0.05: each run has a common test set." in none.err
    for words in (("--client", "ward"), ("--drop", "ward")):
        done = call("new", "third", "--data", "digits", *words)
        assert (done.code, "'ward'" in done.err) == (2, True)
    assert not Path("third.toml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("heart", "--label", "outcom"), "did you mean 'outcome'"),
        (("heart", "--label", "visit"), "the same in all rows"),
        (("heart", "--label", "note"), "another text in most rows"),
        (("a/b", "--label", "outcome"), "letters, digits"),
        (("taken", "--label", "outcome"), "There is a file taken.toml already"),
        (("heart", "--label", "outcome", "--client", "ward"), "no column 'ward'"),
        (("heart", "--label", "outcome", "--drop", "ward"), "no column 'ward'"),
    ],
)
def test_what_cannot_be_begun_leaves_no_file(
    patients: Path, words: tuple[str, ...], message: str
) -> None:
    Path("taken.toml").write_text("mine", encoding="utf-8")
    before = sorted(patients.iterdir())
    done = call("new", *words, "--data", "patients.csv")
    assert done.code == 2
    assert message in done.err
    assert sorted(patients.iterdir()) == before
    assert Path("taken.toml").read_text(encoding="utf-8") == "mine"


def test_a_folder_that_cannot_be_written_to(
    patients: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path_factory.mktemp("gone")
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = call("new", "heart", "--data", patients / "patients.csv", "--label", "outcome")
    assert done.code == 2
    assert "RunError: The experiment cannot be written into the current folder." in done.err


def test_run_and_compare_of_one_experiment_have_folders_of_their_own(patients: Path) -> None:
    """Both are called as `new` says, and again: the order decides nothing."""
    words = ("--data", "patients.csv", "--label", "outcome", "--client", "hospital")
    assert call("new", "a", *words).code == 0
    more = {"compare": ("-s", 'compare.methods=["fedavg"]', "--seeds", "1"), "run": ()}
    for command in ("compare", "run", "run", "compare"):
        done = call(command, "a.toml", "-q", "-s", "rounds=1", *more[command])
        assert done.code == 0, done.err
    assert Path("runs/a-compare/comparison.json").is_file()
    assert Path("runs/a/run.json").is_file()
    assert len(list(Path("runs").iterdir())) == 2


def test_a_comparison_of_an_earlier_version_goes_on_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old = Path("runs/old")
    old.mkdir(parents=True)
    assert default_folder("old", "compare") == Path("runs/old-compare")
    assert default_folder("old", "run") == old
    (old / "comparison.json").write_text("{}")
    assert default_folder("old", "compare") == old
    assert default_folder("old", "run") == Path("runs/old-run")


def test_each_command_stands_under_one_heading_of_the_help() -> None:
    listed = [name for names in COMMAND_GROUPS.values() for name in names]
    commands = {c.name or c.callback.__name__ for c in app.registered_commands}
    groups = {group.name for group in app.registered_groups}
    assert sorted(listed) == sorted(commands | groups)
    told = call("--help").out
    places = [told.index(f"\n{heading}:\n") for heading in COMMAND_GROUPS]
    assert places == sorted(places)
    assert "\nCommands:" not in told
    assert told.index("\n  compare ") > told.index("\nTrain:") > told.index("\n  check ")
    assert max(map(len, told.splitlines())) <= 80
    assert "\nCommands:\n  list" in call("data", "--help").out


def test_a_failed_check_leaves_no_file(patients: Path) -> None:
    """A client that gave all its rows to the test could not train: the reader says so itself."""
    Path("one.csv").write_text("x,label\n1,a\n2,b\n", encoding="utf-8")
    done = call("new", "one", "--data", "one.csv")
    assert done.code == 2
    assert not Path("one.toml").exists()


def test_whole_numbers_are_classes_where_they_are_few(tmp_path: Path) -> None:
    few, many = tmp_path / "few.csv", tmp_path / "many.csv"
    few.write_text("x,y\n" + "".join(f"{i},{i % 3}\n" for i in range(60)), encoding="utf-8")
    many.write_text("x,y\n" + "".join(f"{i},{i}\n" for i in range(60)), encoding="utf-8")
    assert survey_tables([few], "y").target == "label"
    assert survey_tables([many], "y").target == "quantity"


def hospitals(odd: Callable[[dict[str, object]], dict[str, object]]) -> tuple[str, ...]:
    """Write the tables of four hospitals, the last one in a coding of its own."""
    random = np.random.default_rng(2)
    words = []
    for hospital in ("north", "south", "west", "east"):
        with Path(f"{hospital}.csv").open("w", newline="", encoding="utf-8") as file:
            rows: list[dict[str, object]] = [
                {
                    **{"age": f"{random.normal(60, 10):.1f}", "sex": ("female", "male")[i % 2]},
                    **{"thal": (3, 6, 7)[i % 3], "smokes": i % 2},
                    "ill": "rare" if hospital == "north" and i == 3 else ("no", "yes")[i // 2 % 2],
                }
                for i in range(40)
            ]
            rows = list(map(odd, rows)) if hospital == "east" else rows
            out = csv.DictWriter(file, rows[0])
            out.writeheader()
            out.writerows(rows)
        words += ["--data", f"{hospital}.csv"]
    return (*words, "--label", "ill")


def test_another_coding_of_one_hospital_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def coded(row: dict[str, object]) -> dict[str, object]:
        sex, ill = str(row["sex"]), row["ill"] == "yes"
        return {"years": row["age"], **row, "sex": sex[0].upper(), "ill": int(ill)} | {"age": ""}

    def renamed(row: dict[str, object]) -> dict[str, object]:
        return {("years" if key == "age" else key): value for key, value in row.items()}

    done = call("new", "a", *hospitals(coded))
    assert done.code == 0, done.err
    for told in (done.out, call("check", "a.toml").out):
        assert "the labels: only east has '0' and '1', and north, south and west have" in told
        assert "the column 'sex': only east has 'F' and 'M', and north, south and west" in told
        assert "write them in one way in all data" in told
    done = call("new", "b", *hospitals(renamed))
    assert done.code == 0, done.err
    for told in (done.out, call("check", "b.toml").out):
        assert "east has no column 'age'" in told
        assert "north has no column 'years'" in told
    words = hospitals(lambda row: {**row, "sex": int(row["sex"] == "male")})
    done = call("new", "c", *words)
    assert done.code == 2
    assert "'sex': texts in north.csv, south.csv, west.csv, but not in east.csv" in done.err


def test_a_rare_class_of_one_hospital_is_no_other_coding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("new", "a", *hospitals(dict))
    assert done.code == 0, done.err
    assert "warning" not in done.out
    assert "3 classes: no, rare, yes" in done.out


def test_few_whole_numbers_may_be_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("new", "a", *hospitals(dict))
    assert "thal has only the whole numbers 3, 6, 7: if these are codes" in done.out
    assert "write thal = [] below [data.categories]" in done.out
    assert "smokes has only" not in done.out
    text = Path("a.toml").read_text(encoding="utf-8")
    changed = text.replace("[data.categories]", "[data.categories]\nthal = []\n#")
    Path("a.toml").write_text(changed, encoding="utf-8")
    assert call("check", "a.toml").code == 0
