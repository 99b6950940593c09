"""
The two models that an artifact is to protocol clients.

A protocol client asks for every output that a model declares, so `<name>` declares the
output alone, and `<name>-weights` also the attention weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from service.codecs.oip_request import split_model_name
from service.contract import (
    ATTENTION_WEIGHTS,
    EMBEDDINGS,
    MEMORY,
    OUTPUT,
    VALUE_MEMORY,
    WEIGHTS_SUFFIX,
)
from service.inference.model import Model
from service.inference.models import Models


@dataclass(frozen=True)
class DeclaredTensor:
    """An input or output that a protocol model declares; a free axis is -1, the batch first."""

    name: str
    shape: tuple[int, ...]

    def metadata(self) -> dict[str, Any]:
        """Return it as a model's metadata lists it."""
        return {"name": self.name, "datatype": "FP32", "shape": self.shape}

    def config(self) -> dict[str, Any]:
        """Return it as a model's configuration lists it, without the batch."""
        return {"name": self.name, "data_type": "TYPE_FP32", "dims": self.shape[1:]}


@dataclass(frozen=True)
class ProtocolModel:
    """One of the two models that an artifact is to protocol clients."""

    name: str
    served: Model

    def inputs(self) -> list[DeclaredTensor]:
        """
        Return the required inputs.

        Masks and positions are accepted and not declared: a tool that sends all that is
        declared could not know their shape.
        """
        layer = self.served.layer
        inputs = [DeclaredTensor(EMBEDDINGS, (-1, -1, layer.embed_dim))]
        if layer.memory_dim is not None:
            inputs.append(DeclaredTensor(MEMORY, (-1, -1, layer.memory_dim)))
        if layer.value_memory_dim is not None:
            inputs.append(DeclaredTensor(VALUE_MEMORY, (-1, -1, layer.value_memory_dim)))
        return inputs

    def outputs(self) -> list[DeclaredTensor]:
        """Return the declared outputs; `extra_weights` is answered and not declared."""
        layer = self.served.layer
        outputs = [DeclaredTensor(OUTPUT, (-1, -1, layer.embed_dim))]
        if self.name != self.served.name:
            outputs.append(DeclaredTensor(ATTENTION_WEIGHTS, (-1, layer.num_heads, -1, -1)))
        return outputs


def protocol_model(models: Models, request: Request) -> ProtocolModel:
    """
    Return the model that a request's path names.

    Raises:
        UnknownModel: no such name or version.
        NotReady: the models are still being loaded.
    """
    name = request.path_params["name"]
    artifact, _ = split_model_name(name)
    return ProtocolModel(name, models.get(artifact, request.path_params.get("version")))


def protocol_models(model: Model) -> Iterator[ProtocolModel]:
    """Give both models of an artifact."""
    return (ProtocolModel(name, model) for name in protocol_names(model.name))


def protocol_names(artifact: str) -> tuple[str, str]:
    """Return the names of both models of an artifact."""
    return artifact, artifact + WEIGHTS_SUFFIX
