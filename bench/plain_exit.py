"""PyTorch's way through a layer exit: what the engine ran before it had kernels of its own, for `bench.roofline` to compare with."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.ladder.heads import ExitHead
from shared.ladder.routers import DepthRouter, scalar_features


@dataclass(frozen=True)
class PlainExit:
    """Modules and `project`: adapted states [N, W] -> draft logits [N, Vd]."""

    head: ExitHead
    router: DepthRouter
    project: Callable[[Tensor], Tensor]
    precision: Callable[[], AbstractContextManager[object]] = nullcontext

    def halved(self, rows: Tensor) -> "PlainExit":
        """With float16 copies of the weights, `rows` [Vd, W] among them, and products in float16: what a GPU would do."""
        small = rows.half()
        return PlainExit(
            deepcopy(self.head).half(),
            deepcopy(self.router).half(),
            lambda states: F.linear(states.half(), small),
            partial(torch.autocast, rows.device.type, torch.float16, cache_enabled=False),
        )

    def exit(self, state: Tensor, deep: Tensor, ago: Tensor) -> object:
        """States [N, D], ago [N] -> places and probabilities [N]."""
        with self.precision():
            adapted = self.head(state, deep, ago)
            logits = self.project(adapted)
            probability = self.router(adapted, scalar_features(logits, ago))
            return logits.argmax(-1), probability

    def exit_head(self, state: Tensor, deep: Tensor, ago: Tensor) -> object:
        """-> adapted states [N, W]."""
        with self.precision():
            return self.head(state, deep, ago)

    def draft_top(self, adapted: Tensor) -> object:
        """Adapted states [N, W] -> what `shared.ops.exits.draft_top` gives."""
        with self.precision():
            logits = self.project(adapted)
            return logits.argmax(-1), torch.topk(logits, 2), logits.logsumexp(-1)

    def route(self, adapted: Tensor, ago: Tensor, logits: Tensor) -> object:
        """-> probabilities [N]."""
        with self.precision():
            return self.router(adapted, scalar_features(logits, ago))
