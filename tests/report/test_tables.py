import io
import json

import pytest
from rich.console import Console

from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.report.summary import MethodSummary, summarise
from fedkeel.report.tables import (
    footnotes,
    result_rows,
    result_table,
    terminal_table,
    visible_columns,
)
from fedkeel.report.text_table import TextTable


def run(best, *, traffic=1, ms=10.0, target=0.8, reached=True):
    """One round to `best`, one back to 0.5; a model of 1 MB, one client."""
    sent = {"bytes_down": {"model": 1_000_000}, "bytes_up": {"model": 1_000_000}}
    if traffic > 1:
        sent["bytes_up"] = sent["bytes_up"] | {"x": 2_000_000 * (traffic - 1)}
    score = [Scores(100, {"accuracy": a, "loss": 1.0}) for a in (best, 0.5)]
    rows = [
        RoundRecord(
            i + 1, clients=[0], train_loss=1.0, seconds={"train": ms / 1e3}, test=one, **sent
        )
        for i, one in enumerate(score)
    ]
    return summarise(rows, target if reached else 0.99, model_bytes=1_000_000)


def group(name, *bests, unfinished=0, **own):
    made = tuple(run(best, **own) for best in bests)
    return MethodSummary(name, made, tuple(range(len(bests))), unfinished)


@pytest.fixture
def groups():
    return [
        group("fedavg", 0.80, 0.81, 0.82),
        group("fedgc", 0.90, 0.91, 0.92, traffic=2, ms=20.0),
        group("gcfed", 0.905, 0.915, 0.922),
    ]


def shown(rows, width=100):
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, legacy_windows=False)
    console.print(terminal_table(rows, width))
    return out.getvalue()


def test_rows_are_plain_values(groups):
    rows = [row.to_json() for row in result_rows(groups)]
    assert json.loads(json.dumps(rows)) == rows
    one = rows[1]
    assert one["method"] == "fedgc"
    assert (one["seeds"], one["reached"], one["target"]) == (3, 3, 0.8)
    assert one["best"] == pytest.approx(0.91)
    assert one["best_std"] == pytest.approx(0.01)
    assert one["traffic"] == pytest.approx(2.0)
    assert one["sent"] == 2 * 4_000_000
    assert one["seconds_per_client"] == pytest.approx(0.02)
    assert one["fluctuation_mean"] == pytest.approx(-41.0)


def test_order_is_kept_and_ties_are_marked(groups):
    rows = result_rows(groups)
    assert [row.summary.method for row in rows] == ["fedavg", "fedgc", "gcfed"]
    marked = [set(row.marked) for row in rows]
    # 91.0 and 91.4 with deviations of 1.0 and 0.85: pooled error 0.76 points
    assert ["best" in m for m in marked] == [False, True, True]
    assert ["traffic" in m for m in marked] == [True, False, True]
    assert not any("seconds_per_client" in m for m in marked)  # the machine may have been busy


def test_a_column_of_equal_values_has_no_best(groups):
    rows = result_rows(groups)
    assert all("rounds_to_target" not in row.marked for row in rows)  # 1 for all
    assert all("last" not in row.marked for row in rows)  # 0.5 for all
    assert result_rows([groups[0]])[0].marked == ()


def test_gap_is_paired_with_the_highest_mean(groups):
    rows = result_rows(groups)
    assert rows[2].gap is None
    assert rows[1].gap.mean == pytest.approx(-(0.005 + 0.005 + 0.002) / 3)
    assert rows[0].gap.mean == pytest.approx(-(0.105 + 0.105 + 0.102) / 3)
    assert rows[0].gap.std == pytest.approx(0.003 / 3**0.5)


def test_rounds_count_only_among_those_who_reached_it_most_often():
    often = group("often", 0.85, 0.86)
    once = MethodSummary("once", (run(0.9), run(0.9, reached=False)), (0, 1))
    never = group("never", 0.6, 0.7)
    rows = result_rows([often, once, never])
    assert ["rounds_to_target" in row.marked for row in rows] == [True, False, False]
    text = result_table(rows).markdown()
    assert "| **1 ± 0** |" in text
    assert "1 (1/2)" in text
    assert "– (0/2)" in text


def test_unfinished_runs_do_not_compete(groups):
    early = group("early", 0.7, traffic=1, ms=1.0, unfinished=1)
    rows = result_rows([*groups, early])
    assert rows[3].marked == ()
    assert "`early †`" in result_table(rows).markdown()
    assert str(footnotes(rows)[-1]) == "†: not every run is finished."
    assert "best" in result_rows([early, group("late", 0.6, unfinished=1)])[0].marked


def test_markdown_is_bold_where_best(groups):
    lines = result_table(result_rows(groups)).markdown().splitlines()
    assert lines[0].startswith("| method | best % | last % | to target rounds |")
    assert lines[1].count("---:") == lines[0].count("|") - 2
    assert lines[2].startswith("| `fedavg` | 81.00 ± 1.00 | 50.00 ± 0.00 | 1 ± 0 | **4.00**")
    assert lines[3].startswith("| `fedgc` | **91.00 ± 1.00** |")
    assert "one pooled standard error" in result_table(result_rows(groups)).markdown()
    assert "3 seeds each" in result_table(result_rows(groups)).markdown()


def test_a_label_cannot_break_the_markdown(groups):
    odd = group("a|b`c", 0.5)
    assert "| `a\\|b'c` |" in result_table(result_rows([odd])).markdown()


def test_the_terminal_table_fits_into_100_columns(groups):
    long = group("fedprox(mu=0.1)+gcfed(lam=0.5)+momentum(beta=0.9)", 0.851, 0.862, 0.83)
    text = shown(result_rows([*groups, long]))
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert "91.00 ± 1.00" in text
    assert "fedprox(mu=0.1)+" in text
    head = " ".join(text.splitlines()[1:3])
    assert all(unit in head for unit in ("%", "rounds", "MB", "× model", "ms/client"))


@pytest.mark.parametrize("width", [100, 86, 72, 60])
def test_a_narrow_terminal_gets_fewer_columns(groups, width):
    long = group("fedprox(mu=0.1)+momentum(beta=0.5)", 0.851, 0.862, 0.83)
    text = shown(result_rows([*groups, long]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "fedprox(mu=0.1)+" in text
    assert "91.00 ± 1.00" in text
    assert ("MB" in text) == (width == 100)
    heading = text.splitlines()[1]
    assert ("ms/client" in text) == (width >= 86)
    assert ("× model" in text) == (width >= 72)
    assert "last" in heading


def test_markup_in_a_label_is_text():
    assert "[bold]x[/bold]" in shown(result_rows([group("[bold]x[/bold]", 0.5)]))


def test_columns_without_values_are_left_out():
    bare = MethodSummary(
        "m", (summarise([RoundRecord(1, test=Scores(10, {"accuracy": 0.5, "loss": 1.0}))]),)
    )
    keys = [column.name for column in visible_columns(result_rows([bare]), is_page=True)]
    assert "rounds_to_target" not in keys
    assert "traffic" not in keys
    assert "gap" not in keys
    assert "best" in keys
    empty = MethodSummary("m", (summarise([]),))
    assert "–" in result_table(result_rows([empty, bare])).markdown()


def test_a_target_that_nobody_reached_is_shown():
    rows = result_rows([group("a", 0.5), group("b", 0.6)])
    assert [c.name for c in visible_columns(rows)].count("rounds_to_target") == 1
    assert "– (0/1)" in result_table(rows).markdown()


def test_a_terminal_never_cuts_a_short_name(groups):
    for width in range(60, 120):
        assert "fedavg" in shown(result_rows(groups), width)


def test_a_heading_is_shown_as_it_is() -> None:
    """It may be the name of a site, which is neither markup nor a command of the terminal."""
    names = ("site[/x]", "[bold]site", "a\x1b[2Jb", "missing\n%")
    table = TextTable(("label", *names), [("yes", *"1234")], has_code=False)
    stream = io.StringIO()
    Console(width=100, file=stream, force_terminal=True, color_system=None).print(table.terminal())
    text = stream.getvalue()
    assert all(name in text for name in (*names[:2], r"a\x1b[2Jb"))
    assert "\x1b[2J" not in text
    first, second = [line for line in text.splitlines() if line.strip()][:2]
    assert first.rstrip().endswith("missing")
    assert second.rstrip().endswith("%")


def test_long_names_are_broken_after_a_mark_in_a_narrow_terminal() -> None:
    methods = ("fedprox(mu=0.001)+gcfed.local", "fedavg+finetune(epochs=5)", "ditto(lambda_=0.1)")
    heads = ("client", "local", *(f"{name}\ngain" for name in methods))
    cells = ["70.1 ± 0.2", "+12.3 ▲", "−3.1 ▼", "+0.4"]
    table = TextTable(heads, [["North Hospital\n4,000 examples", *cells]] * 3, has_code=False)
    text = io.StringIO()
    Console(width=80, file=text).print(table.terminal(is_wrapped=True))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    head = [line.split() for line in lines[: lines.index(next(x for x in lines if "──" in x))]]
    pieces = {piece for line in head for piece in line}
    assert {"fedprox(", "mu=0.001)+", "gcfed.local", "finetune(", "epochs=5)"} <= pieces
