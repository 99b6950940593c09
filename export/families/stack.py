"""The layers of one encoder or decoder in a checkpoint, which are tensors under numbered names."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from export.checkpoint import Checkpoint
from export.errors import SourceInvalid
from export.refusals import is_shared


@dataclass(frozen=True)
class Stack:
    """Where a checkpoint has the layers."""

    checkpoint: Checkpoint
    root: str
    """What stands before `name`, with its dot: "bert."."""
    name: str
    """"encoder.layer" where tensors are called "bert.encoder.layer.3.…"."""

    def prefix(self, layer: int) -> str:
        """Return what the names of a layer's tensors begin with, with its dot."""
        return f"{self.root}{self.name}.{layer}."

    @property
    def count(self) -> int:
        """How many layers there are."""
        names = self.checkpoint.below(f"{self.root}{self.name}.")
        return len({match[0] for name in names if (match := re.match(r"\d+\.", name))})


def find_stack(
    checkpoint: Checkpoint, names: Collection[str], layer: int, *, understood: Collection[str] = ()
) -> Stack:
    """
    Return the only stack of one of these names that has this layer.

    `understood` are tensors beside the layers that all of them share and that the family reads.

    Raises:
        SourceInvalid: there is none or more than one, or a tensor beside the layers may change all
            of them.
    """
    stacks = [
        Stack(checkpoint, prefix.removesuffix(f"{name}.{layer}."), name)
        for name in names
        for prefix in checkpoint.prefixes(rf"{re.escape(name)}\.{layer}")
    ]
    if not stacks:
        expected = " or ".join(f"{name}.{layer}.…" for name in names)
        raise SourceInvalid(f"{checkpoint.where}: expected tensors {expected}, got none")
    if len(stacks) > 1:
        found = " and as ".join(stack.prefix(layer) for stack in stacks)
        raise SourceInvalid(
            f"{checkpoint.where}: ambiguous: layer {layer} is there as {found};"
            " save the model that is meant as a checkpoint of its own"
        )
    [stack] = stacks
    beside = f"{stack.root}{stack.name}".rpartition(".")[0]
    checkpoint.refuse_if_any(
        f"{beside}." if beside else "",
        lambda name: is_shared(name) and name not in understood,
    )
    return stack
