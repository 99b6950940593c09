"""What the exporter says of a layer beside its proof: what it was made of, and what was assumed."""

import argparse
from collections.abc import Mapping, Sequence

from service.contract import Manifest
from service.layer_config import LayerConfig

_SHOWN = 12
"""How many names of tensors are shown."""


def origin_lines(origin: Mapping[str, str | int], tensors: Sequence[str]) -> list[str]:
    """Say which tensors a layer was made of, and what was taken off their names."""
    lines = []
    if tensors:
        shown = ", ".join(tensors[:_SHOWN])
        more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
        lines.append(f"made of {shown}{more}")
    if "wrappers" in origin:
        lines.append(f"without what training put around them: {origin['wrappers']}")
    return lines


def assumptions(args: argparse.Namespace, manifest: Manifest) -> list[str]:
    """
    Say what no weight shows, and where it was taken from.

    Nothing for a seed's layer, which is what was asked for.
    """
    if args.from_torch is not None:
        return _of_torch(args, manifest.layer)
    if args.from_hf is not None:
        return _of_hf(args, manifest.layer)
    is_compared = any(row.reference.startswith(("module", "check ")) for row in manifest.parity)
    if args.from_python is not None and not is_compared:
        return [
            _HEADLINE,
            "  the LayerSpec is that of the model: let the function return the module as well, or"
            " give --check FILE",
        ]
    return []


_HEADLINE = "The parity above cannot show these, which were assumed:"


def _of_torch(args: argparse.Namespace, layer: LayerConfig) -> list[str]:
    if args.attention is not None:
        source = "--attention"
    else:
        source = "separate weights" if layer.is_cross else "packed weights, no --attention cross"
    order = "--causal" if layer.causal else "no --causal"
    absent = [] if "zero" in layer.extra_keys else ["add_zero_attn"]
    if not layer.is_cross:
        absent += [] if layer.window else ["window"]
        absent += [] if layer.positional else ["positions"]
    added = (
        f"rows of {args.positional_table} added to the embeddings for their positions"
        " (--positional learned)"
        if layer.positional == "learned"
        else "sines added to the embeddings for their positions (--positional sinusoidal)"
    )
    return [
        _HEADLINE,
        f"  {layer.num_heads} heads of width {layer.head_dim} (--num-heads)",
        f"  {_kind(layer)}-attention ({source}){_order(layer, order)}",
        *_window(layer, "--window"),
        *([f"  {added}"] if layer.positional else []),
        *(["  add_zero_attn (--add-zero-attn)"] if "zero" in layer.extra_keys else []),
        f"  {''.join(f'no {name}, ' for name in absent)}{'and ' if absent else ''}{_NO_CODE}",
    ]


def _of_hf(args: argparse.Namespace, layer: LayerConfig) -> list[str]:
    shared = (
        f", {layer.num_kv_heads} of keys and values" if layer.num_kv_heads < layer.num_heads else ""
    )
    source = "the layout of the checkpoint" if args.attention is None else "--attention"
    return [
        _HEADLINE,
        f"  {layer.num_heads} heads of width {layer.head_dim}{shared} (config.json)",
        f"  {_kind(layer)}-attention ({source}){_order(layer, _FAMILY)}",
        *_window(layer, _FAMILY),
        *_logits(layer),
        *_positions(layer),
        f"  {_NO_CODE}",
    ]


_NO_CODE = "no computation of the model's own code around these weights"

_FAMILY = "config.json, or the default of its family"
"""Where what config.json need not say comes from."""


def _kind(layer: LayerConfig) -> str:
    return "cross" if layer.is_cross else "self"


def _order(layer: LayerConfig, source: str) -> str:
    if layer.is_cross:
        return ""
    if layer.causal:
        return f"; causal unless a call says false ({source})"
    return f"; not causal unless a call says so ({source})"


def _window(layer: LayerConfig, source: str) -> list[str]:
    if layer.window is None:
        return []
    return [f"  attention to keys less than {layer.window} tokens away ({source})"]


def _logits(layer: LayerConfig) -> list[str]:
    facts = []
    if layer.scale is not None:
        facts.append(f"multiplied by {layer.scale:g}")
    if layer.softcap is not None:
        facts.append(f"capped at {layer.softcap:g}")
    lines = [f"  logits {' and '.join(facts)} ({_FAMILY})"] if facts else []
    if (norm := layer.norm) is not None:
        lines.append(
            f"  {norm.kind} norm of queries and keys with epsilon {norm.epsilon:g} ({_FAMILY})"
        )
    return lines


def _positions(layer: LayerConfig) -> list[str]:
    lines = []
    if (rotary := layer.rotary) is not None:
        pairs = "neighbours" if rotary.interleaved else "halves"
        facts = [f"base {rotary.base:g}", f"{rotary.dims} of {layer.head_dim} numbers a head"]
        facts.append(f"paired as {pairs}")
        if rotary.scaling != "none":
            facts.append(f"{rotary.scaling} scaling by {rotary.factor:g}")
        lines.append(f"  rotary positions: {', '.join(facts)} ({_FAMILY})")
    if layer.position_bias is not None:
        bias = "ALiBi" if layer.position_bias.kind == "alibi" else "buckets of distances"
        lines.append(f"  a position bias: {bias} ({_FAMILY})")
    return lines
