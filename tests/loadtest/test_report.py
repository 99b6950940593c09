"""The load tester's reports say what the raw file says, in every form, and nothing more."""

import csv
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from loadtest.notation import is_supported
from loadtest.report.columns import as_csv
from loadtest.report.commands import main
from loadtest.report.comparing import compare, typical
from loadtest.report.comparison_page import comparison_page
from loadtest.report.grouping import curves, maps
from loadtest.report.measurement import STAGES, RawInvalid
from loadtest.report.page import page
from loadtest.report.raw_files import read
from loadtest.report.svg import Scale, apart, log_scale
from loadtest.report.terminal import show, show_comparison, table
from loadtest.report.verdict import doubts, verdict
from loadtest.report.words import number, share
from tests.support.load_raws import Raw, histogram, point, queueing, raw, shapes, sweep
from tests.support.server import ROOT

HISTOGRAM_SHARE = 1e-3
"""What a histogram of three digits may be off by."""

VALUES = queueing(200, 5)

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b]0;x\x07[red]\u202e"
"""A name that would run code, leave its attribute, steer a terminal, or turn the line around."""


class Page(HTMLParser):
    """What a page consists of: its elements with their attributes, and the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.texts: list[str] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take an element."""
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        """Leave an element."""
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        """Take a text."""
        self.texts.append(data)
        if self._in_cell:
            self.tables[-1][-1][-1] += data

    def table(self, *headings: str) -> list[dict[str, str]]:
        """Return the rows of the first table that has these headings."""
        for rows in self.tables:
            if rows and set(headings) <= set(rows[0]):
                return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
        raise AssertionError(f"no table has {headings}")


def rows_of(content: str) -> list[dict[str, str]]:
    """Return the lines of a CSV file by their headings."""
    return list(csv.DictReader(io.StringIO(content)))


def printed(raw_file: Raw, width: int = 200) -> str:
    """Return what the terminal would show."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(raw_file, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def written(folder: Path, name: str, content: Raw) -> Path:
    """Return where a raw file now lies."""
    path = folder / name
    path.write_text(json.dumps(content))
    return path


MIXED = raw(
    [
        *sweep(400, 100, 200, 600),
        *sweep(100, 200, format="json", service_ms=4.0),
        *shapes((1, 4), (16, 64)),
        point(VALUES, rate=None, clients=8),
        point(VALUES, length="lognormal:3:0.8", rate=200.0, refused=3, lost=2),
    ]
)


def test_csv_holds_every_figure_of_the_raw_file_with_all_digits() -> None:
    """Whoever computes with it gets what was measured, not what was shown."""
    lines = rows_of(as_csv(read(MIXED)))

    assert [line["id"] for line in lines] == [p["id"] for p in MIXED["points"]]
    for line, measured in zip(lines, MIXED["points"], strict=True):
        for group, prefix in (("latency_ms", "latency"), ("sent_ms", "sent")):
            for name in ("mean", "p50", "p90", "p99", "p99.9", "max"):
                column = f"{prefix}_{name.replace('.', '_')}_ms"
                assert float(line[column]) == measured[group][name], column
        for stage in ("queue", "assembly", "compute", "encode", "total"):
            for name in ("mean", "p50", "p99"):
                assert float(line[f"{stage}_{name}_ms"]) == measured["stages_ms"][stage][name]
        for name in ("p50", "p99", "max"):
            assert float(line[f"lag_{name}_ms"]) == measured["lag_ms"][name]
        for name in ("mean", "p50", "p99"):
            assert float(line[f"decode_{name}_ms"]) == measured["decode_ms"][name]
        assert float(line["seconds"]) == measured["seconds"]
        assert int(line["offered"]) == measured["offered"]
        assert int(line["good"]) == measured["statuses"]["200"]
        assert json.loads(line["statuses"]) == measured["statuses"]
        assert json.loads(line["codes"]) == measured["codes"]
        assert json.loads(line["failures"]) == measured["failures"]
        assert (float(line["rate_per_s"]) if line["rate_per_s"] else None) == measured["rate"]


def percentile(latency: Raw, name: str) -> str:
    """Return a figure as tables show it."""
    return ("" if is_supported(name, latency["count"]) else "~") + number(latency[name])


def test_page_table_holds_every_point_with_the_figures_of_the_raw_file() -> None:
    """One line a point, in the raw file's order, to three digits."""
    made = Page(page(read(MIXED)))
    rows, stages, tester = made.table("sent p99"), made.table("queue mean"), made.table("lag max")

    assert len(rows) == len(MIXED["points"])
    for row, stage, lag, measured in zip(rows, stages, tester, MIXED["points"], strict=True):
        for name in ("mean", "p50", "p90", "p95", "p99", "p99.9", "max"):
            assert row[name] == percentile(measured["latency_ms"], name)
        assert row["sent p99"] == percentile(measured["sent_ms"], "p99")
        assert stage["queue mean"] == number(measured["stages_ms"]["queue"]["mean"])
        assert lag["lag max"] == number(measured["lag_ms"]["max"])
        assert row["good/s"] == number(measured["statuses"]["200"] / measured["seconds"])


def test_terminal_table_holds_every_point_with_the_figures_of_the_raw_file() -> None:
    """The same figures as the page."""
    made = table(MIXED)
    columns = {str(column.header): [str(cell) for cell in column.cells] for column in made.columns}

    for name in ("p50", "p90", "p95", "p99", "p99.9", "max"):
        assert columns[name] == [percentile(p["latency_ms"], name) for p in MIXED["points"]]
    assert columns["queue"] == [number(p["stages_ms"]["queue"]["mean"]) for p in MIXED["points"]]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_terminal_cuts_no_number(width: int) -> None:
    """Where one table is too wide, there are two; names are folded."""
    shown = printed(MIXED, width=width)

    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for measured in MIXED["points"]:
        assert number(measured["latency_ms"]["p99.9"]) in shown
        assert number(measured["stages_ms"]["queue"]["mean"]) in shown


def test_labels_tell_every_point_from_every_other() -> None:
    """No two lines of a table have the same name."""
    rows = Page(page(read(MIXED))).table("sent p99")

    assert len({row["point"] for row in rows}) == len(rows)


def test_outcomes_are_told_apart_and_add_up() -> None:
    """Good, refused and failed calls are what was offered."""
    made = point(VALUES, refused=7, lost=2, codes={"queue_full": 7})
    made["statuses"] |= {"500": 3}
    made["offered"] += 3

    [found] = read(raw([made])).points

    assert (found.good, found.refused, found.failed, found.unanswered) == (len(VALUES), 7, 5, 0)
    told = Page(page(read(raw([made])))).table("what", "calls")
    assert {row["what"]: row["calls"] for row in told} == {
        "status 429": "7",
        "status 500": "3",
        "code queue_full": "7",
        "connection lost": "2",
    }


def test_losses_below_saturation_are_told_apart_from_those_beyond() -> None:
    """A search for the capacity goes beyond it, and its server has lost nothing by that."""
    calm, beyond = point(VALUES, rate=10.0, refused=1), point(VALUES, rate=99.0, refused=400)

    alone, both = printed(raw([calm])), printed(raw([calm, beyond]))

    offered = f"{len(VALUES) + 1} calls"
    assert f"(1 refused, 0 failed of {offered})" in alone.replace("\N{NARROW NO-BREAK SPACE}", "")
    assert "401 refused" in both
    assert ", 1 of them where it was not saturated)" in both


@pytest.mark.fault("F9")
def test_parts_of_the_latency_tell_the_server_from_the_way_there() -> None:
    """They add up to the mean latency; what the server names no stage for is its own time."""
    made = point(VALUES)
    [found] = read(raw([made])).points
    parts, mean = found.parts_ms, made["latency_ms"]["mean"]
    stages = sum(made["stages_ms"][name]["mean"] for name in STAGES)

    assert list(parts) == [*STAGES, "other", "network", "waiting"]
    assert sum(parts.values()) == pytest.approx(mean)
    assert parts["other"] == pytest.approx(max(0, made["stages_ms"]["total"]["mean"] - stages))
    assert parts["waiting"] == pytest.approx(mean - made["sent_ms"]["mean"])


@pytest.mark.fault("F9")
def test_without_a_total_of_the_server_the_rest_is_named_as_such() -> None:
    """Its own time and the network cannot be told apart then."""
    made = point(VALUES, rate=None, clients=2)
    del made["stages_ms"]["total"]
    [found] = read(raw([made])).points

    assert list(found.parts_ms) == [*STAGES, "rest"]
    assert read(raw([point(VALUES, stages_ms=None)])).points[0].parts_ms == {}


@pytest.mark.fault("F7")
def test_counts_are_whole_numbers() -> None:
    """26 calls are no 26.0."""
    shown = printed(raw([point(VALUES[:26])]))

    assert " 26 " in shown
    assert "26.0" not in shown


@pytest.mark.fault("F7")
def test_percentile_of_too_few_calls_is_marked_and_an_objective_on_it_is_doubted() -> None:
    """In the terminal and on the page; nothing of it is bold."""
    few = raw([point(VALUES[:4])], slo="p99<1h")
    shown = " ".join(printed(few).split())
    made = Page(page(read(few)))

    assert "p99 of 4 calls is held against p99<1h; it takes 1 000" in shown.replace(
        "\N{NARROW NO-BREAK SPACE}", " "
    )
    assert f"~{number(few['points'][0]['latency_ms']['p99'])}" in shown
    assert "~ too few calls to say" in shown
    assert 'class="thin">~' in page(read(few))
    assert made.table("sent p99")[0]["p99"].startswith("~")


@pytest.mark.fault("F7")
def test_page_shows_latency_and_rate_over_time() -> None:
    """One line a point, and a stall where it was."""
    made = point(VALUES)
    made["windows"][3] |= {"rate": 0.0, "p50": None, "p99": None, "count": 0}
    shown = page(read(raw([made])))

    assert "Good answers over time" in shown
    assert "p99 over time" in shown
    assert "Fewest in a window: " in shown
    assert " 0/s." in shown


@pytest.mark.fault("F9")
def test_kinds_of_work_over_the_same_loads_share_a_chart() -> None:
    """JSON against binary, in one drawing."""
    points = [
        point(VALUES, rate=rate, format=form) for form in ("json", "binary") for rate in (10, 20)
    ]
    shown = page(read(raw(points)))

    assert shown.count('id="together-open"') == 1
    assert "json" in shown[shown.index('id="together-open"') :]


@pytest.mark.fault("F6")
def test_report_names_the_address_that_was_called() -> None:
    """Where the URL has a name, which may have several."""
    made = raw([point(VALUES, address="127.0.0.1")])
    made["server"]["url"] = "http://localhost:8000"

    assert "at http://localhost:8000 (127.0.0.1), 1 point" in printed(made)


def test_percentile_curve_is_that_of_the_latencies_and_ends_at_the_slowest() -> None:
    """Latency at 1 / (1 - p), rising, to the last call."""
    [found] = read(raw([point(VALUES)])).points

    curve = found.curve()

    assert curve[-1] == pytest.approx((len(VALUES), VALUES.max()))
    assert curve == sorted(curve)
    ordered = np.sort(VALUES)
    for x, y in curve[:-1]:
        # The histogram's library may count one call more or less.
        rank = round(len(VALUES) * (1 - 1 / x))
        low, high = ordered[max(rank - 2, 0)], ordered[rank]
        assert low * (1 - HISTOGRAM_SHARE) <= y <= high * (1 + HISTOGRAM_SHARE)


def test_curve_runs_from_the_lowest_load_to_the_highest() -> None:
    """Whatever order they were measured in."""
    first, second, *_ = curves(read(MIXED).points)

    assert [p.load for p in first.points] == [100, 200, 400, 600]
    assert first.saturated_from == 600
    assert [p.load for p in second.points] == [100, 200]
    assert second.saturated_from is None


def test_map_has_batch_by_length_with_p99_in_its_cells() -> None:
    """A cell of the page is the p99 of its point."""
    found = maps(read(MIXED).points)[0]
    grid = Page(page(read(MIXED))).table("batch \\ length", "16", "64")

    assert (found.rows, found.lengths) == ([1, 4], [16, 64])
    for row, batch in zip(grid, (1, 4), strict=True):
        for length in (16, 64):
            p99 = found.points[batch, length].latency_ms.p99
            assert row[str(length)].rstrip("*") == number(p99)


@pytest.mark.fault("F1")
def test_each_try_of_a_rate_has_its_own_stages_label_and_dot() -> None:
    """A search tries a rate that broke the objective once more; both are measurements."""
    quick, slow = np.full(100, 4.0), np.full(100, 40.0)
    first, second = point(slow), point(quick)
    second["id"] += " try 2"
    first["stages_ms"]["compute"]["mean"], second["stages_ms"]["compute"]["mean"] = 31.25, 3.125
    content = raw([point(quick, rate=50.0), first, second])

    text = page(read(content))
    made = Page(text)

    names = ["50/s", "100/s, try 1", "100/s, try 2"]
    assert [row["point"] for row in made.table("sent p99")] == names
    assert [row["compute mean"] for row in made.table("compute mean")][1:] == ["31.2", "3.12"]
    stages = next(said for said in made.texts if said.startswith("Mean times of stages: "))
    assert re.search(
        r"100/s, try 1: (?:(?!try).)*compute 31\.2 ms(?:(?!try).)*, of 40\.0 ms", stages
    )
    assert re.search(r"100/s, try 2: .*compute 3\.12 ms.*, of 4\.00 ms", stages)
    assert "100/s, try 1" in printed(content)
    assert "100/s, try 2" in printed(content)
    [curve] = curves(read(content).points)
    assert [p.id for p in curve.earlier_tries] == [first["id"]]
    assert [p.load for p in curve.last_tries] == [50, 100]
    assert "Dots off the lines: earlier tries of a load." in text
    assert "earlier tries" not in page(read(raw([point(quick, rate=50.0), second])))


@pytest.mark.fault("F4")
def test_every_table_of_a_closed_load_says_that_stalls_hide_in_it() -> None:
    """In terminal, page and comparison; an open load hides none."""
    closed = raw([point(VALUES, rate=None, clients=clients) for clients in (2, 4)])
    opened = raw([point(VALUES)])
    hides = "stalls of the server hide in these figures (coordinated omission)"

    made = page(read(closed))
    figures = re.findall(r'<table class="figures">.*?</table>', made, re.DOTALL)
    assert figures
    assert all(hides in table for table in figures if "p99" in table)
    assert hides in " ".join(printed(closed).split())
    both = comparison_page(compare(read(closed), read(closed)))
    assert hides in both
    assert hides not in page(read(opened)) + " ".join(printed(opened).split())


@pytest.mark.fault("F2", "F7")
def test_lost_calls_speak_against_a_raw_file_whatever_its_warnings_say() -> None:
    """Also one that was written before they did, or by another tool."""
    found = verdict(read(raw([point(VALUES, lost=1)])))

    assert found.sentence == "These numbers are not to be trusted."
    assert "lost calls: 1 of " in found.doubts[0]


@pytest.mark.parametrize(
    ("changed", "is_saturated"),
    [
        ({}, False),
        ({"refused": 9}, False),
        ({"refused": 11}, True),
        ({"lost": 11}, True),
        ({"good_per_s": 95.0}, False),
        ({"good_per_s": 94.0}, True),
        ({"good_per_s": 94.0, "windows": [{"at_s": 0, "p50": 100.0}]}, False),  # always under way
        ({"rate": 130.0}, False),  # fewer were due than chance lets expect, and all were answered
        ({"rate": None, "clients": 2}, False),
    ],
)
def test_saturation_is_loss_or_calls_that_pile_up(
    changed: dict[str, Any], is_saturated: bool
) -> None:
    """One of a hundred lost, or one of twenty not answered by the end."""
    [found] = read(raw([point(np.full(1000, 3.0), **changed)])).points

    assert found.is_saturated is is_saturated


def doubtful() -> Iterator[Any]:
    """Return raw points with what must be said of each."""
    good = point(VALUES)
    latency = good["latency_ms"]
    yield good, []
    yield good | {"warnings": ["the generator was the bottleneck"]}, ["bottleneck"]
    yield good | {"checked": 10, "wrong": 2}, ["2 of 10 checked answers wrong"]
    yield good | {"offered": good["offered"] + 1}, ["1 call neither answered nor counted"]
    yield (
        good | {"latency_ms": latency | {"count": 5}},
        [f"5 latencies for {number(len(VALUES))} good answers", "the histogram holds"],
    )
    yield good | {"latency_ms": latency | {"p90": latency["max"] + 1}}, ["out of order", "p90"]
    yield good | {"histogram": histogram(VALUES * 1.1)}, ["the histogram says"]


@pytest.mark.parametrize(("made", "said"), list(doubtful()))
def test_what_does_not_add_up_is_said_first(made: Raw, said: list[str]) -> None:
    """In the verdict of page and terminal, before any figure."""
    content = raw([made])

    found = doubts(read(content).points[0])

    assert len(found) == len(said)
    assert all(part in doubt for part, doubt in zip(said, found, strict=True)), found
    assert verdict(read(content)).is_good == (not said)
    text = "".join(Page(page(read(content))).texts)
    for part in said:
        assert text.index(part) < text.index("All figures")
        assert part in printed(content)


@pytest.mark.parametrize(
    ("warnings", "sentence"),
    [
        ([], "Nothing speaks against these numbers."),
        (["calls waited for a free connection"], "Read the numbers with care."),
        (["unstable: the median went"], "These numbers are not to be trusted."),
        (["the generator was the bottleneck"], "These numbers are not to be trusted."),
    ],
)
def test_verdict_tells_remarks_from_what_spoils_the_numbers(
    warnings: list[str], sentence: str
) -> None:
    """As the exit code of the load tester does."""
    content = raw([point(VALUES), point(VALUES, rate=50.0, warnings=warnings)])

    assert verdict(read(content)).sentence == sentence
    assert sentence in page(read(content))


def test_doubts_beyond_a_dozen_are_counted_and_left_to_the_csv() -> None:
    """The figures stay in sight, and no warning is lost."""
    points = [point(VALUES, id=f"p{i}", warnings=[f"warning {i}"]) for i in range(15)]

    found = verdict(read(raw(points)))

    assert len(found.doubts) == 13
    assert found.doubts[-1] == "3 warnings more: the CSV file has them all."
    assert rows_of(as_csv(read(raw(points))))[14]["warnings"] == "warning 14"


def test_interruption_is_said() -> None:
    """A report of half a sweep says that it is one."""
    content = raw([point(VALUES)], interrupted=True)

    assert not verdict(read(content)).is_good
    assert "interrupted" in page(read(content))
    assert "interrupted" in printed(content)


def test_search_for_capacity_is_judged_by_the_rates_that_kept_the_objective() -> None:
    """A rate that was too high is unstable as a matter of course."""
    points = sweep(100, 600)
    points[1]["warnings"] = ["unstable"]
    capacity = {"rate": 100.0, "slo": "p99<20ms", "broken_at": 600.0}

    assert verdict(read(raw(points, capacity=capacity))).is_good
    assert not verdict(read(raw(points))).is_good
    assert "keeps p99<20ms; 600/s breaks it" in printed(raw(points, capacity=capacity))


def test_measurement_without_a_good_answer_is_reported() -> None:
    """Nothing is made up where nothing was seen."""
    content = raw(
        [point(np.array([]), rate=rate, lost=50, stages_ms=None) for rate in (10.0, 20.0)]
    )

    made = Page(page(read(content)))

    assert [row["p99"] for row in made.table("sent p99")] == ["–", "–"]  # noqa: RUF001
    assert rows_of(as_csv(read(content)))[0]["latency_p99_ms"] == ""
    assert "100 failed" in printed(content)


def test_empty_measurement_is_reported() -> None:
    """Interrupted before the first point."""
    content = raw([], interrupted=True)

    assert "Nothing was measured." in page(read(content))
    assert "Nothing was measured." in printed(content)
    assert rows_of(as_csv(read(content))) == []


def test_ratios_are_those_of_a_over_b() -> None:
    """A that takes half the time has ratios of one half."""
    a = raw([point(VALUES, rate=rate) for rate in (200.0, 300.0)])
    b = raw([point(VALUES * 2, rate=rate) for rate in (200.0, 300.0)])
    comparison = compare(read(a), read(b))

    for pair in comparison.pairs:
        assert [pair.ratio(name) for name in ("p50", "p90", "p99", "max")] == [0.5] * 4
        assert pair.rate_ratio == 1.0
    assert typical(comparison, "p99") == pytest.approx(0.5)

    rows = Page(comparison_page(comparison)).tables[0]
    headings, first = rows[0], rows[1]
    assert headings.count("A / B") == 5
    at = [i for i, heading in enumerate(headings) if heading == "A / B"]
    assert [first[i] for i in at] == ["0.50", "0.50", "0.50", "0.50", "1.00"]
    assert first[headings.index("p99 B")] == number(b["points"][0]["latency_ms"]["p99"])


def test_typical_ratio_leaves_out_what_was_saturated() -> None:
    """A side that could not keep up says nothing of speed."""
    a = raw([point(VALUES), point(VALUES * 9, rate=900.0, refused=99)])
    b = raw([point(VALUES * 4), point(VALUES, rate=900.0)])

    assert typical(compare(read(a), read(b)), "p50") == pytest.approx(0.25)


def test_unmatched_points_are_listed_and_not_compared() -> None:
    """On both sides, in page and terminal; another rate, work or model is another point."""
    a = raw([*sweep(50, 100), point(VALUES, rate=None, clients=4)])
    b = raw([*sweep(100, 150), point(VALUES, rate=100.0, weights="on")])
    comparison = compare(read(a), read(b))
    console = Console(file=io.StringIO(), width=200)
    show_comparison(comparison, console)
    assert isinstance(console.file, io.StringIO)

    assert [pair.a.id for pair in comparison.pairs] == ["binary 1x8 weights=off 100/s"]
    text = "".join(Page(comparison_page(comparison)).texts)
    shown = console.file.getvalue()
    for side, name in (
        ("A", "binary 1x8 weights=off 50/s"),
        ("A", "binary 1x8 weights=off 4 clients"),
        ("B", "binary 1x8 weights=off 150/s"),
        ("B", "binary 1x8 weights=on 100/s"),
    ):
        assert f"{name} (" in text
        assert f"only {side} has: {name}\n" in shown
    assert "4 points of one side alone" in text


def test_tries_of_the_same_point_are_matched_in_turn() -> None:
    """The second of A with the second of B; a third stays alone."""
    tries = [point(VALUES * k, id=f"try {k}") for k in (1, 2, 3)]

    comparison = compare(read(raw(tries)), read(raw(tries[:2])))

    assert [(p.a.id, p.b.id) for p in comparison.pairs] == [("try 1", "try 1"), ("try 2", "try 2")]
    assert [p.id for p in comparison.only_a] == ["try 3"]


@pytest.mark.parametrize(("factor", "is_clear"), [(1.0, False), (5.0, True)])
def test_difference_is_clear_only_beyond_each_sides_own_spread(
    factor: float, is_clear: bool
) -> None:
    """Every window of the one beyond every window of the other."""
    a, b = raw([point(VALUES)]), raw([point(VALUES * factor)])

    [pair] = compare(read(a), read(b)).pairs

    assert pair.is_clear("p50") is is_clear
    assert pair.is_clear("p90") is None


def test_sides_that_were_not_asked_alike_are_told() -> None:
    """Another machine, or one that was busier, makes ratios of its own."""
    a, b = raw([point(VALUES)]), raw([point(VALUES)])
    b["client"] = b["client"] | {"cpu": "another"}
    b["generator"] = {"null_calls_per_s": 4000.0}

    text = "".join(Page(comparison_page(compare(read(a), read(b)))).texts)

    assert "not asked from the same processor: AMD EPYC 7B13 against another" in text
    assert "2.05 times as fast for A as for B" in text


def hostile() -> Raw:
    """Return a raw file with the hostile name wherever a name may be."""
    made = point(VALUES, refused=5, lost=5)
    made |= {
        "id": HOSTILE,
        "arrivals": HOSTILE,
        "warnings": [HOSTILE],
        "codes": {HOSTILE: 5},
        "failures": {HOSTILE: 5},
        "work": dict.fromkeys(("rows", "length", "weights", "mask", "format"), HOSTILE),
    }
    second = made | {"id": HOSTILE + "2", "rate": 200.0}
    details = {HOSTILE: [HOSTILE], "more": {"name": HOSTILE}}
    return raw(
        [made, second],
        tool=HOSTILE,
        command=["python", HOSTILE],
        started=HOSTILE,
        client=dict.fromkeys(("cpu", "python", "kernel", "commit"), HOSTILE),
        server=dict.fromkeys(("url", "name", "version", "model"), HOSTILE) | {"details": details},
        capacity={"rate": 1.0, "slo": HOSTILE, "broken_at": 2.0},
    )


def pages_of(content: Raw) -> list[str]:
    """Return the page of a raw file and one that compares it with itself and more."""
    other = content | {"points": content["points"][:1]}
    return [page(read(content)), comparison_page(compare(read(content), read(other)))]


def test_hostile_names_stay_text_in_pages() -> None:
    """No name becomes an element, an attribute or a hidden letter."""
    harmless = hostile_elements(raw([*sweep(100, 200)]))
    for made in pages_of(hostile()):
        found = Page(made)

        assert {tag for tag, _ in found.elements} <= harmless | {"ul", "li"}
        for _, attributes in found.elements:
            assert not any(name.startswith("on") for name in attributes)
        assert "<script>alert(1)</script>" in "".join(found.texts)
        assert not re.search("[\x1b\x07\u202e]", made)


def hostile_elements(content: Raw) -> set[str]:
    """Return which elements the pages of an honest raw file are made of."""
    return {tag for made in pages_of(content) for tag, _ in Page(made).elements}


def test_hostile_names_steer_no_terminal() -> None:
    """Neither by control letters nor by the markup of the library that prints."""
    content = hostile()
    console = Console(file=io.StringIO(), width=3000, highlight=False)
    show_comparison(compare(read(content), read(content)), console)
    assert isinstance(console.file, io.StringIO)

    for shown in (printed(content, width=3000), console.file.getvalue()):
        assert "[red]" in shown
        assert not re.search("[\x1b\x07\u202e]", shown)


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_csv_names_are_no_formulas(start: str) -> None:
    """A spreadsheet shows them."""
    [line] = rows_of(as_csv(read(raw([point(VALUES, id=f"{start}cmd|' /C calc'!A0")]))))

    assert line["id"] == f"'{start}cmd|' /C calc'!A0"


def test_pages_refer_to_nothing_outside_themselves() -> None:
    """No address is loaded or linked, whatever the raw file names."""
    for made in pages_of(MIXED):
        found = Page(made)
        [style] = re.findall(r"<style>(.*?)</style>", made, re.DOTALL)
        ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]

        assert len(ids) == len(set(ids))
        assert "http://127.0.0.1:8000" in "".join(found.texts)  # as a text
        assert not re.search(r"url\(|@import|https?:", style)
        assert {tag for tag, _ in found.elements}.isdisjoint({"script", "img", "iframe", "object"})
        for _, attributes in found.elements:
            assert "src" not in attributes
            assert not any(
                "http" in (value or "")
                for key, value in attributes.items()
                if key not in ("content", "aria-label")
            )
            if (target := attributes.get("href")) is not None and target != "data:,":
                assert target.startswith("#")
                assert target[1:] in ids


def test_drawings_say_in_words_what_they_show() -> None:
    """Each has a title and a description with its figures, for those who do not see it."""
    made = page(read(MIXED))
    drawings = re.findall(r"<svg .*?</svg>", made)

    assert len(drawings) == 2 * (made.count("<figure id="))
    for drawing in drawings:
        found = Page(drawing)
        attributes = found.elements[0][1]
        named = {tag: given.get("id") for tag, given in found.elements if tag in ("title", "desc")}
        assert attributes["role"] == "img"
        assert named == {
            "title": attributes["aria-labelledby"],
            "desc": attributes["aria-describedby"],
        }
        assert re.search(r"<desc [^>]*>[^<]*\d", drawing)


def test_report_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table on the terminal, CSV and page in files."""
    path = written(tmp_path, "raw.json", MIXED)

    code = main(["report", str(path), "--html", f"{tmp_path}/a.html", "--csv", f"{tmp_path}/a.csv"])

    assert code == 0
    assert "headwise 0.1.0 serving mha" in capsys.readouterr().out
    assert (tmp_path / "a.html").read_text() == page(read(MIXED))
    assert (tmp_path / "a.csv").read_text() == as_csv(read(MIXED))


def test_report_command_puts_parts_of_one_measurement_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All points in one table; sides that differ are told."""
    first = written(tmp_path, "1.json", raw(sweep(100)))
    other = raw(sweep(200)) | {"client": raw([])["client"] | {"cpu": "another"}}
    second = written(tmp_path, "2.json", other)

    assert main(["report", str(first), str(second), "--csv", f"{tmp_path}/a.csv"]) == 0

    assert "the files differ in client" in capsys.readouterr().out
    lines = rows_of((tmp_path / "a.csv").read_text())
    assert [line["rate_per_s"] for line in lines] == ["100.0", "200.0"]


def test_compare_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ratios on the terminal, and the page in a file."""
    a = written(tmp_path, "a.json", raw(sweep(100, 200)))
    b = written(tmp_path, "b.json", raw(sweep(100, 200, service_ms=3.0)))

    assert main(["compare", str(a), str(b), "--html", f"{tmp_path}/both.html"]) == 0

    assert "A / B" in capsys.readouterr().out
    assert "Ratios" in (tmp_path / "both.html").read_text()


def test_slo_option_holds_latencies_against_another_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line moves, and with it the highest load that is below."""
    path = written(tmp_path, "raw.json", raw(sweep(50, 100, 200, 300)))

    assert main(["report", str(path), "--slo", "p99<6ms", "--html", f"{tmp_path}/a.html"]) == 0

    assert "Highest load with p99<6ms: 100/s" in capsys.readouterr().out
    assert ">p99 &lt; 6 ms<" in (tmp_path / "a.html").read_text()


def test_module_command_reports(tmp_path: Path) -> None:
    """`python -m loadtest report`, as documented."""
    path = written(tmp_path, "raw.json", raw(sweep(100, 200)))

    ended = subprocess.run(
        [sys.executable, "-m", "loadtest", "report", path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "100/s" in ended.stdout


def wrong_files() -> Iterator[Any]:
    """Return contents of raw files with what is said of each."""
    good = raw([point(VALUES)])
    broken = point(VALUES)
    del broken["seconds"]
    null = point(VALUES)
    null["latency_ms"] = null["latency_ms"] | {"p99": None}
    yield "{", "raw.json: expected JSON, got something else"
    yield "[]", "raw.json: the file: "
    yield json.dumps(good | {"format": 2}), "raw.json: format: expected 1, got 2"
    yield json.dumps(raw([broken])), "raw.json: points.0.seconds: field required"
    yield json.dumps(raw([null])), f"expected every figure of {len(VALUES)} latencies"
    yield json.dumps(raw([point(VALUES, histogram="AAAA")])), "expected an HDR histogram in base64"
    yield json.dumps(raw([point(VALUES, rate=-1.0)])), "points.0.rate: input should be greater"
    yield json.dumps(good | {"points": [point(VALUES)] * 2}), "expected each point once, got it 2"
    yield json.dumps(good | {"slo": "fast"}), "slo: expected bounds such as p99<20ms"


@pytest.mark.parametrize(("content", "message"), list(wrong_files()))
def test_wrong_raw_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    """Exit code 2, and where it is wrong."""
    (tmp_path / "raw.json").write_text(content)

    assert main(["report", str(tmp_path / "raw.json")]) == 2

    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert message in said


def test_files_that_cannot_be_had_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one to read and the one to write."""
    path = written(tmp_path, "raw.json", raw([point(VALUES)]))

    assert main(["report", f"{tmp_path}/none.json"]) == 2
    assert "none.json: cannot be read: No such file" in capsys.readouterr().err
    assert main(["report", str(path), "--html", f"{tmp_path}/none/a.html"]) == 2
    assert "a.html: cannot be written: No such file" in capsys.readouterr().err
    assert main(["report", str(path), "--slo", "p99"]) == 2
    assert "--slo: expected bounds such as p99<20ms" in capsys.readouterr().err


def test_reading_refuses_what_is_no_point() -> None:
    """A model that is neither open nor closed."""
    with pytest.raises(RawInvalid, match=r"points\.0\.model"):
        read(raw([point(VALUES, model="half")]))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),  # noqa: RUF001
        (0.0, "0"),
        (0.01234, "0.012"),
        (1.2345, "1.23"),
        (9.996, "10.0"),
        (99.96, "100"),
        (1234.5, "1\u202f234"),
    ],
)
def test_numbers_have_three_digits_that_count(value: float | None, shown: str) -> None:
    """Nor more, nor a thousandth of a millisecond where there is none."""
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0 %"), (0.00001, "<0.01 %"), (0.0505, "5.05 %"), (0.9999, "99.99 %"), (1.0, "100 %")],
)
def test_shares_never_hide_a_few_as_none(value: float, shown: str) -> None:
    """One lost call of a million is not nothing."""
    assert share(value) == shown


def test_log_scale_spaces_factors_evenly_with_round_ticks() -> None:
    """Twice as much is as far anywhere."""
    scale = Scale(1, 1000, 0, 300, log=True)

    assert [scale(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 100, 200, 300])
    assert scale.ticks(4) == [1, 10, 100, 1000]
    assert Scale(0, 480, 0, 300).ticks(5) == [0, 100, 200, 300, 400]
    held = log_scale([3.0, 3.0], 100, 0)
    assert 0 < held(3.0) < 100


def test_labels_of_lines_do_not_cover_each_other() -> None:
    """They stay within the drawing, in the order of their lines."""
    placed = apart([10, 11, 12, 99], 14, 0, 100)

    assert placed == sorted(placed)
    assert all(b - a >= 14 for a, b in itertools.pairwise(placed))
    assert placed[-1] <= 100
