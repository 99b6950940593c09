"""What every call of a load asks for: shape, weights, mask, wire format."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from loadtest.draws import Draw
from loadtest.errors import UsageWrong
from loadtest.target import DTYPES, Input

Mask = Literal["none", "padding", "causal", "pair"]
Format = Literal["json", "binary", "safetensors", "shared-memory"]

_WEIGHTS = re.compile(r"off|on|heads:\d+(?:,\d+)*")
_SHAPE = re.compile(r"(?P<rows>(?:[a-z]+:)?[\d.:]+|file:[^x]+)x(?P<length>.+)")


@dataclass(frozen=True)
class Work:
    """What one load asks for, each part as it is written on the command line."""

    rows: str = "1"
    length: str = "8"
    weights: str = "off"
    mask: Mask = "none"
    format: Format = "binary"
    body: str = ""
    """The file whose bodies are sent as they are; all but the format is theirs then."""

    def __str__(self) -> str:
        if self.body:
            return f"{self.format} {self.body}"
        mask = "" if self.mask == "none" else f" mask={self.mask}"
        return f"{self.format} {self.rows}x{self.length} weights={self.weights}{mask}"

    @property
    def heads(self) -> tuple[int, ...] | None:
        """Whose weights are asked for by number; None = nobody's, or everybody's."""
        if not self.weights.startswith("heads:"):
            return None
        return tuple(int(head) for head in self.weights.removeprefix("heads:").split(","))

    def as_dict(self) -> dict[str, str]:
        """Return it as the raw file has it."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Tensors:
    """
    One call's inputs.

    Shapes: B rows, S length.
        inputs       each [B, S, its width], by name
        attend_mask  [B, S] bool, true = takes part
        pair_mask    [B, 1, S, S] bool, true = this query may attend to this key
    """

    inputs: dict[str, npt.NDArray[Any]]
    attend_mask: npt.NDArray[np.bool_] | None = None
    pair_mask: npt.NDArray[np.bool_] | None = None
    causal: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return sum(tensor.nbytes for tensor in self.inputs.values())

    @property
    def masks(self) -> dict[str, npt.NDArray[np.bool_]]:
        """The masks that are given, by their names in the contract."""
        given = {"attend_mask": self.attend_mask, "pair_mask": self.pair_mask}
        return {name: mask for name, mask in given.items() if mask is not None}


_HALF: Final = 0.5


def shapes(option: str, text: str) -> list[tuple[str, str]]:
    """
    Return (rows, length) of each shape of a list such as `1x8,4xuniform:1:64`.

    Raises:
        UsageWrong: one of them is none.
    """
    found = []
    for part in re.split(r",(?=\d+x|[a-z]+:[^,]*x)", text):
        match = _SHAPE.fullmatch(part.strip())
        if not match:
            raise UsageWrong(
                f"{option}: expected ROWSxLENGTH such as 1x8 or 4xuniform:1:64, got {part!r}"
            )
        Draw.parse(option, match["rows"])
        Draw.parse(option, match["length"])
        found.append((match["rows"], match["length"]))
    return found


def check_weights(option: str, text: str) -> str:
    """
    Return the mode itself.

    Raises:
        UsageWrong: there is no such mode.
    """
    if not _WEIGHTS.fullmatch(text):
        raise UsageWrong(f"{option}: expected off, on or heads:0,3, got {text!r}")
    return text


def check_mask(option: str, text: str) -> Mask:
    """
    Return the kind itself.

    Raises:
        UsageWrong: there is no such kind.
    """
    return cast(Mask, _one_of(option, text, get_args(Mask)))


def check_format(option: str, text: str) -> Format:
    """
    Return the format itself.

    Raises:
        UsageWrong: there is no such format.
    """
    return cast(Format, _one_of(option, text, get_args(Format)))


def draw_tensors(
    work: Work, inputs: Sequence[Input], count: int, *, most_bytes: int, seed: int
) -> list[Tensors]:
    """
    Return the inputs of up to `count` calls, fewer where they would be more than `most_bytes`.

    Each call draws its rows and its length anew; all rows of a call have that length.

    Raises:
        UsageWrong: a drawn shape is not what the model takes.
    """
    random = np.random.default_rng(seed)
    rows, length = Draw.parse("--shape", work.rows), Draw.parse("--shape", work.length)
    made: list[Tensors] = []
    size = 0
    while len(made) < count and (not made or size + made[-1].nbytes <= most_bytes):
        made.append(_tensors(work.mask, inputs, rows(random), length(random), random))
        size += made[-1].nbytes
    return made


def _tensors(
    mask: Mask, inputs: Sequence[Input], rows: int, length: int, random: np.random.Generator
) -> Tensors:
    drawn = {}
    for one in inputs:
        one.check(rows, length)
        values = random.standard_normal((rows, length, one.width), dtype=np.float32)
        drawn[one.name] = values.astype(DTYPES[one.datatype])
    if mask == "padding":
        lengths = random.integers(1, length, rows, endpoint=True)
        return Tensors(drawn, attend_mask=np.arange(length)[None, :] < lengths[:, None])
    if mask == "pair":
        return Tensors(drawn, pair_mask=random.random((rows, 1, length, length)) < _HALF)
    return Tensors(drawn, causal=mask == "causal")


def _one_of(option: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise UsageWrong(f"{option}: expected one of {', '.join(choices)}, got {text!r}")
    return text
