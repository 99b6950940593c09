"""Which options go together: each source of weights has its own, and misuse names the flags."""

from pathlib import Path

import pytest

from export.options import parse_export, parse_verify

SEED = ["--embed-dim", "8", "--num-heads", "2"]
TORCH = ["--from-torch", "layer.pt", "--num-heads", "2"]
HF = ["--from-hf", "dir", "--layer", "0"]
PYTHON = ["--from-python", "mine:layer"]

PAIR = "is for weights from a seed or --from-torch FILE"

MISUSED: dict[str, tuple[list[str], str]] = {
    "causal of a function": ([*PYTHON, "--causal"], f"--causal: {PAIR}"),
    "causal of a checkpoint": ([*HF, "--causal"], "--causal: a layer is causal if its family is"),
    "window of a checkpoint": ([*HF, "--window", "3"], f"--window: {PAIR}"),
    "positions of a checkpoint": ([*HF, "--positional", "sinusoidal"], f"--positional: {PAIR}"),
    "heads of a function": ([*PYTHON, "--num-heads", "2"], f"--num-heads: {PAIR}"),
    "attention of a seed": (
        [*SEED, "--attention", "cross"],
        "--attention: a seed's layer is cross-attention if it has --memory-dim M",
    ),
    "attention of a function": (
        [*PYTHON, "--attention", "cross"],
        "--attention: is for --from-torch FILE or --from-hf DIR",
    ),
    "a table of a seed": (
        [*SEED, "--positional", "learned"],
        "--positional learned: --max-positions is needed with weights from a seed",
    ),
    "a table of a file": (
        [*TORCH, "--positional", "learned"],
        "--positional learned: --positional-table is needed with --from-torch FILE",
    ),
    "a size without a table": (
        [*SEED, "--positional", "sinusoidal", "--max-positions", "9"],
        "--max-positions: is for --positional learned",
    ),
    "a table without positions": (
        [*TORCH, "--positional-table", "pos"],
        "--positional-table: is for --positional learned",
    ),
    "one file for all layers": (
        ["--from-hf", "dir", "--layer", "all", "--check", "calls.safetensors"],
        "--check: a file is for one layer; name it with --layer N",
    ),
    "no number": (
        ["--from-hf", "dir", "--layer", "each"],
        "argument --layer: expected a number from 0, or all, got 'each'",
    ),
    "no function": (
        ["--from-python", "mine.py"],
        "argument --from-python: expected package.module:function, got 'mine.py', which names no"
        " function",
    ),
    "no function after the colon": (
        ["--from-python", "mine:"],
        "argument --from-python: expected package.module:function, got 'mine:', which names no"
        " function",
    ),
    "no module": (
        ["--from-python", ":layer"],
        "argument --from-python: expected package.module:function, got ':layer', which names no"
        " module",
    ),
    "a relative module": (
        ["--from-python", "..mine:layer"],
        "argument --from-python: expected package.module:function, got '..mine:layer'; name the"
        " module from the current directory on, without dots before it",
    ),
    "no key heads": (
        [*SEED, "--kv-heads", "0"],
        "--kv-heads: expected a positive integer, got 0",
    ),
    "heads of no width": (
        [*SEED, "--head-dim", "0"],
        "--head-dim: expected a positive integer, got 0",
    ),
    "an empty window": (
        [*TORCH, "--window", "0"],
        "--window: expected a positive integer, got 0",
    ),
    "an empty table": (
        [*SEED, "--positional", "learned", "--max-positions", "0"],
        "--max-positions: expected a positive integer, got 0",
    ),
    "an order of a memory": (
        [*SEED, "--memory-dim", "6", "--causal", "--rotary", "10000"],
        "--causal, --rotary: expected self-attention, got --memory-dim: queries and keys of"
        " cross-attention do not stand in one order",
    ),
    "a path": (
        ["--from-python", "a/mine:layer"],
        "argument --from-python: expected package.module:function, got 'a/mine:layer'",
    ),
    "key heads of a file": (
        [*TORCH, "--kv-heads", "1"],
        "expected options of one source of weights: --embed-dim E for a seed, --from-torch FILE,"
        " --from-hf DIR, or --from-python MODULE:FUNCTION; got --kv-heads (for weights from a seed)"
        " and --from-torch (for --from-torch FILE)",
    ),
    "zero keys of a checkpoint": (
        [*HF, "--add-zero-attn"],
        "expected options of one source of weights: --embed-dim E for a seed, --from-torch FILE,"
        " --from-hf DIR, or --from-python MODULE:FUNCTION; got --add-zero-attn (for --from-torch"
        " FILE) and --from-hf, --layer (for --from-hf DIR)",
    ),
}


@pytest.mark.parametrize(("argv", "message"), MISUSED.values(), ids=MISUSED)
def test_parse_export_options_that_do_not_go_together(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line names the flag, and what it is for."""
    with pytest.raises(SystemExit) as ended:
        parse_export(["--name", "x", *argv])

    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f": error: {message}\n")


def test_parse_export_all_layers() -> None:
    """A number is a number, and all is all."""
    numbered = parse_export(["--name", "x", "--from-hf", "dir", "--layer", "11"])
    every = parse_export(["--name", "x", "--from-hf", "dir", "--layer", "all", "--part", "text"])

    assert (numbered.layer, numbered.part) == (11, None)
    assert (every.layer, every.part) == ("all", "text")


@pytest.mark.parametrize("source", [SEED, TORCH, HF, PYTHON], ids=" ".join)
def test_parse_export_checks_go_with_every_source(source: list[str]) -> None:
    """Several files may be given, and none by default."""
    checks = ["--check", "a.safetensors", "--check", "b.safetensors"]

    assert parse_export(["--name", "x", *source]).check == []
    given = parse_export(["--name", "x", *source, *checks]).check
    assert given == [Path("a.safetensors"), Path("b.safetensors")]


def test_parse_verify_takes_checks() -> None:
    """A published artifact is held against new expectations as a new one is."""
    args = parse_verify(["artifacts/x/1", "--check", "a.safetensors"])

    assert args.check == [Path("a.safetensors")]
