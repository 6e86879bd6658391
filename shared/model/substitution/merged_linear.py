"""Linear layers that multiply the same input become one product: query, key and value projections, or gate and up.

For GPUs, where a small product takes as long to start as to compute. Which layers those are is seen in a pass of the
model. Names do not matter.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.model.substitution.layer import Hooks
from shared.model.weights.quantised import quantisation

NUM_TOKENS = 3  # of the pass that is watched


class _Group:
    """Layers that multiply the same input one after another. `weight` [sum of N, K] and `bias` [sum of N] or None: of
    all of them, in this order. `sizes`: N of each."""

    # What multiplies in place of torch's product.
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self.weight = torch.cat([member.weight.detach() for member in members])
        biases = [member.bias.detach() for member in members if member.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.sizes = [member.out_features for member in members]
        self.input: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def output(self, x: Tensor, index: int) -> Tensor:
        """That of member number `index`. The first one computes those of all, and the last one drops them."""
        if index == 0 or self.input is not x:  # the latter: they are called in another order
            multiply = self.multiply or F.linear
            self.input, self.outputs = x, multiply(x, self.weight, self.bias).split(self.sizes, -1)
        output = self.outputs[index]
        if index == len(self.sizes) - 1:
            self.input, self.outputs = None, ()
        return output


class MergedLinear(nn.Linear):
    """One of the layers of a group. Its parameters are views of the group's."""

    group: _Group
    index: int

    def forward(self, input: Tensor) -> Tensor:
        return self.group.output(input, self.index)


@torch.no_grad()
def merge_linears(model: PreTrainedModel) -> int:
    """Merges what can be merged, in place, and returns the number of groups. The model must stay on its device.

    A weight that several modules share, a quantised one, and a layer with hooks or a forward of its
    own stay as they are.
    """
    if quantisation(model.config) is not None:
        return 0
    groups = _groups(model)
    for members in groups:
        group = _Group(members)
        weights, biases = group.weight.split(group.sizes), None if group.bias is None else group.bias.split(group.sizes)
        for index, member in enumerate(members):
            member.weight = nn.Parameter(weights[index], requires_grad=False)
            if biases is not None:
                member.bias = nn.Parameter(biases[index], requires_grad=False)
            member.__class__ = MergedLinear
            member.group, member.index = group, index  # type: ignore[assignment]
    return len(groups)


def _groups(model: PreTrainedModel) -> list[list[nn.Linear]]:
    """Layers of one parent that are called with the same tensor and could be one layer, in the order of the calls."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    linears = [each for each in model.modules() if type(each) is nn.Linear and "forward" not in vars(each)]
    candidates = [each for each in linears if uses[id(each.weight)] == 1 and not Hooks([each]).are_any()]
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(module: nn.Linear, args: tuple[Any, ...]) -> None:
        calls.append((module, args[0]))

    hooks = [module.register_forward_pre_hook(note) for module in candidates]
    try:
        model(input_ids=torch.arange(NUM_TOKENS, device=model.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    groups: list[list[nn.Linear]] = []
    last: tuple[object, ...] | None = None
    for module, x in calls:
        like = parents[module], id(x), module.bias is None, module.weight.dtype
        if like == last:
            groups[-1].append(module)
        else:
            groups.append([module])
        last = like
    num_calls = Counter(module for module, _ in calls)
    return [group for group in groups if len(group) > 1 and all(num_calls[member] == 1 for member in group)]
