"""BERT-family checkpoints: one layer is read right, and nothing that changes it is left out."""

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from export.families.registry import MODULES
from export.sources import SourceInvalid, from_hf
from service.contract import FP32_TOLERANCE
from service.inference.parity import absolute_error, relative_error
from service.layer_config import LayerConfig
from tests.support.checkpoints import (
    BERT,
    EMBED_DIM,
    HEADS,
    LAYERS,
    SEED,
    checkpoint_tensors,
    write_checkpoint,
    write_tensors,
)

ONE_FOLDER = settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    # One checkpoint is written over and over, which is what is wanted.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

NOT_FLOATS = [
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
]


@pytest.mark.parametrize("layer", [0, 1, 10, 11])
@pytest.mark.parametrize("prefix", ["bert.", "", "roberta."])
def test_from_hf_takes_exactly_the_asked_layer(prefix: str, layer: int, tmp_path: Path) -> None:
    """Layer 1 is not layer 11, whatever the checkpoint calls its encoder."""
    tensors = write_checkpoint(tmp_path / "checkpoint", prefix=prefix)

    source = from_hf(tmp_path / "checkpoint", layer)

    names = _names(f"{prefix}encoder.layer.{layer}")
    for ours, theirs in names.items():
        assert torch.equal(source.spec.tensors[ours], tensors[theirs])
    assert source.config == LayerConfig(EMBED_DIM, HEADS)
    assert source.origin == {
        "kind": "hf",
        "checkpoint": "checkpoint",
        "family": "bert",
        "layer": layer,
    }
    assert source.spec.tensors.keys() == names.keys()
    assert sorted(source.tensors) == sorted(names.values())


def _names(layer: str) -> dict[str, str]:
    """Return what a checkpoint calls the tensors of a layer, by the names of `LayerSpec`."""
    modules = {name: f"{layer}.attention.self.{name}" for name in ("query", "key", "value")}
    modules["output"] = f"{layer}.attention.output.dense"
    return {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }


def test_from_hf_layer_answers_as_pytorchs_own(tmp_path: Path) -> None:
    """The parts of a checkpoint's layer come together as one attention layer."""
    write_checkpoint(tmp_path)

    source = from_hf(tmp_path, 3)

    assert source.reference is not None
    embeddings = torch.randn(2, 5, EMBED_DIM, generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        output, weights, *_ = source.layer(embeddings)
        expected = source.reference(*[embeddings] * 3, average_attn_weights=False)
    assert relative_error(output.numpy(), expected[0].numpy()) <= FP32_TOLERANCE
    assert absolute_error(weights.numpy(), expected[1].numpy()) <= FP32_TOLERANCE


def test_from_hf_half_precision_becomes_fp32(tmp_path: Path) -> None:
    """Checkpoints are often saved in FP16."""
    name = "bert.encoder.layer.2.attention.self.key.weight"
    half = torch.full((8, 8), 0.1, dtype=torch.float16)
    write_checkpoint(tmp_path, changes={name: half})

    source = from_hf(tmp_path, 2)

    assert torch.equal(source.spec.tensors["key.weight"], half.float())


def test_from_hf_records_the_checkpoints_own_name(tmp_path: Path) -> None:
    """A manifest says where its weights came from as their author would."""
    write_checkpoint(tmp_path, config=BERT | {"_name_or_path": "author/model"})

    source = from_hf(tmp_path, 0)

    assert source.origin["checkpoint"] == "author/model"


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "camembert", "electra"])
def test_from_hf_reads_every_family_of_this_layout(family: str, tmp_path: Path) -> None:
    """Without a word on positions they are absolute."""
    config = {name: value for name, value in BERT.items() if name != "position_embedding_type"}
    write_checkpoint(tmp_path, config=config | {"model_type": family})

    source = from_hf(tmp_path, 0)

    assert source.config.embed_dim == EMBED_DIM


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_from_hf_layer_out_of_range_is_refused(layer: int, tmp_path: Path) -> None:
    """The message says which layers there are."""
    write_checkpoint(tmp_path)

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, layer)

    assert str(caught.value) == f"{tmp_path}: --layer: expected 0 to 11, got {layer}"


FAMILY = f"model_type: expected one of {', '.join(sorted(MODULES))}, got "
BY_HAND = (
    "save its query, key, value and output weights as those of an nn.MultiheadAttention, and export"
    ' that with --from-torch; docs/exporting.md, "Other families", shows how'
)
IN_PYTHON = (
    "and its layout is not read yet: describe the layer in Python, as a LayerSpec, and export that"
    " with --from-python; docs/exporting.md shows how"
)
PLAIN = f"its attention is plain multi-head attention, whose layout is not read yet: {BY_HAND}"
UNKNOWN = (
    "this version does not know how that family computes attention; if it is plain multi-head"
    " attention, softmax(Q K^T / sqrt(d)) V with a key and a value for every head and no positions"
    f" inside: {BY_HAND}"
)
NEVER = "which the formula of this version does not have; a layer of it cannot be exported"
ROTARY = "its queries and keys are turned by rotary positions"
RELATIVE = "it adds terms of relative positions to the scores"

CONFIGS: dict[str, tuple[object, str]] = {
    "no architecture": ({}, f"{FAMILY}None; {UNKNOWN}"),
    "an unknown architecture": (BERT | {"model_type": "mamba"}, f"{FAMILY}'mamba'; {UNKNOWN}"),
    "a list of architectures": (BERT | {"model_type": ["bert"]}, f"{FAMILY}['bert']; {UNKNOWN}"),
    **{
        f"{family}, whose layout is not read": (BERT | {"model_type": family}, message)
        for family in ("dinov2", "hubert", "xlm", "vit_mae", "wav2vec2")
        for message in [f"{FAMILY}{family!r}; {PLAIN}"]
    },
    "opt, which is causal besides": (
        BERT | {"model_type": "opt"},
        f"{FAMILY}'opt'; {PLAIN}; it attends causally: add --causal",
    ),
    **{
        f"{family}, which has more": (
            BERT | {"model_type": family},
            f"{FAMILY}{family!r}; {reason}, {IN_PYTHON}",
        )
        for family, reason in {
            "cohere": f"{ROTARY}, and several heads may share one key and value",
            "mixtral": f"{ROTARY}, and several heads may share one key and value",
            "roformer": ROTARY,
            "switch_transformers": "it adds a bias of distances to the scores, and does not divide"
            " them by sqrt(d)",
            "mpt": "it adds a bias of distances to the scores (ALiBi)",
        }.items()
    },
    **{
        f"{family}, which computes more": (
            BERT | {"model_type": family},
            f"{FAMILY}{family!r}; {reason}, {NEVER}",
        )
        for family, reason in {
            "deberta": RELATIVE,
            "deberta-v2": RELATIVE,
            "deepseek_v3": "its keys and values are made of a compressed input (multi-head latent"
            " attention)",
        }.items()
    },
    "relative positions": (
        BERT | {"position_embedding_type": "relative_key_query"},
        "position_embedding_type: expected absolute, got 'relative_key_query'; relative positions"
        " add terms inside the softmax that the formula of this version does not have",
    ),
    "no number of layers": (
        {"model_type": "bert", "num_attention_heads": 2},
        "num_hidden_layers: expected a positive integer, got None",
    ),
    "heads in words": (
        BERT | {"num_attention_heads": "two"},
        "num_attention_heads: expected a positive integer, got 'two'",
    ),
    "heads true": (
        BERT | {"num_attention_heads": True},
        "num_attention_heads: expected a positive integer, got True",
    ),
    "a list": ([], "expected a JSON object, got list"),
}


@pytest.mark.fault("E10")
@pytest.mark.parametrize(("config", "message"), CONFIGS.values(), ids=CONFIGS)
def test_from_hf_other_configuration_is_refused(
    config: object, message: str, tmp_path: Path
) -> None:
    """The message names the file, the key, what was expected and what came."""
    write_checkpoint(tmp_path, config=config)

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 0)

    assert str(caught.value) == f"{tmp_path / 'config.json'}: {message}"


def test_from_hf_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """A configuration of another checkpoint does not pass."""
    write_checkpoint(tmp_path, config=BERT | {"num_attention_heads": 3})

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 0)

    assert str(caught.value) == (
        f"{tmp_path / 'config.json'}: embed_dim: expected a multiple of num_heads 3, got 8"
    )


def test_from_hf_configuration_that_is_no_json_is_refused(tmp_path: Path) -> None:
    """The message says where the text goes wrong."""
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 0)

    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: expected JSON: ")


def test_from_hf_missing_configuration_is_refused(tmp_path: Path) -> None:
    """A file instead of the directory, or a wrong directory, is told at once."""
    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 0)

    file = tmp_path / "config.json"
    assert str(caught.value) == (
        f"{file}: no such file; expected a checkpoint directory with config.json and"
        " model.safetensors"
    )


def test_from_hf_missing_weights_are_refused(tmp_path: Path) -> None:
    """Other forms of weights are not read, and the message says which is."""
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.unlink()

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 0)

    assert str(caught.value) == f"{file}: no such file; expected safetensors weights"


@pytest.mark.parametrize("damage", ["empty", "garbage", "directory"])
def test_from_hf_weights_that_are_no_safetensors_are_refused(damage: str, tmp_path: Path) -> None:
    """The message names the file."""
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.unlink()
    if damage == "directory":
        file.mkdir()
    else:
        file.write_bytes(b"" if damage == "empty" else b"no weights at all, but text\n")

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 0)

    assert str(caught.value).startswith(f"{file}: expected safetensors: ")


KEY = "bert.encoder.layer.4.attention.self.key"

HF_TENSORS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "missing": (
        {f"{KEY}.bias": None},
        "{file}: expected a tensor bert.encoder.layer.4.attention.self.key.bias, got none",
    ),
    "of half the heads": (
        {f"{KEY}.weight": torch.zeros(4, 8)},
        "{file}: bert.encoder.layer.4.attention.self.key.weight: expected shape [8, 8], got [4, 8]",
    ),
    "over another width": (
        {f"{KEY}.weight": torch.zeros(8, 4)},
        "{file}: bert.encoder.layer.4.attention.self.key.weight: expected shape [8, 8], got [8, 4]",
    ),
    "a scalar": (
        {f"{KEY}.bias": torch.tensor(1.0)},
        "{file}: bert.encoder.layer.4.attention.self.key.bias: expected shape [8], got []",
    ),
    "not finite": (
        {f"{KEY}.bias": torch.full((8,), torch.nan)},
        "{file}: bert.encoder.layer.4.attention.self.key.bias:"
        " expected finite FP32 numbers, got NaN or infinity",
    ),
}


@pytest.mark.parametrize(("changes", "message"), HF_TENSORS.values(), ids=HF_TENSORS)
def test_from_hf_wrong_tensor_is_refused(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    """The message names the tensor, what was expected and what came."""
    write_checkpoint(tmp_path, changes=changes)

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 4)

    assert str(caught.value) == message.format(file=tmp_path / "model.safetensors")


def test_from_hf_damaged_layer_does_not_spoil_the_others(tmp_path: Path) -> None:
    """Only the asked layer is read."""
    write_checkpoint(tmp_path, changes={f"{KEY}.bias": None})

    source = from_hf(tmp_path, 5)

    assert source.origin["layer"] == 5


START = "bert.encoder.layer.4"
PROJECTION = f"{START}.attention.self.query"

EXTRA: dict[str, tuple[str, str]] = {
    # PEFT and its relatives
    "LoRA A": (f"{PROJECTION}.lora_A.weight", "adapter"),
    "LoRA B": (f"{PROJECTION}.lora_B.weight", "adapter"),
    "LoRA of PEFT's own names": (f"base_model.model.{PROJECTION}.lora_A.default.weight", "adapter"),
    "LoRA of a fused name": (
        "lora_te_encoder_layer_4_attention_self_query.lora_up.weight",
        "adapter",
    ),
    "a wrapped projection": (f"{PROJECTION}.base_layer.weight", "adapter"),
    "DoRA": (f"{PROJECTION}.lora_magnitude_vector", "adapter"),
    "AdaLoRA": (f"{PROJECTION}.lora_E", "adapter"),
    "IA3": (f"{PROJECTION}.ia3_l", "adapter"),
    "LoHa": (f"{PROJECTION}.hada_w1_a", "adapter"),
    "LoKr": (f"{PROJECTION}.lokr_w1", "adapter"),
    "OFT": (f"{PROJECTION}.oft_r.weight", "adapter"),
    "VeRA": (f"{PROJECTION}.vera_lambda_b", "adapter"),
    "BitFit": (f"{PROJECTION}.bitfit_bias", "adapter"),
    "saved modules": (f"{PROJECTION}.modules_to_save.default.weight", "adapter"),
    "bottleneck adapter": (f"{START}.attention.output.adapters.x.adapter_down.0.weight", "adapter"),
    "prefix tuning": (f"{START}.attention.self.prefix_tuning.prefix_gates.x.weight", "adapter"),
    "prefix encoder": ("prefix_encoder.embedding.weight", "adapter"),
    "prompt": ("prompt_embeddings", "adapter"),
    # quantised weights
    "bitsandbytes int8": (f"{PROJECTION}.SCB", "dequantise"),
    "bitsandbytes 4 bits": (f"{PROJECTION}.weight.absmax", "dequantise"),
    "its state": (f"{PROJECTION}.weight.quant_state.bitsandbytes__nf4", "dequantise"),
    "GPTQ": (f"{PROJECTION}.qweight", "dequantise"),
    "GPTQ zeros": (f"{PROJECTION}.qzeros", "dequantise"),
    "scales": (f"{PROJECTION}.weight.scales", "dequantise"),
    "a scale": (f"{PROJECTION}.weight_scale", "dequantise"),
    "zeros": (f"{PROJECTION}.weight.zeros", "dequantise"),
    "quantisation-aware training": (f"{PROJECTION}.weight_fake_quant.scale", "dequantise"),
    # weights that are computed from others
    "pruning mask": (f"{PROJECTION}.weight_mask", "prune.remove"),
    "pruned weight": (f"{PROJECTION}.weight_orig", "prune.remove"),
    "weight norm": (f"{PROJECTION}.weight_g", "remove_parametrizations"),
    "parametrization": (
        f"{PROJECTION}.parametrizations.weight.original0",
        "remove_parametrizations",
    ),
    # what the formula does not have
    "query norm": (f"{START}.attention.self.q_norm.weight", "normalisation"),
    "key norm": (f"{START}.attention.self.k_norm.weight", "normalisation"),
    "norm of queries": (f"{START}.attention.self.layer_norm_q.weight", "normalisation"),
    "norm in the layer": (f"{START}.attention.self.LayerNorm.weight", "normalisation"),
    "relative positions": (f"{START}.attention.self.distance_embedding.weight", "relative"),
    "relative bias": (f"{START}.attention.self.relative_attention_bias.weight", "relative"),
    "relative bias of another layer": (
        "bert.encoder.layer.0.attention.self.relative_attention_bias.weight",
        "relative",
    ),
    "relative bias of all layers": ("bert.encoder.relative_attention_bias.weight", "relative"),
    "rotary frequencies": (f"{START}.attention.self.rotary_emb.inv_freq", "rotary"),
    "rotary cache": (f"{START}.attention.self.cos_cached", "rotary"),
    "rotary positions of all layers": ("bert.encoder.embed_positions.weight", "rotary"),
    # what nobody knows
    "a second bias": (f"{START}.attention.self.query.bias2", "does not know"),
    "a gate": (f"{START}.attention.head_gate", "does not know"),
    "a gate beside the attention": (f"{START}.gate", "does not know"),
}


@pytest.mark.parametrize(("name", "words"), EXTRA.values(), ids=EXTRA)
@pytest.mark.fault("G1", "G5")
def test_from_hf_tensor_that_the_layer_does_not_use_is_refused(
    name: str, words: str, tmp_path: Path
) -> None:
    """Whatever may change the answer and is not used is refused by name, with what to do."""
    write_checkpoint(tmp_path, changes={name: torch.zeros(4)})

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 4)

    assert f"model.safetensors: {name}: " in str(caught.value)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@given(
    parts=st.lists(
        st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=12),
        min_size=1,
        max_size=4,
    ),
    below=st.sampled_from([".attention.self.", ".attention.output.", ".attention.", "."]),
    dtype=st.sampled_from([torch.float32, *NOT_FLOATS]),
)
@ONE_FOLDER
@pytest.mark.fault("G5")
def test_from_hf_any_unknown_tensor_of_the_layer_is_refused(
    parts: list[str], below: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The list of what may lie in a layer is closed: no name and no dtype is passed over."""
    name, tensors = f"{START}{below}{'.'.join(parts)}", checkpoint_tensors()
    assert name not in tensors
    write_tensors(tmp_path, {**tensors, name: torch.zeros(2).to(dtype)})

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 4)

    assert f": {name}: " in str(caught.value)


OF_THE_LAYER = sorted(name for name in checkpoint_tensors() if name.startswith(f"{START}.att"))


@pytest.mark.parametrize("dtype", NOT_FLOATS, ids=str)
@pytest.mark.parametrize("name", OF_THE_LAYER)
@pytest.mark.fault("G2")
def test_from_hf_any_tensor_that_is_no_float_is_refused(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """One integer tensor among floats is as wrong as a layer of integers, and is named."""
    tensor = checkpoint_tensors()[name]
    write_checkpoint(tmp_path, changes={name: tensor.to(dtype)})

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 4)

    assert str(caught.value) == (
        f"{tmp_path / 'model.safetensors'}: {name}: expected floating-point weights"
        f" (float32, float16, bfloat16, float64), got {DTYPES.get(dtype, str(dtype)[6:])};"
        " quantised numbers are not weights as they stand: dequantise the model first, e.g."
        " model.dequantize(), and save it again"
    )


DTYPES = {torch.complex64: "C64"}
"""What safetensors says of a dtype that no model is saved in."""


def test_from_hf_integers_elsewhere_do_not_matter(tmp_path: Path) -> None:
    """Position ids are integers in every old checkpoint; another layer's weights are its own."""
    other = f"{START.replace('4', '5')}.attention.self.query.weight"
    ids = torch.arange(16)[None]
    write_checkpoint(
        tmp_path,
        changes={"bert.embeddings.position_ids": ids, other: torch.zeros(8, 8, dtype=torch.int8)},
    )

    source = from_hf(tmp_path, 4)

    assert source.config.embed_dim == EMBED_DIM


def test_from_hf_layer_norms_of_old_names_are_harmless(tmp_path: Path) -> None:
    """Old checkpoints say gamma and beta for the weight and bias of a LayerNorm."""
    norm = f"{START}.attention.output.LayerNorm"
    names = (f"{norm}.gamma", f"{norm}.beta", f"{START}.output.LayerNorm.gamma")
    write_checkpoint(tmp_path, changes={name: torch.ones(8) for name in names})

    source = from_hf(tmp_path, 4)

    assert source.config.embed_dim == EMBED_DIM


def test_from_hf_two_encoders_are_ambiguous(tmp_path: Path) -> None:
    """Neither is chosen; both are named."""
    tensors = checkpoint_tensors(prefix="question.bert.") | checkpoint_tensors(prefix="context.")
    write_tensors(tmp_path, tensors)

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 4)

    assert str(caught.value) == (
        f"{tmp_path / 'model.safetensors'}: ambiguous: layer 4 is there as"
        " context.encoder.layer.4. and as question.bert.encoder.layer.4.;"
        " save the model that is meant as a checkpoint of its own"
    )


def test_from_hf_name_that_only_ends_alike_is_another(tmp_path: Path) -> None:
    """`text_encoder` is not `encoder`: a prefix ends at a dot."""
    tensors = checkpoint_tensors(prefix="bert.")
    others = {
        name.replace("bert.encoder", "bert.text_encoder"): torch.zeros_like(tensor)
        for name, tensor in tensors.items()
    }
    write_tensors(tmp_path, others | tensors)

    source = from_hf(tmp_path, 4)

    expected = tensors[f"{START}.attention.output.dense.weight"]
    assert torch.equal(source.spec.tensors["output.weight"], expected)


def test_from_hf_crossattention_is_not_taken_for_self_attention(tmp_path: Path) -> None:
    """A decoder's second attention has the same tensor names, one part apart."""
    tensors = checkpoint_tensors()
    for name in [n for n in tensors if ".attention." in n]:
        tensors[name.replace(".attention.", ".crossattention.")] = torch.full((8, 8), torch.nan)
    write_tensors(tmp_path, tensors)

    source = from_hf(tmp_path, 4)

    expected = tensors[f"{START}.attention.output.dense.weight"]
    assert torch.equal(source.spec.tensors["output.weight"], expected)


OF_ANOTHER_MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "width": (
        {"hidden_size": 16},
        "hidden_size is 16, but the weights say 8 (the width of layer 4)",
    ),
    "fewer layers": (
        {"num_hidden_layers": 6},
        "num_hidden_layers is 6, but the weights say 12 (layers below bert.encoder.layer)",
    ),
    "more layers": (
        {"num_hidden_layers": 24},
        "num_hidden_layers is 24, but the weights say 12 (layers below bert.encoder.layer)",
    ),
    "width of a head": (
        {"head_dim": 2},
        "head_dim is 2, but the weights say 4 (width 8 over 2 heads)",
    ),
    "shared keys": (
        {"num_key_value_heads": 1},
        "num_key_value_heads is 1, but the weights say 2"
        " (one key and value each for num_attention_heads)",
    ),
    "feed-forward width": (
        {"intermediate_size": 32},
        "intermediate_size is 32, but the weights say 8"
        " (rows of bert.encoder.layer.4.intermediate.dense.weight)",
    ),
    "vocabulary": (
        {"vocab_size": 30522},
        "vocab_size is 30522, but the weights say 4"
        " (rows of bert.embeddings.word_embeddings.weight)",
    ),
}


@pytest.mark.parametrize(("keys", "message"), OF_ANOTHER_MODEL.values(), ids=OF_ANOTHER_MODEL)
@pytest.mark.fault("G4")
def test_from_hf_config_that_contradicts_the_weights_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A config.json of another checkpoint would give the wrong heads; both values are named."""
    write_checkpoint(tmp_path, config=BERT | keys)

    with pytest.raises(SourceInvalid) as caught:
        from_hf(tmp_path, 4)

    assert str(caught.value) == (
        f"{tmp_path / 'config.json'}: {message};"
        " expected the config.json that belongs to these weights"
    )


def test_from_hf_config_that_agrees_with_the_weights_is_taken(tmp_path: Path) -> None:
    """Every key that is checked may also be right, or null."""
    keys = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 4, "head_dim": None}
    write_checkpoint(tmp_path, config=BERT | keys | {"is_decoder": False, "pruned_heads": {}})

    source = from_hf(tmp_path, 4)

    assert source.config.embed_dim == EMBED_DIM


OTHER_COMPUTATION: dict[str, tuple[dict[str, Any], str]] = {
    "cross-attention of an encoder": (
        {"add_cross_attention": True},
        "add_cross_attention: expected false, got True; only a decoder \\(is_decoder\\) has",
    ),
    "one of two attentions": (
        {"is_decoder": True, "add_cross_attention": True},
        "--attention: expected self or cross for model_type bert, got none",
    ),
    "pruned heads": ({"pruned_heads": {"4": [0]}}, "pruned_heads is {'4': \\[0\\]}: heads were"),
    "quantised": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        "quantization_config is .*: the weights are quantised; dequantise",
    ),
    "its own code": ({"auto_map": {"AutoModel": "m.Model"}}, "auto_map is .*: the model is"),
}


@pytest.mark.parametrize(("keys", "message"), OTHER_COMPUTATION.values(), ids=OTHER_COMPUTATION)
@pytest.mark.fault("E10")
def test_from_hf_config_of_another_computation_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """What a model computes beyond the formula is refused by its key, with what to do."""
    write_checkpoint(tmp_path, config=BERT | keys)

    with pytest.raises(SourceInvalid, match=message):
        from_hf(tmp_path, 4)


@pytest.mark.parametrize(
    "file", ["adapter_config.json", "adapter_model.safetensors", "pytorch_adapter.bin"]
)
@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.fault("G1")
def test_from_hf_folder_with_an_adapter_is_refused(
    file: str, is_alone: bool, tmp_path: Path
) -> None:
    """An adapter's folder, with the base beside it or not, is told from a missing checkpoint."""
    if not is_alone:
        write_checkpoint(tmp_path)
    (tmp_path / file).write_text("{}")

    with pytest.raises(SourceInvalid, match=r"an adapter that was not merged .*merge_and_unload"):
        from_hf(tmp_path, 0)


def _permuted(random: Any) -> dict[str, Tensor]:
    names = list(checkpoint_tensors())
    random.shuffle(names)
    tensors = checkpoint_tensors()
    return {name: tensors[name] for name in names}


@given(random=st.randoms(use_true_random=False), shards=st.integers(1, 4))
@ONE_FOLDER
@pytest.mark.fault("G3")
def test_from_hf_any_split_into_shards_is_the_same_layer(
    random: Any, shards: int, tmp_path: Path
) -> None:
    """Where and in which order tensors lie says nothing about the layer."""
    tensors = _permuted(random)
    place = {name: random.randrange(shards) for name in tensors}
    for old in tmp_path.glob("model*"):
        old.unlink()
    write_tensors(tmp_path, tensors, shard_of=lambda name: place[name])

    source = from_hf(tmp_path, 4)

    for ours, theirs in _names(START).items():
        assert torch.equal(source.spec.tensors[ours], tensors[theirs])
