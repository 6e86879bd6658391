"""Where the experts of a gpt-oss .gguf file belong in the model. Transformers looks for them under names that no
converter writes, and only for an architecture that no file states.

A file has gate and up apart, [E, I, D], and the model has their rows in turn, and turned: [E, D, 2 I].
"""

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import modeling_gguf_pytorch_utils as checkpoints

# The parameters that are no `weight` or `bias` of a module.
_PARAMETER = re.compile(
    r"(?:model\.)?layers\.(?P<layer>\d+)\."
    r"(?P<name>self_attn\.sinks|mlp\.experts\.(?:gate_up|down)_proj(?:_bias)?)"
)
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
        if found is not None:
            own = qual_name + hf_name.removeprefix("=")
            gguf_to_hf_name_map.update({f"blk.{found['layer']}.{tensor}": own for tensor in _TENSORS[found["name"]]})

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
