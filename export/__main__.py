"""The command that exports, proves and publishes a layer."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from service import __version__
from service.contract import (
    FP32_TOLERANCE,
    NAME_PATTERN,
    LayerConfig,
    ParityRow,
    is_valid_name,
)
from service.errors import HeadwiseError

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

_out = Console()
_err = Console(stderr=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0 published or verified, 1 refused, 2 misused."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["verify"]:
        return _report_failure(lambda: _verify(_parse_verify(argv[1:])))
    return _report_failure(lambda: _export(_parse_export(argv)))


def _parse_export(argv: list[str]) -> argparse.Namespace:
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
    seeded = {
        "--embed-dim": args.embed_dim,
        "--seed": args.seed,
        "--memory-dim": args.memory_dim,
        "--no-bias": args.no_bias or None,
    }
    saved = {
        "--from-torch": args.from_torch,
        "--prefix": args.prefix,
        "--attention": args.attention,
    }
    if args.from_torch is not None and args.memory_dim is not None:
        parser.error(
            "--memory-dim is for weights from a seed: a saved layer has its own; where keys and"
            " values come from a memory as wide as the queries, say --attention cross"
        )
    kinds = {
        "a seed": (["--embed-dim", "--num-heads"], seeded),
        "--from-torch": (["--num-heads"], saved),
        "--from-hf": (["--layer"], {"--from-hf": args.from_hf, "--layer": args.layer}),
    }
    used = [
        kind for kind, (_, flags) in kinds.items() if any(v is not None for v in flags.values())
    ]
    if len(used) != 1:
        parser.error(f"expected one source of weights, got {', '.join(used) or 'none'}")
    given = {**seeded, "--num-heads": args.num_heads, "--layer": args.layer}
    for flag in kinds[used[0]][0]:
        if given[flag] is None:
            parser.error(f"{flag} is needed with weights from {used[0]}")
    if used[0] == "--from-torch" and args.from_torch is None:
        parser.error("--prefix and --attention need --from-torch FILE")
    if used[0] == "--from-hf" and (args.from_hf is None or args.num_heads is not None):
        parser.error(
            "--layer needs --from-hf DIR"
            if args.from_hf is None
            else "--num-heads: the checkpoint's own config.json says it"
        )


def _parse_verify(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m export verify",
        description="Repeat every check on a published artifact: checksums, signature, parity.",
    )
    parser.add_argument("artifact", type=Path, help="its directory: REPOSITORY/NAME/VERSION")
    return parser.parse_args(argv)


def _export(args: argparse.Namespace) -> int:
    from service.inference.artifact import published_versions

    if args.if_missing and published_versions(args.repository, args.name):
        _out.print(f"{args.name} is published already; nothing to do")
        return 0
    with _err.status("loading PyTorch"):  # seconds: only those who export should wait
        from export import gate, publish, sources
    with _err.status("reading the weights"):
        if args.from_torch is not None:
            source = sources.from_torch(
                args.from_torch,
                args.num_heads,
                prefix=args.prefix or "",
                attention=args.attention,
            )
        elif args.from_hf is not None:
            source = sources.from_hf(args.from_hf, args.layer)
        else:
            source = sources.random_layer(
                args.embed_dim,
                args.num_heads,
                seed=args.seed or 0,
                memory_dim=args.memory_dim,
                bias=not args.no_bias,
            )
    with _progress(f"proving {args.name}", len(gate.grid(source))) as advance:
        artifact = publish.publish(
            source,
            args.repository,
            args.name,
            threads=_threads(),
            on_cell=lambda cell: advance(),
            on_warning=lambda text: _err.print(
                f"PyTorch's exporter: {text}", style="yellow", markup=False, soft_wrap=True
            ),
        )
    _print_parity(artifact.manifest.parity)
    size_mb = sum(entry.size_bytes for entry in artifact.manifest.files.values()) / 1e6
    _out.print(f"published {artifact.path} ({size_mb:.1f} MB)", soft_wrap=True, markup=False)
    for line in _assumptions(args, artifact.manifest.layer):
        _out.print(line, soft_wrap=True, markup=False, highlight=False)
    return 0


def _assumptions(args: argparse.Namespace, layer: LayerConfig) -> list[str]:
    """Say what no weight shows, and where it was taken from; nothing for a seed's layer."""
    if args.from_torch is None and args.from_hf is None:
        return []
    heads = "--num-heads" if args.from_hf is None else "num_attention_heads in config.json"
    if args.from_hf is not None:
        source = "the layout of the checkpoint"
    elif args.attention is not None:
        source = "--attention"
    else:
        source = "separate weights" if layer.is_cross else "packed weights, no --attention cross"
    order = "" if layer.is_cross else "; not causal unless a call says so"
    return [
        "The parity above cannot show these, which were assumed:",
        f"  {layer.num_heads} heads of width {layer.head_dim} ({heads})",
        f"  {'cross' if layer.is_cross else 'self'}-attention ({source}){order}",
        "  no add_zero_attn, and no computation of the model's own code around these weights",
    ]


def _verify(args: argparse.Namespace) -> int:
    with _err.status("loading PyTorch"):
        from export import gate, publish
    total = len(gate.LENGTHS) * len(gate.BATCHES) * len(gate.MASKS)
    with _progress(f"verifying {args.artifact}", total) as advance:
        report = publish.verify(args.artifact, threads=_threads(), on_cell=lambda cell: advance())
    _print_parity(report.rows)
    _out.print(f"verified {args.artifact}", soft_wrap=True, markup=False)
    return 0


def _report_failure(command: Callable[[], int]) -> int:
    """Turn what a user can cause into one line and exit status 1."""
    try:
        with _ended_like_ctrl_c(signal.SIGTERM, signal.SIGHUP):
            return command()
    except HeadwiseError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    except KeyboardInterrupt:
        reason = "interrupted; nothing was published"
    except Exception as error:
        from export.gate import GateFailed
        from export.publish import PublishRefused
        from export.sources import SourceInvalid

        if not isinstance(error, GateFailed | PublishRefused | SourceInvalid):
            raise
        reason = str(error)
    _err.print(f"error: {reason}", soft_wrap=True, markup=False, highlight=False)
    return 1


@contextmanager
def _ended_like_ctrl_c(*signals: signal.Signals) -> Iterator[None]:
    """Let these signals end the command as Ctrl-C does, so that nothing half-made stays behind."""
    # What is ignored stays so: nohup means it.
    before = {number: signal.getsignal(number) for number in signals}
    caught = [number for number in signals if before[number] is not signal.SIG_IGN]
    try:
        for number in caught:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])


def _threads() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def _progress(task: str, total: int) -> Iterator[Callable[[], None]]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=_err) as progress:
        bar = progress.add_task(task, total=total)
        yield lambda: progress.advance(bar)
        progress.update(bar, completed=total)


def _print_parity(rows: tuple[ParityRow, ...]) -> None:
    table = Table(title=f"largest differences (allowed {FP32_TOLERANCE:g})")
    for column in ("against", "cells", "output, relative", "weights, absolute"):
        table.add_column(column, justify="left" if column == "against" else "right")
    for reference in dict.fromkeys(row.reference for row in rows):
        own = [row for row in rows if row.reference == reference]
        table.add_row(
            reference,
            str(len(own)),
            f"{max(row.output_error for row in own):.2e}",
            f"{max(row.weights_error for row in own):.2e}",
        )
    _out.print(table)


if __name__ == "__main__":
    sys.exit(main())
