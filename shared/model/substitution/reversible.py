"""The replacements made in one model, and how to undo them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from shared.model.substitution.match import Substitute, Unsuitable


class Substitutions:
    """The state of one call of `accelerate`: counts of what it replaced, and the steps that undo it.

    `left_alone` maps a module's name to the reason why it kept its own forward. `consumed`: modules that need no replacement any more.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.undo: list[Callable[[], object]] = []
        self.left_alone: dict[str, str] = {}
        self.consumed: set[nn.Module] = set()
        self.found: dict[nn.Module, Substitute] = {}
        self.counts = {"linear": 0, "gated_mlp": 0, "rms_norm": 0}
        self.packed_bytes = self.freed_bytes = 0
        owners: dict[int, int] = {}
        for _, parameter in model.named_parameters(remove_duplicate=False):
            pointer = parameter.untyped_storage().data_ptr()
            owners[pointer] = owners.get(pointer, 0) + 1
        self.shared_storages = {pointer for pointer, count in owners.items() if count > 1}

    def attempt(
        self, kind: str, name: str, module: nn.Module, propose: Callable[[], Substitute]
    ) -> None:
        """Replaces the forward of `module` by what `propose` returns, or notes the reason why it raised `Unsuitable`."""
        try:
            found = propose()
        except Unsuitable as reason:
            self.left_alone[name] = str(reason)
            return
        self.left_alone.pop(name, None)
        module.forward = found.forward
        self.undo.append(partial(_own_forward, module))
        self.found[module] = found
        self.counts[kind] += 1
        self.consumed.add(module)
        self.packed_bytes += sum(t.nbytes for t in found.packed)
        self.free(found)
        for source in found.sources:
            self.consumed.add(source)

    def free(self, found: Substitute) -> None:
        """Frees the weights that no other module shares. A meta tensor keeps their name, shape and dtype."""
        freed: list[tuple[int, nn.Module, bool]] = []
        for index, source in enumerate(found.sources):
            weight = source.get_parameter("weight")
            if weight.untyped_storage().data_ptr() in self.shared_storages:
                continue
            self.freed_bytes += weight.nbytes
            freed.append((index, source, weight.requires_grad))
            source.weight = nn.Parameter(
                torch.empty_like(weight, device="meta"), requires_grad=False
            )

        def restore() -> None:
            weights = found.unpack()
            for index, source, requires_grad in freed:
                source.weight = nn.Parameter(weights[index], requires_grad=requires_grad)

        if freed:
            self.undo.append(restore)

    def undo_all(self) -> None:
        """Undoes all steps, the last one first."""
        while self.undo:
            self.undo.pop()()


def _own_forward(module: nn.Module) -> None:
    vars(module).pop("forward", None)
