"""Saved nn.MultiheadAttention layers: every constructor option, and every place in a larger one."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from export.checkpoint import Checkpoint, from_values, open_file
from export.errors import SourceInvalid
from export.families.family import Attention, Found
from export.torch_layers import attention_modules, read_torch_layer
from service.inference.calls import Inputs
from service.layer_config import PROJECTIONS
from tests.support.attention_cases import Case, check

SEED = 5
"""Any: every rule here holds for all weights."""

EMBED_DIM, HEADS = 8, 2


def seeded(module: nn.Module) -> nn.Module:
    """Return the module with random numbers in what PyTorch starts at zero, and without dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    return module.eval()


def torch_layer(**options: Any) -> nn.MultiheadAttention:
    """Return PyTorch's own layer with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = nn.MultiheadAttention(EMBED_DIM, HEADS, batch_first=True, **options)
    seeded(module)
    return module


def read(module: nn.MultiheadAttention, **options: Any) -> Found:
    """Return what is read of its state dict."""
    return read_torch_layer(from_values("state dict", module.state_dict()), "", HEADS, **options)


def cases_of(module: nn.MultiheadAttention, found: Found) -> list[Case]:
    """Return calls without masks, with padding, causal and with a mask of pairs, as it answers."""
    config = found.spec.config
    random = np.random.default_rng(SEED)

    def tokens(length: int, width: int | None) -> Any:
        return None if width is None else random.standard_normal((2, length, width), np.float32)

    length, keys = 5, 4 if config.is_cross else 5
    padding = np.array([[True] * keys, [True] * (keys - 2) + [False] * 2])
    pairs = random.random((2, 1, length, keys)) < 0.7
    pairs[..., 0] = True
    cases = []
    for masks in ({}, {"attend_mask": padding}, {"causal": True}, {"pair_mask": pairs}):
        if config.is_cross and "causal" in masks:
            continue
        inputs = Inputs(
            tokens(length, EMBED_DIM),
            tokens(keys, config.memory_dim),
            value_memory=tokens(keys, config.value_memory_dim),
            **masks,
        )
        cases.append(answered(module, inputs))
    return cases


def answered(module: nn.MultiheadAttention, inputs: Inputs) -> Case:
    """Return the call with the module's answer; in it a true mask entry means *ignore*."""
    sources = (inputs.embeddings, inputs.memory, inputs.value_memory)
    query, key, value = (None if source is None else torch.from_numpy(source) for source in sources)
    assert query is not None
    key = query if key is None else key
    hidden = torch.zeros(query.shape[1], key.shape[1], dtype=torch.bool)
    if inputs.causal:
        hidden = ~torch.ones_like(hidden).tril()
    if inputs.pair_mask is not None:
        pairs = torch.from_numpy(inputs.pair_mask).expand(-1, HEADS, -1, -1)
        hidden = ~pairs.flatten(0, 1)
    mask = inputs.attend_mask
    with torch.no_grad():
        output, weights = module(
            query,
            key,
            key if value is None else value,
            key_padding_mask=None if mask is None else ~torch.from_numpy(mask),
            attn_mask=hidden,
            average_attn_weights=False,
        )
    count = key.shape[1]
    return Case(inputs, output.numpy(), weights[..., :count].numpy(), weights[..., count:].numpy())


WIDTHS: dict[str, dict[str, Any]] = {
    "self": {},
    "kdim": {"kdim": 6},
    "vdim": {"vdim": 6},
    "kdim = vdim": {"kdim": 6, "vdim": 6},
    "kdim and vdim": {"kdim": 6, "vdim": 3},
}


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize(
    ("bias", "add_bias_kv", "add_zero_attn"),
    # All of bias_kv and zero_attn with a bias, and the extremes without.
    [(True, *both) for both in itertools.product((False, True), repeat=2)]
    + [(False, False, False), (False, True, True)],
)
def test_read_torch_layer_every_option_answers_as_pytorch(
    widths: dict[str, Any], bias: bool, add_bias_kv: bool, add_zero_attn: bool
) -> None:
    """Output, weights, and the weights of learned and zero keys, which PyTorch appends in turn."""
    module = torch_layer(bias=bias, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, **widths)

    found = read(module, add_zero_attn=add_zero_attn)

    config = found.spec.config
    kdim, vdim = widths.get("kdim", EMBED_DIM), widths.get("vdim", EMBED_DIM)
    assert config.memory_dim == (kdim if widths else None)
    assert config.value_memory_dim == (vdim if kdim != vdim else None)
    assert config.biases == (PROJECTIONS if bias else ())
    assert config.extra_keys == ("learned",) * add_bias_kv + ("zero",) * add_zero_attn
    assert set(found.tensors) == set(module.state_dict())
    check(found.spec, cases_of(module, found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_read_torch_layer_learned_keys_of_any_precision_become_fp32(dtype: torch.dtype) -> None:
    """Each number is the nearest to what was saved."""
    module = torch_layer(add_bias_kv=True).to(dtype)

    found = read(module)

    assert {tensor.dtype for tensor in found.spec.tensors.values()} == {torch.float32}
    check(found.spec, cases_of(module.float(), found))


def changed(**changes: Tensor | None) -> Checkpoint:
    """Return a good state with bias_k and bias_v, some tensors changed or taken away."""
    state = dict(torch_layer(add_bias_kv=True).state_dict())
    for name, tensor in changes.items():
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    return from_values("state dict", state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias_k": None}, "state dict: expected bias_k and bias_v, or neither"),
        (
            {"bias_v": torch.zeros(EMBED_DIM)},
            "state dict: bias_v: expected shape [1, 1, E], got [8]",
        ),
        (
            {"bias_v": torch.zeros(1, 1, 6)},
            "state dict: bias_v: expected shape [8], got [6]",
        ),
    ],
    ids=str,
)
def test_read_torch_layer_incomplete_learned_key_is_refused(
    changes: dict[str, Tensor | None], message: str
) -> None:
    """Key and value go together, each in the shape that PyTorch gives them."""
    with pytest.raises(SourceInvalid) as caught:
        read_torch_layer(changed(**changes), "", HEADS)

    assert str(caught.value) == message


def test_read_torch_layer_of_two_memories_is_no_self_attention() -> None:
    """A statement that contradicts the weights is refused with both widths."""
    module = torch_layer(kdim=EMBED_DIM, vdim=6)

    with pytest.raises(SourceInvalid, match=r"for --attention self, got 8 and 6: the layer is"):
        read(module, attention="self")


def larger_modules() -> dict[str, tuple[nn.Module, list[str]]]:
    """Return PyTorch's larger modules, each with the attention modules in it."""
    encoder = nn.TransformerEncoderLayer(EMBED_DIM, HEADS, 16, batch_first=True)
    decoder = nn.TransformerDecoderLayer(EMBED_DIM, HEADS, 16, batch_first=True)
    whole = nn.Transformer(EMBED_DIM, HEADS, 1, 1, 16, batch_first=True)
    return {
        "encoder layer": (encoder, ["self_attn"]),
        "decoder layer": (decoder, ["multihead_attn", "self_attn"]),
        "transformer": (
            whole,
            [
                "decoder.layers.0.multihead_attn",
                "decoder.layers.0.self_attn",
                "encoder.layers.0.self_attn",
            ],
        ),
    }


@pytest.mark.parametrize("kind", ["encoder layer", "decoder layer", "transformer"])
def test_read_torch_layer_of_a_larger_module_by_its_name(kind: str) -> None:
    """Each attention of PyTorch's own transformer modules; without a name they are listed."""
    module, names = larger_modules()[kind]
    seeded(module)
    checkpoint = from_values("state dict", module.state_dict())

    assert attention_modules(checkpoint) == names
    for name in names:
        attention: Attention = "cross" if name.endswith("multihead_attn") else "self"
        found = read_torch_layer(checkpoint, name, HEADS, attention=attention)
        inner = module.get_submodule(name)
        assert isinstance(inner, nn.MultiheadAttention)
        assert all(tensor.startswith(f"{name}.") for tensor in found.tensors)
        check(found.spec, cases_of(inner, found))
    with pytest.raises(SourceInvalid) as caught:
        read_torch_layer(checkpoint, "", HEADS)
    assert f"it holds these attention modules: {', '.join(names)}; name one" in str(caught.value)


WRAPPED: dict[str, tuple[str, tuple[str, ...]]] = {
    "data parallel": ("module.", ("module.",)),
    "compiled": ("_orig_mod.", ("_orig_mod.",)),
    "compiled, then parallel": ("module._orig_mod.", ("module.", "_orig_mod.")),
    "parallel, then compiled": ("_orig_mod.module.", ("module.", "_orig_mod.")),
    "sharded": ("_fsdp_wrapped_module.", ("_fsdp_wrapped_module.",)),
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(("start", "wrappers"), WRAPPED.values(), ids=WRAPPED)
def test_open_file_takes_off_what_training_puts_around_a_module(
    start: str, wrappers: tuple[str, ...], suffix: str, tmp_path: Path
) -> None:
    """The layer is named as the model has it, or as the file does; both are the same one."""
    module = nn.TransformerEncoderLayer(EMBED_DIM, HEADS, 16, batch_first=True)
    state = {f"{start}{name}": tensor for name, tensor in module.state_dict().items()}
    file = tmp_path / f"layer{suffix}"
    if suffix == ".pt":
        torch.save(state, file)
    else:
        save_file(state, file)

    checkpoint = open_file(file)

    assert checkpoint.wrappers == wrappers
    for prefix in ("self_attn", f"{start}self_attn", f"{start}self_attn."):
        found = read_torch_layer(checkpoint, prefix, HEADS)
        weight = found.spec.tensors["output.weight"]
        assert torch.equal(weight, module.self_attn.out_proj.weight)
        assert "self_attn.out_proj.weight" in found.tensors


def test_open_file_takes_off_a_compiled_part_in_the_middle_of_a_name(tmp_path: Path) -> None:
    """Whoever compiles each layer has the reserved name inside, and `module` may be a part's."""
    state = torch_layer().state_dict()
    tensors = {f"module.layers.0._orig_mod.attn.{name}": t for name, t in state.items()}
    file = tmp_path / "layer.safetensors"
    save_file({**tensors, "head.weight": torch.zeros(2, 2)}, file)

    checkpoint = open_file(file)

    assert checkpoint.wrappers == ("_orig_mod.",)
    assert attention_modules(checkpoint) == ["module.layers.0.attn"]


@pytest.mark.parametrize("path", [("state_dict",), ("model",), ("module",), ("model", "module")])
def test_open_file_reads_the_weights_of_a_training_checkpoint(
    path: tuple[str, ...], tmp_path: Path
) -> None:
    """What lies beside them, such as an optimizer's state, is no part of the layer."""
    module = torch_layer()
    value: dict[str, Any] = {f"module.{name}": t for name, t in module.state_dict().items()}
    for key in reversed(path):
        value = {key: value, "optimizer": {"state": {}}, "epoch": 3, "loss": torch.tensor(0.5)}
    torch.save(value, tmp_path / "checkpoint.pt")

    checkpoint = open_file(tmp_path / "checkpoint.pt")

    assert checkpoint.wrappers == (*path, "module.")
    found = read_torch_layer(checkpoint, "", HEADS)
    assert torch.equal(found.spec.tensors["output.weight"], module.out_proj.weight)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"model": {"a": torch.zeros(1)}, "state_dict": {"a": torch.ones(1)}},
            "ambiguous: a training checkpoint with weights under 'state_dict' and 'model'; save the"
            " one that counts as a file of its own",
        ),
        (
            {"ema": {"a": torch.zeros(1)}},
            "expected a state dict, got a training checkpoint; save what it holds under 'ema' as a"
            " file of its own",
        ),
        (
            {"a._orig_mod.x": torch.zeros(1), "a.x": torch.ones(1)},
            "ambiguous: a._orig_mod.x and a.x are the same tensor without what training puts around"
            " a module; save the one that counts",
        ),
    ],
    ids=["two", "unknown", "twice"],
)
def test_open_file_ambiguous_checkpoint_is_refused(
    value: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Which weights count is never guessed."""
    file = tmp_path / "checkpoint.pt"
    torch.save(value, file)

    with pytest.raises(SourceInvalid) as caught:
        open_file(file)

    assert str(caught.value) == f"{file}: {message}"
