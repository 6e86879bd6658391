"""Matrices packed for the kernels, in memory while a model is loaded, and in a file that later starts map.

A matrix is known by what it was made from: the file, the place in it, the rows, and what was done to them. The file has
the matrices one after another, each at a multiple of ALIGNMENT bytes, and nothing else; their places and checksums are
facts.
"""

import ctypes
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shared.cpus import usable_cpus

# That of pages, so that writing to one matrix copies pages of this one only.
ALIGNMENT = 1 << 12
# The bytes of a packed matrix that change when matmuls are told to round their inputs.
HEADER_BYTES = 64
_PIECE = 1 << 24
_libc = ctypes.CDLL(None, use_errno=True)
_FAILED = ctypes.c_void_p(-1).value
_MOVES_ONTO = 3  # MREMAP_MAYMOVE | MREMAP_FIXED
# Each takes a place in the kernel's table of a process' mappings, which has 65,530 by default.
MOST_REPLACED = 1 << 12

# name -> place, number of bytes, checksums of the pieces
Table = dict[str, list[Any]]


class PackedMatrices:
    """The packed matrices of one model by name: those that were made, and those that are `mapped` from an earlier
    start's file."""

    def __init__(self, mapped: dict[str, Tensor] | None = None) -> None:
        self._known = dict(mapped or {})
        # Matmuls are told to round their inputs in the header, once everything is compared.
        # The file has the matrices before that.
        self._headers: dict[str, bytes] = {}

    def get(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The packed matrix `name`: uint8 [*]. Made once."""
        matrix = self._known.get(name)
        if matrix is None:
            matrix = self._known[name] = make()
            self._headers[name] = bytes(matrix[:HEADER_BYTES].numpy())
        return matrix

    def forget(self) -> None:
        """Forgets the mapped ones. To be called before any of them is taken."""
        self._known.clear()
        self._headers.clear()

    @property
    def num_bytes(self) -> int:
        """The bytes of those that were made."""
        return sum(self._known[name].nbytes for name in self._headers)

    def write(self, file: BinaryIO) -> Table:
        """Appends all that were made, in the order of their names, so that workers that write at once write the same.
        Raises `OSError`."""
        table: Table = {}
        for name, header in sorted(self._headers.items()):
            file.write(bytes(-file.tell() % ALIGNMENT))
            data = memoryview(self._known[name].numpy())  # type: ignore[arg-type]
            place, sums = file.tell(), []
            file.write(header)
            file.write(data[len(header) :])
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                sums.append(zlib.crc32(piece) if start else zlib.crc32(piece[len(header) :], zlib.crc32(header)))
            table[name] = [place, len(data), sums]
        return table

    def map(self, descriptor: int, table: Table) -> None:
        """Pages of the file that `write` has made take the place of this process' own, which have the same bytes: those
        of the MOST_REPLACED largest matrices. They stay where they are, and other threads may read them meanwhile. Does
        nothing but on Linux. Raises `OSError`; then some are mapped."""
        if sys.platform != "linux":
            return
        largest = sorted(table.items(), key=lambda entry: entry[1][1], reverse=True)
        for name, (place, count, _) in largest[:MOST_REPLACED]:
            address = self._known[name].data_ptr()
            if address % ALIGNMENT == 0:  # as those are that `shared.ops` has packed
                _map_onto(address, count // ALIGNMENT * ALIGNMENT, descriptor, place)


def _map_onto(address: int, num_bytes: int, descriptor: int, place: int) -> None:
    """Replaces whole pages of private memory by those of a file. What they hold never differs: a mapping gets the
    matrix' present header, and is then moved onto its place in one call. Raises `OSError`."""
    if not num_bytes:
        return
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    _libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
    size, at = ctypes.c_size_t(num_bytes), ctypes.c_void_p(address)
    fresh = _libc.mmap(None, size, protection, mmap.MAP_PRIVATE, descriptor, ctypes.c_long(place))
    if fresh == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    ctypes.memmove(fresh, address, HEADER_BYTES)
    if _libc.mremap(ctypes.c_void_p(fresh), size, size, _MOVES_ONTO, at) == _FAILED:
        error = ctypes.get_errno()
        _libc.munmap(ctypes.c_void_p(fresh), size)
        raise OSError(error, "mremap")


class MappedFile:
    """The matrices of a file, mapped. Writing to one changes this process' own copy of a page. Raises `OSError`, and
    `ValueError` if the file does not have the size that its table says.

    The file must not be cut while it is mapped: whoever touches a page that is no longer there is ended by SIGBUS. The
    store replaces and removes files; it never writes to one that has its name.
    """

    def __init__(self, path: Path, table: Table) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            ends = [place + count for place, count, _ in table.values()]
            if not ends or max(ends) != size:
                raise ValueError("it does not have the size that was written")
            mapped = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._mapped, self._bytes = mapped, torch.frombuffer(mapped, dtype=torch.uint8)
        self._table = table
        self.matrices = {name: self._bytes[place : place + count] for name, (place, count, _) in table.items()}

    def checked(self) -> "Future[bool]":
        """Begins to compare all checksums. Whether they agree. It reads the whole file, and brings it into the system's
        memory. In this process' own, pages come back when they are used: what is built until then takes much, too."""
        pool = ThreadPoolExecutor(1, "neap-checksums")
        try:
            return pool.submit(self._agrees)
        finally:
            pool.shutdown(wait=False)

    def _agrees(self) -> bool:
        with ThreadPoolExecutor(usable_cpus()) as pool:
            agree = all(pool.map(self._piece_agrees, self._pieces()))
        self._mapped.madvise(mmap.MADV_DONTNEED)
        return agree

    def _pieces(self) -> Iterable[tuple[int, int, int]]:
        for place, count, sums in self._table.values():
            for index, expected in enumerate(sums):
                start = index * _PIECE
                yield place + start, place + min(start + _PIECE, count), expected

    def _piece_agrees(self, piece: tuple[int, int, int]) -> bool:
        start, end, expected = piece
        return zlib.crc32(self._bytes[start:end].numpy().data) == expected
