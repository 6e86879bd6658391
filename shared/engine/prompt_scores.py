"""Log-probabilities of a prompt's tokens, from the passes that read it."""

import torch

from shared.engine.drafting.speculation import Speculation
from shared.engine.failure import non_finite_logits
from shared.engine.request.logprobs import logprobs, logprobs_from_row
from shared.engine.request.request import GeneratedToken, TokenChunk
from shared.model.runner import Runner

# Logits that are in memory at once: 16 MiB.
MAX_LOGITS = 2**22
PROMPT = "prompt"


def score_prompt(part: Speculation, runner: Runner) -> list[TokenChunk]:
    """What a piece of a prompt that has been through every layer says of the prompt's tokens, up to the one after it.

    The first token has no log-probability. Raises `NeapError` where logits are not finite.
    """
    sequence, request = part.sequence, part.sequence.request
    if request.prompt_logprobs is None:
        return []
    start, end = sequence.num_scored, part.base + len(part.tokens) + 1
    tokens = request.prompt_ids[start:end]
    if not tokens:
        return []
    scores = [] if start else [GeneratedToken(tokens[0], 0, PROMPT)]
    scored = tokens[len(scores) :]
    first = part.offset + start + len(scores) - 1 - part.base
    states = part.passed.by_depth[runner.num_layers][0, first : first + len(scored)]
    num_rows = max(1, MAX_LOGITS // sequence.vocabulary_size)
    for begin in range(0, len(scored), num_rows):
        ids = runner.ids(list(scored[begin : begin + num_rows])).view(-1)
        logits = runner.logits(states[begin : begin + num_rows])
        if not torch.isfinite(logits).all():
            raise non_finite_logits()
        numbers = map(logprobs_from_row, logprobs(logits, ids, request.prompt_logprobs).tolist())
        scores += [
            GeneratedToken(token, runner.num_layers, PROMPT, entry.value, entry.alternatives)
            for token, entry in zip(ids.tolist(), numbers, strict=True)
        ]
    sequence.num_scored += len(scores)
    return [TokenChunk("", (), tuple(scores))]
