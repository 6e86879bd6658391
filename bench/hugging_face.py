"""Hugging Face's `generate`, the baseline of the benchmarks.

It runs in a separate process, because two OpenMP pools in one process slow each other down (docs/decisions/004). On a GPU both
processes share the device and take turns, and both use the checkpoint's own dtype.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.options import silence_transformers
from neap_engine.evaluate.sides import Side, in_process
from neap_engine.evaluate.transformers_sides import (
    GENERATE,
    PAD,
    generate,
    transformers_sides,
)
from shared.model.load import load_model

HF = GENERATE


def _many(model: Any, prompts: list[list[int]], max_tokens: int, batch: int) -> float:
    """Tokens per second, prefill included. Padding after the end of an answer is not counted."""
    start, tokens = time.perf_counter(), 0
    for first in range(0, len(prompts), batch):
        new = generate(model, prompts[first : first + batch], max_tokens)
        tokens += int((new != PAD).sum())
    return tokens / (time.perf_counter() - start)


def _batches(source: str, device: str, max_tokens: int, batch: int) -> Callable[[Any], Any]:
    silence_transformers()
    model = load_model(source, device=device, accelerate=False).model
    return partial(_many, model, max_tokens=max_tokens, batch=batch)


@contextmanager
def hugging_face(source: str, max_tokens: int, device: str = "cpu") -> Iterator[Side]:
    """A `Side` that runs `generate` on one prompt at a time. `source`: as for `load_model`."""
    with in_process(transformers_sides, source, {"device": device}, max_tokens) as run:
        yield lambda ids: run((HF, ids, []))


@contextmanager
def hugging_face_batch(
    source: str, max_tokens: int, batch: int, device: str = "cpu"
) -> Iterator[Callable[[Sequence[list[int]]], float]]:
    """A function that answers prompts in left-padded batches of `batch` and returns tokens per second."""
    with in_process(_batches, source, device, max_tokens, batch) as run:
        yield run
