"""How the load tester's options are written."""

import pytest

from loadtest import notation
from loadtest.errors import UsageWrong
from loadtest.notation import Bound, Objective, is_supported
from loadtest.work import check_weights, shapes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10), ("500ms", 0.5), ("2m", 120), ("1h", 3600), ("3", 3), ("1.5s", 1.5), ("0", 0)],
)
def test_time_is_read_with_its_unit(text: str, seconds: float) -> None:
    """A bare number is seconds."""
    assert notation.seconds("--duration", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "10x", "1e3", "nan", "1 2"])
def test_time_that_is_none_names_the_option(text: str) -> None:
    """The message says which option, what was expected, and what came."""
    with pytest.raises(UsageWrong) as caught:
        notation.seconds("--duration", text)

    wanted = f"--duration: expected a time such as 10s, 500ms or 2m, got {text!r}"
    assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("100", [100]),
        ("50,100", [50, 100]),
        ("100:500:200", [100, 300, 500]),
        ("0.1:0.3:0.1", [0.1, 0.2, 0.3]),
        ("1,10:30:10", [1, 10, 20, 30]),
        ("5:5:1", [5]),
    ],
)
def test_lists_and_ranges_of_numbers(text: str, numbers: list[float]) -> None:
    """A range holds its last number, though steps are rounded."""
    assert notation.numbers("--rate", text) == pytest.approx(numbers)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0", "5:1:1", "1:2", "1:9:0", "1:1e9:1", "-3"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    """Under the option's name."""
    with pytest.raises(UsageWrong, match=r"^--rate: expected "):
        notation.numbers("--rate", text)


def test_clients_are_whole() -> None:
    """There is no half a client."""
    assert notation.whole_numbers("--clients", "1,4") == [1, 4]
    with pytest.raises(UsageWrong, match=r"^--clients: expected whole numbers, got '1.5'$"):
        notation.whole_numbers("--clients", "1.5")


def test_list_of_words_keeps_heads_together() -> None:
    """The comma between heads divides no modes."""
    assert notation.words("off,on,heads:0,3") == ["off", "on", "heads:0,3"]
    assert notation.words("heads:1,2,off") == ["heads:1,2", "off"]


def test_shapes_are_rows_by_length() -> None:
    """Each side is a number or a draw."""
    assert shapes("--shape", "1x8,4xuniform:1:64,uniform:1:4xlognormal:3:0.8") == [
        ("1", "8"),
        ("4", "uniform:1:64"),
        ("uniform:1:4", "lognormal:3:0.8"),
    ]


@pytest.mark.parametrize("text", ["8", "1x", "x8", "0x8", "1x0", "1xuniform:9:2", "1xnormal:3:1"])
def test_shape_that_is_none_names_the_option(text: str) -> None:
    """So do shapes with a draw that is none."""
    with pytest.raises(UsageWrong, match=r"^--shape: expected "):
        shapes("--shape", text)


@pytest.mark.parametrize("text", ["yes", "heads:", "heads:a", "heads:0,"])
def test_weights_mode_that_is_none_is_refused(text: str) -> None:
    """The modes are named."""
    with pytest.raises(UsageWrong, match=r"^--weights: expected off, on or heads:0,3, got "):
        check_weights("--weights", text)


def test_objective_is_read() -> None:
    """Several bounds, each with its unit; errors have a bound even unsaid."""
    found = Objective.parse("--slo", "p50<5ms, p99.9<0.1s, errors<0.1%")

    assert found.bounds_ms == {"p50": Bound(5), "p99.9": Bound(100)}
    assert found.errors.limit == pytest.approx(0.001)
    assert Objective.parse("--slo", "p95<=20ms").bounds_ms == {"p95": Bound(20, reachable=True)}
    assert Objective.parse("--slo", "p99<20ms").errors == Bound(0.01, reachable=True)


@pytest.mark.fault("F7")
def test_bound_that_may_be_reached_is_kept_there() -> None:
    """`<=` differs from `<` in that alone."""
    calls = {"count": 99, "p95": 20.0}

    assert Objective.parse("--slo", "p95<=20ms").broken(calls, offered=99) is None
    assert Objective.parse("--slo", "p95<20ms").broken(calls, offered=99) == (
        "p95 20 ms, not < 20 ms"
    )
    assert Objective.parse("--slo", "p95<=20ms,errors<=1%").broken(calls, offered=100) is None
    assert Objective.parse("--slo", "p95<=20ms,errors<1%").broken(calls, offered=100) == (
        "errors 1.00%, not < 1.00%"
    )


@pytest.mark.fault("F7")
@pytest.mark.parametrize(
    ("figure", "calls"), [("p50", 20), ("p90", 100), ("p95", 200), ("p99", 1000), ("p99.9", 10_000)]
)
def test_percentile_takes_ten_calls_beyond_it(figure: str, calls: int) -> None:
    """Fewer are chance; a mean or a maximum takes one."""
    assert is_supported(figure, calls)
    assert not is_supported(figure, calls - 1)
    assert is_supported("max", 1)
    assert not is_supported("mean", 0)


@pytest.mark.parametrize(
    "text",
    ["", "p99", "p99>20ms", "p99<<1ms", "errors<0%", "p98<1ms", "p99<fast", "p99<0ms", "p99<="],
)
def test_objective_that_is_none_names_the_option(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(UsageWrong, match=r"^--slo: (expected|no share is) "):
        Objective.parse("--slo", text)


def test_objective_is_broken_by_latency_by_errors_and_by_silence() -> None:
    """Each is told in words; what is kept is told by nothing."""
    objective = Objective.parse("--slo", "p99<20ms")

    def of(p99: float | None, count: int) -> str | None:
        return objective.broken({"count": count, "p99": p99}, offered=100)

    assert of(19.9, 100) is None
    assert of(19.9, 99) is None
    assert of(20.0, 100) == "p99 20 ms, not < 20 ms"
    assert of(1.0, 98) == "errors 2.00%, not <= 1.00%"
    assert of(None, 0) == "errors 100.00%, not <= 1.00%"
