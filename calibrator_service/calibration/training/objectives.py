"""What exit heads are trained to do, as losses of a batch of chains."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.training.chain_outputs import gather_chains
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from shared.ladder.exit_head import ExitHead, chained
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.runner import captured_depths

# Steps of its own chain over which a head is trained.
NUM_STEPS = 2
# Weight of the full model's greedy choice in the loss. The rest of the weight is on its distribution.
HARD_SHARE = 0.5

# Deep states [N, D] as chunks hold them -> the full model's logits over the draft vocabulary [N, Vd].
Teacher = Callable[[Tensor], Tensor]


class ChainObjective:
    """The full model's distribution and its greedy choice, after each token of a chain that the head continues itself.

    `teacher`: None trains on the greedy choices alone.
    """

    def __init__(
        self,
        heads: Mapping[int, ExitHead],
        vocabulary: DraftVocabulary,
        num_layers: int,
        teacher: Teacher | None,
        *,
        hard_share: float = HARD_SHARE,
        num_steps: int = NUM_STEPS,
    ) -> None:
        self._heads, self._vocabulary = heads, vocabulary
        self._lookup = vocabulary.lookup.to(vocabulary.device)
        self._kept_depths = captured_depths(num_layers)
        self._teacher, self._num_steps = teacher, num_steps
        self._hard_share = hard_share if teacher is not None else 1.0

    def losses(self, chunk: StateChunk, index: Tensor) -> dict[int, Tensor]:
        """Depth -> loss, of the chains that begin at the positions `index` [B] of a chunk on the vocabulary's
        device."""
        vocabulary = self._vocabulary
        batch = gather_chains(
            chunk, index, self._num_steps, tuple(self._heads), self._kept_depths, self._lookup,
            vocabulary.device,
        )  # fmt: skip
        goals = None
        if self._teacher is not None and self._hard_share < 1.0:
            with torch.no_grad():
                goals = torch.softmax(self._teacher(batch.deep).float(), -1)
        by_depth = {}
        for depth, head in self._heads.items():
            states, losses = batch.states, []
            for step, entering in enumerate(batch.entering[depth]):
                output = head(states, entering)
                logits = F.linear(head.adapted(output), vocabulary.rows, vocabulary.bias).float()
                choices = batch.choices[step]
                losses.append(self._loss(logits, choices, None if goals is None else goals[step]))
                states = chained(output)
            by_depth[depth] = torch.stack(losses).mean()
        return by_depth

    def _loss(self, logits: Tensor, choices: Tensor, goals: Tensor | None) -> Tensor:
        """Mean over the positions whose choice is in the draft vocabulary: the others' distributions are mostly outside
        it."""
        log_probabilities = torch.log_softmax(logits, -1)
        counts = (choices >= 0).float()
        loss = -self._hard_share * log_probabilities.gather(-1, choices.clamp(min=0)[:, None])[:, 0]
        if goals is not None:
            loss = loss - (1 - self._hard_share) * (goals * log_probabilities).sum(-1)
        return (loss * counts).sum() / counts.sum().clamp(min=1)


def make_teacher(runner: ContiguousRunner, vocabulary: DraftVocabulary) -> Teacher | None:
    """The full model's logits from deep states that have been scaled to a root mean square of 1, as chunks hold them.

    None for a model without a final norm: from scaled states its logits cannot be computed.
    """
    loaded = runner.loaded
    if loaded.parts.final_norm is None:
        return None
    dtype, tokens = loaded.model.dtype, vocabulary.tokens.to(vocabulary.device)

    def teacher(deep: Tensor) -> Tensor:
        if not runner.head_is_direct:
            return runner.logits(deep.to(dtype))[..., tokens]
        normed = runner.normed(deep.to(dtype)).to(vocabulary.rows.dtype)
        return F.linear(normed, vocabulary.rows, vocabulary.bias)

    return teacher
