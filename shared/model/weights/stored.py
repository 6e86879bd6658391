"""Matrices of a model that are still in a checkpoint's file, or packed for the kernels."""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from shared import ops
from shared.errors import UnsupportedModel
from shared.model.dtypes import dtype_name
from shared.model.remembered.packed import PackedMatrices
from shared.model.weights.files import StableFile

# The block formats of GGUF that the kernels multiply by.
BLOCK_KINDS = frozenset(["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"])
PLAIN_KINDS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# The dtypes of the kernels' matrices.
LAZY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_ROWS = slice(None)
# A matrix is dequantised in parts of so many numbers where it need not be whole: an embedding takes a gigabyte. A part
# stays in the processor's caches, and in memory that is used again: the C library asks the system for more.
PART_NUMBERS = 1 << 19
# The number of a part's first row, and what gives its rows [*, K].
Reader = tuple[int, Callable[[], Tensor]]
# Rows that are packed together, and dequantised together if they are asked for together.
_PANEL = 16


class Stored(ABC):
    """A matrix [N, K]. `format` names its numbers: a dtype such as "bfloat16", or a block format such as "Q4_K".

    `transposed`: whether a model holds it as [K, N], as GPT-2 does; `shape` is what the model holds. `parts`: those
    that it consists of. `dtype` and `device`: of the tensor that it is to a model. `device_kind`: of blocks that a GPU
    multiplies by (`shared.ops.blocks`), if it can be arranged in such. `why_wide`: why it is kept in 16 bits though its
    checkpoint has fewer; empty if it is not.
    """

    parts: tuple["Stored", ...] = ()
    dtype, device = torch.float32, torch.device("cpu")
    device_kind = why_wide = ""

    def __init__(self, rows: int, columns: int, form: str, *, transposed: bool = False) -> None:
        self.rows, self.columns, self.format, self.transposed = rows, columns, form, transposed

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    def dequantised(self) -> Tensor:
        """The matrix as the model holds it: float32 [*shape]."""
        dequantised = self.dequantised_rows()
        return dequantised.T.contiguous() if self.transposed else dequantised

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The packed matrices that hold it. Empty if it is in a file."""
        return tuple(packed for part in self.parts for packed in part.memory)

    @property
    def sections(self) -> "tuple[Stored, ...]":
        """What it consists of, one below the other, if that is of several kinds."""
        return (self,)

    @abstractmethod
    def dequantised_rows(self) -> Tensor:
        """float32 [N, K]."""

    @abstractmethod
    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        """Rows [N, K] packed for the kernels, as `shared.ops.packed_linear` takes them."""

    def device_blocks(self) -> Tensor:
        """Blocks of `device_kind`: uint8 [N, bytes per row], those of all parts one below the other."""
        if not self.device_kind:
            raise NotImplementedError("it is not in blocks")
        return torch.cat([part.device_blocks() for part in self.parts])

    def pack_transpose(self, rows: slice = ALL_ROWS) -> tuple[Tensor, str]:
        """Rows of the transpose [K, N], packed, and the format of their numbers."""
        return ops.pack_linear(self.dequantised_rows().T[rows]), "float32"

    def pack_ahead(self) -> None:
        """Packs the matrix, or those that it consists of, if whoever reads it will read it packed."""
        for part in self.parts:
            part.pack_ahead()

    def row_readers(self) -> Iterator[Reader]:
        """What gives the rows of `dequantised_rows` in their order, in parts. Several threads may call them."""
        yield 0, self.dequantised_rows

    def row_parts(self) -> Iterator[Tensor]:
        """What `row_readers` give."""
        return (read() for _, read in self.row_readers())

    def turned(self) -> "Stored":
        """The same matrix, held by a model as the transpose of what this one holds."""
        turned = copy.copy(self)
        turned.transposed = not self.transposed
        return turned

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows `ids` [*] int64 as float32 [*, K]."""
        return self.dequantised_rows()[ids]

    def ends(self) -> Tensor:
        """The first row and the last one of all parts, float32 [2, K]: by them matrices of one shape are told apart."""
        if self.parts:
            return torch.cat([self.parts[0].ends()[:1], self.parts[-1].ends()[1:]])
        return self.look_up(torch.tensor([0, self.rows - 1]))

    def rounded(self) -> Tensor:
        """The checkpoint's matrix as the model holds it, rounded to bfloat16 once, whatever other dtype was wanted."""
        return self.dequantised().to(torch.bfloat16)

    def rounded_parts(self) -> Iterator[Tensor]:
        """The numbers of `rounded` in their order, in parts."""
        yield self.rounded()


class Plain(Stored):
    """Numbers of one dtype in a file. `row_order` [N] int64: row i of the matrix is row `row_order[i]` of the file.

    `target_dtype`: the dtype they are rounded to when they are read. None: their own.
    `matrices`: where packed matrices are kept while loading.
    """

    def __init__(
        self,
        file: StableFile,
        offset: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        target_dtype: torch.dtype | None = None,
        row_order: Tensor | None = None,
        transposed: bool = False,
        matrices: PackedMatrices | None = None,
    ) -> None:
        self._place = (file, offset, shape, dtype)
        self._target_dtype, self._row_order = target_dtype or dtype, row_order
        self._matrices = matrices or PackedMatrices()
        super().__init__(*shape, dtype_name(self._target_dtype), transposed=transposed)

    def read(self) -> Tensor:
        """[N, K] of the target dtype. Raises `UnsupportedModel` if that cannot hold a number."""
        return rounded_to(self._read(), self._target_dtype)

    def _read(self) -> Tensor:
        """[N, K] of the file's dtype."""
        numbers = self._read_rows(0, self.rows)
        return numbers if self._row_order is None else numbers[self._row_order]

    def _read_rows(self, first: int, count: int) -> Tensor:
        """`count` rows of the file from row `first` on: [count, K] of its dtype."""
        file, offset, (_, columns), dtype = self._place
        row_bytes = columns * dtype.itemsize
        return file.read(offset + first * row_bytes, count * row_bytes).view(dtype).view(count, -1)

    def _part_readers(self) -> Iterator[Reader]:
        """What gives the rows of `_read` in their order, in parts."""
        if self._row_order is not None:
            yield 0, self._read
            return
        for rows in row_ranges(self):
            yield int(rows[0]), partial(self._read_rows, int(rows[0]), len(rows))

    def dequantised_rows(self) -> Tensor:
        return self.read().float()

    def row_readers(self) -> Iterator[Reader]:
        return (
            (first, lambda read=read: rounded_to(read(), self._target_dtype).float())  # type: ignore[misc]
            for first, read in self._part_readers()
        )

    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        name = name_of(self._place[0], self._place[1], self.format, rows, self._row_order)
        return self._matrices.get(name, lambda: ops.pack_linear(self.read()[rows]))

    def pack_transpose(self, rows: slice = ALL_ROWS) -> tuple[Tensor, str]:
        name = name_of(self._place[0], self._place[1], f"{self.format}.T", rows, self._row_order)
        return self._matrices.get(name, lambda: ops.pack_linear(self.read().T[rows])), self.format

    def look_up(self, ids: Tensor) -> Tensor:
        file, offset, (_, columns), dtype = self._place
        rows = file.read_rows(offset, columns * dtype.itemsize, _in_file(ids, self._row_order))
        return rounded_to(rows.view(dtype), self._target_dtype).float().view(*ids.shape, columns)

    def rounded(self) -> Tensor:
        numbers = self._read().to(torch.bfloat16)
        return numbers.T.contiguous() if self.transposed else numbers

    def rounded_parts(self) -> Iterator[Tensor]:
        if self.transposed:
            yield self.rounded()
        else:
            yield from (read().to(torch.bfloat16) for _, read in self._part_readers())


class Blocks(Stored):
    """Quantised blocks in a GGUF file, of which none spans two rows. `target_dtype`, `row_order` and `matrices` as in
    `Plain`."""

    def __init__(
        self,
        file: StableFile,
        offset: int,
        shape: tuple[int, int],
        kind: GGMLQuantizationType,
        *,
        target_dtype: torch.dtype | None = None,
        row_order: Tensor | None = None,
        transposed: bool = False,
        matrices: PackedMatrices | None = None,
    ) -> None:
        self._place = (file, offset, shape, kind)
        self._target_dtype, self._row_order = target_dtype, row_order
        # Made once: loading reads a matrix for the fingerprint, for the model's own pass, and for the kernels.
        self._matrices = matrices or PackedMatrices()
        super().__init__(*shape, dtype_name(target_dtype) if target_dtype else kind.name, transposed=transposed)
        self.device_kind = "" if target_dtype else kind.name

    def device_blocks(self) -> Tensor:
        return self._blocks(self._place[0].read)

    def _blocks(self, read: Callable[[int, int], Tensor]) -> Tensor:
        _, offset, (rows, columns), kind = self._place
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = columns // block * block_bytes
        blocks = read(offset, rows * row_bytes).view(rows, row_bytes)
        return blocks if self._row_order is None else blocks[self._row_order]

    def pack_ahead(self) -> None:
        if self._target_dtype is None:
            self.pack()

    def dequantised_rows(self) -> Tensor:
        return ops.unpack_linear(self.pack())

    def row_readers(self) -> Iterator[Reader]:
        packed = self.pack()
        return ((int(rows[0]), partial(ops.packed_rows, packed, rows)) for rows in row_ranges(self))

    def look_up(self, ids: Tensor) -> Tensor:
        blocks = self._rows_in_file(_in_file(ids, self._row_order))
        rows = ops.unpack_linear(ops.pack_blocks(blocks, self._place[3].name, self.columns))
        return rounded_to(rows, self._target_dtype or rows.dtype).float().view(*ids.shape, self.columns)

    def _rows_in_file(self, rows: Sequence[int]) -> Tensor:
        file, offset, (_, columns), kind = self._place
        block, block_bytes = GGML_QUANT_SIZES[kind]
        return file.read_rows(offset, columns // block * block_bytes, rows)

    def rounded(self) -> Tensor:
        blocks = self.pack() if self._target_dtype is None else self._pack_blocks()
        numbers = ops.unpack_linear(blocks).to(torch.bfloat16)
        return numbers.T.contiguous() if self.transposed else numbers

    def rounded_parts(self) -> Iterator[Tensor]:
        if self.transposed or self._target_dtype is not None:
            yield self.rounded()
        else:
            yield from (part.to(torch.bfloat16) for part in self.row_parts())

    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        name = name_of(self._place[0], self._place[1], self.format, rows, self._row_order)
        return self._matrices.get(name, lambda: self._packed(rows))

    def _packed(self, rows: slice) -> Tensor:
        packed = self._pack_blocks(rows)
        if self._target_dtype is None:
            return packed
        return ops.pack_linear(rounded_to(ops.unpack_linear(packed), self._target_dtype))

    def _pack_blocks(self, rows: slice = ALL_ROWS) -> Tensor:
        blocks = self._blocks(self._place[0].read_briefly)[rows].contiguous()
        return ops.pack_blocks(blocks, self._place[3].name, self.columns)


class Packed(Stored):
    """A matrix in memory, packed for the kernels."""

    def __init__(self, packed: Tensor, rows: int, columns: int, form: str, *, transposed: bool = False) -> None:
        self.packed = packed
        super().__init__(rows, columns, form, transposed=transposed)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return (self.packed,)

    def dequantised_rows(self) -> Tensor:
        return ops.unpack_linear(self.packed)

    def row_readers(self) -> Iterator[Reader]:
        return ((int(rows[0]), partial(self.look_up, rows)) for rows in row_ranges(self))

    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        if rows == ALL_ROWS:
            return self.packed
        raise NotImplementedError("a packed matrix is packed as a whole")

    def look_up(self, ids: Tensor) -> Tensor:
        return ops.packed_rows(self.packed, ids)


def rounded_to(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """`numbers` in `dtype`. Raises `UnsupportedModel` (reason WEIGHTS_OVERFLOW) if one is too large for it."""
    if numbers.dtype == dtype:
        return numbers
    rounded = numbers.to(dtype)
    if dtype == torch.float16 and bool((rounded.isinf() & numbers.isfinite()).any()):
        raise UnsupportedModel(
            "a weight is too large for float16: choose bfloat16 or float32", reason="WEIGHTS_OVERFLOW"
        )
    return rounded


def row_ranges(matrix: Stored) -> tuple[Tensor, ...]:
    """The numbers of the matrix' rows, int64, in parts of about PART_NUMBERS numbers and of whole panels."""
    panels = max(1, PART_NUMBERS // _PANEL // max(matrix.columns, 1))
    return tuple(torch.arange(matrix.rows).split(_PANEL * panels))


def name_of(file: StableFile, offset: int, form: str, rows: slice, row_order: Tensor | None = None) -> str:
    """Names what a packed matrix was made from."""
    order = "" if row_order is None else hashlib.sha256(row_order.numpy().data).hexdigest()
    step = "" if rows.step is None else f":{rows.step}"
    return f"{file.path.name}:{offset}:{form}:{rows.start}:{rows.stop}{step}:{order}"


def _in_file(ids: Tensor, row_order: Tensor | None) -> Sequence[int]:
    """The rows of a file that hold rows `ids` [*] of a matrix."""
    rows: list[int] = (ids if row_order is None else row_order[ids]).flatten().tolist()
    return rows
