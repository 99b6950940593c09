"""Layers that a function returns: what it may return, and how its mistakes are reported."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.errors import SourceInvalid
from export.gate import pass_gate
from export.python_source import ModuleFailed, module_oracle, read_function
from export.sources import from_state
from service.inference.calls import Inputs
from service.layer_config import LayerConfig
from tests.support.attention_cases import engine_of

START = """\
import torch
from torch import nn
from export.layer_spec import LayerSpec
from service.layer_config import LayerConfig

def tensors():
    names = ("query", "key", "value", "output")
    return {f"{name}.weight": torch.eye(4) for name in names}

"""
"""The beginning of a caller's module: 9 lines."""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return what writes `mylayer.py` into the current directory, and its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write_module(text: str) -> str:
        (tmp_path / "mylayer.py").write_text(START + text)
        return "mylayer"

    yield write_module
    sys.modules.pop("mylayer", None)


def test_read_function_returns_the_spec_of_a_module_in_the_current_directory(write: Write) -> None:
    """Parameters of a model under training are taken as the numbers that they are."""
    name = write(
        "class Mine:\n"
        "    @staticmethod\n"
        "    def layer(heads=2):\n"
        "        parts = {name: nn.Parameter(t.T) for name, t in tensors().items()}\n"
        "        return LayerSpec(LayerConfig(4, heads, biases=(), window=3), parts)\n"
    )

    found = read_function(f"{name}:Mine.layer")

    assert found.oracle is None
    assert found.spec.config == LayerConfig(4, 2, biases=(), window=3)
    for tensor in found.spec.tensors.values():
        assert type(tensor) is Tensor
        assert not tensor.requires_grad
        assert torch.equal(tensor, torch.eye(4))


def test_read_function_returns_the_module_as_an_oracle(write: Write) -> None:
    """It is put into eval mode and asked without gradients."""
    name = write(
        "class Layer(nn.Module):\n"
        "    def forward(self, embeddings):\n"
        "        assert not self.training and not torch.is_grad_enabled()\n"
        "        return 2 * embeddings\n"
        "def layer():\n"
        "    return LayerSpec(LayerConfig(4, 2, biases=()), tensors()), Layer().train()\n"
    )
    embeddings = np.ones((1, 3, 4), np.float32)

    oracle = read_function(f"{name}:layer").oracle

    assert oracle is not None
    output, weights = oracle(Inputs(embeddings))
    assert np.array_equal(output, 2 * embeddings)
    assert weights is None


MISTAKES: dict[str, tuple[str, str, str]] = {
    "no such function": (
        "def other():\n    pass\n",
        "layer",
        "there is no layer in {file}; its functions are other, tensors",
    ),
    "no such attribute of a class": (
        "class Mine:\n    pass\n",
        "Mine.layer",
        "there is no Mine.layer in {file}; its functions are tensors",
    ),
    "no function": (
        "layer = 3\n",
        "layer",
        "expected a function without arguments that returns a LayerSpec, got int",
    ),
    "needs arguments": (
        "def layer(path, *rest, heads, seed=0):\n    pass\n",
        "layer",
        "expected a function that needs no arguments, got one that needs path, heads; give them"
        " defaults, or name a function that calls it",
    ),
    "returns nothing": (
        "def layer():\n    pass\n",
        "layer",
        "expected it to return a LayerSpec (from export.layer_spec), or a pair of it and an"
        " nn.Module, got None",
    ),
    "returns the module alone": (
        "def layer():\n    return nn.Linear(2, 2)\n",
        "layer",
        "expected it to return a LayerSpec (from export.layer_spec), or a pair of it and an"
        " nn.Module, got Linear",
    ),
    "returns them the other way round": (
        "def layer():\n"
        "    return nn.Linear(2, 2), LayerSpec(LayerConfig(4, 2, biases=()), tensors())\n",
        "layer",
        "expected it to return a LayerSpec (from export.layer_spec), or a pair of it and an"
        " nn.Module, got (Linear, LayerSpec)",
    ),
    "raises": (
        "def layer():\n    helper()\n\ndef helper():\n    raise KeyError('no\\nweights')\n",
        "layer",
        "KeyError: 'no\\nweights', at {file}:14",
    ),
    "raises inside PyTorch": (
        "def layer():\n    return torch.zeros(2).reshape(3)\n",
        "layer",
        "RuntimeError: shape '[3]' is invalid for input of size 2, at {file}:11",
    ),
    "raises without words": (
        "def layer():\n    assert False\n",
        "layer",
        "AssertionError, at {file}:11",
    ),
    "ends the process": (
        "def layer():\n    raise SystemExit(3)\n",
        "layer",
        "SystemExit: 3, at {file}:11",
    ),
    "fails to be imported": (
        "1 / 0\ndef layer():\n    pass\n",
        "layer",
        "ZeroDivisionError: division by zero, at {file}:10",
    ),
    "imports what is not there": (
        "import no_such_package.part\n",
        "layer",
        "ModuleNotFoundError: No module named 'no_such_package', at {file}:10",
    ),
    "is no Python": ("def layer(:\n", "layer", "SyntaxError: invalid syntax, at {file}:10"),
    "a tensor is missing": (
        "def layer():\n    return LayerSpec(LayerConfig(4, 2), tensors())\n",
        "layer",
        "query.bias: expected a tensor [4], got none, at {file}:11",
    ),
    "another precision": (
        "def layer():\n"
        "    halves = {name: t.half() for name, t in tensors().items()}\n"
        "    return LayerSpec(LayerConfig(4, 2, biases=()), halves)\n",
        "layer",
        "query.weight: expected float32, got torch.float16, at {file}:12",
    ),
    "contradicting numbers": (
        "def layer():\n    return LayerSpec(LayerConfig(4, 3), tensors())\n",
        "layer",
        "ValueError: embed_dim: expected a multiple of num_heads 3, got 4, at {file}:11",
    ),
    "not finite": (
        "def layer():\n"
        "    bad = tensors() | {'key.weight': torch.full((4, 4), torch.nan)}\n"
        "    return LayerSpec(LayerConfig(4, 2, biases=()), bad)\n",
        "layer",
        "key.weight: expected finite numbers, got NaN or infinity, at {file}:12",
    ),
    "no numbers": (
        "def layer():\n"
        "    bad = tensors() | {'key.weight': torch.empty(4, 4, device='meta')}\n"
        "    return LayerSpec(LayerConfig(4, 2, biases=()), bad)\n",
        "layer",
        "key.weight: expected a dense tensor with its numbers, got one on the meta device,"
        " at {file}:12",
    ),
    "a subclass": (
        "class Packed(torch.Tensor):\n    pass\n"
        "def layer():\n"
        "    bad = tensors() | {'key.weight': torch.eye(4).as_subclass(Packed)}\n"
        "    return LayerSpec(LayerConfig(4, 2, biases=()), bad)\n",
        "layer",
        "key.weight: expected a plain tensor, got Packed, at {file}:14",
    ),
    "sparse": (
        "def layer():\n"
        "    bad = tensors() | {'key.weight': torch.eye(4).to_sparse()}\n"
        "    return LayerSpec(LayerConfig(4, 2, biases=()), bad)\n",
        "layer",
        "key.weight: expected a dense tensor with its numbers, got torch.sparse_coo, at {file}:12",
    ),
}


@pytest.mark.parametrize(("text", "path", "message"), MISTAKES.values(), ids=MISTAKES)
def test_read_function_mistake_is_one_line_with_its_place(
    text: str, path: str, message: str, write: Write, tmp_path: Path
) -> None:
    """The caller's own code may do anything; what it did wrong and where is told in one line."""
    name = write(text)

    with pytest.raises(SourceInvalid) as caught:
        read_function(f"{name}:{path}")

    expected = message.format(file=tmp_path / "mylayer.py")
    assert str(caught.value) == f"{name}:{path}: {expected}"


def test_read_function_of_no_module_says_where_it_was_looked_for(
    write: Write, tmp_path: Path
) -> None:
    """A misspelt module is no error inside one."""
    with pytest.raises(SourceInvalid) as caught:
        read_function("no.such:layer")

    assert str(caught.value) == (
        f"no.such:layer: there is no module no; it is looked for in the current directory"
        f" ({tmp_path}) and where Python finds packages"
    )


def test_read_function_that_is_interrupted_is_interrupted(write: Write) -> None:
    """Ctrl-C is nobody's mistake."""
    name = write("def layer():\n    raise KeyboardInterrupt\n")

    with pytest.raises(KeyboardInterrupt):
        read_function(f"{name}:layer")


class Module(nn.Module):
    """Returns what it was given to return, and keeps what it was called with."""

    def __init__(self, returned: object) -> None:
        super().__init__()
        self.returned, self.shapes = returned, list[list[int]]()

    def forward(self, *sources: Tensor) -> object:
        """Return it."""
        self.shapes = [list(source.shape) for source in sources]
        if isinstance(self.returned, Exception):
            raise self.returned
        return self.returned


CROSS = LayerConfig(4, 2, 6, 3, biases=(), extra_keys=("learned", "zero"))
CROSS_CALL = Inputs(
    np.zeros((1, 3, 4), np.float32),
    np.zeros((1, 5, 6), np.float32),
    value_memory=np.zeros((1, 5, 3), np.float32),
)


@pytest.mark.parametrize("keys", [5, 7])
def test_module_oracle_is_asked_with_each_source_of_the_layer(keys: int) -> None:
    """Weights come with those of extra keys or without; both are weights of the layer."""
    module = Module((torch.ones(1, 3, 4).half(), torch.ones(1, 2, 3, keys).double()))

    output, weights = module_oracle("f", CROSS, module)(CROSS_CALL)

    assert module.shapes == [[1, 3, 4], [1, 5, 6], [1, 5, 3]]
    assert output.dtype == np.float32
    assert output.shape == (1, 3, 4)
    assert weights is not None
    assert weights.dtype == np.float32
    assert weights.shape == (1, 2, 3, keys)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "output [1, 3, 4], got None"),
        (torch.zeros(3, 4), "output [1, 3, 4], got [3, 4]"),
        ((torch.zeros(1, 3, 4), torch.zeros(1, 3, 5)), "weights [1, 2, 3, 5] or [1, 2, 3, 7],"),
        ((torch.zeros(1, 3, 4), "cache"), "weights [1, 2, 3, 5] or [1, 2, 3, 7], got str"),
        ([torch.zeros(1, 3, 4)], "output [1, 3, 4], got list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_module_oracle_other_answer_is_explained(returned: object, message: str) -> None:
    """The message has both allowed forms, and what came."""
    oracle = module_oracle("f", CROSS, Module(returned))

    with pytest.raises(ModuleFailed) as caught:
        oracle(CROSS_CALL)

    words = "f: expected the module to return the output, or (output, weights): "
    assert str(caught.value).startswith(words + message)


def test_module_oracle_may_leave_the_weights_of_extra_keys_out() -> None:
    """The gate compares those of the sequence's own keys, and the output, with the module's."""
    module = nn.MultiheadAttention(4, 2, add_zero_attn=True, batch_first=True).eval()
    source = from_state(module.state_dict(), 2, origin={}, add_zero_attn=True)

    class Own(nn.Module):
        """As some families do it."""

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            """Attend."""
            output, weights = module(x, x, x, average_attn_weights=False)
            return output, weights[..., :-1]

    oracle = module_oracle("f", source.config, Own())
    report = pass_gate(engine_of(source.spec), replace(source, oracle=oracle))

    rows = [row for row in report.rows if row.reference == "module"]
    assert len(rows) == 7
    assert all(row.weights_error is not None for row in rows)


def test_module_oracle_that_raises_is_one_line_with_the_call() -> None:
    """Which shapes it was called with is half of what is needed to find the mistake."""
    oracle = module_oracle("f", CROSS, Module(ValueError("bad\nshape")))

    with pytest.raises(ModuleFailed) as caught:
        oracle(CROSS_CALL)

    line = str(caught.value)
    start = "f: the module, called with [1, 3, 4], [1, 5, 6], [1, 5, 3]: ValueError: bad shape, at "
    assert line.startswith(f"{start}{__file__}:")
