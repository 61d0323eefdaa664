"""Errors: four short facts, on four lines, whatever is put into them."""

from __future__ import annotations

import pickle
import traceback

import pytest

from each import each
from fedkeel import errors
from fedkeel.errors import LONGEST_FACT, ConfigError, FedkeelError, did_you_mean, nearest

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FedkeelError)
]


def full(kind: type[FedkeelError] = ConfigError) -> FedkeelError:
    return kind("What.", got=3, expected="4", why="because", do="this")


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_has_four_facts_on_four_lines(kind: type[FedkeelError]) -> None:
    facts = ["  got 3; expected 4", "  why  because", "  do   this"]
    assert full(kind).lines() == [f"{kind.__name__}: What.", *facts]
    assert str(full(kind)).splitlines() == ["What.", *facts]


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ({}, []),
        ({"got": 0}, ["  got 0"]),
        ({"got": ""}, ["  got "]),
        ({"expected": "x"}, ["  expected x"]),
        ({"do": "x"}, ["  do   x"]),
        ({"got": False, "why": "y"}, ["  got False", "  why  y"]),
    ],
)
def test_what_is_not_said_takes_no_line(facts: dict, lines: list[str]) -> None:
    assert ConfigError("What.", **facts).lines()[1:] == lines


def test_line_breaks_of_others_make_no_lines() -> None:
    error = ConfigError("a\nb", got="c\r\nd", expected="e\nf", why="g\nh\n", do="i\n\nj")
    assert error.lines() == [
        "ConfigError: a b",
        "  got c d; expected e f",
        "  why  g h",
        "  do   i  j",
    ]


def test_texts_of_others_move_no_cursor() -> None:
    """Control characters and invisible ones are shown; letters of any language stay."""
    error = ConfigError("a\x1b[2Jb", got="c\x07\u202ed", do="\ud800 \x9b1m é 漢 \u00a0x")
    assert error.lines() == [
        "ConfigError: a\\x1b[2Jb",
        "  got c\\x07\\u202ed",
        "  do   \\ud800 \\x9b1m é 漢 \u00a0x",
    ]


def test_the_type_is_printed_once() -> None:
    """Python prints it before the text of an exception, and the command by itself."""
    error = ConfigError("What.", do="x")
    printed = "".join(traceback.format_exception_only(error))
    assert printed == "fedkeel.errors.ConfigError: What.\n  do   x\n"
    assert error.lines() == ["ConfigError: What.", "  do   x"]


@each("fact", ["what", "got", "expected", "why", "do"])
@each("value", ["x" * 300_000, "say " * 75_000])
def test_the_middle_of_a_long_fact_is_left_out(fact: str, value: str) -> None:
    error = ConfigError(**{"what": "What.", fact: f"begin {value} end"})
    text = str(error)
    assert len(text) < LONGEST_FACT + 40
    assert "begin" in text
    assert "characters left out" in text
    assert text.endswith("end")
    again = ConfigError(error.what, got=error.got, expected=error.expected, why=error.why)
    assert vars(again) == vars(error) | {"do": None}


def test_values_of_any_size_can_be_shown() -> None:
    for value in (10**5000, [10**5000], {"a": "b" * 100_000}, list(range(10**5))):
        text = str(ConfigError("What.", got=value, expected=value))
        assert len(text) < 3 * LONGEST_FACT


def test_what_is_nested_too_deeply_to_be_shown() -> None:
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert "a value of type list that is too large" in str(ConfigError("What.", got=deep))
    while deep:  # Python may not take it apart by itself
        (deep,) = deep


def test_a_short_value_stays_what_it_is() -> None:
    error = ConfigError("What.", got=3, expected=(1, 2))
    assert (error.got, error.expected) == (3, (1, 2))


def test_a_place_is_marked() -> None:
    error = ConfigError("What.", got="lr = 0,1", do="write 0.1", mark=6)
    assert error.lines() == [
        "ConfigError: What.",
        "  got lr = 0,1",
        "            ^",
        "  do   write 0.1",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_comes_out_of_another_process_as_it_went_in(kind: type[FedkeelError]) -> None:
    error = full(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_every_error_is_one_of_ours() -> None:
    assert len(KINDS) >= 7
    with pytest.raises(FedkeelError):
        raise full()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("learning_rte", "learning_rate"),
        ("Epochs", "epochs"),
        ("BATCHSIZE", "batch_size"),
        ("epoch", "epochs"),
        ("zzz", None),
        ("", None),
    ],
)
def test_the_nearest_word_whatever_its_case(word: str, expected: str | None) -> None:
    assert nearest(word, ["learning_rate", "epochs", "batch_size"]) == expected


def test_the_known_word_is_given_as_it_is_written() -> None:
    assert nearest("resnet8", ["ResNet8", "LeNet"]) == "ResNet8"


def test_known_words_are_sorted_and_cut_short() -> None:
    words = [f"word{i:02d}" for i in range(20, 0, -1)]
    text = did_you_mean("word07", words, limit=3)
    assert text == "did you mean 'word07'? known: word01, word02, word03, ..."
    assert did_you_mean("q", ["b", "a"]) == "known: a, b"
