"""
What an artifact answers, computed by the service's own engine: for `--repository` alone.

The one file of the load tester that knows more of the service than a client can.
"""

from collections.abc import Sequence
from pathlib import Path

from loadtest.errors import UsageWrong
from loadtest.oip import Arrays
from loadtest.work import Tensors, Work
from service.contract import EMBEDDINGS, MEMORY, VALUE_MEMORY
from service.errors import StartRefused
from service.inference.artifact import find_artifacts, read_artifact
from service.inference.calls import Inputs
from service.inference.engine import OnnxEngine


def of_artifact(
    model: str, work: Work, tensors: Sequence[Tensors], repository: Path
) -> list[Arrays]:
    """
    Return what the newest artifact of a repository gives for each call, on this machine's CPU.

    Raises:
        UsageWrong: it cannot be read.
    """
    try:
        artifact = read_artifact(find_artifacts(repository)[model])
        layer = artifact.manifest.layer
        engine = OnnxEngine(artifact.graph, layer)
    except KeyError:
        raise UsageWrong(f"--repository: {repository}: holds no artifact {model}") from None
    except (StartRefused, OSError) as error:
        raise UsageWrong(f"--repository: {error}") from None
    found = []
    for one in tensors:
        inputs = Inputs(
            embeddings=one.inputs[EMBEDDINGS],
            memory=one.inputs.get(MEMORY),
            attend_mask=one.attend_mask,
            pair_mask=one.pair_mask,
            causal=one.causal or layer.causal,
            value_memory=one.inputs.get(VALUE_MEMORY),
        )
        outputs = engine.run(inputs, weights=work.weights != "off")
        arrays: Arrays = {"output": outputs.output}
        heads = slice(None) if work.heads is None else list(work.heads)
        if outputs.attention_weights is not None:
            arrays["attention_weights"] = outputs.attention_weights[:, heads]
        if outputs.extra_weights is not None:
            arrays["extra_weights"] = outputs.extra_weights[:, heads]
        found.append(arrays)
    return found
