"""The source of weights that the command's options name."""

import argparse

from export.sources import (
    HfLayers,
    Source,
    from_hf,
    from_python,
    from_torch,
    hf_layers,
    random_layer,
)


def source_of(args: argparse.Namespace) -> Source:
    """
    Return the one layer that the options name.

    Raises:
        SourceInvalid: it cannot be read.
    """
    if args.from_torch is not None:
        return from_torch(
            args.from_torch,
            args.num_heads,
            prefix=args.prefix or "",
            attention=args.attention,
            add_zero_attn=args.add_zero_attn,
            causal=args.causal,
            window=args.window,
            positional=args.positional,
            positional_table=args.positional_table,
        )
    if args.from_hf is not None:
        return from_hf(args.from_hf, args.layer, attention=args.attention, part=args.part)
    if args.from_python is not None:
        return from_python(args.from_python)
    return random_layer(
        args.embed_dim,
        args.num_heads,
        seed=args.seed or 0,
        memory_dim=args.memory_dim,
        bias=not args.no_bias,
        rotary_base=args.rotary,
        num_kv_heads=args.kv_heads or 0,
        head_dim=args.head_dim or 0,
        causal=args.causal,
        window=args.window,
        positional=args.positional,
        max_positions=args.max_positions,
    )


def layers_of(args: argparse.Namespace) -> HfLayers:
    """
    Return all layers of the checkpoint that the options name.

    Raises:
        SourceInvalid: it cannot be read.
    """
    return hf_layers(args.from_hf, attention=args.attention, part=args.part)
