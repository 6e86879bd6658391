"""The LM head restricted to the draft vocabulary (FR-Spec, 2502.14856)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared import ops

Projection = Callable[[Tensor], Tensor]


def head_width(head: nn.Module) -> int:
    """Width of the LM head's input: D, or less in models that project the final state down first."""
    weight = head.get_parameter("weight")
    return int(weight.shape[-1])


@torch.no_grad()
def gather_rows(head: nn.Module, vocabulary: Tensor) -> tuple[Tensor, Tensor | None]:
    """The LM head's rows [Vd, head_width] and biases [Vd] (or None) for the tokens `vocabulary` [Vd], float32, on the
    head's device."""
    weight, bias = head.get_parameter("weight"), getattr(head, "bias", None)
    bias_rows = bias.detach()[vocabulary].float() if isinstance(bias, Tensor) else None
    vocabulary = vocabulary.to(weight.device)
    # As an embedding's look-up, which dequantises these rows only if the weight is packed.
    return F.embedding(vocabulary, weight.detach()).float(), bias_rows


class Matmul:
    """A function from states [..., K] to float32 [..., M], by `rows` [M, K] and `bias` [M]: a packed kernel on a CPU,
    else PyTorch. Inference only."""

    def __init__(self, rows: Tensor, bias: Tensor | None = None) -> None:
        self._size, self._is_packed, self._bias = len(rows), rows.device.type == "cpu", bias
        self._weight = ops.pack_linear(rows) if self._is_packed else rows

    def __call__(self, states: Tensor) -> Tensor:
        if self._is_packed:
            return ops.packed_linear(states, self._weight, self._size, self._bias)
        return F.linear(states.to(self._weight.dtype), self._weight, self._bias).float()

    def held(self) -> list[Tensor | None]:
        """The tensors that it keeps in memory."""
        return [self._weight, self._bias]
