"""Drafts of an exit in plain PyTorch, as the engine made them before it had kernels. `bench.roofline` compares the kernels with it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.ladder.confidence_head import ConfidenceHead, scalar_features


@dataclass(frozen=True)
class PlainDraws:
    """An exit's confidence head and draft vocabulary. `project`: adapted states [N, D] -> draft logits [N, Vd]. `precision`: a context for every
    call."""

    confidence: ConfidenceHead
    project: Callable[[Tensor], Tensor]
    precision: Callable[[], AbstractContextManager[object]] = nullcontext

    def halved(self, rows: Tensor) -> "PlainDraws":
        """The same with float16 copies of the weights and of `rows` [Vd, D], and float16 products: PyTorch's best case on a GPU."""
        small = rows.half()
        return PlainDraws(
            deepcopy(self.confidence).half(),
            lambda states: F.linear(states.half(), small),
            partial(torch.autocast, rows.device.type, torch.float16, cache_enabled=False),
        )

    def draft_top(self, adapted: Tensor) -> object:
        """Draft vocabulary alone: adapted states [N, D] -> best tokens, two largest logits and log mass, as `draft_top` computes."""
        with self.precision():
            logits = self.project(adapted)
            return logits.argmax(-1), torch.topk(logits, 2), logits.logsumexp(-1)

    def route(self, adapted: Tensor, place: Tensor, logits: Tensor) -> Tensor:
        """The confidence head alone -> probabilities [N]. `place` [N] int64 >= 1."""
        with self.precision():
            probability: Tensor = self.confidence(adapted, scalar_features(logits, place))
            return probability
