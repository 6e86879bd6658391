"""Decodes many rows at once, which is the fastest way for a frozen model to write text.

Rows are padded on the left to one length, so that each pass appends one column. Rows that have ended are dropped from the KV cache.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import Cancelled
from shared.model.cache import ContiguousCache
from shared.model.cache_argument import with_cache
from shared.model.loaded import LoadedModel

# Nucleus sampling considers the most likely tokens only: sorting the whole vocabulary takes longer than the model's pass.
NUCLEUS_CANDIDATES = 512
# A row whose last LOOP_TAIL tokens repeat with a period of at most LOOP_PERIOD is in a loop, and more of it teaches nothing.
LOOP_TAIL, LOOP_PERIOD, LOOP_CHECK_INTERVAL = 48, 16, 8
# Rows are dropped once this share of them has ended, because each drop copies the cache.
DROP_SHARE = 0.2


@dataclass(frozen=True)
class DecodeParams:
    """`temperature` 0 is greedy. `max_new_tokens` counts per row. A token of `stop_ids` ends its row and is part of it.

    `stop_loops`: a loop ends its row, too.
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_p: float = 1.0
    stop_loops: bool = True


def _no_stop() -> bool:
    return False


@torch.inference_mode()
def decode_batch(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: DecodeParams,
    *,
    generator: torch.Generator | None = None,
    should_stop: Callable[[], bool] = _no_stop,
    is_late: Callable[[], bool] = _no_stop,
    on_tokens: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """The model's continuation of each prompt, as token ids. No prompt may be empty.

    All rows end once `is_late`. `on_tokens` gets the number of tokens of every step. Raises `Cancelled` once `should_stop`.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    if not prompts or params.max_new_tokens < 1:
        return outputs
    device = loaded.device
    width = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width + params.max_new_tokens, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    tokens, mask = tokens.to(device), mask.to(device)
    positions = (mask[:, :width].cumsum(-1) - 1).clamp_min(0)
    cache = ContiguousCache(width + params.max_new_tokens)
    rows = list(range(len(prompts)))  # cache row -> prompt
    ended: set[int] = set()
    base = 0
    for step in range(params.max_new_tokens):
        if should_stop():
            raise Cancelled("stopped while the model wrote text")
        if step and is_late():
            break
        logits = _last_logits(loaded, tokens, mask, positions, cache, base)
        base += tokens.shape[1]
        chosen = _choose_tokens(logits, params, generator)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row in ended:
                continue
            outputs[row].append(token)
            if token in params.stop_ids or (
                params.stop_loops and step % LOOP_CHECK_INTERVAL == 0 and is_repeating(outputs[row])
            ):
                ended.add(row)
        alive = [index for index, row in enumerate(rows) if row not in ended]
        if on_tokens is not None:
            on_tokens(len(alive))
        if not alive:
            break
        tokens, positions = chosen[:, None], positions[:, -1:] + 1
        if len(alive) <= (1 - DROP_SHARE) * len(rows):
            kept = torch.tensor(alive, device=device)
            tokens, positions, mask = tokens[kept], positions[kept], mask[kept]
            cache.keep_rows(kept)
            rows = [rows[index] for index in alive]
    return outputs


def _last_logits(
    loaded: LoadedModel,
    tokens: Tensor,
    mask: Tensor,
    positions: Tensor,
    cache: ContiguousCache,
    base: int,
) -> Tensor:
    """One pass over the columns [base, base + Q). Returns the last column's logits [B, V], float32."""
    end = base + tokens.shape[1]
    cache.begin(base, tokens.shape[1])
    accepted = inspect.signature(type(loaded.model).forward).parameters
    optional = {"position_ids": positions, "logits_to_keep": 1}
    logits: Tensor = loaded.model(
        input_ids=tokens,
        attention_mask=mask[:, :end],
        **with_cache(loaded.model, cache),
        use_cache=True,
        **{name: value for name, value in optional.items() if name in accepted},
    ).logits
    return logits[:, -1].float()


def _choose_tokens(
    logits: Tensor, params: DecodeParams, generator: torch.Generator | None
) -> Tensor:
    """Logits [B, V] -> tokens [B]."""
    if params.temperature == 0.0:
        return logits.argmax(-1)
    scores, candidates = torch.topk(logits, min(NUCLEUS_CANDIDATES, logits.shape[-1]))
    probabilities = torch.softmax(scores / params.temperature, -1)
    probabilities[probabilities.cumsum(-1) - probabilities >= params.top_p] = 0.0
    picked = torch.multinomial(probabilities.cpu(), 1, generator=generator).to(logits.device)
    return candidates.gather(-1, picked)[:, 0]


def is_repeating(tokens: Sequence[int]) -> bool:
    """Whether the last LOOP_TAIL tokens repeat with a short period."""
    if len(tokens) < LOOP_TAIL:
        return False
    tail = tokens[-LOOP_TAIL:]
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1))
