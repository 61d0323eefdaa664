"""Errors: four short facts, on four lines, whatever is put into them."""

from __future__ import annotations

import pickle
import traceback

import pytest

from fedkeel import errors
from fedkeel.errors import ConfigError, FedkeelError, did_you_mean, nearest

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
