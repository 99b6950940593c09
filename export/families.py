"""
What a checkpoint's config.json says of its attention: whether it is read, and if not, why.

Known without PyTorch, so that a checkpoint that cannot be exported is refused at once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export.errors import SourceInvalid
from export.json_files import read_json

READ = frozenset({"bert", "camembert", "electra", "roberta", "xlm-roberta"})

_BY_HAND = (
    "save its query, key, value and output weights as those of an nn.MultiheadAttention, and"
    ' export that with --from-torch; docs/exporting.md, "Other families", shows how'
)

_PLAIN_NAMES = (
    "albert audio-spectrogram-transformer bart bert-generation blenderbot blenderbot-small clip"
    " clip_text_model clip_vision_model data2vec-audio data2vec-text deit detr dinov2 distilbert"
    " ernie flaubert hubert layoutlm m2m_100 marian mbart megatron-bert pegasus plbart rembert"
    " roberta-prelayernorm siglip siglip_vision_model speech_to_text trocr vit vit_mae wav2vec2"
    " whisper xlm"
)
_PLAIN = frozenset(_PLAIN_NAMES.split())
"""Multi-head attention as the formula has it, at least in their encoders."""

_PLAIN_CAUSAL = frozenset({"biogpt", "gpt2", "openai-gpt", "opt", "xglm"})

_GROUPS = {
    "its queries and keys are turned by rotary positions, and several heads may share one key and"
    " value": "cohere deepseek_v2 deepseek_v3 gemma gemma2 gemma3 gemma3_text granite llama llama4"
    " mistral mixtral olmo olmo2 phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2",
    "its queries and keys are turned by rotary positions": "codegen gpt_neox gptj modernbert"
    " nomic_bert persimmon phi roformer",
    "it adds terms of relative positions to the scores, and does not divide them by"
    " sqrt(d)": "longt5 mt5 switch_transformers t5 umt5",
    "it adds terms of relative positions to the scores": "beit data2vec-vision deberta deberta-v2"
    " mpnet nezha swin swinv2 transfo-xl wav2vec2-conformer wavlm xlnet",
    "it adds a bias of distances to the scores (ALiBi)": "bloom mpt",
    "several heads may share one key and value": "falcon gpt_bigcode",
    "not every query attends to every key, or only approximately": "big_bird bigbird_pegasus fnet"
    " funnel led longformer nystromformer reformer yoso",
    "it does not divide the scores by sqrt(d), and some of its layers are local": "gpt_neo",
    "its queries and keys are made of another input than its values": "mobilebert",
    "its queries, keys and values are made by grouped convolutions": "squeezebert",
}
_OTHER = {family: reason for reason, families in _GROUPS.items() for family in families.split()}
"""What the attention of these families computes that the formula does not."""


_ADAPTER_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "pytorch_adapter.bin",
)


def read_config(directory: Path) -> dict[str, Any]:
    """
    Return a checkpoint's config.json, of a family that is read and that computes the formula.

    Raises:
        SourceInvalid: it is missing, damaged, or of a family or configuration that is refused.
        OSError: it cannot be read.
    """
    _refuse_adapter_files(directory)
    file = directory / "config.json"
    if directory.is_file():
        raise SourceInvalid(
            f"{directory}: expected a directory with config.json and model.safetensors, got a"
            f" file; name its folder: --from-hf {directory.parent}"
        )
    try:
        config = read_json(file)
    except FileNotFoundError:
        raise SourceInvalid(
            f"{file}: no such file; expected a checkpoint directory with config.json and"
            " model.safetensors"
        ) from None
    if not isinstance(config, dict):
        raise SourceInvalid(f"{file}: expected a JSON object, got {type(config).__name__}")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in READ:
        raise SourceInvalid(
            f"{file}: model_type: expected one of {', '.join(sorted(READ))}, got"
            f" {shortened(family)}; {_reason_against(family, config)}"
        )
    position = config.get("position_embedding_type", "absolute")
    if position != "absolute":
        raise SourceInvalid(
            f"{file}: position_embedding_type: expected absolute, got {position!r}; relative"
            " positions add terms inside the softmax that the formula of this version does not have"
        )
    _refuse_other_computation(file, config)
    for key in ("num_hidden_layers", "num_attention_heads"):
        if type(config.get(key)) is not int:
            raise SourceInvalid(f"{file}: {key}: expected an integer, got {config.get(key)!r}")
    return config


def _refuse_adapter_files(directory: Path) -> None:
    found = next((name for name in _ADAPTER_FILES if (directory / name).exists()), None)
    if found is not None:
        raise SourceInvalid(
            f"{directory / found}: the folder holds an adapter that was not merged into the"
            " weights; load the model with it, merge it with model.merge_and_unload(), and export"
            " what save_pretrained() then writes"
        )


def _reason_against(family: object, config: Mapping[str, Any]) -> str:
    """Say why a family is not read, and what to do instead."""
    known = family if isinstance(family, str) else ""
    other = _OTHER.get(known)
    if known == "gpt2" and config.get("scale_attn_by_inverse_layer_idx"):
        other = "it divides the scores by the layer's number, too (scale_attn_by_inverse_layer_idx)"
    if other is not None:
        return (
            f"{other}, which the formula of this version does not have; a layer of it cannot be"
            " exported"
        )
    if known in _PLAIN | _PLAIN_CAUSAL:
        causal = (
            '; it attends causally, so every call needs "causal": true'
            if known in _PLAIN_CAUSAL
            else ""
        )
        return (
            "its attention is plain multi-head attention, whose layout is not read yet:"
            f" {_BY_HAND}{causal}"
        )
    return (
        "this version does not know how that family computes attention; if it is plain multi-head"
        " attention, softmax(Q K^T / sqrt(d)) V with a key and a value for every head and no"
        f" positions inside: {_BY_HAND}"
    )


def _refuse_other_computation(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse a configuration under which transformers computes more than the formula."""
    reasons = {
        "is_decoder": "the attention of a decoder is causal by default, which an artifact of this"
        " version cannot record; set is_decoder to false to export the layer as bidirectional,"
        ' and send "causal": true with every call',
        "add_cross_attention": "the model is a decoder with cross-attention, whose self-attention"
        " is causal by default, which an artifact of this version cannot record; set it to false"
        ' to export the self-attention as bidirectional, and send "causal": true with every call',
        "pruned_heads": "heads were pruned away, and layers with fewer heads than width allows"
        " cannot be exported",
        "quantization_config": "the weights are quantised; dequantise the model first, e.g."
        " model.dequantize(), and export what save_pretrained() then writes",
        "auto_map": "the model is computed by code of its own (trust_remote_code), which may"
        " differ from the family's; remove auto_map if its attention is exactly the family's",
    }
    for key, reason in reasons.items():
        # transformers goes by truth: "false" in quotes is true, too.
        if config.get(key):
            raise SourceInvalid(f"{file}: {key} is {shortened(config[key])}: {reason}")


def shortened(value: object) -> str:
    """Return how a value of a file is shown, 40 characters at most."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
