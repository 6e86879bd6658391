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


def projection(rows: Tensor, bias: Tensor | None) -> Projection:
    """A function from states [..., head_width] to logits [..., Vd]: a packed kernel on a CPU, else PyTorch.
    Inference only."""
    if rows.device.type == "cpu":
        packed, size = ops.pack_linear(rows), rows.shape[0]
        return lambda states: ops.packed_linear(states, packed, size, bias)
    return lambda states: F.linear(states, rows, bias)
