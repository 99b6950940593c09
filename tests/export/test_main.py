"""The command: what it publishes, what it says, and how it ends."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

from export.__main__ import main
from export.grid import grid
from export.sources import random_layer
from service import __version__
from service.inference.artifact import read_artifact
from service.layer_config import LayerConfig
from tests.support.layers import Layers
from tests.support.server import ROOT, until

TINY = ["--embed-dim", "4", "--num-heads", "1"]

SEED = 4
"""Any but 0, which is the default."""

ONE_SOURCE = (
    "expected options of one source of weights: --embed-dim E for a seed, --from-torch FILE,"
    " --from-hf DIR, or --from-python MODULE:FUNCTION; got "
)

BAD_NAME = "--name: expected [a-z0-9][a-z0-9._-]{0,62}, not ending in -weights, got "

END_LIMIT_S = 600
"""A hang is a failure; loading PyTorch on a busy machine takes minutes."""


def _run(*argv: object) -> int:
    """Return the exit status of the command in this process."""
    try:
        return main([str(word) for word in argv])
    except SystemExit as end:
        return int(end.code or 0)


def _take_every_signal() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _start(*argv: object, **environment: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "export", *map(str, argv)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background ignores Ctrl-C or a hang-up; its children inherit that.
        preexec_fn=_take_every_signal,
    )


def test_main_publishes_from_a_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shortest export: a name, a shape; the answer is a table and where the artifact lies."""
    status = _run("--name", "mha", *TINY, "--repository", tmp_path)

    out, err = capsys.readouterr()
    artifact = read_artifact(tmp_path / "mha" / "1")
    assert status == 0
    assert artifact.manifest.source == {"kind": "random", "seed": 0}
    assert (artifact.manifest.layer.embed_dim, artifact.manifest.layer.num_heads) == (4, 1)
    assert re.search(rf"published {tmp_path}/mha/1 \(\d\.\d kB\)\n", out)
    assert "largest differences (allowed 1e-05)" in out
    assert _table(out) == _cells(artifact.manifest.layer)
    assert "assumed" not in out  # a seed's layer is what was asked for
    assert "proving mha" in err
    assert "100%" in err


def _table(out: str) -> dict[str, int]:
    """Return from the summary how many cells were measured against each reference."""
    rows = re.findall(r"(\w+) +│ +(\d+) │ +\d\.\d\de[-+]\d\d │ +\d\.\d\de[-+]\d\d", out)
    return {name: int(cells) for name, cells in rows}


def _cells(layer: LayerConfig) -> dict[str, int]:
    """Return how many cells of the grid each reference has an answer for."""
    cells = grid(layer)
    torchs = [cell for cell in cells if cell.masks not in ("empty row", "head mask", "all")]
    batches = [cell for cell in cells if cell.batch > 1]
    counted = {"formula": cells, "layer": cells, "torch": torchs, "alone": batches}
    return {name: len(found) for name, found in counted.items()}


def test_main_publishes_cross_attention_without_bias_from_a_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every flag of a seeded layer reaches it, in a repository whose name is no markup."""
    repository = tmp_path / "layers [old]" / "[/v2]"

    status = _run(
        *("--name", "cross", "--embed-dim", 4, "--num-heads", 2, "--seed", SEED),
        *("--memory-dim", 3, "--no-bias", "--precision", "fp32", "--repository", repository),
    )

    out, _ = capsys.readouterr()
    artifact = read_artifact(repository / "cross" / "1")
    layer = artifact.manifest.layer
    assert status == 0
    assert (layer.memory_dim, layer.biases) == (3, ())
    assert artifact.manifest.source == {"kind": "random", "seed": SEED}
    assert f"published {repository}/cross/1" in out


@pytest.mark.fault("G7")
def test_main_publishes_a_layer_of_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint says everything but which layer."""
    checkpoint = _checkpoint(tmp_path / "bert-like")

    status = _run(
        "--name", "bert-1", "--from-hf", checkpoint, "--layer", 1, "--repository", tmp_path / "r"
    )

    out = capsys.readouterr().out
    assert status == 0
    assert "published" in out
    assert "  2 heads of width 2 (config.json)\n" in out
    assert (
        "  self-attention (the layout of the checkpoint); not causal unless a call says so"
        " (config.json, or the default of its family)\n" in out
    )
    artifact = read_artifact(tmp_path / "r" / "bert-1" / "1")
    assert artifact.manifest.source == {
        "kind": "hf",
        "checkpoint": "bert-like",
        "family": "bert",
        "layer": 1,
    }
    assert "bert.encoder.layer.1.attention.self.query.weight" in artifact.manifest.tensors


@pytest.mark.fault("G6", "G7")
def test_main_publishes_cross_attention_of_a_decoder_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is packed like self-attention is published as what it was said to be, and verified."""
    file = tmp_path / "decoder.safetensors"
    save_file(nn.TransformerDecoderLayer(4, 2, 8).state_dict(), file)

    status = _run(
        *("--name", "cross", "--from-torch", file, "--num-heads", 2, "--attention", "cross"),
        *("--prefix", "multihead_attn", "--repository", tmp_path / "r"),
    )

    out, err = capsys.readouterr()
    artifact = read_artifact(tmp_path / "r" / "cross" / "1")
    assert status == 0, err
    assert artifact.manifest.layer.memory_dim == 4
    assert artifact.manifest.source == {
        "kind": "torch",
        "file": "decoder.safetensors",
        "module": "multihead_attn",
    }
    assert out.endswith(
        "The parity above cannot show these, which were assumed:\n"
        "  2 heads of width 2 (--num-heads)\n"
        "  cross-attention (--attention)\n"
        "  no add_zero_attn, and no computation of the model's own code around these weights\n"
    )
    assert _run("verify", artifact.path) == 0


def _checkpoint(directory: Path) -> Path:
    """Write a checkpoint of two layers of width 4."""
    config = {"model_type": "bert", "num_hidden_layers": 2, "num_attention_heads": 2}
    tensors = {}
    for layer in range(2):
        weights = random_layer(4, 2, seed=layer).spec.tensors
        start = f"bert.encoder.layer.{layer}.attention"
        for kind in ("weight", "bias"):
            for name in ("query", "key", "value"):
                tensors[f"{start}.self.{name}.{kind}"] = weights[f"{name}.{kind}"].clone()
            tensors[f"{start}.output.dense.{kind}"] = weights[f"output.{kind}"]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_main_if_missing_leaves_a_published_name_alone(
    layers: Layers, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who starts twice exports once."""
    status = _run("--name", "tiny", *TINY, "--if-missing", "--repository", layers.repository)

    assert status == 0
    assert capsys.readouterr() == ("tiny is published already; nothing to do\n", "")
    assert [path.name for path in (layers.repository / "tiny").iterdir()] == ["1"]


def test_main_repository_is_taken_from_the_environment(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exporter writes where the server reads, without a flag."""
    monkeypatch.setenv("HEADWISE_REPOSITORY", str(layers.repository))

    status = _run("--name", "mha", *TINY, "--if-missing")

    assert status == 0
    assert capsys.readouterr().out == "mha is published already; nothing to do\n"


@pytest.mark.fault("E11")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: --name"),
        (["--name", "mha"], f"{ONE_SOURCE}none of them"),
        (["--name", "mha", "--num-heads", "2"], f"{ONE_SOURCE}none of them"),
        (
            ["--name", "mha", "--embed-dim", "8"],
            "--embed-dim: --num-heads is needed with weights from a seed",
        ),
        (
            ["--name", "mha", "--seed", "1", "--num-heads", "2"],
            "--seed: --embed-dim is needed with weights from a seed",
        ),
        (
            ["--name", "mha", "--memory-dim", "8", "--num-heads", "2"],
            "--memory-dim: --embed-dim is needed with weights from a seed",
        ),
        (
            ["--name", "mha", "--no-bias", "--num-heads", "2"],
            "--no-bias: --embed-dim is needed with weights from a seed",
        ),
        (
            ["--name", "mha", "--from-torch", "layer.pt"],
            "--from-torch: --num-heads is needed with --from-torch FILE",
        ),
        (
            ["--name", "mha", "--from-torch", "layer.pt", "--num-heads", "2", "--no-bias"],
            f"{ONE_SOURCE}--no-bias (for weights from a seed) and --from-torch (for --from-torch"
            " FILE)",
        ),
        (
            ["--name", "mha", *TINY, "--layer", "3"],
            f"{ONE_SOURCE}--embed-dim (for weights from a seed) and --layer (for --from-hf DIR)",
        ),
        (
            ["--name", "mha", *TINY, "--seed", "0", "--layer", "0"],
            f"{ONE_SOURCE}--embed-dim, --seed (for weights from a seed) and --layer (for --from-hf"
            " DIR)",
        ),
        (
            ["--name", "mha", "--from-torch", "layer.pt", "--from-hf", "dir", "--layer", "0"],
            f"{ONE_SOURCE}--from-torch (for --from-torch FILE) and --from-hf, --layer (for"
            " --from-hf DIR)",
        ),
        (["--name", "mha", "--from-hf", "dir"], "--from-hf: --layer is needed with --from-hf DIR"),
        (["--name", "mha", "--layer", "0"], "--layer: --from-hf is needed with --from-hf DIR"),
        (
            ["--name", "mha", "--from-hf", "dir", "--layer", "0", "--num-heads", "12"],
            "--num-heads: the checkpoint's own config.json says it",
        ),
        (
            ["--name", "mha", "--prefix", "attn", "--num-heads", "2"],
            "--prefix: --from-torch is needed with --from-torch FILE",
        ),
        (
            ["--name", "mha", "--attention", "cross", "--num-heads", "2"],
            f"{ONE_SOURCE}none of them",
        ),
        (
            ["--name", "mha", "--from-torch", "x.pt", "--num-heads", "2", "--memory-dim", "8"],
            "--memory-dim is for weights from a seed: a saved layer has its own; where keys and"
            " values come from a memory as wide as the queries, say --attention cross",
        ),
        (
            ["--name", "mha", "--from-torch", "x.pt", "--attention", "both"],
            "argument --attention: invalid choice",
        ),
        (["--name", "MHA", *TINY], BAD_NAME),
        (["--name", "../mha", *TINY], BAD_NAME),
        (["--name", "", *TINY], BAD_NAME),
        (["--name", "mha-weights", *TINY], BAD_NAME),
        (["--name", "mha", *TINY, "--precision", "fp16"], "argument --precision: invalid choice"),
        (["--name", "mha", "--embed-dim", "eight"], "argument --embed-dim: invalid int value"),
        (["--name", "mha", *TINY, "--heads", "2"], "unrecognized arguments: --heads 2"),
        (["verify"], "the following arguments are required: artifact"),
        (["verify", "a", "b"], "unrecognized arguments: b"),
    ],
    ids=" ".join,
)
def test_main_misused_says_what_is_missing_or_too_much(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Misuse is exit status 2, a usage and one line that names the flags."""
    status = _run(*argv)

    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert f": error: {message}" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--embed-dim", "8", "--num-heads", "3"],
            "embed_dim: expected a multiple of num_heads 3, got 8",
        ),
        (
            ["--embed-dim", "0", "--num-heads", "2"],
            "embed_dim and num_heads: expected positive integers, got 0 and 2",
        ),
        (
            [*TINY, "--memory-dim", "-1"],
            "memory_dim: expected a positive integer, got -1",
        ),
        (
            [*TINY, "--seed", "99999999999999999999"],
            "seed: expected a number of 64 bits, got 99999999999999999999",
        ),
        (
            ["--from-torch", "no/such.pt", "--num-heads", "2"],
            "no/such.pt: no such file",
        ),
        (
            ["--from-torch", "no/[red]such.safetensors", "--num-heads", "2"],
            "no/[red]such.safetensors: no such file",
        ),
        (
            ["--from-hf", "no/such", "--layer", "0"],
            "no/such/config.json: no such file; expected a checkpoint directory with config.json"
            " and model.safetensors",
        ),
        (
            ["--from-hf", __file__, "--layer", "0"],
            f"{__file__}: expected a directory with config.json and model.safetensors, got a file;"
            f" name its folder: --from-hf {Path(__file__).parent}",
        ),
        (
            ["--from-torch", "/", "--num-heads", "2"],
            "/: expected a file with a state dict, got a directory; a checkpoint directory is read"
            " by --from-hf DIR --layer N",
        ),
    ],
    ids=" ".join,
)
@pytest.mark.fault("E11")
def test_main_refused_weights_are_one_line(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a user can mend is exit status 1 and one line, and nothing is written."""
    status = _run("--name", "mha", *argv, "--repository", tmp_path / "repository")

    assert status == 1
    assert capsys.readouterr() == ("", f"error: {message}\n")
    assert not (tmp_path / "repository").exists()


def test_main_repository_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the system refuses is told with the path it refused."""
    file = tmp_path / "repository"
    file.write_text("")

    status = _run("--name", "mha", *TINY, "--repository", file)

    assert status == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {file}: the artifact cannot be written there: File exists; expected a directory,"
        " got a file; name another directory with --repository"
    )


def test_main_layer_that_fails_the_gate_is_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed proof says by how much it failed."""
    large = {
        name: 1e30 * tensor for name, tensor in nn.MultiheadAttention(4, 1).state_dict().items()
    }
    save_file(large, tmp_path / "large.safetensors")

    status = _run(
        *("--name", "large", "--from-torch", tmp_path / "large.safetensors"),
        *("--num-heads", 1, "--repository", tmp_path / "repository"),
    )

    out, err = capsys.readouterr()
    assert status == 1
    assert out == "made of in_proj_bias, in_proj_weight, out_proj.bias, out_proj.weight\n"
    assert err.splitlines()[-1] == (
        "error: batch 1, length 1, masks none: output differs from formula by inf, allowed 1e-05"
    )
    assert not list((tmp_path / "repository").iterdir())


def test_main_bug_is_not_dressed_up_as_a_users_mistake() -> None:
    """What nobody foresaw keeps its traceback."""
    with pytest.raises(ValueError, match="null"):
        main(["verify", "\0"])


@pytest.mark.parametrize("argv", [["--help"], ["verify", "--help"]], ids=" ".join)
def test_main_help_explains_itself(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Help goes to standard output and ends well."""
    status = _run(*argv)

    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    assert out.startswith("usage: python -m export")


def test_main_help_names_every_source_of_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Who reads the help can export without the README."""
    _run("--help")

    out = capsys.readouterr().out
    flags = ("--embed-dim", "--from-torch", "--from-hf", "--from-python", "--check")
    assert [flag for flag in flags if flag not in out] == []
    assert "--prefix decoder.layers.0.multihead_attn --attention cross" in out
    assert "--num-heads 8 \\\n" in out  # a line of the shell that goes on in the next
    assert "python -m export verify artifacts/mha/1" in out


def test_main_version_is_the_projects(capsys: pytest.CaptureFixture[str]) -> None:
    """Exporter and server carry one version."""
    status = _run("--version")

    assert status == 0
    assert capsys.readouterr() == (f"headwise {__version__}\n", "")


@pytest.mark.fault("G12")
def test_main_verify_repeats_every_check(
    layers: Layers, capsys: pytest.CaptureFixture[str]
) -> None:
    """A published artifact proves itself again, with the same table; fewer cells for cross."""
    artifact = layers.artifact("cross")

    status = _run("verify", artifact)

    out, err = capsys.readouterr()
    assert status == 0
    assert f"verified {artifact}\n" in out
    assert re.search(
        r"\n  proven on .+ threads, onnxruntime .+; largest difference \d\.\de-0\d\n", out
    )
    assert re.search(r"\n  and here  .+, \d+ times below the allowed 1e-05\n", out)
    assert _table(out) == _cells(read_artifact(artifact).manifest.layer)
    assert "verifying" in err


def test_main_verify_altered_artifact_is_one_line(
    layers: Layers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An artifact that is not as published is refused by file, whatever its path looks like."""
    copy = tmp_path / "tiny [bold]" / "[/x]"
    shutil.copytree(layers.artifact("tiny"), copy)
    file = copy / "layer.weights"
    file.write_bytes(bytes(file.stat().st_size))

    status = _run("verify", copy)

    out, err = capsys.readouterr()
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == (
        f"error: {copy}/layer.weights: its SHA-256 is not the one in manifest.json"
    )


def test_main_verify_missing_artifact_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt path is no traceback."""
    status = _run("verify", tmp_path / "mha" / "1")

    assert status == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {tmp_path}/mha/1/manifest.json: No such file or directory"
    )


@pytest.mark.fault("E11")
def test_command_publishes_a_saved_layer_in_a_process_of_its_own(tmp_path: Path) -> None:
    """A state dict and its number of heads are enough, and the table survives a plain terminal."""
    file, repository = tmp_path / "layer.safetensors", tmp_path / "repository"
    save_file(nn.MultiheadAttention(4, 2).state_dict(), file)
    process = _start(
        *("--name", "mine", "--from-torch", file, "--num-heads", 2),
        HEADWISE_REPOSITORY=str(repository),
        PYTHONIOENCODING="ascii",
    )

    out, err = process.communicate(timeout=END_LIMIT_S)

    artifact = read_artifact(repository / "mine" / "1")
    assert process.returncode == 0, err
    assert re.search(rf"published {repository}/mine/1 \(\d\.\d kB\)\n", out)
    assert "  self-attention (packed weights, no --attention cross); not causal unless" in out
    assert artifact.manifest.source == {"kind": "torch", "file": "layer.safetensors"}
    assert "Traceback" not in err
    assert "Warning" not in err


def test_command_refused_ends_with_status_1_and_one_line(tmp_path: Path) -> None:
    """A script can rely on status and standard error."""
    process = _start("--name", "x", "--from-torch", tmp_path / "none.pt", "--num-heads", 2)

    out, err = process.communicate(timeout=END_LIMIT_S)

    assert process.returncode == 1
    assert (out, err) == ("", f"error: {tmp_path}/none.pt: no such file\n")


@pytest.mark.fault("E11")
def test_command_tells_what_is_missing_before_it_loads_pytorch(tmp_path: Path) -> None:
    """A misspelt path or a family that is not read needs no PyTorch, and does not wait for it."""
    (tmp_path / "config.json").write_text('{"model_type": "longformer"}')
    code = (
        "import sys; from export.__main__ import main; status = main(sys.argv[1:]);"
        " print(status, 'torch' in sys.modules)"
    )
    for source in (
        ["--from-torch", "none.pt", "--num-heads", "2"],
        ["--from-hf", "none", "--layer", "0"],
        ["--from-hf", str(tmp_path), "--layer", "0"],
    ):
        argv = [sys.executable, "-c", code, "--name", "x", *source]
        ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)

        assert ended.stdout == "1 False\n", ended.stderr
        assert len(ended.stderr.splitlines()) == 1


FULL = """
import resource, sys
from export.__main__ import main
from export.grid import grid
import export.publish  # its own files are not bounded
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.fault("E11")
@pytest.mark.parametrize("allowed_bytes", [1, 3000, 5000])
def test_command_on_a_full_disk_says_what_where_and_the_cure(
    allowed_bytes: int, tmp_path: Path
) -> None:
    """Whichever file no longer fits: the weights, the graph, or the manifest after the proof."""
    argv = [sys.executable, "-c", FULL, str(allowed_bytes), "--name", "x", *TINY]

    ended = subprocess.run(
        [*argv, "--repository", str(tmp_path / "r")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"error: {tmp_path}/r: the artifact cannot be written there: File too large; raise the"
        " limit of a file's size (ulimit -f), or name another directory with --repository"
    )
    assert not list((tmp_path / "r").iterdir())


@pytest.mark.fault("E11")
def test_main_disk_that_is_full_is_told_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system names no file when a write fails; the repository is named all the same."""

    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)

    status = _run("--name", "x", *TINY, "--repository", tmp_path)

    assert status == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {tmp_path}: the artifact cannot be written there: No space left on device; free"
        " some space there, or name another directory with --repository"
    )


@pytest.mark.fault("E11")
@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9")],
    ids=str,
)
def test_main_too_little_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's way to run out of memory, and PyTorch's."""

    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("export.chosen.random_layer", fail)

    status = _run("--name", "x", *TINY)

    assert status == 1
    assert capsys.readouterr().err.startswith("error: not enough memory; an export takes about")


@pytest.mark.fault("E11", "G8")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_command_interrupted_publishes_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """Whatever ends the command amid the proof: one line, and nothing is left behind."""
    # Wide enough that the proof has long not ended when its first files are seen.
    process = _start(
        "--name", "wide", "--embed-dim", 512, "--num-heads", 8, "--repository", tmp_path
    )
    until(
        lambda: process.poll() is not None or any(tmp_path.glob(".staging-*/layer.weights")),
        END_LIMIT_S,
    )

    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
    _, err = process.communicate(timeout=END_LIMIT_S)

    assert process.returncode == 128 + number
    assert err.splitlines()[-1] == "error: interrupted; nothing was published"
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())
