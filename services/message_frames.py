"""Frames and unframes protobuf messages whose large bytes fields do not go through protobuf objects.

A generated class would copy every payload twice more (into the field and out of it). Here it serialises the small
fields, and the large ones follow as tag, length, bytes, joined once. The result is an ordinary message: the generated
classes read it, and `unframe` reads theirs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from embedding_server.errors import InvalidInput

#: number of the `padding` field in every message of embedding.proto that has bulk fields
PADDING_FIELD = 15
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_ALIGNMENT = 8

M = TypeVar("M", bound=Message)

#: one a table and a few more; a message of nothing but tiny fields would take a hundred times its size to read
MAX_FIELDS = 1 << 16

_allocate_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_allocate_bytes.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
_allocate_bytes.restype = ctypes.py_object


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Value and the position after it. Raises IndexError past the end, InvalidInput beyond 64 bits."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise InvalidInput(f"message: the varint before byte {at} has over 64 bits; the message is damaged")


def _tag(number: int) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED)


def _intros(position: int, sizes: Iterable[tuple[int, int]], aligned: int | None) -> list[tuple[int, bytes, int]]:
    """(number, bytes before the content, size) of each bulk field that is not empty; the first starts at `position`."""
    intros = []
    for number, size in sizes:
        if not size:
            continue
        intro = _tag(number) + _varint(size)
        if number == aligned:
            # The padding field adds a byte of tag and a byte of length of its own.
            filler = -(position + 2 + len(intro)) % _ALIGNMENT
            intro = _tag(PADDING_FIELD) + bytes([filler]) + bytes(filler) + intro
        intros.append((number, intro, size))
        position += len(intro) + size
    return intros


def frame(header: Message, bulk: Mapping[int, Sequence[np.ndarray]], aligned: int | None = None) -> bytes:
    """One message: the fields set in `header`, then each bulk field, by number the contiguous arrays that make it up.

    `aligned` is the number of the bulk field whose bytes start at a multiple of 8 from the start of the message.
    """
    head = header.SerializeToString()
    sizes = [(number, sum(array.nbytes for array in arrays)) for number, arrays in bulk.items()]
    pieces: list[bytes | np.ndarray] = [head]
    for number, intro, _ in _intros(len(head), sizes, aligned):
        pieces.append(intro)
        pieces.extend(bulk[number])
    return b"".join(pieces)


def reserve(
    header: Message, sizes: Mapping[int, int], aligned: int | None = None
) -> tuple[bytes, dict[int, np.ndarray]]:
    """A message whose bulk fields are still to be written, and where: uint8[size] of each by its number.

    As `frame`, without the copy. Write every byte before the message leaves: the memory is not cleared.
    """
    head = header.SerializeToString()
    intros = _intros(len(head), sizes.items(), aligned)
    message = _new_bytes(len(head) + sum(len(intro) + size for _, intro, size in intros))
    whole = as_array(message)
    whole[: len(head)] = np.frombuffer(head, np.uint8)
    fields = dict.fromkeys(sizes, whole[:0])
    at = len(head)
    for number, intro, size in intros:
        whole[at : at + len(intro)] = np.frombuffer(intro, np.uint8)
        at += len(intro)
        fields[number] = whole[at : at + size]
        at += size
    return message, fields


def _new_bytes(size: int) -> bytes:
    """Bytes that nobody has seen yet, so that writing them is no harm; not cleared."""
    # Bytes of 0 or 1 are shared by the whole interpreter.
    return _allocate_bytes(None, size) if size > 1 else bytes(size)


def unframe(data: bytes, cls: type[M], bulk: Iterable[int]) -> tuple[M, dict[int, tuple[int, int]]]:
    """The small fields as a `cls` message, and (offset, size) of each bulk field present; of a repeated one the last.

    Raises InvalidInput if the bytes are not a message.

    A small look-up of many tables is mostly small fields: so the loop calls nothing for a tag or a length of one byte,
    and what lies between bulk fields is passed over and parsed at once.
    """
    wanted = frozenset(bulk) | {PADDING_FIELD}
    found: dict[int, tuple[int, int]] = {}
    small: list[bytes] = []
    at, end = 0, len(data)
    passed_from = num_small = 0  # the small fields since the last bulk field begin there
    try:
        while at < end:
            start, tag = at, data[at]
            at += 1
            if tag > 0x7F:
                tag, at = _read_varint(data, start)
            if tag & 7 != _LENGTH_DELIMITED:
                at = _end_of_number(data, at, tag & 7)
            else:
                size = data[at]
                at += 1
                if size > 0x7F:
                    size, at = _read_varint(data, at - 1)
                at += size
                if tag >> 3 in wanted:
                    if start > passed_from:
                        small.append(data[passed_from:start])
                    found[tag >> 3] = (at - size, size)
                    passed_from = at
                    continue
            num_small += 1
            if num_small > MAX_FIELDS:
                raise InvalidInput(
                    f"message: more than {MAX_FIELDS} fields beside the bulk in one {cls.DESCRIPTOR.name};"
                    " name fewer tables in a call"
                )
        if at > end:
            raise IndexError
        small.append(data[passed_from:])
        return cls.FromString(b"".join(small)), found
    except (IndexError, DecodeError) as error:
        raise InvalidInput(
            f"message: {end} bytes are not a whole {cls.DESCRIPTOR.name}; it was cut or is of another API"
        ) from error


def _end_of_number(data: bytes, at: int, wire_type: int) -> int:
    """Where the number ends that begins at `at`; it may lie past the message."""
    if wire_type == _VARINT:
        return _read_varint(data, at)[1]
    if wire_type in _FIXED_BYTES:
        return at + _FIXED_BYTES[wire_type]
    raise InvalidInput(f"message: wire type {wire_type} at byte {at} is not one of proto3; the message is damaged")


class _Writable:
    """Lets numpy see a message's bytes as a writable array.

    numba compiles every kernel again for read-only arrays. Nobody writes here but who fills a message from `reserve`.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: bytes) -> None:
        interface = dict(np.frombuffer(owner, np.uint8).__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.owner = owner
        self.__array_interface__ = interface


def as_array(data: bytes) -> np.ndarray:
    """The bytes of a message as uint8[len], without a copy; keeps `data` alive."""
    return np.asarray(_Writable(data)) if data else np.empty(0, np.uint8)


def view(base: np.ndarray, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
    """`count` values of a message from `offset`, flat; copied only if unaligned, which numba cannot take."""
    values = base[offset : offset + count * dtype.itemsize].view(dtype)
    return values if values.flags.aligned else values.copy()
