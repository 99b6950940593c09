"""
Whisper: laid out as BART, but keys have no bias.

Names as in transformers.models.whisper.modeling_whisper.
"""

from export.checkpoint import Checkpoint
from export.families import bart
from export.families.config import Config
from export.families.family import Found, Place

num_layers = bart.num_layers


def read(checkpoint: Checkpoint, config: Config, place: Place) -> Found:
    """See `Family`; the output is that of `out_proj`."""
    return bart.read_layer(checkpoint, config, place, biases=("query", "value", "output"))
