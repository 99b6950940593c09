"""The exporter's command line: its options, and which of them go together."""

import argparse
import os
import re
from pathlib import Path
from typing import Any

from service import __version__
from service.contract import NAME_PATTERN, is_valid_name

ALL = "all"
"""Of `--layer`: every layer of the checkpoint."""

_DESCRIPTION = """\
Export one attention layer to ONNX, prove it equal to PyTorch and publish it.
Weights come from a seed, a saved nn.MultiheadAttention state dict, a layer of a checkpoint
folder, or a function of your own.  `verify ARTIFACT` repeats every check on a published
artifact."""

_EPILOG = """\
examples:
  python -m export --name mha --embed-dim 768 --num-heads 12 --seed 0
  python -m export --name wide --embed-dim 2048 --num-heads 32 --kv-heads 8 --no-bias \\
      --rotary 10000 --causal
  python -m export --name mine --from-torch layer.safetensors --num-heads 8
  python -m export --name cross-0 --from-torch decoder.safetensors --num-heads 8 \\
      --prefix decoder.layers.0.multihead_attn --attention cross
  python -m export --name minilm-3 --from-hf CHECKPOINT_DIR --layer 3
  python -m export --name minilm --from-hf CHECKPOINT_DIR --layer all
  python -m export --name own --from-python package.module:function --check calls.safetensors
  python -m export verify artifacts/mha/1"""

_CHECK_HELP = (
    "inputs and expected outputs, by their names in the contract, that the layer must meet, too;"
    " may be given several times"
)


def parse_export(argv: list[str]) -> argparse.Namespace:
    """Return what to export; misuse ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m export",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headwise {__version__}")
    parser.add_argument("--name", required=True, help=f"the artifact's name: {NAME_PATTERN}")
    parser.add_argument(
        "--repository",
        type=Path,
        default=Path(os.environ.get("HEADWISE_REPOSITORY") or "artifacts"),
        help="directory of artifacts (default: HEADWISE_REPOSITORY, else artifacts)",
    )
    parser.add_argument("--precision", choices=["fp32"], default="fp32", help="default: fp32")
    parser.add_argument(
        "--if-missing", action="store_true", help="do nothing when the name is published already"
    )
    parser.add_argument(
        "--check", type=Path, action="append", default=[], metavar="FILE", help=_CHECK_HELP
    )
    _add_sources(parser)
    _add_shared(parser)
    args = parser.parse_args(argv)
    _check_combination(parser, args)
    return args


def _add_sources(parser: argparse.ArgumentParser) -> None:
    weights = parser.add_argument_group("weights from a seed")
    weights.add_argument("--embed-dim", type=int, metavar="E")
    weights.add_argument("--seed", type=int, default=None, help="default: 0")
    weights.add_argument(
        "--memory-dim", type=int, metavar="M", help="make it cross-attention over this width"
    )
    weights.add_argument("--no-bias", action="store_true", help="no biases anywhere")
    weights.add_argument(
        "--kv-heads",
        type=int,
        metavar="K",
        help="heads of keys and values, each for H/K query heads (default: H)",
    )
    weights.add_argument("--head-dim", type=int, metavar="D", help="width of a head (default: E/H)")
    weights.add_argument(
        "--rotary", type=float, metavar="BASE", help="rotary positions of this base, such as 10000"
    )
    weights.add_argument(
        "--max-positions", type=int, metavar="N", help="rows of the table of --positional learned"
    )
    saved = parser.add_argument_group("weights from a saved nn.MultiheadAttention")
    saved.add_argument(
        "--from-torch", type=Path, metavar="FILE", help="state dict, .pt or .safetensors"
    )
    saved.add_argument(
        "--prefix",
        metavar="NAME",
        help="the attention module, where FILE holds a larger one's: decoder.layers.0.self_attn",
    )
    saved.add_argument(
        "--add-zero-attn",
        action="store_true",
        help="the layer was made with add_zero_attn, which no weight shows",
    )
    saved.add_argument(
        "--positional-table",
        metavar="NAME",
        help="the tensor of FILE with the table of --positional learned: [rows, E]",
    )
    checkpoint = parser.add_argument_group("weights from a checkpoint folder")
    checkpoint.add_argument(
        "--from-hf",
        type=Path,
        metavar="DIR",
        help="directory of config.json and model.safetensors, or shards with their index",
    )
    checkpoint.add_argument(
        "--layer",
        type=_layer,
        metavar="N",
        help="which layer, from 0; all = each one as an artifact NAME-N",
    )
    checkpoint.add_argument(
        "--part",
        choices=["encoder", "decoder", "text", "vision"],
        help="of a checkpoint that holds several models",
    )
    python = parser.add_argument_group("weights from a function of your own")
    python.add_argument(
        "--from-python",
        type=_function,
        metavar="MODULE:FUNCTION",
        help="what it returns, a LayerSpec or a pair of it and the nn.Module, is published;"
        " the current directory is searched",
    )


def _add_shared(parser: argparse.ArgumentParser) -> None:
    layer = parser.add_argument_group("what weights do not show")
    layer.add_argument(
        "--num-heads", type=int, metavar="H", help="needed with a seed and with --from-torch"
    )
    layer.add_argument(
        "--attention",
        choices=["self", "cross"],
        help="whether keys and values come from the queries' own sequence or from a memory. For"
        " --from-hf: where a layer has both. For --from-torch: packed weights (in_proj_weight) do"
        " not say (default: self for packed weights, cross for separate ones; needed where the"
        " name is that of cross-attention)",
    )
    layer.add_argument(
        "--causal",
        action="store_true",
        help="calls are causal unless they say otherwise (a seed, --from-torch)",
    )
    layer.add_argument(
        "--window",
        type=int,
        metavar="W",
        help="a query attends to keys less than W away (a seed, --from-torch)",
    )
    layer.add_argument(
        "--positional",
        choices=["sinusoidal", "learned"],
        help="add positions to the embeddings, without which the layer does not know their order"
        " (a seed, --from-torch)",
    )


def _layer(text: str) -> int | str:
    if text == ALL:
        return ALL
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number from 0, or all, got {text!r}"
        ) from None


def _function(text: str) -> str:
    if re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", text):
        return text
    module, colon, function = text.partition(":")
    problem = ""
    if not colon or not function:
        problem = ", which names no function"
    elif not module:
        problem = ", which names no module"
    elif module.startswith("."):
        problem = "; name the module from the current directory on, without dots before it"
    raise argparse.ArgumentTypeError(f"expected package.module:function, got {text!r}{problem}")


_SEED, _TORCH, _HF, _PYTHON = (
    "weights from a seed",
    "--from-torch FILE",
    "--from-hf DIR",
    "--from-python MODULE:FUNCTION",
)

_OPTIONS = {
    _SEED: (
        *("--embed-dim", "--seed", "--memory-dim", "--no-bias"),
        *("--kv-heads", "--head-dim", "--rotary", "--max-positions"),
    ),
    _TORCH: ("--from-torch", "--prefix", "--add-zero-attn", "--positional-table"),
    _HF: ("--from-hf", "--layer", "--part"),
    _PYTHON: ("--from-python",),
}
"""Each source of weights with the options that are for it alone."""

_SHARED = {
    "--num-heads": (_SEED, _TORCH),
    "--attention": (_TORCH, _HF),
    "--causal": (_SEED, _TORCH),
    "--window": (_SEED, _TORCH),
    "--positional": (_SEED, _TORCH),
}
"""Each other option with the sources of weights that it is for."""

_INSTEAD = {
    ("--num-heads", _HF): "the checkpoint's own config.json says it",
    ("--attention", _SEED): "a seed's layer is cross-attention if it has --memory-dim M",
    ("--causal", _HF): "a layer is causal if its family is",
}
"""What is so where a shared option is for other sources."""

_COUNTS = ("--kv-heads", "--head-dim", "--window", "--max-positions")
"""What is at least 1 where it is given."""

_ORDER = ("--causal", "--window", "--positional", "--rotary")
"""What counts the places of queries and keys in one sequence."""

_NEEDED = {
    _SEED: ("--embed-dim", "--num-heads"),
    _TORCH: ("--from-torch", "--num-heads"),
    _HF: ("--from-hf", "--layer"),
    _PYTHON: ("--from-python",),
}


def _check_combination(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not is_valid_name(args.name):
        parser.error(f"--name: expected {NAME_PATTERN}, not ending in -weights, got {args.name!r}")
    if args.from_torch is not None and args.memory_dim is not None:
        parser.error(
            "--memory-dim is for weights from a seed: a saved layer has its own; where keys and"
            " values come from a memory as wide as the queries, say --attention cross"
        )
    kind = _kind(parser, args)
    for flag, kinds in _SHARED.items():
        if kind not in kinds and _is_given(args, flag):
            parser.error(
                f"{flag}: {_INSTEAD.get((flag, kind), f'is for {kinds[0]} or {kinds[1]}')}"
            )
    for flag in _COUNTS:
        value = _value(args, flag)
        if value is not None and value < 1:
            parser.error(f"{flag}: expected a positive integer, got {value}")
    if args.memory_dim is not None:
        _refuse_order(parser, args)
    if args.layer == ALL and args.check:
        parser.error("--check: a file is for one layer; name it with --layer N")
    _check_positional(parser, args, kind)


def _kind(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return the one source of weights whose options are given, once it has all that it needs."""
    given = {
        kind: [flag for flag in flags if _is_given(args, flag)] for kind, flags in _OPTIONS.items()
    }
    used = [kind for kind, flags in given.items() if flags]
    if len(used) != 1:
        got = " and ".join(f"{', '.join(given[kind])} (for {kind})" for kind in used)
        parser.error(
            "expected options of one source of weights: --embed-dim E for a seed, --from-torch"
            f" FILE, --from-hf DIR, or --from-python MODULE:FUNCTION; got {got or 'none of them'}"
        )
    [kind] = used
    for flag in _NEEDED[kind]:
        if not _is_given(args, flag):
            parser.error(f"{', '.join(given[kind])}: {flag} is needed with {kind}")
    return kind


def _check_positional(parser: argparse.ArgumentParser, args: argparse.Namespace, kind: str) -> None:
    table = {_SEED: "--max-positions", _TORCH: "--positional-table"}.get(kind)
    if table is None:
        return
    is_learned, has_table = args.positional == "learned", _is_given(args, table)
    if is_learned and not has_table:
        parser.error(f"--positional learned: {table} is needed with {kind}")
    if has_table and not is_learned:
        parser.error(f"{table}: is for --positional learned")


def _refuse_order(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with the options that a seed's cross-attention cannot have, if there are any."""
    given = [flag for flag in _ORDER if _is_given(args, flag)]
    if given:
        parser.error(
            f"{', '.join(given)}: expected self-attention, got --memory-dim: queries and keys of"
            " cross-attention do not stand in one order"
        )


def _value(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def _is_given(args: argparse.Namespace, flag: str) -> bool:
    value = _value(args, flag)
    return value is not None and value is not False  # 0 is a value


def parse_verify(argv: list[str]) -> argparse.Namespace:
    """Return what to verify; misuse ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m export verify",
        description="Repeat every check on a published artifact: checksums, signature, parity.",
    )
    parser.add_argument("artifact", type=Path, help="its directory: REPOSITORY/NAME/VERSION")
    parser.add_argument(
        "--check", type=Path, action="append", default=[], metavar="FILE", help=_CHECK_HELP
    )
    return parser.parse_args(argv)
