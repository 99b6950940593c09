"""
Why a tensor that the formula has no place for is refused, and what to do about it.

The kinds below decide only what a message says.  Whether a tensor is refused does not depend
on its being recognised: whatever a layer does not use is (export/checkpoint.py).
"""

import re
from dataclasses import dataclass
from typing import Literal

NOT_WEIGHTS = (
    "quantised numbers are not weights as they stand: dequantise the model first, e.g."
    " model.dequantize(), and save it again"
)
"""What to do about a tensor whose dtype is not that of weights."""

_IN_PYTHON = "describe the layer in Python, as a LayerSpec, and export that with --from-python"


@dataclass(frozen=True)
class Reason:
    """What is said of a refused tensor."""

    text: str
    is_recognised: bool


@dataclass(frozen=True)
class _Kind:
    """A kind of tensor that changes a layer's answer, recognised by a part of its name."""

    pattern: str
    """Of one part of a dotted name, from its beginning to its end; upper and lower case alike."""
    text: str
    reach: Literal["layer", "encoder", "model"] = "layer"
    """What it may change, wherever below that it lies: a relative bias is often kept once for all
    layers, and an adapter's tensors need not bear the name of the layer that they change."""

    def is_kind_of(self, name: str) -> bool:
        return any(re.fullmatch(self.pattern, part, re.IGNORECASE) for part in name.split("."))


_KINDS = (
    _Kind(
        # PEFT, AdapterHub, diffusers and OpenDelta name them by these.
        r"(lora|loras|dora|adalora|ia3|hada|loha|lokr|oft|boft|vera|fourierft|randlora|vblora|hra"
        r"|xlora|c3a|shira|ln_tuning|bitfit|waveft|gralora|glora)(_.*|\d*)"
        r"|(poly|bone|miss|road|delta)_.*|.*_(lora|dora|ia3|delta)"
        r"|base_layer|original_module|modules_to_save",
        "the layer has an adapter that was not merged into its weights; merge it first:"
        " model.merge_and_unload(), then save the merged model",
        reach="model",
    ),
    _Kind(
        r"adapters?(_.*)?|.*_adapters?|prefix_(tuning|encoder|projection|keys?|values?|gates?).*"
        r"|prompt_(embeddings?|encoder|tuning|learning).*|prompts?|adaption_.*|soft_prompts?"
        r"|past_key_values?|compacter.*|parallel_adapter.*",
        "the model has an adapter that adds to its computation (bottleneck, prefix or prompt) and"
        " cannot be merged into its weights; export the base model's own checkpoint, without it",
        reach="model",
    ),
    _Kind(
        r"qweight|qzeros|(.*_)?g_idx|_?q?scales?|zeros?|(.*_)?zero_points?|SCB|CB|(nested_)?absmax"
        r"|(nested_)?quant_(map|state).*|quant_.*|.*_quant|.*_quantizer|weight_format"
        r"|(weight|bias|input|output|act|activation)_(scales?|scale_inv|scale_ub|packed|shape|zp)"
        r"|W_q|meta|codes|codebooks?|_data"
        r"|_?packed_params|_amax|.*fake_quant.*|activation_post_process.*|observer.*|bitsandbytes.*",
        "the layer's weights are quantised; dequantise the model first, e.g. model.dequantize(),"
        " and save it again",
    ),
    _Kind(
        r".*_(orig|mask)|pruned_heads|head_mask|mask",
        "a pruning mask or the weight under it; make the pruning permanent first:"
        " torch.nn.utils.prune.remove(module, 'weight'), and save the model again",
    ),
    _Kind(
        r"parametrizations|original\d*|(weight|bias)_[guv]|.*_weight_[guv]",
        "a weight that is computed from others (a parametrization such as weight or spectral norm);"
        " fold it first: torch.nn.utils.parametrize.remove_parametrizations(module, 'weight'), and"
        " save the model again",
    ),
    _Kind(
        r"rotary.*|rope.*|inv_freq|freqs(_.*)?|(cos|sin)(_.*)?|.*_(cos|sin)|embed_positions",
        "rotary positions: they turn queries and keys by their place, which a layer of this kind"
        f" does not; {_IN_PYTHON}",
        reach="encoder",
    ),
    _Kind(
        r"distance_embedding|rel(ative)?_.*|rel_?pos.*|.*_rel(ative)?_.*|alibi.*|slopes?"
        r"|pos_(proj|bias)(_.*)?|r_[wrs]_bias|pos_(key|query)_proj",
        "relative positions: they add terms inside the softmax that a layer of this kind does not"
        f" have; if they are a bias for each distance, {_IN_PYTHON}",
        reach="encoder",
    ),
    _Kind(
        r"bias_[kv]",
        "a learned key and value (add_bias_kv), which is read from the state dict of an"
        " nn.MultiheadAttention: --from-torch FILE",
    ),
    _Kind(
        r"(q|k|v|query|key|value|qk|kv|head|attn|inner_attn)_?(layer_?)?(norm|ln)\d*"
        r"|(layer_?)?(norm|ln)_?(q|k|v|query|key|value|qk)|(layer_?|rms_?)?norm\d*|ln\d*",
        "a normalisation inside the layer, of queries, keys or values, which a layer of this kind"
        f" does not have; if it is of queries and keys, {_IN_PYTHON}",
    ),
)

_UNKNOWN = Reason(
    "a tensor that this version does not know and that may change the layer's answer;"
    " if it has no part in the attention, save the checkpoint again without it",
    is_recognised=False,
)


def reason_against(name: str) -> Reason:
    """Return why a tensor of this name, which no layer uses, is refused."""
    kind = _kind_of(name)
    return _UNKNOWN if kind is None else Reason(kind.text, is_recognised=True)


def is_adapters(name: str) -> bool:
    """Say whether a tensor of this name is a part of an adapter."""
    kind = _kind_of(name)
    return kind is not None and kind.reach == "model"


def is_shared(name: str) -> bool:
    """Say whether a tensor of this name may change all layers of the encoder that it lies in."""
    kind = _kind_of(name)
    return kind is not None and kind.reach != "layer"


def _kind_of(name: str) -> _Kind | None:
    return next((kind for kind in _KINDS if kind.is_kind_of(name)), None)
