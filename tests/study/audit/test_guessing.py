"""Beside what an attacker found, the headline has what a guesser has, and says where it is all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedkeel.records.audit import AttackResult, AuditRecord
from fedkeel.report.audit_page import render_audit_page
from fedkeel.report.audit_text import headline, overview
from fedkeel.study.audit.linear import guessed_shares
from fedkeel.study.audit.quality import Units, compare


def rows(count: int, seed: int) -> torch.Tensor:
    """Rows as of patients: the first column is hundreds of times as wide as the others."""
    table = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return table * torch.tensor([300.0, 1.0, 1.0, 1.0, 1.0, 1.0])


def found(attack: str, **numbers: float) -> AttackResult:
    return AttackResult(attack, "", "client 0", "", "", "", numbers)


def record(*results: AttackResult, unit: str | None = None) -> AuditRecord:
    epsilon = None if unit is None else 1.88
    return AuditRecord(
        "a", "fedavg", 0, "client", 1, 1, 1, results=results, epsilon=epsilon, delta=1e-5, unit=unit
    )


def test_rows_of_other_people_do_not_count_as_recovered() -> None:
    originals, others, guesses = rows(60, 1), rows(200, 2), rows(60, 3)
    units = Units.of(torch.cat([originals, others]), None)
    assert compare(guesses, originals, units).recovered > 0.1, "they are near in any table"
    assert compare(guesses, originals, units, others).recovered == pytest.approx(0.0, abs=0.02)
    near = originals + 0.01 * originals.std(dim=0)
    assert compare(near, originals, units, others).recovered > 0.95
    assert compare(originals, originals, units, originals).recovered == 0.0, "anybody has them"


def test_a_wide_column_does_not_decide_alone_how_near_rows_are() -> None:
    originals = rows(60, 1)
    wrong = originals.clone()
    wrong[:, 1:] = wrong[:, 1:].flip(0)  # only the wide column is right
    quality = compare(wrong[:5], originals[:5], Units.of(originals, None))
    assert quality.mean_psnr is not None
    assert quality.mean_psnr < 25.0


def test_the_headline_has_guessing_beside_each_number() -> None:
    inputs = found("linear", recovered=0.06, recovered_of_others=0.06)
    labels = found("labels", labels_right=0.96, labels_right_of_even=0.99)
    text = headline(record(inputs, labels))
    assert "6 % of the inputs, where guessing with other examples recovers 6 %: no better" in text
    assert "96 % of the labels were read off, where guessing equal shares of the classes" in text
    assert "has 99 % right: no better than guessing" in text
    few = {"labels_right": 70 / 73, "labels_right_of_majority": 69 / 73, "examples": 73.0}
    assert "has 95 % right: a difference within chance" in headline(record(found("labels", **few)))
    many = {**few, "examples": 7_300.0}
    assert "within chance" not in headline(record(found("labels", **many)))
    text = headline(
        record(
            found("linear", recovered=0.5, recovered_of_others=0.02),
            found("labels", labels_right=0.9, total_variation_of_even=0.5),
        )
    )
    assert "no better" not in text
    assert "recovers 2 %; 90 % of the labels" in text
    assert "has 50 % right" in text, "audits of earlier versions have only the distance"


def test_labels_are_beside_the_best_guess_of_who_saw_nothing() -> None:
    shares = {"labels_right_of_even": 0.55, "labels_right_of_shares": 0.6}
    text = headline(record(found("labels", labels_right=0.86, **shares)))
    assert "guessing the classes' shares in the test set has 60 % right." in text
    assert "no better" not in text
    labels = found("labels", labels_right=0.86, **shares, labels_right_of_majority=0.945)
    text = headline(record(labels))
    assert "the test set's most frequent class for all has 94 % right: no better than" in text
    assert "<dt>by guessing equal shares of the classes</dt>" in render_audit_page(record(labels))


def test_one_label_for_all_is_a_guess_where_most_examples_have_it() -> None:
    guesses = guessed_shares(np.array([9, 11]))
    assert {name: shares.tolist() for name, shares in guesses.items()} == {
        "even": [0.5, 0.5],
        "shares": [0.45, 0.55],
        "majority": [0.0, 1.0],
    }
    assert "majority" not in guessed_shares(np.array([10, 9, 11]))
    assert set(guessed_shares(np.zeros(3, dtype=np.int64))) == {"even"}


def membership(attack: str, auc: float, count: int, **more: float) -> AttackResult:
    return found(attack, auc=auc, members=count, others=count, **more)


def test_members_are_told_only_beyond_what_guessing_may_have() -> None:
    one = membership("updates", 0.65, 73, others_alike=1.0)
    text = headline(record(one))
    assert "who was trained on could be told better than by guessing (AUC 0.65 by" in text
    assert "`updates`, interval 0.56 to 0.73; guessing has 0.5)" in text
    text = headline(record(membership("updates", 0.65, 24, others_alike=1.0)))
    assert "who was trained on could not be told better than by guessing" in text
    text = headline(record(membership("loss", 0.6, 73, others_alike=1.0)))
    assert "could not" not in text
    two = [membership(attack, 0.6, 73, others_alike=1.0) for attack in ("loss", "updates")]
    text = headline(record(*two))
    assert "could not be told" in text, "the best of two is the better by chance, too"
    assert "the best of 2, interval" in text


def test_members_beside_other_clients_are_not_said_to_be_told() -> None:
    old = membership("updates", 0.65, 73)  # an earlier version took the test set
    for result in (old, membership("updates", 0.65, 73, others_alike=0.0)):
        text = headline(record(result))
        assert "who was trained on could" not in text
        assert "training examples could be told from test examples better than by" in text
        assert "of other clients, too: this also tells clients apart" in text
        assert "partition.holdout" in text
    inputs = found("linear", recovered=0.5, recovered_of_others=0.1, others_alike=0.0)
    assert "guessing with test examples of any client recovers 10 %" in headline(record(inputs))


def test_a_budget_of_an_example_says_what_it_allows() -> None:
    one = membership("updates", 0.65, 24, others_alike=1.0)
    bound = "Epsilon 1.88 of an example allows an AUC of 0.87 at most, on average"
    assert bound in headline(record(one, unit="example"))
    assert "allows" not in headline(record(one, unit="client")) + headline(record(one))
    assert "allows" not in headline(record(found("labels", labels_right=0.9), unit="example"))


def test_of_what_was_not_recovered_the_nearest_other_example_is_named() -> None:
    best = found("linear", recovered=0.0, psnr_best=45.0, psnr_best_of_others=46.2)
    text = headline(record(best))
    assert text.startswith("No input was recovered: the best reconstruction, by `linear`, has 45.0")
    assert "where the nearest of other examples has 46.2: no better than guessing" in text
    assert "No reconstruction reached" not in text


def test_epsilon_is_of_an_example_or_a_client() -> None:
    assert "epsilon 1.88 of an example spent" in overview(record(unit="example"))
    assert "epsilon 1.88 of a client spent" in overview(record(unit="client"))


def test_the_page_has_the_numbers_of_guessing() -> None:
    page = render_audit_page(record(found("linear", recovered=0.5, recovered_of_others=0.02)))
    assert "share that other examples would recover" in page
