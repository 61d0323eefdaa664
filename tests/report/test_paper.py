"""Tables and figures for a paper, and ranks over experiments."""

from __future__ import annotations

import csv
import io
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from commands import call
from fedkeel.errors import RunError
from fedkeel.records.comparison import write_index
from fedkeel.records.ranks import RankTest, rank_test
from fedkeel.records.run_record import EngineChoice
from fedkeel.report.claims import claims_of
from fedkeel.report.paper_figures import save_figures, save_rank_figure
from fedkeel.report.ranking import rank_methods, rank_sentence
from fedkeel.report.runs import load_runs
from fedkeel.report.tables import csv_table, result_rows, result_table

METHODS = {"fedavg": {"top": 0.7}, "fedprox(mu=0.1)+gcfed": {"top": 0.8}, "fedgc": {"top": 0.9}}


def summaries(folders):
    methods = load_runs(folders)
    return methods, [method.summary for method in methods]


def test_the_latex_table_is_a_tabular(make, tmp_path) -> None:
    _, of_methods = summaries(make.comparison(tmp_path, METHODS, rounds=5))
    text = result_table(result_rows(of_methods)).latex()
    lines = text.splitlines()
    columns = re.fullmatch(r"\\begin\{tabular\}\{l(r+)\}", lines[0])
    assert columns is not None
    cells = [line.split(" & ") for line in lines if line.endswith(r" \\")]
    assert {len(line) for line in cells} == {len(columns[1]) + 1}
    assert cells[0][1] == r"best \%"
    assert cells[2][0] == r"\texttt{fedprox(mu=0.1)+gcfed}"
    best = of_methods[2].stat("best")
    mean, std = 100 * best.mean, 100 * best.std
    assert cells[3][1] == rf"\textbf{{{mean:.2f} $\pm$ {std:.2f}}}"
    comments = lines[lines.index(r"\end{tabular}") + 1 :]
    assert comments
    assert all(line.startswith("% ") for line in comments)
    assert comments[0] == r"% Needs \usepackage{booktabs}."


def test_the_csv_holds_every_figure_unrounded(make, tmp_path) -> None:
    _, of_methods = summaries(make.comparison(tmp_path, METHODS, rounds=5, seeds=4))
    claims = claims_of(of_methods)
    rows = list(csv.DictReader(io.StringIO(csv_table(result_rows(of_methods, claims)))))
    assert [row["method"] for row in rows] == list(METHODS)
    assert float(rows[2]["best"]) == of_methods[2].stat("best").mean
    assert rows[0]["claim"] == ""
    assert rows[2]["claim"] == "better"
    assert float(rows[2]["claim_p_value"]) == claims.of("fedgc").p_value


def test_figures_are_svg_and_pdf_with_text(make, tmp_path) -> None:
    folders = make.comparison(tmp_path / "runs", METHODS, rounds=5)
    methods, of_methods = summaries(folders)
    files = save_figures(methods, claims_of(of_methods), tmp_path / "figures")
    names = ("curves-rounds", "curves-megabytes", "differences")
    assert [f.name for f in files] == [f"{n}.{e}" for n in names for e in ("svg", "pdf")]
    for file in files:
        if file.suffix == ".pdf":
            assert file.read_bytes().startswith(b"%PDF-")
            continue
        texts = " ".join("".join(e.itertext()) for e in ET.parse(file).iter() if "text" in e.tag)
        assert "fedgc" in texts
        assert "fedprox(mu=0.1)+gcfed" in texts


def test_without_matplotlib_it_says_what_to_install(make, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    methods, of_methods = summaries(make.comparison(tmp_path, METHODS, rounds=3))
    with pytest.raises(RunError, match="need matplotlib") as error:
        save_figures(methods, claims_of(of_methods), tmp_path / "figures")
    assert "fedkeel[figures]" in error.value.do


def saved(make, root: Path, tops: dict[str, float], name: str) -> Path:
    """A folder of a comparison."""
    folder = root / name
    runs = make.comparison(folder, {m: {"top": t} for m, t in tops.items()}, rounds=4, seeds=2)
    write_index(folder, name, [run.path.name for run in runs], EngineChoice("sequential"))
    return folder


def test_ranks_over_experiments(make, tmp_path, monkeypatch) -> None:
    tops = {"fedavg": 0.4, "fedprox": 0.55, "fedgc": 0.7, "fedgh": 0.85, "local": 0.95}
    paths = [saved(make, tmp_path, tops, f"e{i}") for i in range(5)]
    paths.append(saved(make, tmp_path, {**tops, "new": 0.9}, "more"))
    test = rank_methods(paths)
    assert test.methods == ("fedgh", "fedgc", "fedprox", "fedavg")  # the baseline has no rank
    assert test.ranks == (1.0, 2.0, 3.0, 4.0)
    assert test.experiments == 6
    assert rank_sentence(test) == (
        "What the results show (Friedman's test over 6 experiments, best round: p = 0.00044; "
        "Nemenyi's critical difference: 1.91 ranks): `fedgh` above `fedprox` and "
        "`fedavg` and `fedgc` above `fedavg`."
    )
    monkeypatch.chdir(tmp_path)
    names = [path.name for path in paths]
    done = call("rank", *names, "--json", "--figure", "pictures/ranks")
    assert done.code == 0, done.err
    assert done.json["ranks"][0] == {"method": "fedgh", "mean_rank": 1.0}
    assert done.json["above"] == [["fedgh", "fedprox"], ["fedgh", "fedavg"], ["fedgc", "fedavg"]]
    shown = done.json["friedman_p_value"], done.json["critical_difference"]
    assert shown == (test.p_value, test.critical_difference)
    assert (done.json["experiments"], done.json["claim"]) == (test.experiments, rank_sentence(test))
    assert Path("pictures/ranks.pdf").exists()
    assert "fedgh (1.00)" in Path("pictures/ranks.svg").read_text()
    assert "fedgh" in call("rank", *names).out
    assert call("rank", names[0]).code == 2


def test_ranks_that_show_nothing_say_so() -> None:
    test = rank_test([[0.5, 0.6], [0.6, 0.5], [0.5, 0.6]], ["a", "b"])
    assert rank_sentence(test).startswith("The results show no method to rank above another")


def test_methods_that_differ_as_a_whole_and_in_no_pair() -> None:
    test = RankTest(("a", "b", "c"), (1.2, 2.2, 2.6), 5, 0.0467, 1.4801)
    assert test.separated == []
    assert rank_sentence(test) == (
        "The methods differ as a whole (Friedman's test over 5 experiments, best round: "
        "p = 0.0467), but no two of them by as much as one has to differ from another (Nemenyi's "
        "critical difference: 1.48 ranks): the results show no method above another."
    )


def test_a_picture_for_one_group(tmp_path) -> None:
    test = rank_test([[0.5, 0.6, 0.7], [0.6, 0.5, 0.4]], ["a$x", "b", "c"])
    svg, pdf = save_rank_figure(test, tmp_path / "ranks")
    again = save_rank_figure(test, tmp_path / "again")
    assert [svg.read_bytes(), pdf.read_bytes()] == [file.read_bytes() for file in again]
    assert "a$x (2.00)" in svg.read_text()
    assert "CD 2.34" in svg.read_text()  # 2.343 sqrt(3 * 4 / 12)


def test_the_command_prints_and_draws(make, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tops = {"fedavg": 0.4, "fedgc": 0.9}
    runs = make.comparison(Path("c"), {m: {"top": t} for m, t in tops.items()}, rounds=4, seeds=3)
    write_index(Path("c"), "c", [run.path.name for run in runs], EngineChoice("sequential"))
    done = call("report", "c", "--latex", "--figures", "f")
    assert done.code == 0, done.err
    assert done.out.startswith(r"\begin{tabular}")
    assert "Against `fedavg` (best round, paired" in done.err
    assert "f/differences.pdf" in done.err
    assert call("report", "c", "--csv").out.startswith("method,score,seeds")
    other = call("report", "c", "--reference", "fedgc", "--margin", "1", "--json").json
    assert other[0]["claim"]["claim"] == "worse"
    assert other[0]["claim"]["margin"] == 0.01
    assert other[1]["claim"] is None
    both = call("report", "c", "--csv", "--latex")
    assert (both.code, both.out) == (2, "")
    assert "--latex --csv" in both.err
    assert "give one" in both.err
    wrong = call("report", "c", "--reference", "x")
    assert wrong.code == 2
    assert "one of fedavg, fedgc" in wrong.err
