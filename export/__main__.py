"""The command that exports, proves and publishes a layer."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.filesize import decimal

from export.console import err, out, print_parity, progress, proof
from export.errors import ExportRefused, SourceInvalid
from export.families import read_config
from export.options import parse_export, parse_verify
from service.contract import FP32_TOLERANCE, LayerConfig
from service.errors import HeadwiseError


def main(argv: list[str] | None = None) -> int:
    """
    Run the command; return its exit status.

    0 published or verified, 1 refused, 2 misused, 128 + the number of the signal that ended it.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["verify"]:
        return _report_failure(lambda: _verify(parse_verify(argv[1:])))
    return _report_failure(lambda: _export(parse_export(argv)))


def _check_files(args: argparse.Namespace) -> None:
    """Refuse what is not there, or of a family that is not read, before PyTorch is loaded."""
    if args.from_hf is not None:
        read_config(args.from_hf)
    file = args.from_torch
    if file is not None and not file.exists():
        raise SourceInvalid(f"{file}: no such file")
    if file is not None and file.is_dir():
        raise SourceInvalid(
            f"{file}: expected a file with a state dict, got a directory; a checkpoint directory"
            " is read by --from-hf DIR --layer N"
        )


def _export(args: argparse.Namespace) -> int:
    from service.inference.artifact import published_versions

    if args.if_missing and published_versions(args.repository, args.name):
        out.print(f"{args.name} is published already; nothing to do")
        return 0
    _check_files(args)
    with err.status("loading PyTorch"):  # seconds: only those who export should wait
        from export import publish, sources
    with err.status("reading the weights"):
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
    with progress(f"proving {args.name}") as advance:
        artifact = publish.publish(
            source,
            args.repository,
            args.name,
            threads=_threads(),
            on_cell=advance,
            on_warning=lambda text: err.print(
                f"PyTorch's exporter: {text}", style="yellow", markup=False, soft_wrap=True
            ),
        )
    print_parity(artifact.manifest.parity)
    size = decimal(sum(entry.size_bytes for entry in artifact.manifest.files.values()))
    out.print(f"published {artifact.path} ({size})", soft_wrap=True, markup=False)
    if (scale := artifact.manifest.input_scale) < 1:
        out.print(
            f"proven for inputs scaled by {scale:.3g}: larger ones have logits beyond what FP32"
            " and a softmax tell apart",
            soft_wrap=True,
            highlight=False,
        )
    for line in _assumptions(args, artifact.manifest.layer):
        out.print(line, soft_wrap=True, markup=False, highlight=False)
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
    with err.status("loading PyTorch"):
        from export import publish
    with progress(f"verifying {args.artifact}") as advance:
        found = publish.verify(args.artifact, threads=_threads(), on_cell=advance)
    print_parity(found.rows)
    out.print(f"verified {args.artifact}", soft_wrap=True, markup=False)
    before = found.manifest
    worst = max(before.worst_output_error, before.worst_weights_error)
    for line in (
        f"  proven on {proof(before.proven_on, before.versions, worst)}",
        f"  and here  {proof(found.proven_on, found.versions, found.worst_error)},"
        f" {FP32_TOLERANCE / max(found.worst_error, 1e-12):.0f} times below the allowed"
        f" {FP32_TOLERANCE:g}",
    ):
        out.print(line, soft_wrap=True, markup=False, highlight=False)
    return 0


def _report_failure(command: Callable[[], int]) -> int:
    """Turn what a user can cause into one line and an exit status: 1, or 128 + the signal."""
    try:
        with _raised(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            return command()
    except (HeadwiseError, ExportRefused) as error:
        reason, status = str(error), 1
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        reason, status = f"{where}{error.strerror or error}", 1
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, _Ended) else signal.SIGINT
        reason, status = "interrupted; nothing was published", 128 + number
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        reason, status = f"not enough memory; {_MEMORY_CURE}", 1
    err.print(f"error: {reason}", soft_wrap=True, markup=False, highlight=False)
    return status


_MEMORY_CURE = (
    "an export takes about five times the layer's weights and 1.5 GB; end what else runs here, or"
    " export on a larger machine: artifacts may be copied"
)


class _Ended(KeyboardInterrupt):
    """A signal that ends the command as Ctrl-C does, so that nothing half-made stays behind."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _raised(*signals: signal.Signals) -> Iterator[None]:
    """Raise these signals as `_Ended` meanwhile."""

    def end(number: int, frame: object) -> None:
        raise _Ended(number)

    # What is ignored stays so: nohup means it.
    before = {number: signal.getsignal(number) for number in signals}
    caught = [number for number in signals if before[number] is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])


def _threads() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(main())
