"""The outputs of an infer request: which a model offers, and in which form they are wanted."""

from typing import Any, Final

from service.codecs.checks import check_known
from service.codecs.json_reader import Node, Reader
from service.codecs.oip_inputs import REGION, flag_of, name_of, parameters_of, slot_of
from service.codecs.shared_memory import Slot
from service.contract import ATTENTION_WEIGHTS, EXTRA_WEIGHTS, OUTPUT, WEIGHTS_SUFFIX
from service.errors import InvalidInput
from service.layer_config import LayerConfig

Offered = tuple[str, ...]
"""The outputs that a request may name, and gets all of when it names none."""

WEIGHTS: Final = (ATTENTION_WEIGHTS, EXTRA_WEIGHTS)


def offered_outputs(with_weights: bool, layer: LayerConfig) -> Offered:
    """Return the outputs of a protocol model, also those that its metadata does not declare."""
    if not with_weights:
        return (OUTPUT,)
    if layer.extra_keys:
        return (OUTPUT, ATTENTION_WEIGHTS, EXTRA_WEIGHTS)
    return (OUTPUT, ATTENTION_WEIGHTS)


def outputs_of(
    reader: Reader, root: dict[str, Node], parameters: dict[str, Any], offered: Offered
) -> tuple[dict[str, bool], dict[str, Slot]]:
    """Return whether each output is binary, and the slots of those for shared memory."""
    by_default = flag_of(parameters, "binary_data_output", "parameters", default=False)
    entries = reader.objects(root["outputs"], "outputs") if "outputs" in root else []
    if not entries:
        return dict.fromkeys(offered, by_default), {}
    outputs: dict[str, bool] = {}
    kept: dict[str, Slot] = {}
    for i, entry in enumerate(entries):
        where = f"outputs[{i}]"
        check_known(entry, ("name", "parameters"), where)
        name = name_of(reader, entry, where)
        if name in WEIGHTS and ATTENTION_WEIGHTS not in offered:
            raise InvalidInput(
                f"{where}: expected {OUTPUT}, got {name!r}, an output of the model"
                f" <name>{WEIGHTS_SUFFIX}"
            )
        if name not in offered:
            reason = ": the layer has no extra keys" if name == EXTRA_WEIGHTS else ""
            raise InvalidInput(
                f"{where}: expected {' or '.join(offered)}, got {name[:64]!r}{reason}"
            )
        if name in outputs:
            raise InvalidInput(f"{where}: expected each output once, got {name} twice")
        own = parameters_of(reader, entry, f"{where}.parameters")
        if "classification" in own:
            raise InvalidInput(
                f"{where}.parameters.classification: expected none, got one: not offered"
            )
        outputs[name] = flag_of(own, "binary_data", f"{where}.parameters", default=by_default)
        if REGION in own:
            outputs[name], kept[name] = False, slot_of(own, f"{where}.parameters")
    return outputs, kept
