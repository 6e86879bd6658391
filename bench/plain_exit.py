"""A layer exit in plain PyTorch, as the engine ran it before it had kernels. `bench.roofline` compares the kernels with it."""

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
    """An exit's modules. `project`: adapted states [N, W] -> draft logits [N, Vd]. `precision`: a context for every call."""

    head: ExitHead
    router: DepthRouter
    project: Callable[[Tensor], Tensor]
    precision: Callable[[], AbstractContextManager[object]] = nullcontext

    def halved(self, rows: Tensor) -> "PlainExit":
        """The same exit with float16 copies of the weights and of `rows` [Vd, W], and float16 products: PyTorch's best case on a GPU."""
        small = rows.half()
        return PlainExit(
            deepcopy(self.head).half(),
            deepcopy(self.router).half(),
            lambda states: F.linear(states.half(), small),
            partial(torch.autocast, rows.device.type, torch.float16, cache_enabled=False),
        )

    def exit(self, state: Tensor, deep: Tensor, distance: Tensor) -> object:
        """The whole exit: states [N, D], distance [N] -> indices into the draft vocabulary [N] and probabilities [N]."""
        with self.precision():
            adapted = self.head(state, deep, distance)
            logits = self.project(adapted)
            probability = self.router(adapted, scalar_features(logits, distance))
            return logits.argmax(-1), probability

    def exit_head(self, state: Tensor, deep: Tensor, distance: Tensor) -> object:
        """Head alone -> adapted states [N, W]."""
        with self.precision():
            return self.head(state, deep, distance)

    def draft_top(self, adapted: Tensor) -> object:
        """Draft vocabulary alone: adapted states [N, W] -> best tokens, two largest logits and log mass, as `draft_top` computes."""
        with self.precision():
            logits = self.project(adapted)
            return logits.argmax(-1), torch.topk(logits, 2), logits.logsumexp(-1)

    def route(self, adapted: Tensor, distance: Tensor, logits: Tensor) -> object:
        """The router alone -> probabilities [N]."""
        with self.precision():
            return self.router(adapted, scalar_features(logits, distance))
