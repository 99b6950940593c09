"""Why a family of checkpoints is not read, and what to do instead."""

from collections.abc import Mapping

_BY_HAND = (
    "save its query, key, value and output weights as those of an nn.MultiheadAttention, and"
    ' export that with --from-torch; docs/exporting.md, "Other families", shows how'
)

_IN_PYTHON = (
    "describe the layer in Python, as a LayerSpec, and export that with --from-python;"
    " docs/exporting.md shows how"
)

_PLAIN_NAMES = (
    "audio-spectrogram-transformer bert-generation data2vec-audio data2vec-text detr dinov2 ernie"
    " flaubert hubert layoutlm megatron-bert rembert roberta-prelayernorm speech_to_text trocr"
    " vit_mae wav2vec2 xlm"
)
_PLAIN = frozenset(_PLAIN_NAMES.split())
"""Multi-head attention as the formula has it, at least in their encoders."""

_PLAIN_CAUSAL = frozenset({"biogpt", "openai-gpt", "opt", "xglm"})


def _by_family(groups: Mapping[str, str]) -> dict[str, str]:
    return {family: reason for reason, families in groups.items() for family in families.split()}


_NOT_READ = _by_family(
    {
        "its queries and keys are turned by rotary positions, and several heads may share one key"
        " and value": "cohere gemma granite mixtral olmo olmo2 qwen2_moe qwen3_moe smollm3 stablelm"
        " starcoder2",
        "its queries and keys are turned by rotary positions": "codegen gptj nomic_bert persimmon"
        " phi roformer",
        "it adds a bias of distances to the scores, and does not divide them by"
        " sqrt(d)": "switch_transformers",
        "it adds a bias of distances to the scores (ALiBi)": "mpt",
        "several heads may share one key and value": "gpt_bigcode",
        "it does not divide the scores by sqrt(d), and some of its layers are local": "gpt_neo",
    }
)
"""What the attention of these families computes that not every layer does."""

_BEYOND = _by_family(
    {
        "it adds terms of relative positions to the scores": "beit data2vec-vision deberta"
        " deberta-v2 nezha swin swinv2 transfo-xl wav2vec2-conformer wavlm xlnet",
        "its keys and values are made of a compressed input (multi-head latent"
        " attention)": "deepseek_v2 deepseek_v3",
        "some of its layers attend in chunks, and scale queries by their positions": "llama4",
        "not every query attends to every key, or only approximately": "big_bird bigbird_pegasus"
        " fnet funnel led longformer longt5 nystromformer reformer yoso",
        "its queries and keys are made of another input than its values": "mobilebert",
        "its queries, keys and values are made by grouped convolutions": "squeezebert",
    }
)
"""What the attention of these families computes that the formula does not."""


def reason_against_family(family: object) -> str:
    """Say why a family is not read, and what to do instead."""
    known = family if isinstance(family, str) else ""
    if known in _BEYOND:
        return (
            f"{_BEYOND[known]}, which the formula of this version does not have; a layer of it"
            " cannot be exported"
        )
    if known in _NOT_READ:
        return f"{_NOT_READ[known]}, and its layout is not read yet: {_IN_PYTHON}"
    if known in _PLAIN | _PLAIN_CAUSAL:
        causal = "; it attends causally: add --causal" if known in _PLAIN_CAUSAL else ""
        return (
            "its attention is plain multi-head attention, whose layout is not read yet:"
            f" {_BY_HAND}{causal}"
        )
    return (
        "this version does not know how that family computes attention; if it is plain multi-head"
        " attention, softmax(Q K^T / sqrt(d)) V with a key and a value for every head and no"
        f" positions inside: {_BY_HAND}"
    )
