"""The tensors of an infer request: in its JSON, behind it as binary data, or in shared memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from service.codecs.checks import check_known, kind_of, shown
from service.codecs.datatypes import (
    BOOL,
    DTYPES,
    FP32,
    INPUTS,
    INTEGERS,
    check_datatype,
    to_floats,
)
from service.codecs.json_reader import MAX_RANK, Nested, Node, Reader
from service.codecs.names import check_names
from service.codecs.shared_memory import Place, Slot, checked_size
from service.errors import InvalidInput

REGION: Final = "shared_memory_region"

_LONGEST_AXIS: Final = 2**31 - 1

Arrays = dict[str, npt.NDArray[Any]]

Places = Mapping[str, Place]
"""Where in shared memory tensors lie or belong, by their names."""


@dataclass(frozen=True)
class Borrowed:
    """An input that lies in shared memory."""

    slot: Slot
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Trailing:
    """An input that lies in the body, behind its JSON."""

    offset: int
    """From the end of the JSON."""
    byte_size: int
    datatype: str
    shape: tuple[int, ...]


def inputs_of(
    reader: Reader, entries: list[dict[str, Node]]
) -> tuple[Arrays, dict[str, Trailing], dict[str, Borrowed]]:
    """Return the tensors that the JSON holds, and where the others lie: behind it, or shared."""
    arrays: Arrays = {}
    trailing: dict[str, Trailing] = {}
    borrowed: dict[str, Borrowed] = {}
    offset = 0
    for i, entry in enumerate(entries):
        where = f"inputs[{i}]"
        check_known(entry, ("name", "shape", "datatype", "parameters", "data"), where)
        name = name_of(reader, entry, where)
        check_names([name], INPUTS, where)
        if name in {*arrays, *trailing, *borrowed}:
            raise InvalidInput(f"{where}: expected each input once, got {name} twice")
        shape = _shape(reader, entry, where)
        datatype = _datatype(reader, entry, name, where)
        parameters = parameters_of(reader, entry, f"{where}.parameters")
        size = parameters.get("binary_data_size")
        places = ("data" in entry) + (size is not None) + (REGION in parameters)
        if places != 1:
            raise InvalidInput(
                f"{name}: expected one of data, parameters.binary_data_size and"
                f" parameters.{REGION}, got {places or 'none'}"
            )
        if size is not None:
            byte_size = _check_size(size, "binary_data_size", name, datatype, shape)
            trailing[name] = Trailing(offset, byte_size, datatype, shape)
            offset += byte_size
        elif REGION in parameters:
            slot = slot_of(parameters, f"{where}.parameters")
            _check_size(slot.byte_size, "shared_memory_byte_size", name, datatype, shape)
            borrowed[name] = Borrowed(slot, datatype, shape)
        else:
            arrays[name] = _from_json(reader, entry["data"], name, datatype, shape)
    return arrays, trailing, borrowed


def name_of(reader: Reader, entry: Mapping[str, Node], where: str) -> str:
    """Return the `name` of an input or output."""
    name = reader.plain(entry["name"]) if "name" in entry else None
    if not isinstance(name, str):
        raise InvalidInput(f"{where}.name: expected a string, got {kind_of(name)}")
    return name


def parameters_of(reader: Reader, members: Mapping[str, Node], where: str) -> dict[str, Any]:
    """Return the `parameters` object; unknown ones are the protocol's to ignore."""
    parameters = reader.plain(members["parameters"]) if "parameters" in members else {}
    if not isinstance(parameters, dict):
        raise InvalidInput(f"{where}: expected an object, got {kind_of(parameters)}")
    return parameters


def flag_of(parameters: Mapping[str, Any], name: str, where: str, *, default: bool) -> bool:
    """Return a boolean parameter, or its default."""
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidInput(f"{where}.{name}: expected true or false, got {kind_of(value)}")
    return value


def slot_of(parameters: dict[str, Any], where: str) -> Slot:
    """Return the place in shared memory that the parameters of a tensor name."""
    region = parameters[REGION]
    if not isinstance(region, str):
        raise InvalidInput(f"{where}.{REGION}: expected a string, got {kind_of(region)}")
    offset = parameters.get("shared_memory_offset", 0)
    byte_size = parameters.get("shared_memory_byte_size")
    return Slot(
        region,
        checked_size(f"{where}.shared_memory_offset", offset, least=0),
        checked_size(f"{where}.shared_memory_byte_size", byte_size, least=1),
    )


def _shape(reader: Reader, entry: Mapping[str, Node], where: str) -> tuple[int, ...]:
    shape = reader.plain(entry["shape"]) if "shape" in entry else None
    expected = (
        f"{where}.shape: expected at most {MAX_RANK} axes, each a whole number from 1 to"
        f" {_LONGEST_AXIS}, got"
    )
    if not isinstance(shape, list):
        raise InvalidInput(f"{expected} {shown(shape)}")
    if len(shape) > MAX_RANK:
        raise InvalidInput(f"{expected} {len(shape)} axes")
    for size in shape:
        if type(size) is not int or not 1 <= size <= _LONGEST_AXIS:
            raise InvalidInput(f"{expected} {shown(size)}")
    return tuple(shape)


def _datatype(reader: Reader, entry: Mapping[str, Node], name: str, where: str) -> str:
    datatype = reader.plain(entry["datatype"]) if "datatype" in entry else None
    place = f"{where}.datatype: {name}"
    if not isinstance(datatype, str):
        raise InvalidInput(f"{place}: expected {INPUTS[name]}, got {kind_of(datatype)}")
    check_datatype(datatype[:64], INPUTS[name], place)
    return datatype


def _from_json(
    reader: Reader, node: Node, name: str, datatype: str, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    if INPUTS[name] == BOOL:
        nested = reader.bools(node, name)
    elif datatype in INTEGERS:
        nested = reader.integers(node, name, INTEGERS[datatype])
    else:
        nested = reader.floats(node, name)
    expected = math.prod(shape)
    flat = nested.rank == 1 and nested.values.size == expected
    if not flat and nested.shape != shape:
        raise InvalidInput(
            f"{name}: expected data of shape {list(shape)} or {expected} flat values,"
            f" got {_found_shape(nested)}"
        )
    array = nested.values.reshape(shape)
    if array.dtype.kind not in "iu":
        return array
    return to_floats(array, name) if INPUTS[name] == FP32 else array.astype(np.int64)


def _found_shape(nested: Nested) -> str:
    if nested.shape is None:
        return "rows of unequal length"
    return f"{nested.values.size} flat values" if nested.rank == 1 else str(list(nested.shape))


def _check_size(
    size: object, parameter: str, name: str, datatype: str, shape: tuple[int, ...]
) -> int:
    """Return how many bytes the tensor takes, when that is what the parameter says."""
    expected = math.prod(shape) * DTYPES[datatype].itemsize
    if type(size) is not int or size != expected:
        found = size if type(size) is int else kind_of(size)
        raise InvalidInput(
            f"{name}: {parameter}: expected {expected} bytes for {datatype} {list(shape)},"
            f" got {found}"
        )
    return expected
