import numpy as np
import pytest

from fedkeel.data.read.identifiers import encode, encode_as
from fedkeel.data.read.raw_examples import stratified_split
from fedkeel.errors import DataError


def test_numbers_are_sorted_as_numbers_and_texts_as_texts():
    index, names = encode(np.array([10, 9, -1, 9]))
    assert names == ("-1", "9", "10")
    assert index.tolist() == [2, 1, 0, 1]
    assert encode(np.array(["b", "a"]))[1] == ("a", "b")


def test_test_labels_take_the_numbers_of_the_training_labels():
    names = ("cat", "dog", "fox")
    assert encode_as(encode(np.array(["fox", "cat"])), names, "t.csv").tolist() == [2, 0]


def test_an_unseen_label_is_named_with_its_row():
    with pytest.raises(DataError) as caught:
        encode_as(encode(np.array(["cat", "dgo", "dgo"])), ("cat", "dog"), "t.csv")
    assert "label 'dgo' in row 1" in str(caught.value)
    assert "did you mean 'dog'?" in str(caught.value)


def test_stratified_keeps_the_shares():
    y = np.repeat([0, 1, 2], [50, 30, 20])
    train, test = stratified_split(y, 0.2, np.random.default_rng(0))
    assert np.bincount(y[test]).tolist() == [10, 6, 4]
    assert sorted([*train, *test]) == list(range(100))
    assert train.tolist() == sorted(train)


def test_stratified_gives_remainders_to_the_largest():
    # 0.25 * (6, 3, 3) = 1.5, 0.75, 0.75: floors 1, 0, 0, and two more of round(3.0) = 3
    y = np.repeat([0, 1, 2], [6, 3, 3])
    _, test = stratified_split(y, 0.25, np.random.default_rng(0))
    assert np.bincount(y[test], minlength=3).tolist() == [1, 1, 1]


def test_every_class_keeps_an_example_to_train_on():
    y = np.array([0, 0, 0, 0, 1])
    train, test = stratified_split(y, 0.9, np.random.default_rng(0))
    assert sorted(y[train]) == [0, 1]
    assert y[test].tolist() == [0, 0, 0]


def test_stratified_draws_other_rows_with_another_stream():
    y = np.zeros(100, dtype=np.int64)
    one, two = (stratified_split(y, 0.1, np.random.default_rng(seed))[1] for seed in (0, 1))
    assert one.tolist() != two.tolist()


def test_too_few_examples():
    train, test = stratified_split(np.array([0, 1, 2]), 0.2, np.random.default_rng(0))
    assert (train.tolist(), test.tolist()) == ([0, 1, 2], [])


@pytest.mark.parametrize("names", [["ill", " ill", "well"], ["a", "a "]])
def test_names_that_differ_by_spaces_alone_are_refused(names):
    with pytest.raises(DataError, match="differ only by spaces around them") as caught:
        encode(np.array(names))
    assert repr(names[0]) in str(caught.value)
    assert encode(np.array(["very ill", "ill"]))[1] == ("ill", "very ill")
