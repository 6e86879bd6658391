"""Where the experts of a gpt-oss .gguf file belong in the model. Transformers looks for them under names that no
converter writes, and only for an architecture that no file states.

A file has gate and up apart, [E, I, D], and the model has their rows in turn, and turned: [E, D, 2 I].
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import modeling_gguf_pytorch_utils as checkpoints

from shared import ops
from shared.model.remembered.packed import PackedMatrices
from shared.model.weights.stored import ALL_ROWS, Stored

# The parameters that are no `weight` or `bias` of a module.
_PARAMETER = re.compile(r"(?:model\.)?layers\.(?P<layer>\d+)\.(?P<name>self_attn\.sinks|mlp\.experts\.(?:gate_up|down)_proj(?:_bias)?)")
_TENSORS = {
    "self_attn.sinks": ("attn_sinks.weight",),
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
}
_IN_TURN = re.compile(r"blk\.\d+\.ffn_(?P<part>gate|up)_exps\..*")
_DOWN = re.compile(r"blk\.\d+\.ffn_down_exps\.weight")


class GptOssProcessor(checkpoints.TensorProcessor):
    """As transformers asks one for each tensor of a file."""

    def preprocess_name(self, hf_name: str) -> str:
        # A name without an equal in GGUF's own tables, so that `perform_fallback_tensor_mapping` is asked.
        return f"={hf_name}" if _PARAMETER.fullmatch(hf_name) else hf_name

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        found = _PARAMETER.fullmatch(hf_name.removeprefix("="))
        for tensor in _TENSORS[found["name"]] if found else ():
            gguf_to_hf_name_map[f"blk.{found['layer']}.{tensor}"] = qual_name + hf_name.removeprefix("=")

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> checkpoints.GGUFTensor:
        in_turn = _IN_TURN.fullmatch(name)
        if in_turn and name in kwargs["tensor_key_mapping"]:
            tensors, own = kwargs["parsed_parameters"]["tensors"], kwargs["tensor_key_mapping"][name]
            numbers = torch.from_numpy(np.copy(weights))
            if own not in tensors:
                tensors[own] = _turned(numbers.new_zeros(len(numbers), 2 * numbers.shape[1], *numbers.shape[2:]))
            _turned(tensors[own])[:, int(in_turn["part"] == "up") :: 2] = numbers
            return checkpoints.GGUFTensor(weights, None, {})
        if _DOWN.fullmatch(name):
            weights = weights.swapaxes(1, 2)
        return checkpoints.GGUFTensor(weights, name, {})


def _turned(numbers: Tensor) -> Tensor:
    """Biases have no second direction."""
    return numbers.transpose(1, 2) if numbers.dim() == 3 else numbers


class InTurn(Stored):
    """Two matrices [N, K] of a file, whose rows follow each other in turn: [2 N, K], in float32 if they differ in
    format. `name` and `matrices`: where it is kept while loading once it is packed."""

    def __init__(self, parts: Sequence[Stored], name: str, matrices: PackedMatrices) -> None:
        first, second = self.parts = tuple(parts)
        self._name, self._matrices = name, matrices
        self.is_one = first.format == second.format
        form = first.format if self.is_one else "float32"
        super().__init__(2 * first.rows, first.columns, form, transposed=first.transposed)
        self.device_kind = first.device_kind if self.is_one else ""

    def dequantised_rows(self) -> Tensor:
        return _in_turn([part.dequantised_rows() for part in self.parts])

    def device_blocks(self) -> Tensor:
        return _in_turn([part.device_blocks() for part in self.parts])

    def pack_ahead(self) -> None:
        if self.device_kind:
            self.pack()

    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        return self._matrices.get(f"{self._name}:{rows.start}:{rows.stop}", lambda: self._packed(rows))

    def _packed(self, rows: slice) -> Tensor:
        if self.device_kind:
            return ops.pack_blocks(self.device_blocks()[rows], self.format, self.columns)
        return ops.pack_linear(self.dequantised_rows()[rows].to(getattr(torch, self.format, torch.float32)))


def _in_turn(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([*parts], 1).flatten(0, 1)
