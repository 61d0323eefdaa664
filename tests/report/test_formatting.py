import pytest

from each import each
from fedkeel.records.statistics import Stat
from fedkeel.report.formatting import (
    format_bytes,
    format_duration,
    format_number,
    format_setting,
    format_signed,
    format_stat,
    without_folders,
)


@each(
    ("value", "text"),
    [
        (0, "0"),
        (0.99, "0.990"),
        (0.996, "1.00"),
        (9.99, "9.99"),
        (9.996, "10.0"),
        (99.94, "99.9"),
        (99.96, "100"),
        (-1.5, "-1.50"),
        (float("nan"), "–"),
        (None, "–"),
    ],
)
def test_three_digits(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [(115.3, 0.21, "115.3 ± 0.2"), (115.3, 12.0, "115 ± 12"), (1.5, 0.0, "1.50 ± 0.00")],
)
def test_mean_and_deviation_have_the_same_decimals(mean, std, text):
    assert format_stat(Stat(mean, std, 3, 0, 0)) == text


def test_a_small_deviation_is_not_shown_as_none():
    assert format_stat(Stat(93.2, 0.02, 3, 0, 0), decimals=1) == "93.20 ± 0.02"
    assert format_stat(Stat(93.2, 0.0, 3, 0, 0), decimals=1) == "93.2 ± 0.0"


def test_minus_zero_has_no_sign():
    assert format_signed(-0.0001, 2) == "0.00"
    assert format_signed(-12.5, 1) == "−12.5"


@each(
    ("text", "cut"),
    [
        ("/srv/a/b.npz", "b.npz"),
        ("~/x/y", "y"),
        ("C:\\Users\\ann\\x.npz is bad", "x.npz is bad"),
        ("in '/a b/c.txt'", "in 'a b/c.txt'"),
        ("1/10 of clients", "1/10 of clients"),
        ("own/data.csv", "own/data.csv"),
        ("https://a.b/c", "https://a.b/c"),
        ("down / up", "down / up"),
    ],
)
def test_folders_are_cut(text, cut):
    assert without_folders(text) == cut


def test_settings_in_words():
    assert format_setting(["/a/b/x.csv", "mnist"]) == "x.csv, mnist"
    assert format_setting({"alpha": 0.1, "clients": 1000}) == "alpha 0.1, clients 1,000"
    assert format_setting(True) == "yes"
    assert format_setting(None) == "–"


def test_units():
    assert [format_bytes(b) for b in (0, 1e3, 2.5e12, None)] == ["0 B", "1.00 kB", "2.50 TB", "–"]
    assert [format_duration(s) for s in (119.0, 3600.0, None)] == ["119 s", "60 min", "–"]
    hours = [format_duration(3600.0 * h) for h in (47, 49, 24 * 400)]
    assert hours == ["47 h 0 min", "2 d 1 h", "1.1 years"]
