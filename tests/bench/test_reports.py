"""Reports: well-formed, self-contained, and written only where they can be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.bench.test_score import OBJECTIVES, answered, refused
from tidegate.bench.html import write_report
from tidegate.bench.machine import describe_machine
from tidegate.bench.report import check_writable, percentile, write_json
from tidegate.bench.score import score
from tidegate.bench.serve import Measured
from tidegate.bench.svg import Chart, Line
from tidegate.bench.sweep import find_capacity
from tidegate.config import ConfigError


def measured(name: str, rate: float = 1.0) -> Measured:
    outcomes = [*(answered(0.1 * (place + 1), 0.01, arrival_s=place) for place in range(9)), refused(0.1)]
    return Measured(name, rate, score(outcomes, OBJECTIVES, 10.0), outcomes)


def test_the_report_is_one_file_that_needs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    runs = [measured("ours"), measured("<theirs> & co")]
    write_report(
        str(path), "load & goodput", describe_machine(), runs, [(run.name, [run, measured("", 2.0)]) for run in runs]
    )
    html = path.read_text()
    assert not re.search(r"(src|href)=|<script|@import|url\(", html)
    charts = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(charts) == 4 + 3 + 2
    for chart in charts:
        ElementTree.fromstring(chart)
    assert "&lt;theirs&gt; &amp; co" in html


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [Line("empty", [])],
        [Line("one", [(5.0, 5.0)])],
        [Line("flat", [(1.0, 0.0), (2.0, 0.0)])],
        [Line("wide", [(0.001, 1.0), (1e6, 2.0)], has_markers=True)],
    ],
)
@pytest.mark.parametrize("is_log_x", [False, True])
def test_charts_of_odd_data_are_still_charts(lines: list[Line], is_log_x: bool) -> None:
    root = ElementTree.fromstring(Chart("t", "x", "y", lines, is_log_x=is_log_x).svg())
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")


@pytest.mark.parametrize(("true_capacity", "start"), [(3.3, 1.0), (0.4, 1.0), (1.0, 1.0), (100.0, 1.0), (5.0, 8.0)])
def test_the_search_ends_close_below_the_capacity(true_capacity: float, start: float) -> None:
    asked: list[float] = []

    def holds(rate: float) -> bool:
        asked.append(rate)
        return rate <= true_capacity

    found = find_capacity(holds, start, num_halvings=4)
    assert true_capacity * 0.93 <= found <= true_capacity
    assert len(asked) == len(set(asked))


def test_a_server_that_holds_nothing_has_no_capacity() -> None:
    assert find_capacity(lambda rate: False, 1.0, 3) == 0.0


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0), (0.9, 3.7)])
def test_percentiles_are_interpolated(share: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == pytest.approx(value)


def test_json_goes_to_stdout_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document: dict[str, Any] = {"at_16": {"ratio": 1.0}}
    write_json(document, "-")
    assert json.loads(capsys.readouterr().out) == document
    write_json(document, str(tmp_path / "r.json"))
    assert json.loads((tmp_path / "r.json").read_text()) == document


def test_a_path_that_cannot_be_written_is_told_before_the_work() -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        check_writable("/no/such/folder/r.json")
