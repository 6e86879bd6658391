"""Judges a policy: against the full model's recorded answers, and by answers that the policy writes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.skip.passes import Batch, Policy
from bench.skip.text import full, recorded_batches
from calibrator_service.calibration.text.shards import TokenSequence
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.ragged import RaggedSequence


@dataclass(frozen=True)
class Recorded:
    """Shares of tokens of recorded answers. `agreement`: the policy's token is the recorded one; `deep` and `left`: the same among those
    that stayed and those that left. `share`: left. `layers`: per token. `surprise`: mean negative log-likelihood of the recorded
    tokens, of those that stayed."""

    agreement: float
    deep: float
    left: float
    share: float
    layers: float
    surprise: float


@torch.inference_mode()
def recorded(
    runner: ContiguousRunner,
    policy: Policy,
    sequences: Sequence[TokenSequence],
    *,
    prompts_leave: bool = False,
) -> Recorded:
    """The policy reads the full model's greedy answers, and chooses after each token."""
    right, stayed, layers, surprise = [], [], [], 0.0
    for batch, answers in recorded_batches(runner, sequences, prompts_leave=prompts_leave):
        outcome = policy.run(runner, batch)
        expected = batch.ids[0].roll(-1)[answers]
        tokens = outcome.tokens[answers]
        deep = tokens < 0
        logits = runner.logits(outcome.states[answers][deep])
        tokens[deep] = logits.argmax(-1)
        surprise += float(F.cross_entropy(logits, expected[deep], reduction="sum"))
        right.append(tokens == expected)
        stayed.append(deep)
        layers.append(outcome.depths[answers])
    is_right, is_deep = torch.cat(right).float(), torch.cat(stayed)
    return Recorded(
        float(is_right.mean()),
        float(is_right[is_deep].mean()),
        float(is_right[~is_deep].mean()),
        float((~is_deep).float().mean()),
        float(torch.cat(layers).float().mean()),
        surprise / max(1, int(is_deep.sum())),
    )


@dataclass(frozen=True)
class Written:
    """Answers that a policy has written. `layers`: per token after each answer's first. `agreement`: share of tokens that the full
    model would choose after the same text. `surprise`: their mean negative log-likelihood under the full model."""

    answers: list[TokenSequence]
    layers: float
    agreement: float
    surprise: float


@torch.inference_mode()
def written(
    runner: ContiguousRunner,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    at_once: int = 16,
) -> Written:
    """Greedy answers of a policy. Prompts go through all layers that are ever kept."""
    answers, layers = [], []
    for begin in range(0, len(prompts), at_once):
        own, depths = _write(runner, policy, prompts[begin : begin + at_once], max_tokens)
        answers += own
        layers += depths
    judged = recorded(runner, full(runner), answers)
    return Written(answers, sum(layers) / max(1, len(layers)), judged.agreement, judged.surprise)


def _write(
    runner: ContiguousRunner, policy: Policy, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[TokenSequence], list[int]]:
    """The answers, and the layers run for each token that was decoded."""
    stop_ids = runner.loaded.eos_token_ids
    texts = [list(prompt) for prompt in prompts]
    caches = [runner.new_cache(len(prompt) + max_tokens) for prompt in prompts]
    read = [0] * len(texts)
    alive, layers = list(range(len(texts))), []
    for step in range(max_tokens):
        ids = torch.tensor([[token for row in alive for token in texts[row][read[row] :]]])
        counts = [len(texts[row]) - read[row] for row in alive]
        sequences = [
            RaggedSequence(caches[row], read[row], count)
            for row, count in zip(alive, counts, strict=True)
        ]
        may_leave = torch.full((ids.shape[1],), step > 0)
        outcome = policy.run(runner, Batch(ids, sequences, may_leave))
        lasts = torch.tensor(counts).cumsum(0) - 1
        tokens = _chosen(runner, outcome.states[lasts], outcome.tokens[lasts])
        if step:
            layers += outcome.depths.tolist()
        for row, token in zip(alive, tokens, strict=True):
            read[row] = len(texts[row])
            texts[row].append(token)
        alive = [row for row in alive if texts[row][-1] not in stop_ids]
        if not alive:
            break
    answers = [
        TokenSequence(tuple(text), len(prompt)) for text, prompt in zip(texts, prompts, strict=True)
    ]
    return answers, layers


def _chosen(runner: ContiguousRunner, states: Tensor, tokens: Tensor) -> list[int]:
    """`tokens` [N], with those that are -1 chosen from the states [N, D]."""
    deep = tokens < 0
    tokens = tokens.clone()
    if deep.any():
        tokens[deep] = runner.logits(states[deep]).argmax(-1)
    return [int(token) for token in tokens]
