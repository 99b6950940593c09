"""What samples with known figures come to: medians, ratios, fits, tables and plots."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.fits import line, power, power_range
from bench.growth import BENCHES, fits_of, place_of, points_of
from bench.plots import growth_lines, write_plots
from bench.results import (
    Machine,
    Results,
    Sample,
    Spread,
    Work,
    ratios,
    read,
    results_of,
    spread,
)
from bench.tables import Table, markdown, tables

ROOT = Path(__file__).parents[2]

EXACT = 1e-9
"""Relative; the arithmetic here is in double precision."""

SHORT, LONG = Work(shape=(1, 8), weights=False), Work(shape=(4, 512), weights=True)


def _sample(who: str, turn: int, value: float, work: Work = SHORT, **more: str) -> Sample:
    named = {"bench": "inprocess", "what": "time", "unit": "ms"} | more
    return Sample(work=work, who=who, round=turn, value=value, **named)


def _results(samples: Sequence[Sample], **missing: str) -> Results:
    return Results(
        machine=Machine("a processor", 2, 4096, ("avx2", "amx_tile")),
        versions={"python": "3.11.7", "torch": "not installed"},
        commit="0123abc-dirty",
        command="python -m bench.inprocess --quick",
        started="2026-01-02T03:04:05+00:00",
        samples=tuple(samples),
        missing=missing,
    )


def _growth(
    bench: str, works: Sequence[Work], value: Callable[[float], float], what: str, unit: str
) -> list[Sample]:
    """Return three rounds: the value itself, a tenth less and a tenth more."""
    return [
        Sample(bench, work, "headwise", turn, what, unit, value(place_of(work, bench)) * factor)
        for turn, factor in enumerate((0.9, 1.0, 1.1))
        for work in works
    ]


LENGTHS = [Work(shape=(1, 2**i), heads=12, width=768) for i in range(13)]
CELLS = [Work(shape=(1, 2**i), weights=True, heads=12) for i in range(7, 13)]
COUNTS = [Work(artifacts=count) for count in (1, 2, 4, 8, 16)]

EVERYTHING = _results(
    [
        *(
            _sample(who, turn, base * (turn + 1), work)
            for turn in range(3)
            for who, base in (("torch", 3.0), ("headwise", 2.0))
            for work in (SHORT, LONG)
        ),
        *(
            _sample(who, 0, rate, work, bench="compare", what="rate", unit="calls/s")
            for who, rate in (("headwise", 1400.0), ("triton", 900.0))
            for work in (
                Work(shape=(1, 8), wire="binary", clients=16),
                Work(shape=(1, 8), wire="json", clients=1),
            )
        ),
        *_growth("growth: length", LENGTHS, lambda s: 0.4 + 2e-2 * s + 2e-5 * s**2, "time", "ms"),
        *_growth("growth: memory", CELLS, lambda cells: 2e-5 * cells, "peak", "MB"),
        *_growth("growth: artifacts", COUNTS, lambda count: 120 + 21 * count, "resident", "MB"),
    ],
    ray="no such package",
)


def test_what_is_written_is_read_back_the_same(tmp_path: Path) -> None:
    """Nothing of a run is lost in its file."""
    EVERYTHING.write(tmp_path / "new" / "run.json")

    assert read(tmp_path / "new" / "run.json") == EVERYTHING


def test_a_file_leaves_out_what_does_not_apply(tmp_path: Path) -> None:
    """A sample's work lists only what says something."""
    _results([_sample("headwise", 0, 1.5)]).write(tmp_path / "run.json")

    [sample] = json.loads((tmp_path / "run.json").read_text())["samples"]
    assert sample["work"] == {"shape": [1, 8], "weights": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, r"run\.json: format: "),
        ({"commit": None}, r"run\.json: commit: "),
        ({"samples": [{"bench": "x"}]}, r"run\.json: samples\.0\.work: Field required"),
        ({"mood": "good"}, r"run\.json: mood: "),
    ],
)
def test_read_names_the_file_and_the_field_it_cannot_read(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    """A record of another format is refused, not guessed at."""
    file = tmp_path / "run.json"
    _results([]).write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))

    with pytest.raises(ValueError, match=message):
        read(file)


def test_read_refuses_what_is_no_json(tmp_path: Path) -> None:
    """The file is named there, too."""
    (tmp_path / "run.json").write_text("mean: 3")

    with pytest.raises(ValueError, match=r"run\.json: Invalid JSON"):
        read(tmp_path / "run.json")


def test_a_run_says_what_it_was_made_on() -> None:
    """Machine, versions and commit are those of this process, in UTC."""
    started = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    found = results_of([], started=started, missing={"x": "y"})

    assert found.machine.cores >= 1
    assert found.machine.memory_mb > 0
    assert set(found.versions) == {"python", "headwise", "onnxruntime", "numpy", "torch"}
    assert found.versions["python"] == sys.version.split()[0]
    assert re.fullmatch("unknown|[0-9a-f]{7,40}(-dirty)?", found.commit)
    assert found.started == "2026-01-02T03:04:05+00:00"
    assert found.missing == {"x": "y"}


def test_spread_is_median_least_and_most() -> None:
    """An outlier moves the range, not the median."""
    assert spread([3.0, 1.0, 200.0, 2.0]) == Spread(2.5, 1.0, 200.0, 4)


def test_spread_of_nothing_is_refused() -> None:
    """There is no median of nothing."""
    with pytest.raises(ValueError, match="at least one value"):
        spread([])


def test_ratios_are_taken_within_each_round() -> None:
    """The median of 2, 3 and 1 is 2; the medians' own ratio would be 30 / 20."""
    ours, theirs = (10.0, 30.0, 20.0), (20.0, 90.0, 20.0)
    samples = [
        _sample(who, turn, value)
        for who, values in (("headwise", ours), ("torch", theirs))
        for turn, value in enumerate(values)
    ]

    assert ratios(samples, "torch", "headwise") == Spread(2.0, 1.0, 3.0, 3)
    assert ratios(samples, "headwise", "torch").median == 0.5


def test_a_drift_of_the_machine_does_not_move_a_ratio() -> None:
    """Both candidates of a round meet the same machine, each round twice as slow as the last."""
    samples = [
        _sample(who, turn, base * 2**turn)
        for turn in range(5)
        for who, base in (("headwise", 1.0), ("torch", 1.25))
    ]

    assert ratios(samples, "torch", "headwise") == Spread(1.25, 1.25, 1.25, 5)


def test_ratios_count_only_rounds_that_both_were_in() -> None:
    """What one of them missed is no comparison."""
    samples = [
        _sample("headwise", 0, 1.0),
        _sample("torch", 0, 4.0),
        _sample("torch", 1, 900.0),
        _sample("headwise", 2, 900.0),
    ]

    assert ratios(samples, "torch", "headwise") == Spread(4.0, 4.0, 4.0, 1)


def test_ratios_without_a_common_round_are_refused() -> None:
    """The message names both."""
    samples = [_sample("headwise", 0, 1.0), _sample("torch", 1, 4.0)]

    with pytest.raises(ValueError, match="both torch and headwise"):
        ratios(samples, "torch", "headwise")


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5, 2.0])
def test_power_finds_the_exponent_of_a_power_law(exponent: float) -> None:
    """Points that lie on one give it back, with nothing left over."""
    found = power([(x, 3 * x**exponent) for x in (64, 1, 8, 512)])

    assert found.exponent == pytest.approx(exponent, abs=EXACT)
    assert found.factor == pytest.approx(3, rel=EXACT)
    assert (found.low, found.high, found.count) == (1, 512, 4)
    assert found.residual == pytest.approx(0, abs=EXACT)
    assert found.at(100) == pytest.approx(3 * 100**exponent, rel=EXACT)


def test_powers_residual_is_the_worst_share_that_a_point_is_off() -> None:
    """The level line through 1, 4 and 1 lies at their geometric mean."""
    found = power([(1, 1), (2, 4), (4, 1)])

    assert found.exponent == pytest.approx(0, abs=EXACT)
    assert found.factor == pytest.approx(4 ** (1 / 3), rel=EXACT)
    assert found.residual == pytest.approx(4 ** (2 / 3) - 1, rel=EXACT)


@pytest.mark.parametrize("points", [[(0, 1), (1, 1)], [(1, 0), (2, 1)]])
def test_power_refuses_what_has_no_logarithm(points: list[tuple[float, float]]) -> None:
    """A zero would be minus infinity."""
    with pytest.raises(ValueError, match="above 0"):
        power(points)


@pytest.mark.parametrize("fit", [power, line])
def test_one_place_is_no_growth(fit: Callable[[Sequence[tuple[float, float]]], object]) -> None:
    """Two values at the same x say nothing about x."""
    with pytest.raises(ValueError, match="at least two different x"):
        fit([(4, 1), (4, 2)])


def test_power_range_is_the_longest_run_that_keeps_to_a_power() -> None:
    """A level start of three and a square of five points: the five are found."""
    points = [(x, 1.0) for x in (1, 2, 4)] + [(x, float(x) ** 2) for x in (8, 16, 32, 64, 128)]

    found = power_range(points)

    assert found is not None
    assert found.exponent == pytest.approx(2, abs=EXACT)
    assert (found.low, found.high, found.count) == (8, 128, 5)


def test_of_two_runs_as_long_the_later_is_taken() -> None:
    """What holds for large x is what growth is about."""
    points = [(x, 1.0) for x in (1, 2, 4)] + [(x, 5.0 * x) for x in (8, 16, 32)]

    found = power_range(points)

    assert found is not None
    assert (found.low, found.high) == (8, 32)
    assert found.exponent == pytest.approx(1, abs=EXACT)


def test_where_no_three_neighbours_keep_to_a_power_there_is_no_range() -> None:
    """Zigzag is no law, and two points always lie on one."""
    assert power_range([(x, 1.0 + 9 * (i % 2)) for i, x in enumerate((1, 2, 4, 8))]) is None


def test_line_finds_start_and_slope() -> None:
    """A server of 120 MB and 21 MB an artifact."""
    found = line([(count, 120 + 21 * count) for count in (16, 1, 2, 8)])

    assert (found.start, found.slope) == pytest.approx((120, 21), rel=EXACT)
    assert found.residual == pytest.approx(0, abs=1e-6)


def test_lines_residual_is_in_the_unit_of_y() -> None:
    """A level line at 1 through 0, 2, 2, 0 is 1 off everywhere."""
    found = line([(0, 0), (1, 2), (2, 2), (3, 0)])

    assert (found.start, found.slope, found.residual) == pytest.approx((1, 0, 1), abs=EXACT)


@pytest.mark.parametrize(
    ("bench", "place"),
    [
        ("growth: length", 8),
        ("growth: rows", 2),
        ("growth: heads", 3),
        ("growth: width", 24),
        ("growth: memory", 2 * 3 * 8**2),
        ("growth: artifacts", 5),
    ],
)
def test_each_axis_reads_its_own_place(bench: str, place: int) -> None:
    """The attention weights are counted as B·H·S²."""
    work = Work(shape=(2, 8), heads=3, width=24, artifacts=5)

    assert place_of(work, bench) == place


@pytest.mark.parametrize("bench", BENCHES)
def test_work_without_a_place_on_an_axis_is_refused(bench: str) -> None:
    """It is named, with the axis."""
    with pytest.raises(ValueError, match=re.escape(f"{bench}: expected work with")):
        place_of(Work(clients=4), bench)


def test_points_of_an_axis_are_medians_in_order() -> None:
    """Samples of other benchmarks and quantities do not count."""
    named = {"bench": "growth: artifacts", "unit": "MB"}
    samples = [
        _sample("headwise", turn, value, Work(artifacts=count), what="resident", **named)
        for count, values in ((8, (300.0, 288.0, 280.0)), (1, (141.0, 141.5, 120.0)))
        for turn, value in enumerate(values)
    ]
    others = [
        _sample("headwise", 0, 7.0, Work(artifacts=1), what="ready", **named),
        _sample("headwise", 0, 7.0, Work(artifacts=1), what="resident", bench="growth: memory"),
    ]

    points = points_of(samples + others, "growth: artifacts", "resident")

    assert points == [(1.0, 141.0), (8.0, 288.0)]


def test_fits_tell_exponent_range_and_residual() -> None:
    """A square over all of its points."""
    told = fits_of([(x, 1e-3 * x**2) for x in (1, 2, 4, 8)], "growth: length", "ms")

    assert told == [
        "S^2.00 for S 1..8 (4 points), none more than 0.0% off",
        "S^2.00 over the last three points, 0.0% off at most",
    ]


def test_the_end_of_an_axis_is_told_for_itself() -> None:
    """Doubling, then fourfold: 1.5 over the last three, whatever held before."""
    points = [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 64)]

    told = fits_of([(x, float(y)) for x, y in points], "growth: length", "ms")

    assert told[0] == "S^1.00 for S 1..16 (5 points), none more than 0.0% off"
    assert told[1].startswith("S^1.50 over the last three points, ")


def test_fits_of_artifacts_are_a_start_and_a_slope() -> None:
    """Nobody asks for the exponent of what has a start."""
    told = fits_of([(x, 120 + 21 * x) for x in (1, 2, 4)], "growth: artifacts", "MB")

    assert len(told) == 1
    assert told[0].startswith("120 MB + 21 MB x artifacts, none more than ")


def test_fits_of_two_points_are_none() -> None:
    """Two points lie on everything."""
    assert fits_of([(1, 1), (2, 2)], "growth: length", "ms") == []


def test_a_comparison_gives_medians_ranges_and_ratios() -> None:
    """Each other one has its ratio to us."""
    [times, *_] = tables(EVERYTHING)

    assert times.head == ("", "headwise", "torch")
    assert times.rows[0] == ("[1, 8]", "4 (2..6)", "6 (3..9), 1.50x")
    assert times.rows[1] == ("[4, 512], weights", "4 (2..6)", "6 (3..9), 1.50x")


def test_we_stand_first_whoever_else_there_is() -> None:
    """All ratios are to the first column."""
    samples = [_sample(who, 0, 1.0) for who in ("bare", "headwise", "torch", "a rival")]

    [table] = tables(_results(samples))

    assert table.head == ("", "headwise", "bare", "torch", "a rival")


def test_a_comparison_shows_who_was_not_measured_there() -> None:
    """A dash, and no ratio where we are missing or never in the same round."""
    samples = [
        _sample("headwise", 0, 1.0),
        _sample("torch", 1, 2.0),
        _sample("torch", 0, 8.0, LONG),
    ]

    [table] = tables(_results(samples))

    assert table.rows == (
        ("[1, 8]", "1 (1..1)", "2 (2..2)"),
        ("[4, 512], weights", "-", "8 (8..8)"),
    )


def _parsed(text: str) -> list[list[list[str]]]:
    """Return the cells of each Markdown table: by table, row and column."""
    found: list[list[list[str]]] = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", row[1:-1])]
            for row in block.splitlines()
        ]
        found.append(rows)
    return found


def test_markdown_holds_every_table_whole() -> None:
    """Each has its head, a ruler, and as many cells in every row."""
    parsed = _parsed(markdown(EVERYTHING))

    made = tables(EVERYTHING)
    assert len(parsed) == len(made) == 5
    for rows, table in zip(parsed, made, strict=True):
        head, ruler, *body = rows
        assert head == list(table.head)
        assert ruler == ["---"] * len(head)
        assert body == [list(row) for row in table.rows]


def test_markdown_escapes_what_would_end_a_cell() -> None:
    """A pipe or a line's end in a name spoils no table."""
    text = Table("t", ("a|b", "c"), (("1\n2", "3"),)).markdown()

    assert _parsed(text) == [[["a\\|b", "c"], ["---", "---"], ["1 2", "3"]]]


def test_markdown_says_where_the_figures_are_from_and_who_is_missing() -> None:
    """Machine, versions, commit and command; nobody is dropped in silence."""
    text = markdown(EVERYTHING)

    for told in (
        "`python -m bench.inprocess --quick`",
        "commit 0123abc-dirty",
        "2 cores of a processor, 4 GB, avx2 amx_tile",
        "python 3.11.7, torch not installed",
        "Not measured: ray (no such package).",
        "- S^",
    ):
        assert told in text


def test_every_plot_is_a_well_formed_svg_with_its_labels(tmp_path: Path) -> None:
    """One for each quantity; the axes name what they show, and its unit."""
    paths = write_plots(EVERYTHING, tmp_path / "plots", "run")

    titles = {
        "inprocess-time-without-weights": "inprocess: time, ratio to headwise (above 1: slower)",
        "inprocess-time-with-weights": "inprocess: time, ratio to headwise (above 1: slower)",
        "compare-rate-binary": "compare: rate (calls/s, logarithmic), binary",
        "compare-rate-json": "compare: rate (calls/s, logarithmic), json",
        "growth-length-time": "S, length of one sequence (tokens); B = 1, H = 12, E = 768",
        "growth-memory-peak": "B·H·S², attention weights; B = 1, H = 12, with weights",
        "growth-artifacts-resident": "artifacts served",
    }
    units = {"growth-length": "time (ms)", "growth-memory": "peak (MB)"}
    assert [path.name for path in paths] == [f"run-{name}.svg" for name in titles]
    for path, (name, title) in zip(paths, titles.items(), strict=True):
        root = ElementTree.parse(path).getroot()  # noqa: S314 (written above)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        shown = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
        assert any(text.startswith(title) for text in shown)
        for start, unit in units.items():
            assert unit in shown or not name.startswith(start)


def test_comparison_plot_names_every_candidate_at_every_work(tmp_path: Path) -> None:
    """Each row carries its name and its median, so that no colour has to be told from another."""
    paths = write_plots(EVERYTHING, tmp_path, "run")

    [path] = [path for path in paths if path.name == "run-inprocess-time-with-weights.svg"]
    root = ElementTree.parse(path).getroot()  # noqa: S314 (written above)
    shown = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for row, ratio in (("[4, 512] headwise", "1.00"), ("[4, 512] torch", "1.50")):
        assert shown[shown.index(row) + 1] == ratio


def test_the_same_samples_make_the_same_plots(tmp_path: Path) -> None:
    """A plot that is checked in changes only with its figures."""
    once, again = (
        [path.read_bytes() for path in write_plots(EVERYTHING, tmp_path / name, "run")]
        for name in ("once", "again")
    )

    assert once == again


def test_a_plot_draws_the_fit_over_its_own_range() -> None:
    """Where time has two regimes, the line does not pretend to one."""
    works = [Work(shape=(1, 2**i), heads=12, width=768) for i in range(9)]
    samples = _growth("growth: length", works, lambda s: max(1.0, s / 8), "time", "ms")

    drawn = growth_lines(samples)

    [law] = [each for label, each in drawn.items() if label.startswith("S^1.00 over 6 points")]
    assert [x for x, _ in law.points] == [8, 256]


def test_growth_plot_shows_every_measured_point_with_its_range() -> None:
    """Median, least and most of the rounds at each place."""
    samples = _growth("growth: artifacts", COUNTS, lambda count: 100.0 * count, "resident", "MB")

    measured, straight = growth_lines(samples).values()

    assert measured.points == [(count, 100.0 * count) for count in (1, 2, 4, 8, 16)]
    assert [x for x, *_ in measured.ranges] == [1, 2, 4, 8, 16]
    for x, least, most in measured.ranges:
        assert (least, most) == pytest.approx((90 * x, 110 * x))
    assert straight.points[0] == pytest.approx((1, 100))
    assert straight.points[-1] == pytest.approx((16, 1600))


def test_report_prints_markdown_and_writes_plots(tmp_path: Path) -> None:
    """As a command, of several files, each for itself."""
    for name in ("one", "two"):
        EVERYTHING.write(tmp_path / f"{name}.json")

    files = [str(tmp_path / f"{name}.json") for name in ("one", "two")]
    ended = subprocess.run(
        [sys.executable, "-m", "bench.report", *files, "--plots", str(tmp_path / "plots")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert ended.stdout == 2 * (markdown(EVERYTHING) + "\n")
    assert len(list((tmp_path / "plots").glob("one-*.svg"))) == 7
    assert len(list((tmp_path / "plots").glob("two-*.svg"))) == 7


def test_report_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    """In one line, without a trace."""
    (tmp_path / "run.json").write_text("{}")

    ended = subprocess.run(
        [sys.executable, "-m", "bench.report", str(tmp_path / "run.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 2
    assert "run.json: machine: Field required" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_results_are_values() -> None:
    """No figure changes once it is taken."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        EVERYTHING.samples[0].value = 1.0  # type: ignore[misc]
