"""Safetensors files of any size, written and read piece by piece: for tables that come and go (interchange.py).

The format is that of the `safetensors` package, which reads what is written here and whose files are read here; that
package holds a file's tensors in memory, and tells less of what is wrong with a file.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embedding_server.errors import InvalidInput
from embedding_server.segment_file import PARTIAL_SUFFIX, sync_fd, sync_folder, write_all
from embedding_server.strict_json import parse_strict

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 1 << 16
MAX_HEADER_VALUES = 3 << 17  # some 40 MB as Python objects, twice that while they are read
DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "F32": np.dtype("<f4")}  # that are read and written
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0  # in the file

    @property
    def row_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape[1:])

    @property
    def size_bytes(self) -> int:
        return self.row_bytes * (self.shape[0] if self.shape else 1)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class TensorFileWriter:
    """append ... or map ..., then finish(); or abandon(), at any time. Methods raise OSError.

    InvalidInput if there is a file of that name. It appears under its name when it is whole and on disk.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        refuse_existing(path)
        self.path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        header, self._tensors = _header(tensors, metadata)
        self._at = {name: tensor.offset for name, tensor in self._tensors.items()}
        self.size_bytes = len(header) + sum(tensor.size_bytes for tensor in tensors.values())
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd: int | None = os.open(self._partial, flags, 0o644)
        self._is_finished = False
        try:
            # All room is taken now: a map of a file for which there is none ends the process.
            os.posix_fallocate(self._fd, 0, self.size_bytes)
            write_all(self._fd, memoryview(header))
        except BaseException:
            self.abandon()
            raise

    def append(self, name: str, rows: np.ndarray) -> None:
        """The next rows of a tensor, in its dtype."""
        assert self._fd is not None
        tensor = self._tensors[name]
        assert rows.dtype == DTYPES[tensor.dtype]
        assert self._at[name] + rows.nbytes <= tensor.offset + tensor.size_bytes, f"{name} of {self.path} is full"
        os.lseek(self._fd, self._at[name], os.SEEK_SET)
        write_all(self._fd, np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        self._at[name] += rows.nbytes

    def map(self, name: str) -> np.ndarray:
        """The whole tensor, to be written in any order; it counts as complete."""
        assert self._fd is not None
        tensor = self._tensors[name]
        self._at[name] = tensor.offset + tensor.size_bytes
        first = tensor.offset - tensor.offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._fd, tensor.offset + tensor.size_bytes - first, offset=first)
        dtype = DTYPES[tensor.dtype]
        return np.frombuffer(mapped, dtype, math.prod(tensor.shape), tensor.offset - first).reshape(tensor.shape)

    def finish(self) -> None:
        assert self._fd is not None
        for name, tensor in self._tensors.items():
            assert self._at[name] == tensor.offset + tensor.size_bytes, f"{name} of {self.path} is not complete"
        sync_fd(self._fd)
        self._close()
        publish(self._partial, self.path)
        self._is_finished = True

    def abandon(self) -> None:
        if self._fd is not None:
            self._close()
        if not self._is_finished:
            with contextlib.suppress(OSError):
                self._partial.unlink()

    def _close(self) -> None:
        assert self._fd is not None
        fd, self._fd = self._fd, None
        os.close(fd)


def publish(partial: Path, path: Path) -> None:
    """Gives a whole file that is on disk its name. OSError: then it has neither its own nor `partial`, if the disk
    still takes that."""
    try:
        os.rename(partial, path)
        sync_folder(path.parent)
    except OSError:
        for left in (partial, path):
            with contextlib.suppress(OSError):
                left.unlink()
        raise


def refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise InvalidInput(f"{path} exists; name another file, or remove it")
    if not path.parent.is_dir():
        raise InvalidInput(f"{path}: there is no folder {path.parent}; make it first")


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Tensor]]:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.size_bytes
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    placed, offset = {}, 8 + len(text)
    for name, tensor in tensors.items():
        placed[name] = Tensor(tensor.dtype, tensor.shape, offset)
        offset += tensor.size_bytes
    return len(text).to_bytes(8, "little") + text, placed


def open_input(path: Path) -> int:
    """A descriptor to read a file that somebody brings. InvalidInput unless it is a regular file, itself."""
    if path.is_symlink():
        raise InvalidInput(f"{path} is a symbolic link; name the file that it leads to, {path.resolve()}")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read ({error.strerror}); name a file") from None
    if not path.is_file():
        os.close(fd)
        raise InvalidInput(f"{path} is no regular file; name a file")
    return fd


class TensorFile:
    """Reads ranges of a file's tensors. InvalidInput, naming the file and the rule, unless it is sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_input(path)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor of DTYPES, a copy."""
        tensor = self.tensors[name]
        data = self._read(tensor.offset + start * tensor.row_bytes, (stop - start) * tensor.row_bytes)
        return np.frombuffer(data, DTYPES[tensor.dtype]).reshape(stop - start, *tensor.shape[1:])

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def bad(self, what: str) -> InvalidInput:
        return InvalidInput(f"{self.path}: {what}")

    def _read_header(self) -> dict[str, Tensor]:
        size = os.fstat(self._fd).st_size
        if size < 8:
            raise self.bad(f"has {size} bytes; a safetensors file has 8 at least")
        start = bytes(self._read(0, 8))
        if start.startswith(_PICKLES):
            raise self.bad(
                "is a file of pickle or torch.save, which can run code when it is read; save it with"
                " safetensors.torch.save_file"
            )
        length = int.from_bytes(start, "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise self.bad(
                f"its header would have {length} bytes, of a file of {size}; a safetensors header has at most"
                f" {MAX_HEADER_BYTES}"
            )
        data = bytes(self._read(8, length))
        try:
            header = parse_strict(data, MAX_HEADER_VALUES, MAX_TENSORS)
        except ValueError as error:
            raise self.bad(f"its header is no JSON ({error}); it is no safetensors file") from None
        if not isinstance(header, dict):
            raise self.bad("its header is no JSON object; it is no safetensors file")
        self.metadata = self._metadata(header.pop("__metadata__", {}))
        tensors = {name: self._entry(name, entry, 8 + length) for name, entry in header.items()}
        self._check_cover(tensors, 8 + length, size)
        return tensors

    def _metadata(self, metadata: Any) -> dict[str, str]:
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self.bad("its __metadata__ must be text by name")
        return metadata

    def _entry(self, name: str, entry: Any, data_start: int) -> Tensor:
        what = f"tensor {name[:200]!r}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self.bad(f"{what}: its entry must have dtype, shape and data_offsets alone")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            raise self.bad(f"{what}: dtype {str(dtype)[:40]!r} is not one of {', '.join(_ITEM_BYTES)}")
        if not _are_sizes(shape) or len(shape) > 8:
            raise self.bad(f"{what}: shape {str(shape)[:80]} must be at most 8 numbers of at least 0")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise self.bad(f"{what}: data_offsets {str(offsets)[:80]} must be two numbers")
        tensor = Tensor(dtype, tuple(shape), data_start + offsets[0])
        if offsets[1] - offsets[0] != tensor.size_bytes:
            raise self.bad(f"{what}: data_offsets {offsets} are not the {tensor.size_bytes} bytes of {tensor}")
        return tensor

    def _check_cover(self, tensors: Mapping[str, Tensor], data_start: int, size: int) -> None:
        """Tensors lie one behind the other, without holes, up to the end of the file."""
        at = data_start
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
            if tensor.offset != at:
                raise self.bad(f"tensor {name[:200]!r} begins at byte {tensor.offset}, not behind the one before, {at}")
            at += tensor.size_bytes
        if at != size:
            raise self.bad(f"has {size} bytes, and its tensors end at {at}; it was cut off or is no safetensors file")

    def _read(self, offset: int, size: int) -> bytearray:
        data = bytearray(size)
        done = 0
        while done < size:
            got = os.preadv(self._fd, [memoryview(data)[done:]], offset + done)
            if got <= 0:
                raise self.bad(f"ends at byte {offset + done}; it was cut off while it was read")
            done += got
        return data


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
