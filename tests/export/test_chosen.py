"""Every source of weights through the command: what is published, said and refused."""

import importlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from export.__main__ import main
from export.chosen import source_of
from export.options import parse_export
from service.inference.artifact import read_artifact
from tests.support.checkpoints import BERT, checkpoint_tensors, write_tensors

EMBED_DIM, HEADS = 4, 2

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs the command in an empty current directory, with its repository `r`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run_command(*argv: object) -> int:
        words = [str(word) for word in argv]
        return main(words if words[0] == "verify" else [*words, "--repository", "r"])

    return run_command


MODULE = """\
import torch
from torch import nn
from export.layer_spec import LayerSpec
from service.layer_config import LayerConfig

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.q, self.o = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.kv = nn.Linear(4, 4)  # keys and values of one head of width 2

    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 2)).transpose(1, 2)
        k, v = (part[:, None] for part in self.kv(x).chunk(2, -1))
        weights = torch.softmax(SCALE * q @ k.transpose(-2, -1), -1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), weights

SCALE = 0.5

def layer():
    module = Attention()
    (key, value), (key_bias, value_bias) = module.kv.weight.chunk(2), module.kv.bias.chunk(2)
    tensors = {
        "query.weight": module.q.weight,
        "key.weight": key,
        "key.bias": key_bias,
        "value.weight": value,
        "value.bias": value_bias,
        "output.weight": module.o.weight,
        "output.bias": module.o.bias,
    }
    biases = ("key", "value", "output")
    return LayerSpec(LayerConfig(4, 2, num_kv_heads=1, biases=biases, scale=0.5), tensors), module

def spec():
    return layer()[0]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[str]:
    """Write a layer as a user would, and return its module's name."""
    (tmp_path / "mylayer.py").write_text(MODULE)
    yield "mylayer"
    sys.modules.pop("mylayer", None)


def write_calls(name: str, file: Path, change: float = 0.0) -> None:
    """Write a call to the user's layer with the answer of its module, one number changed."""
    embeddings = torch.randn(2, 3, EMBED_DIM, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output, weights = sys.modules[name].layer()[1](embeddings)
    output[1, 2, 3] += change
    save_file(
        {"embeddings": embeddings, "output": output, "attention_weights": weights.contiguous()},
        file,
    )


def test_layer_of_a_function_is_proven_against_its_module_and_a_callers_answers(
    run: Run, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Grouped heads, a scale and biases of its own: nothing that PyTorch has a layer for."""
    status = run("--name", "mine", "--from-python", f"{mine}:layer")
    out = capsys.readouterr().out
    write_calls(mine, tmp_path / "calls.safetensors")
    again = run("verify", "r/mine/1", "--check", "calls.safetensors")
    verified = capsys.readouterr().out

    manifest = read_artifact(tmp_path / "r" / "mine" / "1").manifest
    assert (status, again) == (0, 0)
    assert manifest.source == {"kind": "python", "function": "mylayer:layer"}
    assert manifest.layer.num_kv_heads == 1
    made_of = next(line for line in out.splitlines() if line.startswith("made of "))
    assert sorted(made_of.removeprefix("made of ").split(", ")) == sorted(manifest.tensors)
    assert set(manifest.tensors) >= {"query.weight", "output.bias"}
    module = [row for row in manifest.parity if row.reference == "module"]
    assert len(module) == 7
    assert all(row.masks == "none" and row.weights_error is not None for row in module)
    assert "module: the module that came with the weights" in " ".join(out.split())
    assert "assumed" not in out
    assert re.search(r"check calls\.safetensors │ +1 │", verified)
    assert "not repeated: module; " in verified


def test_layer_that_its_module_contradicts_is_not_published(
    run: Run, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip in a LayerSpec, here of the scale, shows against the module alone."""
    text = (tmp_path / "mylayer.py").read_text().replace("SCALE = 0.5", "SCALE = 0.75")
    (tmp_path / "mylayer.py").write_text(text)

    status = run("--name", "mine", "--from-python", f"{mine}:layer")

    err = capsys.readouterr().err
    assert status == 1
    assert re.search(
        r"error: batch 1, length 7, masks none: \w+ differs from module by 0\.\d+, allowed 1e-05$",
        err.strip(),
    )
    assert not list((tmp_path / "r").iterdir())


def test_function_whose_name_is_that_of_an_emoji_is_named_as_it_is(
    run: Run, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`:x:` stands in the message, and stays."""
    with (tmp_path / "mylayer.py").open("a") as file:
        file.write("x = 1\n")

    status = run("--name", "mine", "--from-python", f"{mine}:x")

    assert status == 1
    assert capsys.readouterr().err == (
        "error: mylayer:x: expected a function without arguments that returns a LayerSpec, got int"
        "\n"
    )


def test_layer_that_misses_a_callers_answer_is_not_published(
    run: Run, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file, the tensor, the size and the place; an earlier version stays as it is."""
    sys.path.insert(0, str(tmp_path))
    importlib.import_module(mine)
    write_calls(mine, tmp_path / "calls.safetensors", change=0.5)
    calls = ["--check", "calls.safetensors"]

    status = run("--name", "mine", "--from-python", f"{mine}:spec", *calls)

    assert status == 1
    assert re.fullmatch(
        r"error: calls\.safetensors: output\[1, 2, 3\]: expected \S+, got \S+, which differs by"
        r" 0\.5; allowed \S+; 1 of 24 numbers differ by more",
        capsys.readouterr().err.splitlines()[-1],
    )
    assert not list((tmp_path / "r").iterdir())


def test_missing_check_is_refused_before_anything_is_loaded(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt file does not cost a proof."""
    status = run("--name", "x", "--from-python", "mine:layer", "--check", "none.safetensors")

    assert status == 1
    assert capsys.readouterr().err == "error: none.safetensors: no such file\n"


def test_layer_of_a_training_checkpoint_says_what_was_taken_off_and_assumed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiled, data-parallel decoder with all that no weight shows."""
    module = nn.TransformerDecoderLayer(EMBED_DIM, HEADS, 8)
    state = {f"module._orig_mod.{name}": tensor for name, tensor in module.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "checkpoint.pt")

    status = run(
        *("--name", "decoder", "--from-torch", "checkpoint.pt", "--num-heads", HEADS),
        *("--prefix", "self_attn", "--causal", "--window", 5, "--add-zero-attn"),
    )

    out = capsys.readouterr().out
    manifest = read_artifact(tmp_path / "r" / "decoder" / "1").manifest
    assert status == 0
    assert manifest.source == {
        "kind": "torch",
        "file": "checkpoint.pt",
        "module": "self_attn",
        "wrappers": "state_dict module. _orig_mod.",
    }
    layer = manifest.layer
    assert (layer.causal, layer.window, layer.extra_keys) == (True, 5, ("zero",))
    assert "without what training put around them: state_dict module. _orig_mod.\n" in out
    assert out.endswith(
        "The parity above cannot show these, which were assumed:\n"
        "  2 heads of width 2 (--num-heads)\n"
        "  self-attention (packed weights, no --attention cross); causal unless a call says false"
        " (--causal)\n"
        "  attention to keys less than 5 tokens away (--window)\n"
        "  add_zero_attn (--add-zero-attn)\n"
        "  no positions, and no computation of the model's own code around these weights\n"
    )


def _two_layers(directory: Path, *, without: str = "") -> None:
    """Write a BERT of two layers of width 8, one tensor left out."""
    tensors = {
        name: tensor
        for name, tensor in checkpoint_tensors().items()
        if re.search(r"layer\.[01]\.", name) and name != without
    }
    write_tensors(directory, tensors, config={**BERT, "num_hidden_layers": 2})


@pytest.mark.parametrize("attention", ["self", "cross"])
def test_attention_of_a_checkpoint_is_the_one_that_is_said(attention: str, tmp_path: Path) -> None:
    """A decoder's layer has both, and what was said is kept in the manifest's source."""
    tensors = {name: tensor for name, tensor in checkpoint_tensors().items() if ".layer.0." in name}
    for name, tensor in list(tensors.items()):
        if ".attention." in name:
            tensors[name.replace(".attention.", ".crossattention.")] = 2 * tensor
    decoder = {"num_hidden_layers": 1, "is_decoder": True, "add_cross_attention": True}
    write_tensors(tmp_path / "bert", tensors, config={**BERT, **decoder})
    words = ["--name", "x", "--from-hf", str(tmp_path / "bert"), "--layer", "0"]

    source = source_of(parse_export([*words, "--attention", attention]))

    assert source.config.is_cross == (attention == "cross")
    assert source.config.causal == (attention == "self")
    assert source.origin["attention"] == attention
    module = "attention" if attention == "self" else "crossattention"
    assert f"bert.encoder.layer.0.{module}.self.key.weight" in source.tensors


@pytest.mark.fault("G7")
def test_all_layers_of_a_checkpoint_are_published_each_by_its_number(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command, one artifact a layer; what is there already is spared where that is asked."""
    _two_layers(tmp_path / "bert")
    command = ("--name", "bert", "--from-hf", "bert", "--layer", "all", "--if-missing")

    first = run("--name", "bert-1", *command[2:4], "--layer", 1)
    capsys.readouterr()
    status = run(*command)

    out = capsys.readouterr().out
    assert (first, status) == (0, 0)
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["bert-0", "bert-1"]
    assert [p.name for p in (tmp_path / "r" / "bert-1").iterdir()] == ["1"]
    assert "bert-1 is published already; nothing to do\n" in out
    assert out.endswith("published: bert-0\n")
    sources = [read_artifact(tmp_path / "r" / f"bert-{n}" / "1").manifest.source for n in (0, 1)]
    assert [source["layer"] for source in sources] == [0, 1]


def test_all_layers_a_failure_names_the_layer_and_what_was_published(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What came before is good and stays; what was not reached is known."""
    missing = "bert.encoder.layer.1.attention.self.query.weight"
    _two_layers(tmp_path / "bert", without=missing)

    status = run("--name", "bert", "--from-hf", "bert", "--layer", "all")

    assert status == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: bert/model.safetensors: expected a tensor {missing}, got none; at layer 1;"
        " published: bert-0"
    )
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["bert-0"]


def test_all_layers_an_interruption_says_how_far_it_came(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C amid many layers leaves those that are whole, and names them."""
    _two_layers(tmp_path / "bert")

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("export.publish.publish", interrupted)

    status = run("--name", "bert", "--from-hf", "bert", "--layer", "all")

    assert status == 128 + signal.SIGINT
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: interrupted; at layer 0; nothing was published"
    )


def test_names_of_all_layers_must_be_names(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """63 characters leave no room for a number."""
    _two_layers(tmp_path / "bert")

    status = run("--name", "b" * 63, "--from-hf", "bert", "--layer", "all")

    assert status == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("b-0: expected [a-z0-9][a-z0-9._-]{0,62}; say a shorter one")
