"""The exporter's command line: its options, and which of them go together."""

import argparse
import os
from pathlib import Path

from service import __version__
from service.contract import NAME_PATTERN, is_valid_name

_DESCRIPTION = """\
Export a multi-head-attention layer to ONNX, prove it equal to PyTorch and publish it.
Weights come from a seed, a saved nn.MultiheadAttention state dict, or a layer of a
BERT-family checkpoint.  `verify ARTIFACT` repeats every check on a published artifact."""

_EPILOG = """\
examples:
  python -m export --name mha --embed-dim 768 --num-heads 12 --seed 0
  python -m export --name mine --from-torch layer.safetensors --num-heads 8
  python -m export --name cross-0 --from-torch decoder.safetensors --num-heads 8 \\
      --prefix decoder.layers.0.multihead_attn --attention cross
  python -m export --name minilm-3 --from-hf CHECKPOINT_DIR --layer 3
  python -m export verify artifacts/mha/1"""


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
    weights = parser.add_argument_group("weights from a seed")
    weights.add_argument("--embed-dim", type=int, metavar="E")
    weights.add_argument("--seed", type=int, default=None, help="default: 0")
    weights.add_argument(
        "--memory-dim", type=int, metavar="M", help="make it cross-attention over this width"
    )
    weights.add_argument("--no-bias", action="store_true", help="no biases anywhere")
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
        "--attention",
        choices=["self", "cross"],
        help="whether keys and values come from the queries' own sequence or from a memory; packed"
        " weights (in_proj_weight) do not say (default: self for packed weights, cross for"
        " separate ones; needed where NAME is that of cross-attention)",
    )
    parser.add_argument(
        "--num-heads",
        type=int,
        metavar="H",
        help="needed with a seed and with --from-torch: weights do not say it",
    )
    checkpoint = parser.add_argument_group("weights from a BERT-family checkpoint")
    checkpoint.add_argument(
        "--from-hf",
        type=Path,
        metavar="DIR",
        help="directory of config.json and model.safetensors, or shards with their index",
    )
    checkpoint.add_argument("--layer", type=int, metavar="N", help="which layer, from 0")
    args = parser.parse_args(argv)
    _check_combination(parser, args)
    return args


def _check_combination(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not is_valid_name(args.name):
        parser.error(f"--name: expected {NAME_PATTERN}, not ending in -weights, got {args.name!r}")
    if args.from_torch is not None and args.memory_dim is not None:
        parser.error(
            "--memory-dim is for weights from a seed: a saved layer has its own; where keys and"
            " values come from a memory as wide as the queries, say --attention cross"
        )
    given = {
        kind: [flag for flag in flags if _is_given(args, flag)] for kind, flags in _OPTIONS.items()
    }
    used = [kind for kind, flags in given.items() if flags]
    if len(used) != 1:
        got = " and ".join(f"{', '.join(given[kind])} (for {kind})" for kind in used)
        parser.error(
            "expected options of one source of weights: --embed-dim E for a seed, --from-torch"
            f" FILE, or --from-hf DIR; got {got or 'none of them'}"
        )
    [kind] = used
    for flag in _NEEDED[kind]:
        if not _is_given(args, flag):
            parser.error(f"{', '.join(given[kind])}: {flag} is needed with {kind}")
    if kind == "--from-hf DIR" and args.num_heads is not None:
        parser.error("--num-heads: the checkpoint's own config.json says it")


_OPTIONS = {
    "weights from a seed": ("--embed-dim", "--seed", "--memory-dim", "--no-bias"),
    "--from-torch FILE": ("--from-torch", "--prefix", "--attention"),
    "--from-hf DIR": ("--from-hf", "--layer"),
}
"""Each source of weights with the options that are its own."""

_NEEDED = {
    "weights from a seed": ("--embed-dim", "--num-heads"),
    "--from-torch FILE": ("--from-torch", "--num-heads"),
    "--from-hf DIR": ("--from-hf", "--layer"),
}


def _is_given(args: argparse.Namespace, flag: str) -> bool:
    value = getattr(args, flag.removeprefix("--").replace("-", "_"))
    return value is not None and value is not False  # 0 is a value


def parse_verify(argv: list[str]) -> argparse.Namespace:
    """Return what to verify; misuse ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m export verify",
        description="Repeat every check on a published artifact: checksums, signature, parity.",
    )
    parser.add_argument("artifact", type=Path, help="its directory: REPOSITORY/NAME/VERSION")
    return parser.parse_args(argv)
