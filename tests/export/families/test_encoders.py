"""What all families of encoders share: a layer inside its model, and what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    ViTConfig,
    ViTModel,
)

from export.errors import SourceInvalid
from export.sources import from_hf
from service.inference.calls import Inputs
from tests.support.attention_cases import Case, check
from tests.support.encoders import EAGER, saved

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
}
TOKENS: dict[str, Any] = {
    "vocab_size": 30,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
}
DISTILBERT: dict[str, Any] = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 20}
PARTS: dict[str, Any] = {
    "text_config": {**SIZES, **TOKENS},
    "vision_config": {**SIZES, "image_size": 8, "patch_size": 4},
}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "albert": lambda: AlbertModel(AlbertConfig(**SIZES, **TOKENS, embedding_size=8, **EAGER)),
    "bert": lambda: BertModel(BertConfig(**SIZES, **TOKENS, **EAGER)),
    "clip": lambda: CLIPModel(CLIPConfig(**PARTS, **EAGER)),
    "distilbert": lambda: DistilBertModel(DistilBertConfig(**DISTILBERT, vocab_size=30, **EAGER)),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(**SIZES, **TOKENS, local_attention=6, **EAGER)
    ),
    "mpnet": lambda: MPNetModel(MPNetConfig(**SIZES, **TOKENS, **EAGER)),
    "vit": lambda: ViTModel(ViTConfig(**SIZES, image_size=8, patch_size=4, **EAGER)),
}

LAYERS = {
    "albert": "encoder.albert_layer_groups.0.albert_layers.0.",
    "bert": "encoder.layer.1.",
    "clip": "text_model.encoder.layers.1.",
    "distilbert": "transformer.layer.1.",
    "modernbert": "layers.1.",
    "mpnet": "encoder.layer.1.",
    "vit": "encoder.layer.1.",
}
"""What the names of the tensors of layer 1 begin with."""

VALUES = {
    "albert": "attention.value",
    "bert": "attention.self.value",
    "clip": "self_attn.v_proj",
    "distilbert": "attention.v_lin",
    "modernbert": "attn.Wqkv",
    "mpnet": "attention.attn.v",
    "vit": "attention.attention.value",
}
"""What a layer calls the projection of values."""

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint of each family."""
    root = tmp_path_factory.mktemp("families")
    for name, make in MODELS.items():
        saved(make(), root / name)
    return {name: root / name for name in MODELS}


def _refusal(folder: Path, copy: Path, change: Change, **place: Any) -> str:
    """Return what is said of layer 1 of a copy with changed configuration and tensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    save_file(tensors, copy / "model.safetensors")
    if config["model_type"] == "clip":
        place.setdefault("part", "text")
    with pytest.raises(SourceInvalid) as caught:
        from_hf(copy, 1, **place)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def _setting(**values: Any) -> Change:
    """Return what sets keys of config.json; in CLIP's of its text part."""
    return lambda config, _: config.get("text_config", config).update(values)


def _unchanged(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    pass


INSIDE = {
    "albert": ("encoder.albert_layer_groups.0.albert_layers.0.attention", "dense"),
    "bert": ("encoder.layer.1.attention", "output.dense"),
    "clip": ("text_model.encoder.layers.1.self_attn", "out_proj"),
    "distilbert": ("transformer.layer.1.attention", "out_lin"),
    "modernbert": ("layers.1.attn", "Wo"),
    "mpnet": ("encoder.layer.1.attention.attn", "o"),
    "vit": ("layers.1.attention", "o_proj"),
}
"""The attention of layer 1 in the model, and its last projection."""


def _inside(model: Any, family: str, call: Callable[[], object]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what goes into the attention of layer 1 while a model computes, and its answer."""
    seen: dict[str, Tensor] = {}
    name, projection = INSIDE[family]
    attention = model.get_submodule(name)

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> None:
        seen["x"], seen["weights"] = args[0] if args else kwargs["hidden_states"], answer[1]

    hooks = [
        attention.register_forward_hook(keep, with_kwargs=True),
        attention.get_submodule(projection).register_forward_hook(
            lambda _module, _args, answer: seen.update(output=answer)
        ),
    ]
    with torch.no_grad():
        call()
    for hook in hooks:
        hook.remove()
    return seen["x"], seen["output"], seen["weights"]


@pytest.mark.parametrize("family", MODELS)
def test_encoder_answers_as_inside_its_model(family: str, tmp_path: Path) -> None:
    """Its default masks, window and positions are those that the whole model gives the module."""
    model = saved(MODELS[family](), tmp_path)
    attend, is_text = torch.ones(2, 12, dtype=torch.bool), family != "vit"
    attend[1, 10:] = False
    options = {"output_attentions": True} if family == "mpnet" else {}
    ids = torch.arange(2, 26).reshape(2, 12)

    def call() -> object:
        if not is_text:
            return model(torch.randn(2, 3, 8, 8))
        return getattr(model, "text_model", model)(ids, attention_mask=attend, **options)

    x, output, weights = _inside(model, family, call)

    spec = from_hf(tmp_path, 1, part="text" if family == "clip" else None).spec
    inputs = Inputs(
        x.numpy(),
        attend_mask=attend.numpy() if is_text else None,
        causal=spec.config.causal,
    )
    check(spec, [Case(inputs, output.numpy(), weights.numpy())])


@pytest.mark.parametrize("family", MODELS)
def test_encoder_has_no_cross_attention(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The message says what there is."""
    said = _refusal(folders[family], tmp_path, _unchanged, attention="cross")

    expected = f"--attention: expected self for model_type {family}, got cross"
    assert said == f"{tmp_path / 'config.json'}: {expected}"


@pytest.mark.parametrize("family", set(MODELS) - {"clip"})
def test_encoder_has_no_parts(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """A part that there is not is no synonym of the whole."""
    said = _refusal(folders[family], tmp_path, _unchanged, part="encoder")

    expected = f"--part: expected none for model_type {family}, got encoder"
    assert said == f"{tmp_path / 'config.json'}: {expected}"


@pytest.mark.parametrize("part", [None, "encoder"])
def test_clip_has_two_parts_to_choose_from(
    part: str | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Neither is taken for granted."""
    said = _refusal(folders["clip"], tmp_path, _unchanged, part=part)

    expected = f"--part: expected text or vision for model_type clip, got {part or 'none'}"
    assert said == f"{tmp_path / 'config.json'}: {expected}"


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.fault("G5")
def test_encoder_without_one_of_its_tensors_is_refused(
    family: str, kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A bias that is missing is no bias of zeros."""
    name = f"{LAYERS[family]}{VALUES[family]}.{kind}"

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if family == "modernbert":  # whose layers need not have biases
            config["attention_bias"] = True
        tensors.pop(name, None)

    said = _refusal(folders[family], tmp_path, change)

    assert said == f"{tmp_path / 'model.safetensors'}: expected a tensor {name}, got none"


@pytest.mark.parametrize("family", MODELS)
def test_encoder_of_a_tensor_of_another_shape_is_refused(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The message names the tensor as the checkpoint does."""
    name = f"{LAYERS[family]}{VALUES[family]}.weight"

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-8].contiguous()

    said = _refusal(folders[family], tmp_path, change)

    rows = 48 if family == "modernbert" else 16
    assert said == (
        f"{tmp_path / 'model.safetensors'}: {name}: expected shape [{rows}, 16],"
        f" got [{rows - 8}, 16]"
    )


@pytest.mark.parametrize("part", ["gate", "attention_gate.weight", "lora_A.weight", "q_norm.bias"])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.fault("G1", "G5")
def test_encoder_with_a_tensor_that_it_does_not_use_is_refused(
    family: str, part: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Whatever lies in a layer is used, known to be harmless, or named."""
    for name in (f"{LAYERS[family]}{part}", f"{LAYERS[family]}{VALUES[family]}.{part}"):

        def change(_: dict[str, Any], tensors: dict[str, Tensor], name: str = name) -> None:
            tensors[name] = torch.zeros(2)

        assert f"model.safetensors: {name}: " in _refusal(folders[family], tmp_path, change)


BESIDE = {
    "albert": "encoder.",
    "bert": "encoder.",
    "clip": "text_model.encoder.",
    "distilbert": "transformer.",
    "modernbert": "",
    "mpnet": "encoder.",
    "vit": "encoder.",
}
"""Where the layers lie."""


@pytest.mark.parametrize("name", ["relative_bias.weight", "rotary_emb.inv_freq"])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.fault("G5")
def test_encoder_with_a_tensor_that_all_layers_may_share_is_refused(
    family: str, name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The layer's name is not in that of what all layers share."""

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[BESIDE[family] + name] = torch.zeros(2)

    said = _refusal(folders[family], tmp_path, change)

    assert f"model.safetensors: {BESIDE[family]}{name}: {name[:3]}" in said


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "width": (
        "vit",
        {"hidden_size": 32},
        "hidden_size is 32, but the weights say 16 (the width of layer 1)",
    ),
    "width of a part": (
        "clip",
        {"hidden_size": 32},
        "hidden_size is 32, but the weights say 16 (the width of layer 1)",
    ),
    "width under another name": (
        "distilbert",
        {"dim": 32},
        "dim is 32, but the weights say 16 (the width of layer 1)",
    ),
    "layers": (
        "mpnet",
        {"num_hidden_layers": 6},
        "num_hidden_layers is 6, but the weights say 2 (layers below encoder.layer)",
    ),
    "layers under another name": (
        "distilbert",
        {"n_layers": 6},
        "n_layers is 6, but the weights say 2 (layers below transformer.layer)",
    ),
    "layers of ModernBERT": (
        "modernbert",
        {"num_hidden_layers": 6, "layer_types": None},
        "num_hidden_layers is 6, but the weights say 2 (layers below layers)",
    ),
    "groups": (
        "albert",
        {"num_hidden_groups": 2},
        "num_hidden_groups is 2, but the weights say 1 (groups below encoder.albert_layer_groups)",
    ),
    "layers of a group": (
        "albert",
        {"inner_group_num": 2, "num_hidden_layers": 1},
        "inner_group_num is 2, but the weights say 1"
        " (layers below encoder.albert_layer_groups.0.albert_layers)",
    ),
    "heads": (
        "modernbert",
        {"head_dim": 4},
        "head_dim is 4, but the weights say 8 (width 16 over 2 heads)",
    ),
    "vocabulary": (
        "modernbert",
        {"vocab_size": 31},
        "vocab_size is 31, but the weights say 30 (rows of embeddings.tok_embeddings.weight)",
    ),
    "vocabulary of a part": (
        "clip",
        {"vocab_size": 31},
        "vocab_size is 31, but the weights say 30"
        " (rows of text_model.embeddings.token_embedding.weight)",
    ),
    "feed-forward width": (
        "vit",
        {"intermediate_size": 32},
        "intermediate_size is 32, but the weights say 20"
        " (rows of encoder.layer.1.intermediate.dense.weight)",
    ),
}


@pytest.mark.parametrize(
    ("family", "values", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS
)
@pytest.mark.fault("G4")
def test_encoder_whose_config_contradicts_the_weights_is_refused(
    family: str, values: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A config.json of another checkpoint would give the wrong heads; both values are named."""
    said = _refusal(folders[family], tmp_path, _setting(**values))

    part = ": text_config" if family == "clip" else ""
    assert said == (
        f"{tmp_path / 'config.json'}{part}: {message};"
        " expected the config.json that belongs to these weights"
    )


def _resized(name: str, rows: int) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.zeros(rows, *tensors[name].shape[1:])

    return change


def _without(name: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if config.pop(name, None) is None:
            del tensors[name]

    return change


def _rope(**parameters: Any) -> Change:
    return _setting(rope_parameters=parameters)


def _older(**values: Any) -> Change:
    """Return what makes the configuration one of the time before transformers 5."""

    def change(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        del config["layer_types"], config["rope_parameters"]
        config.update(values)

    return change


SCALED = "scaled rotary positions of this family are not read"

REFUSED: dict[str, tuple[str, Change, str]] = {
    "ALBERT: no number of layers": (
        "albert",
        _setting(num_hidden_layers=None),
        "config.json: num_hidden_layers: expected a positive integer, got None",
    ),
    "ALBERT: relative positions": (
        "albert",
        _setting(position_embedding_type="relative_key"),
        "config.json: position_embedding_type: expected absolute, got 'relative_key'; relative"
        " positions add terms inside the softmax that the formula of this version does not have",
    ),
    "DistilBERT: another number of heads under an alias": (
        "distilbert",
        _setting(num_attention_heads=4),
        "config.json: num_attention_heads: expected the same as n_heads, 2, got 4",
    ),
    "MPNet: another number of buckets": (
        "mpnet",
        _setting(relative_attention_num_buckets=64),
        "config.json: relative_attention_num_buckets: expected 32, got 64;"
        " transformers computes MPNet with no other number",
    ),
    "MPNet: a bias of another number of buckets": (
        "mpnet",
        _resized("encoder.relative_attention_bias.weight", 16),
        "model.safetensors: encoder.relative_attention_bias.weight: expected shape [32, 2],"
        " got [16, 2]",
    ),
    "MPNet: no bias": (
        "mpnet",
        _without("encoder.relative_attention_bias.weight"),
        "model.safetensors: expected a tensor encoder.relative_attention_bias.weight, got none",
    ),
    "ModernBERT: local positions scaled": (
        "modernbert",
        _rope(sliding_attention={"rope_type": "yarn", "rope_theta": 1e4}),
        "config.json: rope_parameters: sliding_attention: rope_type: expected default,"
        f" got 'yarn'; {SCALED}",
    ),
    "ModernBERT: scaled as before": (
        "modernbert",
        _older(rope_scaling={"type": "linear", "factor": 2.0}),
        "config.json: rope_scaling is {'type': 'linear', 'factor': 2.0}: " + SCALED,
    ),
    "ModernBERT: positions of another kind": (
        "modernbert",
        _rope(rope_theta=1e4),
        "config.json: rope_parameters: rope_theta: expected one of sliding_attention,"
        " full_attention; this version does not know what another key changes",
    ),
    "ModernBERT: more about positions": (
        "modernbert",
        _rope(sliding_attention={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "config.json: rope_parameters: sliding_attention: partial_rotary_factor: expected one of"
        " rope_type, rope_theta; this version does not know what another key changes",
    ),
    "ModernBERT: no local base": (
        "modernbert",
        _older(local_rope_theta=None),
        "config.json: local_rope_theta: expected a number, got None",
    ),
    "ModernBERT: a third kind of layer": (
        "modernbert",
        _setting(layer_types=["full_attention", "chunked_attention"]),
        "config.json: layer_types: expected sliding_attention or full_attention for layer 1,"
        " got ['full_attention', 'chunked_attention']",
    ),
    "ModernBERT: kinds of other layers": (
        "modernbert",
        _setting(layer_types=["full_attention"]),
        "config.json: layer_types: expected a list of 2, got ['full_attention']",
    ),
    "ModernBERT: heads that cannot be turned": (
        "modernbert",
        _setting(num_attention_heads=16),
        "config.json: rotary.dims: expected a positive even number, got 1",
    ),
    "ModernBERT: biases that config.json does not have": (
        "modernbert",
        lambda _, tensors: tensors.update({"layers.1.attn.Wo.bias": torch.zeros(16)}),
        "model.safetensors: layers.1.attn.Wo.bias: a tensor that this version does not know and"
        " that may change the layer's answer; if it has no part in the attention, save the"
        " checkpoint again without it",
    ),
    "ViT: biases that config.json does not have": (
        "vit",
        _setting(qkv_bias=False),
        "model.safetensors: encoder.layer.1.attention.attention.key.bias (and 2 more): a tensor"
        " that this version does not know and that may change the layer's answer; if it has no part"
        " in the attention, save the checkpoint again without it",
    ),
    "CLIP: no configuration of the part": (
        "clip",
        _without("text_config"),
        "config.json: text_config: expected an object, got None",
    ),
}


@pytest.mark.parametrize(("family", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_encoder_that_is_not_understood_is_refused(
    family: str, change: Change, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Each family's peculiarities: what was expected, what came and where."""
    assert _refusal(folders[family], tmp_path, change) == f"{tmp_path}/{message}"
