"""Matrices of a .gguf file, or of AWQ and GPTQ, that stay in blocks on a GPU.

Linear layers and experts multiply by the blocks, and embeddings widen the rows that they look up. To the model a weight
is a tensor of the dtype that it computes in, which is widened where other code reads it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shared.model.substitution.experts_on_gpu import group, groupable
from shared.model.substitution.match import Unsuitable
from shared.model.weights.composed import Joined, Stacked
from shared.model.weights.lazy import LazyWeight, as_parameter, lazy
from shared.model.weights.stored import ALL_ROWS, Stored, rounded_to
from shared.ops import blocks as arrangement
from shared.ops.products import blocks_linear

# Rows of blocks that are arranged at once: what is made on the way takes a few bytes a weight.
PART_ROWS = 1 << 15


class OnDevice(Stored):
    """A matrix [N, K] in blocks of a kind on a device, as a model sees it in `dtype`."""

    def __init__(
        self, held: arrangement.Blocks, columns: int, kind: str, dtype: torch.dtype, *, transposed: bool = False
    ) -> None:
        self.held, self.dtype, self.device = held, dtype, held.low.device
        super().__init__(held.rows, columns, kind, transposed=transposed)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return tuple(self.held)

    def dequantised_rows(self) -> Tensor:
        return self._rows(ALL_ROWS)

    def row_parts(self) -> Iterator[Tensor]:
        return (self._rows(slice(first, first + PART_ROWS)) for first in range(0, self.rows, PART_ROWS))

    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        raise NotImplementedError("it is packed for another device")

    def look_up(self, ids: Tensor) -> Tensor:
        wide = arrangement.widened(self.held, self.format, self.columns, ids.flatten())
        return wide.to(self.dtype).view(*ids.shape, -1)

    def _rows(self, rows: slice) -> Tensor:
        return arrangement.widened(self.held, self.format, self.columns, rows).to(self.dtype)


class BlocksLinear(nn.Linear):
    """x [..., K] -> [..., N]. What is multiplied are buffers, because compiled layers cannot take a `LazyWeight`."""

    low: Tensor
    high: Tensor
    scales: Tensor
    supers: Tensor
    kind: str

    def forward(self, input: Tensor) -> Tensor:
        held = arrangement.Blocks(self.low, self.high, self.scales, self.supers)
        return blocks_linear(input, held, self.kind, self.bias)


class TakenBlocks:
    """The matrices of a model that stay in blocks, taken out of it while the rest is read and moved to a device."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._dtype = model, torch.float32
        self._taken: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in model.modules():
            for name in _names_of_kept(module):
                parameter = module._parameters.get(name)
                stored = lazy(parameter)
                if stored is None or parameter is None or stored.transposed != getattr(module, "is_transposed", False):
                    continue
                if all(section.device_kind for section in stored.sections):
                    self._taken.append((module, name, parameter))
                    module._parameters[name] = None

    @torch.no_grad()
    def round_others(self, dtype: torch.dtype) -> None:
        """Makes the model compute in a dtype. Its angles stay as they are."""
        self._dtype = dtype
        for parameter in self._model.parameters():
            parameter.data = rounded_to(parameter.data, dtype)

    @torch.no_grad()
    def place(self, device: torch.device) -> None:
        """Arranges them on the device, one by one, and gives them back to the model. Those that were shared stay
        shared."""
        placed: dict[int, tuple[list[OnDevice], nn.Parameter]] = {}
        experts: dict[nn.Module, dict[str, list[tuple[arrangement.Blocks, str]]]] = {}
        for module, name, parameter in self._taken:
            if id(parameter) not in placed:
                stored = lazy(parameter)
                assert stored is not None
                own = [_arranged(section, device, self._dtype) for section in stored.sections]
                seen = _stacked(own, len(stored.parts)) if isinstance(stored, Stacked) else own[0]
                placed[id(parameter)] = own, as_parameter(LazyWeight(seen))
            own, module._parameters[name] = placed[id(parameter)]
            if name != "weight":
                experts.setdefault(module, {})[name] = [(section.held, section.format) for section in own]
            elif isinstance(module, nn.Linear):
                for name, part in own[0].held._asdict().items():
                    module.register_buffer(name, part, persistent=False)
                module.__class__ = BlocksLinear
                module.kind = own[0].format  # type: ignore[assignment]
        for module, blocks in experts.items():
            group(module, blocks)
        self._taken.clear()


def _names_of_kept(module: nn.Module) -> tuple[str, ...]:
    if type(module) is nn.Linear or isinstance(module, nn.Embedding):
        return ("weight",)
    try:
        return groupable(module)
    except Unsuitable:
        return ()


def _stacked(sections: list[OnDevice], number: int) -> Stacked:
    """The matrices of so many experts, each of one or more sections; those of a section lie one below the other."""
    experts: list[list[Stored]] = [[] for _ in range(number)]
    for own in sections:
        each = own.rows // number
        for expert, parts in enumerate(experts):
            rows = slice(expert * each, (expert + 1) * each)
            held = arrangement.Blocks(*(part[:, rows] if part.dim() > 1 else part for part in own.held))
            parts.append(OnDevice(held, own.columns, own.format, own.dtype, transposed=own.transposed))
    return Stacked([parts[0] if len(parts) == 1 else Joined(parts) for parts in experts])


def _arranged(stored: Stored, device: torch.device, dtype: torch.dtype) -> OnDevice:
    raw, kind = stored.device_blocks(), stored.device_kind
    parts = [arrangement.arranged(part.to(device), kind, stored.columns) for part in raw.split(PART_ROWS)]
    held = arrangement.joined(parts) if len(parts) > 1 else parts[0]
    return OnDevice(held, stored.columns, kind, dtype, transposed=stored.transposed)
