"""Hugging Face's `generate`, the baseline of the benchmarks.

It runs in a separate process, because two OpenMP pools in one process slow each other down (docs/decisions/004). On a GPU both
processes share the device and take turns, and both use the checkpoint's own dtype.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from bench.options import silence_transformers
from bench.sides import Run, Side, in_process
from shared.model.load import load_model

HF = "HF generate"
PAD = 0


class _Clock(BaseStreamer):
    """Records the time of each token of a generation. `generate` passes the prompt first, so `times[0]` is the prompt's."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(model: Any, prompts: Sequence[list[int]], max_tokens: int, **options: Any) -> Any:
    width = max(map(len, prompts))
    padded = [[PAD] * (width - len(ids)) + ids for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    with torch.no_grad():
        out = model.generate(
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=PAD,
            **options,
        )
    return out[:, width:]


def _one(model: Any, ids: list[int], max_tokens: int) -> Run:
    clock = _Clock()
    start = time.perf_counter()
    new = _generate(model, [ids], max_tokens, streamer=clock)
    decode_s = clock.times[-1] - clock.times[1]
    return Run(tuple(new[0].tolist()), decode_s, time.perf_counter() - start)


def _many(model: Any, prompts: list[list[int]], max_tokens: int, batch: int) -> float:
    """Tokens per second, prefill included. Padding after the end of an answer is not counted."""
    start, tokens = time.perf_counter(), 0
    for first in range(0, len(prompts), batch):
        new = _generate(model, prompts[first : first + batch], max_tokens)
        tokens += int((new != PAD).sum())
    return tokens / (time.perf_counter() - start)


def _loaded(
    source: str, device: str, work: Callable[..., Any], options: dict[str, int]
) -> Callable[[Any], Any]:
    silence_transformers()
    return partial(work, load_model(source, device=device, accelerate=False).model, **options)


@contextmanager
def hugging_face(source: str, max_tokens: int, device: str = "cpu") -> Iterator[Side]:
    """A `Side` that runs `generate` on one prompt at a time. `source`: as for `load_model`."""
    with in_process(_loaded, source, device, _one, {"max_tokens": max_tokens}) as run:
        yield run


@contextmanager
def hugging_face_batch(
    source: str, max_tokens: int, batch: int, device: str = "cpu"
) -> Iterator[Callable[[Sequence[list[int]]], float]]:
    """A function that answers prompts in left-padded batches of `batch` and returns tokens per second."""
    options = {"max_tokens": max_tokens, "batch": batch}
    with in_process(_loaded, source, device, _many, options) as run:
        yield run
