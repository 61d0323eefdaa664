"""What people write in TOML out of habit: the line, a mark below the place, and what is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.config import Data, load
from fedkeel.errors import ConfigError

GOOD = """\
rounds = 2
[data]
source = "digits"
[partition]
clients = 4
[model]
name = "logistic"
[local]
lr = 0.1
epochs = 1
"""
SOURCE, RATE = 'source = "digits"', "lr = 0.1"


def refusal(folder: Path, old: str, new: str, overrides: tuple[str, ...] = ()) -> ConfigError:
    path = folder / "try.toml"
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert overrides or "try.toml" in caught.value.what
    assert len(str(caught.value)) < 2000
    assert len(caught.value.lines()) <= 4
    return caught.value


@pytest.mark.parametrize(
    ("old", "wrong", "right"),
    [
        (SOURCE, r'source = "C:\Users\me\data.csv"', r"source = 'C:\Users\me\data.csv'"),
        (SOURCE, r'source = "C:\data\b.csv"', r"source = 'C:\data\b.csv'"),
        (SOURCE, r"source = C:\Users\me\data.csv", r"source = 'C:\Users\me\data.csv'"),
        (SOURCE, "source = “digits”", 'source = "digits"'),
        (SOURCE, "source = „digits“", 'source = "digits"'),
        (SOURCE, "source = ‘digits’", "source = 'digits'"),
        (SOURCE, 'source =\u00a0"digits"', 'source = "digits"'),
        (SOURCE, "source = digits", 'source = "digits"'),
        (SOURCE, "source = data/x.csv  # mine", 'source = "data/x.csv"  # mine'),
        (SOURCE, 'source = "digits', 'source = "digits"'),
        (SOURCE, "source: digits", 'source = "digits"'),
        (SOURCE, '"source": "digits",', '"source" = "digits"'),
        (SOURCE, 'source = "digits";', 'source = "digits"'),
        (SOURCE, 'source = "digits"  // small', 'source = "digits"  # small'),
        (RATE, "lr = 0,1", "lr = 0.1"),
        (RATE, "lr = -0,1  # low", "lr = -0.1  # low"),
        (RATE, "lr = .5", "lr = 0.5"),
        (RATE, "lr = 1.e-3", "lr = 1.0e-3"),
        (RATE, "lr = 1.", "lr = 1.0"),
        (RATE, "lr = 007", "lr = 7"),
        (RATE, "nesterov = True", "nesterov = true"),
        (RATE, "nesterov = FALSE  # no", "nesterov = false  # no"),
        (RATE, "nesterov = yes", "nesterov = true"),
        (RATE, "schedule = {final = 0,1}", "schedule = {final = 0.1}"),
        (RATE, 'schedule = {"kind": "cosine"}', 'schedule = {"kind" = "cosine"}'),
        ("[local]", "[local", "[local]"),
    ],
)
def test_the_line_is_shown_and_what_to_write(
    tmp_path: Path, old: str, wrong: str, right: str
) -> None:
    error = refusal(tmp_path, old, wrong)
    number = GOOD.split("\n").index(old) + 1
    assert f"try.toml is not valid TOML, line {number}: " in error.what
    assert error.got == wrong
    assert str(error.do).startswith(f"write {right}   (")


def test_the_mark_is_below_the_place(tmp_path: Path) -> None:
    lines = refusal(tmp_path, RATE, "   lr = 0,1").lines()
    assert lines[1:3] == ["  got lr = 0,1", "            ^"]
    assert lines[1][lines[2].index("^")] == ","


def test_a_long_line_is_shown_around_the_mark(tmp_path: Path) -> None:
    error = refusal(tmp_path, RATE, f'lr = ["{"a" * 5000}", True]')
    assert str(error.got).endswith('a", True]')
    assert error.mark is not None
    assert str(error.got)[error.mark :] == "True]"


def test_a_setting_without_a_value_is_left_out(tmp_path: Path) -> None:
    assert str(refusal(tmp_path, "epochs = 1", "steps = None").do).startswith("drop the line")


def test_what_is_set_twice(tmp_path: Path) -> None:
    assert "drop one" in str(refusal(tmp_path, RATE, "lr = 0.1\nlr = 0.2").do)
    assert "twice" in str(refusal(tmp_path, "[model]", "[data]\n[model]").do)


@pytest.mark.parametrize("value", ["?", "0.1 0.2", "1/3", "10%", '"a" "b"', "[1, 2", "{", "'x\""])
def test_where_nothing_is_known_nothing_is_suggested(tmp_path: Path, value: str) -> None:
    assert refusal(tmp_path, RATE, f"lr = {value}").do is None


@pytest.mark.parametrize(
    "path", [r"D:\new\table.csv", r"data\train.csv", r"\\server\new.csv", r"C:\temp\file.csv"]
)
@pytest.mark.parametrize("form", ['source = "{}"', 'source = ["digits", "{}"]', 'test = "{}"'])
def test_a_path_that_means_another_one(tmp_path: Path, form: str, path: str) -> None:
    line = form.format(path)
    error = refusal(tmp_path, SOURCE, f"{SOURCE if line[0] == 't' else ''}\n{line}")
    assert "line 4" in error.what
    assert error.got == line
    assert f"'{path}' in single quotes" in str(error.do)


def test_paths_with_control_characters_are_refused_in_python_too() -> None:
    with pytest.raises(ConfigError, match="in TOML"):
        Data(source="D:\new\table.csv")
    with pytest.raises(ConfigError, match="control character"):
        Data(source="digits", test="data\train.csv")
    assert Data(source=r"D:\new\table.csv").sources == (r"D:\new\table.csv",)


def test_a_key_of_the_experiment_below_a_table(tmp_path: Path) -> None:
    error = refusal(tmp_path, RATE, "lr = 0.1\n[engine]\nkind = 'auto'\n method = 'fedprox'")
    assert "line 12: 'method' stands below [engine]" in error.what
    assert error.got == "method = 'fedprox'"
    assert "above the first [table]" in str(error.do)
    assert "[local.schedule]" in str(refusal(tmp_path, RATE, f"{RATE}\n[local.schedule]\nseed = 1"))


@pytest.mark.parametrize(
    ("override", "do"),
    [
        ("local.lr=0,1", "write 0.1"),
        ('local.lr="1e-3"', "write 0.001"),
        ("local.nesterov=True", "write true"),
        ("rounds='3'", "write 3"),
        ("rounds='3.5'", "None"),
        ("local.lr=nan", "None"),
        ("local.lr='inf'", "None"),
    ],
)
def test_texts_that_should_be_numbers_or_truth_values(
    tmp_path: Path, override: str, do: str
) -> None:
    assert str(refusal(tmp_path, "", "", (override,)).do).startswith(do)


DEEP = ["[" * 2000 + "]" * 2000, "{a=" * 500 + "1" + "}" * 500, "[" * 40 + "]" * 40]
LONG = ["9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, str(2**63), f"[[{2**64}]]"]


@pytest.mark.parametrize("value", DEEP + LONG)
@pytest.mark.parametrize("key", ["rounds", "local.lr", "model.args.x", "anything"])
def test_deep_and_long_values_are_refused(tmp_path: Path, key: str, value: str) -> None:
    for error in (
        refusal(tmp_path, GOOD, f"{key} = {value}"),
        refusal(tmp_path, "", "", (f"{key}={value}",)),
    ):
        assert ("in each other" if value in DEEP else "64 bits") in str(error)


def test_deep_keys_are_refused(tmp_path: Path) -> None:
    key = "model.args" + ".a" * 1000
    for error in (
        refusal(tmp_path, GOOD, f"{key} = 1"),
        refusal(tmp_path, "", "", (f"{key}=1",)),
    ):
        assert "in each other" in str(error)


def test_bounds_hold_in_python_too() -> None:
    with pytest.raises(ConfigError, match="'limit' has a whole number of about 5000 digits"):
        Data(source="digits", limit=10**4999)
    assert Data(source="digits", limit=2**63 - 1).limit == 2**63 - 1


@pytest.mark.parametrize("key", ["name", "method", "model.name", "data.source", "data.label", "x"])
def test_long_texts_are_cut_in_messages(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path), (f"{key}={'a b' * 100_000}", "local.lr=-1", "y=2"))
    assert len(str(caught.value)) < 1000


def write(folder: Path) -> Path:
    path = folder / "try.toml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_the_name_of_a_run_fits_into_the_name_of_a_folder(tmp_path: Path) -> None:
    error = refusal(tmp_path, "", "", (f"name={'a' * 300}",))
    assert error.what.endswith("'name' cannot be used.")
    assert "200 characters" in str(error.expected)
    assert load(write(tmp_path), (f"name={'a' * 200}",)).name == "a" * 200
