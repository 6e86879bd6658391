"""Log-probabilities of a prompt's tokens, from the passes that read it."""

import math

from shared.engine.drafting.speculation import Speculation
from shared.engine.failure import non_finite_logits
from shared.engine.request.logprobs import logprobs, logprobs_from_row
from shared.engine.request.request import GeneratedToken, TokenChunk
from shared.model.loaded import LoadedModel
from shared.model.runner import Runner

# Logits that are in memory at once: 16 MiB.
MAX_LOGITS = 2**22
PROMPT = "prompt"
# What a logit takes beside the head's product, in multiply-adds: its exponential, and the search for the largest.
LOGIT_COST = 300


def score_weight(loaded: LoadedModel) -> float:
    """How many tokens that are only read take as long as one whose log-probability is wanted. By the usual shape of
    layers, and not measured, so that a prompt is read in the same pieces every time."""
    width = loaded.hidden_size
    return 1.0 + loaded.vocabulary_size * (width + LOGIT_COST) / (12 * loaded.num_layers * width**2)


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
        numbers = [logprobs_from_row(row) for row in logprobs(logits, ids, request.prompt_logprobs).tolist()]
        if not all(math.isfinite(entry.value) for entry in numbers):
            raise non_finite_logits()
        scores += [
            GeneratedToken(token, runner.num_layers, PROMPT, entry.value, entry.alternatives)
            for token, entry in zip(ids.tolist(), numbers, strict=True)
        ]
    sequence.num_scored += len(scores)
    return [TokenChunk(prompt=tuple(scores))]
