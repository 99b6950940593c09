"""
The names of a call's tensors and options, and those that callers bring from elsewhere:
PyTorch, Hugging Face, Keras, Triton and OpenAI-like APIs.

One table answers foreign names on all wires: JSON keys, safetensors tensors and metadata,
the query, the protocol's inputs and parameters.  Each has a sentence of its own: which of ours
it is, of which shape, and whether its meaning changes.  A name is never answered with a mask
because it looks similar: a wrong mask computes without a word.
"""

import re
from collections.abc import Iterable
from typing import Final

from service.codecs.checks import check_known
from service.codecs.datatypes import FLOAT_MASK, INPUTS
from service.errors import InvalidInput

OPTIONS: Final = ("model", "version", "weights", "causal", "timeout_s", "priority")
"""What a caller may say beside the tensors."""

HEADS: Final = "heads"
"""Which heads' weights, where an option is a text or a parameter: `heads=0,3`."""

_INVERTED: Final = "true hides in PyTorch and takes part here, so invert it (~mask)"

_PADDING: Final = "send attend_mask [B, T], booleans or 0 and 1, one a key: " + _INVERTED

_FULL: Final = (
    "send pair_mask [B or 1, H or 1, S, T], booleans or 0 and 1, one a query and key:"
    f" {_INVERTED} (scaled_dot_product_attention alone has true = takes part, as here);"
    f" [S, T] becomes [1, 1, S, T], and [B * H, S, T] becomes [B, H, S, T]; {FLOAT_MASK}"
)

_ONES: Final = (
    "send attend_mask [B, T] for padding (Hugging Face's 1 = takes part is the same here), or"
    " pair_mask [B or 1, H or 1, S, T] for a mask of queries by keys (true = this query may"
    f" attend to this key); nothing is inverted; {FLOAT_MASK}"
)

MASKS_IN_GENERAL: Final = (
    "masks are attend_mask [B, T] (padding: true = this key takes part), pair_mask"
    " [B or 1, H or 1, S, T] (true = this query may attend to this key) and head_mask [H] or"
    " [B, H] (a factor of each head's output); PyTorch's booleans mean the opposite"
)

_EMBEDDINGS: Final = (
    "send embeddings [B, S, E]: the numbers that enter the attention layer (a hidden state)"
)

_MEMORY: Final = (
    "send memory [B, T, M], the one source of keys and values of a cross-attention layer (where"
    " values have a source of their own, it is value_memory [B, T, M_v]); a self-attention layer"
    " takes them from embeddings"
)

_TEXT: Final = (
    "text and tokens are not read: a layer is served, not a model; send embeddings [B, S, E],"
    " the hidden state that enters the layer"
)

_WEIGHTS: Final = (
    "ask for attention weights with weights true at /v1/attention, or of the model <name>-weights"
    " in /v2; they come for each head, not averaged"
)

_CAUSAL: Final = "say causal true or false: true = query s attends to key t only if t <= s"

_EXTRA_KEYS: Final = (
    "learned, zero and sink keys belong to the layer; their weights come as extra_weights beside"
    " the attention weights"
)

_PART_OF_THE_LAYER: Final = "it is part of the layer: GET /v1/models/{name} shows it"

_POSITION_BIAS: Final = (
    "a position bias is part of the layer (GET /v1/models/{name} shows it); positions [B, S],"
    " whole numbers from 0, say between which places it counts the distances"
)

_STATELESS: Final = "nothing is kept from call to call: send the whole sequence"

_GENERATION: Final = "nothing is generated or sampled here: a call computes one attention layer"

_PROTOCOL: Final = (
    "the Open Inference Protocol is at POST /v2/models/{name}/infer, its inputs, outputs and"
    " parameters side by side; /v1/attention takes embeddings beside its options"
)

_POSITIONS: Final = (
    "send positions [B, S], whole numbers from 0, to a layer that has positions (GET"
    " /v1/models/{name} lists its inputs); what a model adds to embeddings before the layer is"
    " added before the call"
)

_VERSION: Final = (
    "say version; in /v2 the path names it: /v2/models/{name}/versions/{version}/infer"
)

_SEGMENTS: Final = (
    "segments are not read: add them to embeddings, as the model does before the attention layer"
)

_OF_A_CALL: Final = {
    _PADDING: "key_padding_mask src_key_padding_mask tgt_key_padding_mask memory_key_padding_mask",
    "send attend_mask [B, T], booleans or 0 and 1, where true or 1 = this key takes part; a mask"
    " that is true for padding, as in PyTorch and fairseq, is inverted (~mask)": "padding_mask"
    " encoder_padding_mask pad_mask",
    _FULL: "attn_mask src_mask tgt_mask memory_mask self_attn_mask",
    "nothing is added to the scores but the position bias of a layer that has one (ALiBi, the"
    " buckets of T5), which is part of it and which positions [B, S] move; of a bias of 0 and -inf"
    " send pair_mask [B or 1, H or 1, S, T] = bias == 0": "attn_bias attention_bias position_bias"
    " relative_position_bias rel_pos_bias score_mod",
    _ONES: "attention_mask encoder_attention_mask decoder_attention_mask"
    " cross_attention_mask input_mask query_mask value_mask key_mask",
    "send head_mask [H] or [B, H] of one layer: 1 keeps a head, 0 switches it off, as in"
    " Hugging Face": "layer_head_mask cross_attn_head_mask decoder_head_mask",
    _CAUSAL: "is_causal tgt_is_causal memory_is_causal causal_mask use_causal_mask is_decoder",
    _WEIGHTS: "need_weights average_attn_weights output_attentions return_attention_scores"
    " return_attentions attention_weights attentions return_weights output_attention_weights",
    'say weights {"heads": [0, 3]} in JSON, weights=0,3 or heads=0,3 in the query and in'
    " the metadata of safetensors, and parameters.heads in /v2; heads are numbered from 0": HEADS
    + " head head_index head_indices",
}
"""The masks and options of an attention layer, by sentence."""

_OF_TENSORS: Final = {
    _EMBEDDINGS: "hidden_states hidden_state inputs_embeds input_embeds embedding x src tgt"
    " last_hidden_state embeds",
    "send embeddings [B, S, E] for the queries; " + _MEMORY: "query queries q query_states",
    _MEMORY: "key keys value values k v key_states value_states key_value_states"
    " encoder_hidden_states encoder_outputs encoder_output context kv",
    _TEXT: "input_ids token_ids tokens decoder_input_ids",
    _POSITIONS: "position_ids position_id pos_ids position position_indices input_pos"
    " input_positions position_embeddings rotary_pos_emb rope",
    _SEGMENTS: "token_type_ids segment_ids",
    _EXTRA_KEYS: "extra_weights bias_k bias_v add_zero_attn sinks s_aux attention_sinks",
    _PART_OF_THE_LAYER: "window window_size sliding_window scale scaling softcap num_heads"
    " num_kv_heads num_key_value_heads enable_gqa rope_theta",
    _POSITION_BIAS: "alibi alibi_slopes alibi_bias slopes relative_attention_bias"
    " relative_attention_num_buckets relative_attention_max_distance",
    _STATELESS: "past_key_value past_key_values use_cache layer_past cache_position"
    " incremental_state static_k static_v cache",
    "weights carry no dropout": "dropout dropout_p training",
    "the answer always holds the layer's output, and no other hidden state": "output_hidden_states"
    " return_dict",
    "sequences of a batch may differ in length: in JSON each has its own; in safetensors"
    " they lie one after the other beside lengths [B]; in /v2 pad them, and hide the padding with"
    " attend_mask [B, T]": "lengths memory_lengths lens seq_len seq_lens seq_length seq_lengths"
    " seqlens cu_seqlens sequence_length sequence_lengths valid_len valid_lens valid_length"
    " valid_lengths",
}
"""What else goes into an attention layer, or with it through a model, by sentence."""

_OF_OTHER_APIS: Final = {
    _TEXT: "text texts input prompt messages content query_text sentences document documents",
    _GENERATION: "n temperature top_p top_k max_tokens max_new_tokens max_completion_tokens stop"
    " stream seed frequency_penalty presence_penalty logprobs tools response_format"
    " generation_config",
    "the answer has an array of numbers for each token": "encoding_format dimensions",
    "no user is told apart; X-Request-ID marks a call": "user id request_id",
    _PROTOCOL: "inputs outputs parameters data shape datatype instances",
    "say model; in /v2 the path names it: /v2/models/{name}/infer": "model_name model_id engine"
    " deployment",
    _VERSION: "model_version versions",
    "say timeout_s, in seconds (/v2 has parameters.timeout, in microseconds)": "timeout"
    " timeout_ms timeout_us deadline",
    "calls belong to no sequence of calls: each is answered on its own": "sequence_id"
    " sequence_start sequence_end",
    "say Accept: application/x-safetensors for a binary answer of /v1/attention; /v2 has"
    " parameters.binary_data_output, and parameters.binary_data of each output": "format"
    " output_format binary_data binary_data_output",
}
"""What other APIs call what stands beside the tensors, by sentence."""


def _spelt_alike(name: str) -> str:
    """Return a name as the table knows it: `keyPaddingMask` and `key-padding-mask` are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _by_name(sentences: dict[str, str]) -> dict[str, str]:
    return {
        _spelt_alike(name): sentence
        for sentence, names in sentences.items()
        for name in names.split()
    }


SENTENCES: Final = _by_name(_OF_OTHER_APIS) | _by_name(_OF_TENSORS) | _by_name(_OF_A_CALL)
"""What is answered to a foreign name, by the name in lower case without punctuation."""


_OWN: Final = {
    **dict.fromkeys(
        INPUTS,
        "it is a tensor: send it in the body of /v1/attention, or as one of the inputs of"
        " /v2/models/{name}/infer",
    ),
    **dict.fromkeys(
        OPTIONS,
        "it is an option: send it in the query of /v1/attention, in the metadata of safetensors,"
        " beside embeddings in JSON, or in the parameters of /v2",
    ),
    "weights": _WEIGHTS,
    "model": "it is an option of /v1/attention; in /v2 the path names it: /v2/models/{name}/infer",
    "version": "it is an option of /v1/attention; in /v2 the path names it:"
    " /v2/models/{name}/versions/{version}/infer",
    "timeout_s": "it is an option of /v1/attention; in /v2 say parameters.timeout, in"
    " microseconds, or X-Request-Timeout-S",
}
"""What is answered to a name of ours that stands in another place than its own."""


def check_names(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """
    Return when every name of a call is known.

    Raises:
        InvalidInput: names the first unknown one, and what to send instead.
    """
    found, known = tuple(found), tuple(known)
    if all(map(known.__contains__, found)):
        return
    unknown = next(name for name in found if name not in known)
    sentence = _sentence(unknown)
    if sentence is not None:
        raise InvalidInput(f"{where}: unknown key {unknown[:64]!r}: {sentence}")
    check_known(found, known, where, suggested=[name for name in known if "mask" not in name])


def check_parameters(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """
    Return when no name is one of ours or of the table: it would be passed over.

    For the protocol's parameters and query, where other unknown names are not refused.

    Raises:
        InvalidInput: names the first one that is, and what to send instead.
    """
    for name in found:
        if name in known or name == "model":  # the path names the model
            continue
        sentence = _sentence(name)
        if sentence is not None:
            raise InvalidInput(f"{where}: unknown key {name[:64]!r}: {sentence}")


def _sentence(name: str) -> str | None:
    """Return what is answered to a name that is not read where it stands."""
    spelt = _spelt_alike(name[:64])
    sentence = _OWN.get(name) or SENTENCES.get(spelt)
    return MASKS_IN_GENERAL if sentence is None and "mask" in spelt else sentence
