"""ONNX nodes, written one after the other."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir


class Operators(ir.tape.Tape):
    """The nodes of a graph or of a branch, in the order in which they were made."""

    def __call__(self, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Return the output of a new node."""
        return self.op(operator, inputs, attributes)

    def constant(self, value: Any, dtype: npt.DTypeLike = np.int64) -> ir.Value:
        """Return a scalar or a tensor."""
        return self("Constant", value=ir.tensor(np.array(value, dtype)))

    def sizes(self, value: ir.Value, start: int, end: int) -> ir.Value:
        """Return the sizes of the axes from `start` to before `end`, a vector."""
        return self("Shape", value, start=start, end=end)

    def join(self, *parts: ir.Value, axis: int) -> ir.Value:
        """Return tensors side by side along an axis."""
        return self("Concat", *parts, axis=axis)
