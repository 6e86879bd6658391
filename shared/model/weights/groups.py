"""Matrices that AWQ or GPTQ has quantised, read from a folder's own tensors in place of `weight`: `qweight`, `qzeros`,
`scales` and, of GPTQ, `g_idx`.

A weight is (quant - zero) * scale, with a zero and a scale for a group of inputs. 4 bits of GPTQ's kind, or 8, are
packed in int32. AWQ packs 8 outputs, qweight [K, N / 8], in an order of its own; GPTQ 8 inputs, qweight [K / 8, N], or
4 of 8 bits. Zeros are [groups, N / 8] and scales [groups, N] for both. The first version of GPTQ writes zeros less 1.
Sources: AutoAWQ's gemm.py and AutoGPTQ's qlinear_cuda.py.

No number is rounded on the way into GGUF's blocks: those of a symmetric matrix are Q4_0 or Q8_0, and others Q5_0, whose
quants hold quant - zero. A GPU keeps 4 bits, and a scale and a zero for a group (`shared.ops.blocks`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from shared import ops
from shared.model.dtypes import dtype_name
from shared.model.remembered.packed import PackedMatrices
from shared.model.weights.files import corrupt
from shared.model.weights.quantised import quantisation, settings_of
from shared.model.weights.schemes import Place, Scheme
from shared.model.weights.stored import ALL_ROWS, Stored, name_of, rounded_to, row_ranges

# The output among 8 whose quant each four bits of AWQ's words hold, from the lowest on.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
# Columns that share a scale in the blocks, and in what a GPU keeps.
BLOCK, SPANS = 32, (128, 64, 32)


@dataclass(frozen=True)
class Groups(Scheme):
    """How a folder's matrices are packed. `group`: columns of a group; -1: all.
    `zeros_less_one`: whether 1 is to be added to the file's zeros."""

    is_awq: bool
    bits: int
    group: int
    zeros_less_one: bool
    parts, suffix = (".qweight", ".qzeros", ".scales", ".g_idx"), ".weight"

    def shape_of(self, name: str, places: Mapping[str, Place]) -> tuple[int, int]:
        """N and K."""
        path, in_word = places["qweight"].file.path, 32 // self.bits
        for part, dtypes in {"qweight": (torch.int32,), "qzeros": (torch.int32,), "scales": _SCALES}.items():
            if part not in places or len(places[part].shape) != 2 or places[part].dtype not in dtypes:
                raise corrupt(path, f"it has no {part} of {name!r}, or one of another shape or dtype")
        (first, _), (num_groups, rows) = places["qweight"].shape, places["scales"].shape
        columns = first if self.is_awq else first * in_word
        wanted: dict[str, tuple[int, ...]] = {"qweight": (columns, rows // in_word) if self.is_awq else (first, rows)}
        wanted |= {"qzeros": (num_groups, rows // in_word)}
        wanted |= {"g_idx": (columns,)} if "g_idx" in places else {}
        fits = rows > 0 and columns > 0 and rows % in_word == 0
        fits = fits and num_groups == (1 if self.group == -1 else -(-columns // self.group))
        if not fits or any(tuple(places[part].shape) != shape for part, shape in wanted.items()):
            raise corrupt(path, f"the tensors of {name!r} do not fit each other")
        return rows, columns

    def stored(
        self, name: str, places: Mapping[str, Place], target_dtype: torch.dtype | None, matrices: PackedMatrices | None
    ) -> "Grouped":
        return Grouped(name, places, self, target_dtype=target_dtype, matrices=matrices)


def scheme_of(config: PreTrainedConfig) -> Groups | None:
    """None if neap does not read the checkpoint's packing, which then is a matter of the package that made it."""
    method, settings = quantisation(config), settings_of(config) or {}
    bits, group = settings.get("bits", 4), settings.get("group_size", 128)
    if not isinstance(group, int) or (group < 1 and group != -1):
        return None
    if method == "awq":
        is_read = bits == 4 and settings.get("zero_point", True) and settings.get("version", "gemm") in ("gemm", "GEMM")
        return Groups(True, 4, group, False) if is_read else None
    form = settings.get("checkpoint_format") or "gptq"
    is_other = settings.get("is_marlin_format") or settings.get("dynamic") or settings.get("pack_dtype") not in _WORDS
    if method != "gptq" or bits not in (4, 8) or form not in ("gptq", "gptq_v2") or is_other:
        return None
    return Groups(False, bits, group, form == "gptq")


_WORDS = (None, "int32", torch.int32)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


class Grouped(Stored):
    """A matrix [N, K] in such tensors.

    `target_dtype` and `matrices` as of `Plain`. Raises `Corrupt` for tensors that contradict each other.
    """

    def __init__(
        self,
        name: str,
        places: Mapping[str, Place],
        scheme: Groups,
        *,
        target_dtype: torch.dtype | None = None,
        matrices: PackedMatrices | None = None,
    ) -> None:
        rows, columns = scheme.shape_of(name, places)
        self._scheme, self._places, self._matrices = scheme, places, matrices or PackedMatrices()
        self._group = columns if scheme.group == -1 else scheme.group
        zeros = self._zeros()
        self._of_column, scales = None, places["scales"].read()
        if "g_idx" in places:
            own = places["g_idx"].read().long()
            if bool((own < 0).any() or (own >= len(scales)).any()):
                raise corrupt(places["g_idx"].file.path, f"g_idx of {name!r} names groups that are not there")
            in_order = torch.equal(own, torch.arange(columns) // self._group)
            self._of_column = None if in_order else own
        middle = 1 << (scheme.bits - 1)
        if self._of_column is not None:
            self.why_wide = "its groups are not in the order of its columns (desc_act)"
        elif columns % BLOCK or self._group % BLOCK:
            self.why_wide = f"its groups are no multiples of {BLOCK} columns"
        elif scheme.bits == 8 and bool((zeros != middle).any()):
            self.why_wide = "no block has 8 bits and a zero"
        elif not torch.equal(scales.half().to(scales.dtype), scales):
            self.why_wide = "its scales are no float16"
        kind = "Q8_0" if scheme.bits == 8 else "Q4_0" if bool((zeros == middle).all()) else "Q5_0"
        self._wide = target_dtype or (scales.dtype if self.why_wide else None)
        super().__init__(rows, columns, dtype_name(self._wide) if self._wide else kind)
        if not self._wide:
            span = next(span for span in SPANS if self._group % span == columns % span == 0)
            self.device_kind = kind if scheme.bits == 8 else f"W4_{span}"

    def numbers(self) -> Tensor:
        """float32 [N, K]."""
        zeros, scales = self._spread(self._zeros()), self._spread(self._scales().float())
        return (self._quants().float() - zeros.float()) * scales

    def device_blocks(self) -> Tensor:
        if self._scheme.bits == 8:
            return self._blocks()
        span = int(self.device_kind.removeprefix("W4_"))
        quants = self._quants().view(self.rows, -1, 2, span // 2)
        zeros = self._each(self._zeros().short(), span).view(torch.uint8)
        scales = self._each(self._scales(), span).view(torch.uint8)
        return torch.cat([scales, zeros, quants[:, :, 0] | quants[:, :, 1] << 4], -1).flatten(1)

    def pack_ahead(self) -> None:
        if self._wide is None:
            self.pack()

    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        place = self._places["qweight"]
        return self._matrices.get(name_of(place.file, place.offset, self.format, rows), lambda: self._packed(rows))

    def _packed(self, rows: slice) -> Tensor:
        if self._wide is not None:
            return ops.pack_linear(rounded_to(self.numbers(), self._wide)[rows])
        return ops.pack_blocks(self._blocks()[rows], self.format, self.columns)

    def dequantised_rows(self) -> Tensor:
        return ops.unpack_linear(self.pack())

    def row_parts(self) -> Iterator[Tensor]:
        packed = self.pack()
        return (ops.packed_rows(packed, rows) for rows in row_ranges(self))

    def rounded(self) -> Tensor:
        wide = self.numbers() if self._wide is not None else self.dequantised_rows()
        return (wide.T.contiguous() if self.transposed else wide).to(torch.bfloat16)

    def _blocks(self) -> Tensor:
        """uint8 [N, bytes per row], as GGUF writes `format`."""
        quants = self._quants()
        scales = self._each(self._scales(), BLOCK).view(torch.uint8)
        if self.format == "Q8_0":
            return torch.cat([scales, (quants ^ 128).view(self.rows, -1, BLOCK)], -1).flatten(1)
        parts = [scales]
        if self.format == "Q5_0":
            quants = quants + 16 - self._spread(self._zeros())
            fifth = (quants >> 4).view(self.rows, -1, 4, 8) << torch.arange(8, dtype=torch.uint8)
            parts.append(fifth.sum(-1, dtype=torch.uint8))
        halves = (quants & 15).view(self.rows, -1, 2, BLOCK // 2)
        return torch.cat([*parts, halves[:, :, 0] | halves[:, :, 1] << 4], -1).flatten(1)

    def _spread(self, of_groups: Tensor) -> Tensor:
        """[N, groups] -> [N, K]."""
        if self._of_column is not None:
            return of_groups[:, self._of_column]
        return of_groups.repeat_interleave(self._group, 1)[:, : self.columns]

    def _each(self, of_groups: Tensor, columns: int) -> Tensor:
        """[N, groups] -> [N, K / columns, 1]."""
        return of_groups.repeat_interleave(self._group // columns, 1)[:, : self.columns // columns, None].contiguous()

    def _scales(self) -> Tensor:
        """[N, groups], in float16 if it is in blocks."""
        scales = self._places["scales"].read().T
        return scales if self.why_wide else scales.half()

    def _zeros(self) -> Tensor:
        """uint8 [N, groups]."""
        zeros = self._unpacked("qzeros").flatten(1)
        if self._scheme.zeros_less_one:
            zeros = (zeros + 1) & ((1 << self._scheme.bits) - 1)
        return zeros.T

    def _quants(self) -> Tensor:
        """uint8 [N, K]."""
        quants = self._unpacked("qweight")
        return (quants.flatten(1).T if self._scheme.is_awq else quants.transpose(0, 1).flatten(1)).contiguous()

    def _unpacked(self, name: str) -> Tensor:
        """The numbers of words [R, C]: uint8 [R, C, numbers of a word]."""
        words = self._places[name].read()
        eight = words.view(torch.uint8).view(*words.shape, 4)
        if self._scheme.bits == 8:
            return eight
        four = torch.stack([eight & 15, eight >> 4], -1).flatten(-2)
        return four[..., torch.tensor(AWQ_ORDER).argsort()] if self._scheme.is_awq else four
