"""The command that exports, proves and publishes a layer."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rich.filesize import decimal

from export.assumptions import assumptions, origin_lines
from export.console import err, out, print_parity, progress, proof
from export.errors import ExportRefused, SourceInvalid
from export.families.config import read_config
from export.options import ALL, parse_export, parse_verify
from service.contract import FP32_TOLERANCE, NAME_PATTERN, is_valid_name
from service.errors import HeadwiseError

if TYPE_CHECKING:
    from export.sources import Source


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
    for needed in (file, *args.check):
        if needed is not None and not needed.exists():
            raise SourceInvalid(f"{needed}: no such file")
    if file is not None and file.is_dir():
        raise SourceInvalid(
            f"{file}: expected a file with a state dict, got a directory; a checkpoint directory"
            " is read by --from-hf DIR --layer N"
        )


def _export(args: argparse.Namespace) -> int:
    """Publish what the options name; `--layer all` in turn, until one fails."""
    if args.layer != ALL and _is_published(args, args.name):
        return 0
    _check_files(args)
    with err.status("loading PyTorch"):  # seconds: only those who export should wait
        from export import chosen
    if args.layer != ALL:
        _publish(args, args.name, partial(chosen.source_of, args))
        return 0
    layers = chosen.layers_of(args)
    published: list[str] = []
    for layer in range(layers.count):
        name = _name_of(args, layer)
        if _is_published(args, name):
            continue
        try:
            _publish(args, name, partial(layers.source, layer))
        except BaseException as error:  # an interruption, too
            error.add_note(f"at layer {layer}; {_listed(published)}")
            raise
        published.append(name)
    out.print(_listed(published), soft_wrap=True, markup=False, highlight=False)
    return 0


def _name_of(args: argparse.Namespace, layer: int) -> str:
    name = f"{args.name}-{layer}"
    if not is_valid_name(name):
        raise ExportRefused(f"--name: {name}: expected {NAME_PATTERN}; say a shorter one")
    return name


def _listed(published: list[str]) -> str:
    return f"published: {', '.join(published)}" if published else "nothing was published"


def _is_published(args: argparse.Namespace, name: str) -> bool:
    """Say whether `--if-missing` spares this name."""
    from service.inference.artifact import published_versions

    if not args.if_missing or not published_versions(args.repository, name):
        return False
    out.print(f"{name} is published already; nothing to do")
    return True


def _publish(args: argparse.Namespace, name: str, read: "Callable[[], Source]") -> None:
    """Publish one layer, and say of what it was made, how near it came and what was assumed."""
    from export import publish

    with err.status("reading the weights"):
        read_once = [read()]
    for line in origin_lines(read_once[0].origin, read_once[0].tensors):
        out.print(line, soft_wrap=True, markup=False, highlight=False)
    with progress(f"proving {name}") as advance:
        artifact = publish.publish(
            read_once.pop(),  # not held here, so that `publish` can let go of the weights
            args.repository,
            name,
            threads=_threads(),
            checks=args.check,
            on_cell=advance,
        )
    print_parity(artifact.manifest.parity)
    if artifact.manifest.proof == "reduced":
        out.print(
            "proof: reduced, since the weights exceed 1 GB: fewer and shorter calls were tried"
            " (docs/exporting.md, What a proof takes)",
            soft_wrap=True,
            highlight=False,
        )
    size = decimal(sum(entry.size_bytes for entry in artifact.manifest.files.values()))
    out.print(f"published {artifact.path} ({size})", soft_wrap=True, markup=False)
    if (scale := artifact.manifest.input_scale) < 1:
        out.print(
            f"proven for inputs scaled by {scale:.3g}: larger ones have logits beyond what FP32"
            " and a softmax tell apart",
            soft_wrap=True,
            highlight=False,
        )
    for line in assumptions(args, artifact.manifest):
        out.print(line, soft_wrap=True, markup=False, highlight=False)


def _verify(args: argparse.Namespace) -> int:
    with err.status("loading PyTorch"):
        from export import publish
    with progress(f"verifying {args.artifact}") as advance:
        found = publish.verify(
            args.artifact, threads=_threads(), checks=args.check, on_cell=advance
        )
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
    repeated = {row.reference for row in found.rows}
    missing = {row.reference for row in before.parity} - repeated
    if missing:
        out.print(
            f"  not repeated: {', '.join(sorted(missing))}; the artifact holds neither a module nor"
            " files of checks: export again, or give --check FILE",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    return 0


def _report_failure(command: Callable[[], int]) -> int:
    """Turn what a user can cause into one line and an exit status: 1, or 128 + the signal."""
    try:
        with _raised(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            return command()
    except (Exception, KeyboardInterrupt) as error:
        reason, status = _reason(error), 1
        if reason is None:
            raise
        notes = list(getattr(error, "__notes__", []))
        if isinstance(error, KeyboardInterrupt):
            number = error.number if isinstance(error, _Ended) else signal.SIGINT
            status, notes = 128 + number, notes or ["nothing was published"]
    line = "; ".join((reason, *notes))
    err.print(f"error: {line}", soft_wrap=True, markup=False, highlight=False)
    return status


def _reason(error: BaseException) -> str | None:
    """Return what a user can mend or has done; None for a mistake in this program."""
    if isinstance(error, (HeadwiseError, ExportRefused)):
        return str(error)
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror or error}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    is_torchs = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    if isinstance(error, MemoryError) or is_torchs:
        return f"not enough memory; {_MEMORY_CURE}"
    return None


_MEMORY_CURE = (
    "an export takes about four times the layer's weights and 1.5 GB; end what else runs here, or"
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
