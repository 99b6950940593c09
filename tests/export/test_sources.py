"""Where weights come from: every form is read right, everything else is refused by name."""

import pickle
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor, nn

from export.sources import Attention, Source, SourceInvalid, from_state, from_torch, random_layer
from service.layer_config import PROJECTIONS

SEED = 5
"""Any: every rule here holds for all weights."""

TOLERANCE = 1e-5
"""The contract's promise for FP32."""

EMBED_DIM, HEADS, MEMORY_DIM = 8, 2, 6

State = dict[str, Any]


def _module(**options: Any) -> nn.MultiheadAttention:
    """Return PyTorch's own layer with random weights; biases, which start at 0, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = nn.MultiheadAttention(EMBED_DIM, HEADS, batch_first=True, **options)
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    return module.eval()


def _separate(state: State) -> State:
    """Return a packed state with a projection each for queries, keys and values."""
    query, key, value = state["in_proj_weight"].chunk(3)
    rest = {name: tensor for name, tensor in state.items() if name != "in_proj_weight"}
    separate = {"q_proj_weight": query, "k_proj_weight": key, "v_proj_weight": value}
    return rest | {name: tensor.clone() for name, tensor in separate.items()}


def _assert_answers_as(source: Source, module: nn.MultiheadAttention) -> None:
    """Return when our layer and the source's reference answer as this module does."""
    random = torch.Generator().manual_seed(SEED)
    query = torch.randn(2, 5, module.embed_dim, generator=random)
    memory = None
    if source.config.memory_dim is not None:
        memory = torch.randn(2, 4, source.config.memory_dim, generator=random)
    keys = query if memory is None else memory
    assert source.reference is not None
    with torch.no_grad():
        expected = module(query, keys, keys, average_attn_weights=False)
        ours = source.layer(query, memory)
        reference = source.reference(query, keys, keys, average_attn_weights=False)
    for found in ((ours.output, ours.weights), reference):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


def _tensors(source: Source) -> dict[str, Tensor]:
    return dict(source.spec.tensors)


def test_random_layer_same_seed_gives_the_same_weights() -> None:
    """A seed is all that is needed to make a layer again."""
    first, second = random_layer(8, 2, seed=SEED), random_layer(8, 2, seed=SEED)

    assert all(torch.equal(a, _tensors(second)[name]) for name, a in _tensors(first).items())
    assert first.origin == {"kind": "random", "seed": SEED}


def test_random_layer_weights_are_those_pytorch_draws() -> None:
    """Whoever knows the seed can make the same layer with PyTorch alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        expected = nn.MultiheadAttention(EMBED_DIM, HEADS).in_proj_weight

    source = random_layer(EMBED_DIM, HEADS, seed=SEED)

    names = ("query", "key", "value")
    weights = [source.spec.tensors[f"{name}.weight"] for name in names]
    assert torch.equal(torch.cat(weights), expected)


def test_random_layer_other_seed_gives_other_weights() -> None:
    """Every tensor depends on the seed, biases included."""
    first, second = random_layer(8, 2, seed=SEED), random_layer(8, 2, seed=SEED + 1)

    assert not any(torch.equal(a, _tensors(second)[name]) for name, a in _tensors(first).items())


@pytest.mark.parametrize("memory_dim", [None, MEMORY_DIM, EMBED_DIM])
@pytest.mark.parametrize("bias", [True, False])
def test_random_layer_has_the_asked_shape(memory_dim: int | None, bias: bool) -> None:
    """Width, heads, memory and bias are those that were asked for, in both layers."""
    source = random_layer(EMBED_DIM, HEADS, seed=SEED, memory_dim=memory_dim, bias=bias)

    config = source.config
    assert (config.embed_dim, config.num_heads) == (EMBED_DIM, HEADS)
    assert (config.memory_dim, config.biases) == (memory_dim, PROJECTIONS if bias else ())
    assert any(name.endswith("bias") for name in _tensors(source)) == bias
    assert source.reference is not None
    _assert_answers_as(source, source.reference)


def test_random_layer_draws_biases() -> None:
    """A bias of zeros could be left out by mistake without anyone seeing it."""
    source = random_layer(8, 2, seed=SEED)

    assert all(tensor.all() for name, tensor in _tensors(source).items() if name.endswith("bias"))


def test_random_layer_leaves_the_global_generator_untouched() -> None:
    """What a caller draws next does not depend on us."""
    before = torch.get_rng_state()

    random_layer(8, 2, seed=SEED)

    assert torch.equal(torch.get_rng_state(), before)


def test_random_layer_is_in_eval_mode() -> None:
    """A source is ready for export."""
    source = random_layer(8, 2, seed=SEED)

    assert not source.layer.training
    assert source.reference is not None
    assert not source.reference.training


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_random_layer_takes_every_seed_of_64_bits(seed: int) -> None:
    """The bounds are PyTorch's own."""
    assert random_layer(4, 1, seed=seed).origin["seed"] == seed


@pytest.mark.parametrize(
    ("embed_dim", "num_heads", "seed", "memory_dim", "message"),
    [
        (8, 3, 0, None, "embed_dim: expected a multiple of num_heads 3, got 8"),
        (8, 0, 0, None, "embed_dim and num_heads: expected positive integers, got 8 and 0"),
        (0, 2, 0, None, "embed_dim and num_heads: expected positive integers, got 0 and 2"),
        (8, 2, 0, 0, "memory_dim: expected a positive integer, got 0"),
        (8, 2, 2**64, None, "seed: expected a number of 64 bits, got 18446744073709551616"),
        (8, 2, -(2**63) - 1, None, "seed: expected a number of 64 bits, got -9223372036854775809"),
    ],
)
def test_random_layer_impossible_shape_is_refused(
    embed_dim: int, num_heads: int, seed: int, memory_dim: int | None, message: str
) -> None:
    """The message names the number that is wrong."""
    with pytest.raises(SourceInvalid) as caught:
        random_layer(embed_dim, num_heads, seed=seed, memory_dim=memory_dim)

    assert str(caught.value) == message


@pytest.mark.fault("G11")
@pytest.mark.parametrize(
    ("embed_dim", "num_heads", "memory_dim", "weights_gb"),
    [(100_000, 10, None, "160.0"), (8, 2, 10**9, "64.0"), (16_384, 128, None, "4.3")],
)
def test_layer_that_needs_more_memory_than_there_is_is_refused_before_it_is_allocated(
    embed_dim: int,
    num_heads: int,
    memory_dim: int | None,
    weights_gb: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message has the weights' size, the need and what is here."""
    monkeypatch.setattr("export.sources.memory_limit", lambda: 8_000_000_000)

    with pytest.raises(SourceInvalid) as caught:
        random_layer(embed_dim, num_heads, seed=0, memory_dim=memory_dim)

    need = 4 * float(weights_gb) + 1.5
    message = str(caught.value)
    assert message.startswith(
        f"embed_dim: weights of {weights_gb} GB at width {embed_dim} take about "
    )
    assert message.endswith(
        " GB of memory to be exported, and there are 8.0 GB here; export on a larger machine"
    )
    assert float(re.findall(r"about ([\d.]+) GB", message)[0]) == pytest.approx(need, rel=0.01)


MODULES: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed without bias": {"bias": False},
    "separate": {"kdim": MEMORY_DIM, "vdim": MEMORY_DIM},
    "separate without bias": {"kdim": MEMORY_DIM, "vdim": MEMORY_DIM, "bias": False},
}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_from_torch_saved_layer_answers_as_itself(
    options: dict[str, Any], suffix: str, tmp_path: Path
) -> None:
    """A state dict of nn.MultiheadAttention is read whatever form and file it comes in."""
    module, file = _module(**options), tmp_path / f"layer{suffix}"
    if suffix == ".safetensors":
        save_file(module.state_dict(), file)
    else:
        torch.save(module.state_dict(), file)

    source = from_torch(file, HEADS)

    _assert_answers_as(source, module)
    assert source.config.memory_dim == options.get("kdim")
    assert bool(source.config.biases) == options.get("bias", True)
    assert source.origin == {"kind": "torch", "file": f"layer{suffix}"}


def test_from_torch_reads_files_of_old_versions(tmp_path: Path) -> None:
    """What PyTorch wrote before it wrote archives is read as well."""
    module, file = _module(), tmp_path / "layer.pt"
    torch.save(module.state_dict(), file, _use_new_zipfile_serialization=False)

    source = from_torch(file, HEADS)

    _assert_answers_as(source, module)


@pytest.mark.parametrize("bias", [True, False])
def test_from_state_separate_projections_of_equal_width_are_cross_attention(bias: bool) -> None:
    """Who gives keys a projection of their own means a memory, though PyTorch would pack them."""
    module = _module(bias=bias)

    source = from_state(_separate(module.state_dict()), HEADS, origin={})

    assert source.config.memory_dim == EMBED_DIM
    _assert_answers_as(source, module)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_from_torch_other_precision_becomes_fp32(
    dtype: torch.dtype, suffix: str, tmp_path: Path
) -> None:
    """Weights are served in FP32, each the nearest to what was saved."""
    module, file = _module().to(dtype), tmp_path / f"layer{suffix}"
    if suffix == ".safetensors":
        save_file(module.state_dict(), file)
    else:
        torch.save(module.state_dict(), file)

    source = from_torch(file, HEADS)

    assert {tensor.dtype for tensor in _tensors(source).values()} == {torch.float32}
    _assert_answers_as(source, module.float())


def test_from_torch_layer_in_training_mode_answers_without_dropout(tmp_path: Path) -> None:
    """A layer saved amid training is exported as it would be used."""
    module, file = _module(dropout=0.5).train(), tmp_path / "layer.pt"
    torch.save(module.state_dict(), file)

    source = from_torch(file, HEADS)

    assert not source.layer.training
    _assert_answers_as(source, module.eval())


def test_from_state_keeps_its_own_copy() -> None:
    """What happens to a caller's tensors afterwards changes nothing."""
    state = _module().state_dict()
    source = from_state(state, HEADS, origin={})
    before = source.spec.tensors["query.weight"].clone()

    state["in_proj_weight"].zero_()

    assert torch.equal(source.spec.tensors["query.weight"], before)


def _with(**changes: Any) -> State:
    """Return a good packed state with changes; None takes a key away, `__` stands for a dot."""
    state = dict(_module().state_dict())
    for name, value in changes.items():
        if value is None:
            del state[name.replace("__", ".")]
        else:
            state[name.replace("__", ".")] = value
    return state


def _cross(query: Tensor, key: Tensor, value: Tensor) -> State:
    """Return a state with these separate projections."""
    return _with(in_proj_weight=None, q_proj_weight=query, k_proj_weight=key, v_proj_weight=value)


ANY = torch.zeros
STATES: dict[str, tuple[Callable[[], State], str]] = {
    "a whole encoder layer": (
        lambda: {f"self_attn.{name}": tensor for name, tensor in _with().items()},
        "state dict: expected the keys of one nn.MultiheadAttention, got self_attn.in_proj_bias;"
        " it holds these attention modules: self_attn; name one with --prefix",
    ),
    "a key that is no text": (
        lambda: {**_with(), 7: ANY(1)},  # type: ignore[dict-item]
        "state dict: 7: a tensor that this version does not know and that may change the layer's"
        " answer; if it has no part in the attention, save the checkpoint again without it",
    ),
    "nothing": (dict, "state dict: out_proj.weight is missing"),
    "no output matrix": (
        lambda: _with(out_proj__weight=None),
        "state dict: out_proj.weight is missing",
    ),
    "no projection": (
        lambda: _with(in_proj_weight=None),
        "state dict: expected in_proj_weight or k_proj_weight, got neither",
    ),
    "no value projection": (
        lambda: _with(in_proj_weight=None, q_proj_weight=ANY(8, 8), k_proj_weight=ANY(8, 8)),
        "state dict: expected in_proj_weight or v_proj_weight, got neither",
    ),
    "packed and separate": (
        lambda: _with(q_proj_weight=ANY(8, 8)),
        "state dict: expected in_proj_weight or q_proj_weight, k_proj_weight, v_proj_weight, got"
        " both in_proj_weight and q_proj_weight",
    ),
    "input bias alone": (
        lambda: _with(out_proj__bias=None),
        "state dict: expected in_proj_bias and out_proj.bias, or neither",
    ),
    "output bias alone": (
        lambda: _with(in_proj_bias=None),
        "state dict: expected in_proj_bias and out_proj.bias, or neither",
    ),
    "NaN": (
        lambda: _with(out_proj__weight=torch.full((8, 8), torch.nan)),
        "state dict: out_proj.weight: expected finite FP32 numbers, got NaN or infinity",
    ),
    "infinity": (
        lambda: _with(in_proj_bias=torch.full((24,), -torch.inf)),
        "state dict: in_proj_bias: expected finite FP32 numbers, got NaN or infinity",
    ),
    "beyond FP32": (
        lambda: _with(out_proj__bias=torch.full((8,), 1e39, dtype=torch.float64)),
        "state dict: out_proj.bias: expected finite FP32 numbers, got NaN or infinity",
    ),
    "integers": (
        lambda: _with(in_proj_weight=ANY(24, 8, dtype=torch.int64)),
        "state dict: in_proj_weight: expected floating-point weights"
        " (float32, float16, bfloat16, float64), got int64; quantised numbers are not weights as"
        " they stand: dequantise the model first, e.g. model.dequantize(), and save it again",
    ),
    "a list": (
        lambda: _with(out_proj__bias=[0.0] * 8),
        "state dict: out_proj.bias: expected a tensor, got list",
    ),
    "a sparse tensor": (
        lambda: _with(out_proj__weight=torch.eye(8).to_sparse()),
        "state dict: out_proj.weight: expected a dense tensor with its numbers",
    ),
    "a tensor without numbers": (
        lambda: _with(out_proj__weight=torch.empty(8, 8, device="meta")),
        "state dict: out_proj.weight: expected a dense tensor with its numbers",
    ),
    "a scalar for a matrix": (
        lambda: _with(out_proj__weight=torch.tensor(1.0)),
        "state dict: out_proj.weight: expected a matrix, got shape []",
    ),
    "a scalar for a projection": (
        lambda: _cross(ANY(8, 8), torch.tensor(1.0), ANY(8, 8)),
        "state dict: k_proj_weight: expected a matrix, got shape []",
    ),
    "a matrix for a vector": (
        lambda: _with(out_proj__bias=ANY(8, 1)),
        "state dict: out_proj.bias: expected a vector, got shape [8, 1]",
    ),
    "output matrix not square": (
        lambda: _with(out_proj__weight=ANY(8, 4)),
        "state dict: out_proj.weight: expected shape [8, 8], got [8, 4]",
    ),
    "packed matrix of two parts": (
        lambda: _with(in_proj_weight=ANY(16, 8)),
        "state dict: in_proj_weight: expected shape [24, 8], got [16, 8]",
    ),
    "short bias": (
        lambda: _with(in_proj_bias=ANY(8)),
        "state dict: in_proj_bias: expected shape [24], got [8]",
    ),
    "query over the memory": (
        lambda: _cross(ANY(8, 6), ANY(8, 6), ANY(8, 6)),
        "state dict: q_proj_weight: expected shape [8, 8], got [8, 6]",
    ),
    "key of half the heads": (
        lambda: _cross(ANY(8, 8), ANY(4, 8), ANY(12, 8)),
        "state dict: k_proj_weight: expected shape [8, 8], got [4, 8]",
    ),
    "memory of width 0": (
        lambda: _cross(ANY(8, 8), ANY(8, 0), ANY(8, 0)),
        "memory_dim: expected a positive integer, got 0",
    ),
}


@pytest.mark.parametrize(("make", "message"), STATES.values(), ids=STATES)
def test_from_state_what_is_no_attention_layer_is_refused(
    make: Callable[[], State], message: str
) -> None:
    """The message names the tensor, what was expected and what came."""
    state = make()

    with pytest.raises(SourceInvalid) as caught:
        from_state(state, HEADS, origin={})

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("num_heads", "message"),
    [
        (3, "embed_dim: expected a multiple of num_heads 3, got 8"),
        (0, "embed_dim and num_heads: expected positive integers, got 8 and 0"),
    ],
)
def test_from_torch_wrong_number_of_heads_is_refused(
    num_heads: int, message: str, tmp_path: Path
) -> None:
    """A state dict does not say how many heads it has, but it must divide by them."""
    file = tmp_path / "layer.pt"
    torch.save(_module().state_dict(), file)

    with pytest.raises(SourceInvalid) as caught:
        from_torch(file, num_heads)

    assert str(caught.value) == message


def _saved(value: object, file: Path, **options: Any) -> bytes:
    torch.save(value, file, **options)
    return file.read_bytes()


FILES: dict[str, tuple[str, Callable[[Path], bytes], str]] = {
    "a module": (
        ".pt",
        lambda file: _saved(_module(), file),
        "expected a state dict, got objects of other classes; save the weights alone:"
        " torch.save(layer.state_dict(), FILE)",
    ),
    "another object": (
        ".pt",
        lambda file: _saved({"out_proj.weight": date(2026, 1, 1)}, file),
        "expected a state dict, got objects of other classes; save the weights alone:"
        " torch.save(layer.state_dict(), FILE)",
    ),
    "a plain pickle": (
        ".pt",
        lambda file: pickle.dumps(date(2026, 1, 1)),
        "expected a file of weights only: UnpicklingError: Weights only load failed",
    ),
    "a tensor": (
        ".pt",
        lambda file: _saved(torch.zeros(3), file),
        "expected a state dict, got Tensor",
    ),
    "a list": (".pt", lambda file: _saved([1.0], file), "expected a state dict, got list"),
    "an empty file": (
        ".pt",
        lambda file: b"",
        "expected a file of weights only: EOFError",
    ),
    "half a file": (
        ".pt",
        lambda file: (whole := _saved(_module().state_dict(), file))[: len(whole) // 2],
        "expected a file of weights only: RuntimeError: PytorchStreamReader failed reading zip"
        " archive: failed finding central directory",
    ),
    "text": (
        ".pt",
        lambda file: b"hello, this is no file of weights\n",
        "expected a file of weights only: ",
    ),
    "an empty safetensors file": (
        ".safetensors",
        lambda file: b"",
        "expected a file of weights only: SafetensorError: Error while deserializing header:"
        " header too small",
    ),
    "half a safetensors file": (
        ".safetensors",
        lambda file: (whole := save(_module().state_dict()))[: len(whole) // 2],
        "expected a file of weights only: SafetensorError: Error while deserializing header:"
        " incomplete metadata, file not fully covered",
    ),
    "text named safetensors": (
        ".safetensors",
        lambda file: b"hello, this is no file of weights\n",
        "expected a file of weights only: SafetensorError: Error while deserializing header:"
        " header too large",
    ),
    "a pickle named safetensors": (
        ".safetensors",
        lambda file: _saved(_module().state_dict(), file),
        "expected a file of weights only: SafetensorError: Error while deserializing header:"
        " header too large",
    ),
}


@pytest.mark.fault("E10", "E11", "G10")
@pytest.mark.parametrize(("suffix", "make", "message"), FILES.values(), ids=FILES)
def test_from_torch_what_is_no_file_of_weights_is_refused(
    suffix: str, make: Callable[[Path], bytes], message: str, tmp_path: Path
) -> None:
    """Nothing but tensors is ever loaded; the message is one line and names the file."""
    file = tmp_path / f"layer{suffix}"
    file.write_bytes(make(file))

    with pytest.raises(SourceInvalid) as caught:
        from_torch(file, HEADS)

    assert str(caught.value).startswith(f"{file}: {message}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_from_torch_missing_file_is_refused(suffix: str, tmp_path: Path) -> None:
    """The message names the file."""
    file = tmp_path / f"layer{suffix}"

    with pytest.raises(SourceInvalid) as caught:
        from_torch(file, HEADS)

    assert str(caught.value) == f"{file}: no such file"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_from_torch_directory_is_refused(suffix: str, tmp_path: Path) -> None:
    """A directory is no file of weights."""
    directory = tmp_path / f"layer{suffix}"
    directory.mkdir()

    with pytest.raises(SourceInvalid) as caught:
        from_torch(directory, HEADS)

    assert str(caught.value).startswith(f"{directory}: expected a file of weights only: ")


@given(
    suffix=st.sampled_from([".pt", ".legacy.pt", ".safetensors"]),
    changes=st.dictionaries(st.integers(0, 600), st.integers(0, 255), min_size=1, max_size=4),
    length=st.integers(0, 4000),
)
@settings(
    deadline=None,
    derandomize=True,
    # One file is written over and over, which is what is wanted.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_from_torch_damaged_file_is_read_or_refused(
    suffix: str, changes: dict[int, int], length: int, tmp_path: Path
) -> None:
    """Whatever bytes a file holds, it is a layer or a refusal of one line, never another error."""
    file, state = tmp_path / f"layer{suffix}", _module().state_dict()
    is_legacy = ".legacy" in suffix
    whole = (
        save(state)
        if suffix == ".safetensors"
        else _saved(state, file, _use_new_zipfile_serialization=not is_legacy)
    )
    damaged = bytearray(whole)
    for place, byte in changes.items():
        damaged[place] = byte
    file.write_bytes(damaged[:length] if length < len(damaged) else damaged)

    try:
        outcome = from_torch(file, HEADS).config.embed_dim
    except SourceInvalid as error:
        outcome = len(str(error).splitlines())

    assert outcome in (EMBED_DIM, 1)


def _save(state: State, file: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    return file


def _decoder_layer() -> nn.TransformerDecoderLayer:
    """Return PyTorch's own decoder layer, with self_attn and, over a memory, multihead_attn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layer = nn.TransformerDecoderLayer(EMBED_DIM, HEADS, 16, batch_first=True)
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    return layer.eval()


@pytest.mark.fault("G6")
def test_from_torch_packed_cross_attention_answers_over_a_memory(tmp_path: Path) -> None:
    """What packed weights do not say can be stated: then keys and values come from a memory."""
    module = _module()
    file = _save(module.state_dict(), tmp_path / "layer.safetensors")

    source = from_torch(file, HEADS, attention="cross")

    assert source.config.memory_dim == EMBED_DIM
    _assert_answers_as(source, module)


@pytest.mark.parametrize("bias", [True, False])
def test_from_state_packed_weights_are_self_attention_unless_stated(bias: bool) -> None:
    """The default is PyTorch's common use, and may be stated as well."""
    module = _module(bias=bias)

    for attention in (None, "self"):
        source = from_state(module.state_dict(), HEADS, origin={}, attention=attention)

        assert source.config.memory_dim is None
        _assert_answers_as(source, module)


def test_from_state_separate_projections_of_equal_width_can_be_self_attention() -> None:
    """Who says self gets self, whichever form the weights have."""
    module = _module()

    source = from_state(_separate(module.state_dict()), HEADS, origin={}, attention="self")

    assert source.config.memory_dim is None
    _assert_answers_as(source, module)


def test_from_state_memory_of_another_width_is_no_self_attention() -> None:
    """A statement that contradicts the weights is refused."""
    state = _module(kdim=MEMORY_DIM, vdim=MEMORY_DIM).state_dict()

    with pytest.raises(SourceInvalid) as caught:
        from_state(state, HEADS, origin={}, attention="self")

    assert str(caught.value) == (
        "state dict: expected keys and values of width 8 for --attention self, got 6:"
        " the layer is cross-attention"
    )


@pytest.mark.parametrize(
    ("name", "attention"), [("self_attn", None), ("self_attn", "self"), ("multihead_attn", "cross")]
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dot", ["", "."])
def test_from_torch_module_of_a_larger_one_is_taken_by_name(
    name: str, attention: Attention | None, suffix: str, dot: str, tmp_path: Path
) -> None:
    """A decoder's state dict holds two attention modules; each is exported as what it is."""
    layer, file = _decoder_layer(), tmp_path / f"decoder{suffix}"
    state = {f"decoder.layers.0.{key}": tensor for key, tensor in layer.state_dict().items()}
    if suffix == ".pt":
        torch.save(state, file)
    else:
        save_file(state, file)
    prefix = f"decoder.layers.0.{name}"

    source = from_torch(file, HEADS, prefix=prefix + dot, attention=attention)

    module = getattr(layer, name)
    assert source.config.is_cross == (attention == "cross")
    assert source.origin == {"kind": "torch", "file": file.name, "module": prefix}
    _assert_answers_as(source, module)


@pytest.mark.parametrize(
    "name",
    [
        *("multihead_attn", "cross_attn", "crossattention", "cross_attention", "encoder_attn"),
        *("enc_attn", "EncDecAttention", "encoder_decoder_attention", "xattn", "src_attn"),
        "crossattention.self",
    ],
)
@pytest.mark.fault("G6")
def test_from_torch_module_with_the_name_of_cross_attention_needs_a_word(
    name: str, tmp_path: Path
) -> None:
    """Cross-attention is never published as self-attention because nobody said which it is."""
    state = {f"layers.0.{name}.{key}": tensor for key, tensor in _module().state_dict().items()}
    file = _save(state, tmp_path / "decoder.safetensors")
    prefix = f"layers.0.{name}"

    with pytest.raises(SourceInvalid) as caught:
        from_torch(file, HEADS, prefix=prefix)

    assert str(caught.value) == (
        f"{file}: {prefix}: the name is that of cross-attention, but packed weights are the same"
        " for both: say --attention cross (keys and values come from a memory) or --attention self"
    )
    assert not from_torch(file, HEADS, prefix=prefix, attention="self").config.is_cross
    assert from_torch(file, HEADS, prefix=prefix, attention="cross").config.is_cross


@pytest.mark.parametrize("name", ["multihead_attn", "decoder.0.cross_attn"])
@pytest.mark.fault("G6")
def test_from_torch_file_with_the_name_of_cross_attention_needs_a_word(
    name: str, tmp_path: Path
) -> None:
    """A module saved alone has no name but its file's."""
    file = _save(_module().state_dict(), tmp_path / f"{name}.safetensors")

    with pytest.raises(SourceInvalid, match=f"{name}: the name is that of cross-attention"):
        from_torch(file, HEADS)

    assert from_torch(file, HEADS, attention="cross").config.is_cross


def test_from_torch_separate_weights_say_themselves_that_they_are_cross(tmp_path: Path) -> None:
    """Keys of another width than queries leave nothing to state."""
    module = _module(kdim=MEMORY_DIM, vdim=MEMORY_DIM)
    file = _save(module.state_dict(), tmp_path / "cross_attn.safetensors")

    source = from_torch(file, HEADS)

    assert source.config.memory_dim == MEMORY_DIM
    _assert_answers_as(source, module)


@pytest.mark.fault("E10")
def test_from_torch_larger_module_lists_what_can_be_named(tmp_path: Path) -> None:
    """Whoever saved a whole layer learns which names to give."""
    file = _save(_decoder_layer().state_dict(), tmp_path / "decoder.safetensors")

    with pytest.raises(SourceInvalid) as caught:
        from_torch(file, HEADS)

    assert str(caught.value) == (
        f"{file}: expected the keys of one nn.MultiheadAttention, got linear1.bias; it holds these"
        " attention modules: multihead_attn, self_attn; name one with --prefix"
    )


def test_from_torch_many_modules_are_counted(tmp_path: Path) -> None:
    """A message stays one readable line however large the model is."""
    state = {
        f"layers.{i}.self_attn.{key}": tensor.clone()
        for i in range(10)
        for key, tensor in _module().state_dict().items()
    }
    file = _save(state, tmp_path / "encoder.safetensors")

    with pytest.raises(SourceInvalid, match=r"layers\.7\.self_attn and 2 more; name one with"):
        from_torch(file, HEADS)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (
            "decoder",
            "expected tensors below decoder., got none; it holds these attention modules:"
            " multihead_attn, self_attn; name one with --prefix",
        ),
        # `self` is the beginning of `self_attn`, but not of its dotted name.
        (
            "self",
            "expected tensors below self., got none; it holds these attention modules:"
            " multihead_attn, self_attn; name one with --prefix",
        ),
        (
            "linear1",
            "expected the keys of one nn.MultiheadAttention, got linear1.bias;"
            " there is no nn.MultiheadAttention in it",
        ),
    ],
)
def test_from_torch_prefix_of_no_attention_is_refused(
    prefix: str, message: str, tmp_path: Path
) -> None:
    """A misspelt name is answered with those that there are."""
    file = _save(_decoder_layer().state_dict(), tmp_path / "decoder.safetensors")

    with pytest.raises(SourceInvalid) as caught:
        from_torch(file, HEADS, prefix=prefix)

    assert str(caught.value) == f"{file}: {message}"


EXTRA: dict[str, tuple[str, str]] = {
    "LoRA": ("lora_A.default.weight", "adapter"),
    "LoRA of the output": ("out_proj.lora_B.weight", "adapter"),
    "quantised output": ("out_proj.scale", "dequantise"),
    "packed parameters": ("out_proj._packed_params._packed_params", "dequantise"),
    "pruning mask": ("in_proj_weight_mask", "prune.remove"),
    "pruned weight": ("in_proj_weight_orig", "prune.remove"),
    "parametrization": ("parametrizations.in_proj_weight.original", "remove_parametrizations"),
    "weight norm": ("out_proj.weight_g", "remove_parametrizations"),
    "query norm": ("q_norm.weight", "normalisation"),
    "rotary cache": ("rotary.inv_freq", "rotary"),
    "relative positions": ("relative_position_bias_table", "relative"),
    "unknown": ("gate", "does not know"),
}


@pytest.mark.parametrize("prefix", ["", "model.attn"])
@pytest.mark.parametrize(("name", "words"), EXTRA.values(), ids=EXTRA)
@pytest.mark.fault("G5")
def test_from_torch_tensor_that_the_layer_does_not_use_is_refused(
    name: str, words: str, prefix: str, tmp_path: Path
) -> None:
    """A state dict is as closed as a checkpoint: the same mechanism reads both."""
    start = f"{prefix}." if prefix else ""
    state = {f"{start}{key}": tensor for key, tensor in {**_with(), name: ANY(4)}.items()}
    file = _save(state, tmp_path / "layer.safetensors")

    with pytest.raises(SourceInvalid) as caught:
        from_torch(file, HEADS, prefix=prefix)

    assert f"{file}: {start}{name}: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.fault("G1")
def test_from_torch_adapter_beside_the_module_is_refused(tmp_path: Path) -> None:
    """PEFT wraps a module and keeps the adapter beside the weights, not below them."""
    state = {f"attn.base_layer.{key}": tensor for key, tensor in _with().items()}
    file = _save({**state, "attn.lora_A.default.weight": ANY(2, 8)}, tmp_path / "x.safetensors")

    with pytest.raises(SourceInvalid, match=r"an adapter that was not merged .*merge_and_unload"):
        from_torch(file, HEADS, prefix="attn.base_layer")


NOT_FLOATS = [
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", NOT_FLOATS, ids=str)
@pytest.mark.parametrize(
    "name", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
)
@pytest.mark.fault("G2")
def test_from_torch_any_tensor_that_is_no_float_is_refused(
    name: str, dtype: torch.dtype, suffix: str, tmp_path: Path
) -> None:
    """Each tensor's dtype is looked at on its own, and named; none ends in a traceback."""
    file = tmp_path / f"layer{suffix}"
    state = {**_with(), name: _with()[name].to(dtype)}
    if suffix == ".pt":
        torch.save(state, file)
    else:
        save_file(state, file)

    with pytest.raises(SourceInvalid) as caught:
        from_torch(file, HEADS)

    assert f"{file}: {name}: expected floating-point weights" in str(caught.value)
    assert "dequantise" in str(caught.value)
