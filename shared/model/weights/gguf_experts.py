"""Where tensors of a gpt-oss .gguf file and of a Gemma 4 one belong that are no `weight` or `bias` of a module.
Transformers looks for those of gpt-oss under names that no converter writes, and does not know those of Gemma 4.

A file of gpt-oss has gate and up apart, [E, I, D], and the model has their rows in turn, and turned: [E, D, 2 I].
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import modeling_gguf_pytorch_utils as checkpoints

_IN_TURN = re.compile(r"blk\.\d+\.ffn_(?P<part>gate|up)_exps\..*")
_DOWN = re.compile(r"blk\.\d+\.ffn_down_exps\.weight")


class _Named(checkpoints.TensorProcessor):
    """As transformers asks one for each tensor of a file."""

    # A layer's tensors, by the parameter that is made of them.
    tensors: ClassVar[Mapping[str, tuple[str, ...]]]

    def preprocess_name(self, hf_name: str) -> str:
        # A name without an equal in GGUF's own tables, so that `perform_fallback_tensor_mapping` is asked.
        return f"={hf_name}" if self._place(hf_name) else hf_name

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        own = hf_name.removeprefix("=")
        if place := self._place(own):
            layer, name = place
            gguf_to_hf_name_map |= {f"blk.{layer}.{tensor}": qual_name + own for tensor in self.tensors[name]}

    def _place(self, hf_name: str) -> tuple[str, str] | None:
        found = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.(.+)", hf_name)
        return (found[1], found[2]) if found and found[2] in self.tensors else None


class Gemma4Processor(_Named):
    tensors: ClassVar = {
        "layer_scalar": ("layer_output_scale.weight",),
        "router.scale": ("ffn_gate_inp.scale",),
        "router.per_expert_scale": ("ffn_down_exps.scale",),
        "experts.gate_up_proj": ("ffn_gate_up_exps.weight",),
        "experts.down_proj": ("ffn_down_exps.weight",),
    }


class GptOssProcessor(_Named):
    tensors: ClassVar = {
        "self_attn.sinks": ("attn_sinks.weight",),
        "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
        "mlp.experts.down_proj": ("ffn_down_exps.weight",),
        "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
    }

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> checkpoints.GGUFTensor:
        in_turn = _IN_TURN.fullmatch(name)
        if in_turn and name in kwargs["tensor_key_mapping"]:
            tensors, own = kwargs["parsed_parameters"]["tensors"], kwargs["tensor_key_mapping"][name]
            numbers = torch.from_numpy(np.copy(weights))
            if own not in tensors:
                tensors[own] = _turned(numbers.new_zeros(len(numbers), 2 * numbers.shape[1], *numbers.shape[2:]))
            _turned(tensors[own])[:, int(in_turn["part"] == "up") :: 2] = numbers
            nowhere: Any = None
            return checkpoints.GGUFTensor(weights, nowhere, {})
        if _DOWN.fullmatch(name):
            weights = weights.swapaxes(1, 2)
        return checkpoints.GGUFTensor(weights, name, {})


def _turned(numbers: Tensor) -> Tensor:
    """Biases have no second direction."""
    return numbers.transpose(1, 2) if numbers.dim() == 3 else numbers
