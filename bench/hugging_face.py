"""Hugging Face's `generate`, the baseline of the benchmarks.

It runs in a separate process, because two OpenMP pools in one process slow each other down (docs/decisions/004). On a GPU both
processes share the device and take turns, and both use the checkpoint's own dtype.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from bench.options import silence_transformers
from shared.model.load import load_model

HF = "HF generate"
PAD = 0


@dataclass(frozen=True)
class Run:
    """One answer. `decode_s`: seconds from the first token to the last, for `len(token_ids) - 1` tokens. `total_s`: with prefill."""

    token_ids: tuple[int, ...]
    decode_s: float
    total_s: float
    layer_executions: int = 0
    drafted: int = 0
    accepted: int = 0
    deep_passes: int = 0

    @property
    def per_token_s(self) -> float:
        return self.decode_s / max(len(self.token_ids) - 1, 1)


# One of the contenders of a benchmark: answers a prompt of token ids.
Side = Callable[[list[int]], Run]


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


def _token_s(model: Any, context: int) -> float:
    """Seconds of one forward pass over one token after `context` others, logits included."""
    ids = torch.randint(model.config.vocab_size, (1, context + 1))
    with torch.no_grad():
        cache = model(input_ids=ids[:, :context], use_cache=True).past_key_values
        start = time.perf_counter()
        model(input_ids=ids[:, context:], past_key_values=cache)
    return time.perf_counter() - start


def _serve(
    source: str, device: str, work: Callable[..., object], options: dict[str, int], pipe: Connection
) -> None:
    silence_transformers()
    model: Any = load_model(source, device=device, accelerate=False).model
    while (task := pipe.recv()) is not None:
        pipe.send(work(model, task, **options))


@contextmanager
def _process(
    source: str, device: str, work: Callable[..., object], **options: int
) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(source, device, work, options, theirs), daemon=True
    )
    process.start()

    def run(task: object) -> object:
        ours.send(task)
        return ours.recv()

    try:
        yield run
    finally:
        ours.send(None)
        process.join()


@contextmanager
def hugging_face(source: str, max_tokens: int, device: str = "cpu") -> Iterator[Side]:
    """A `Side` that runs `generate` on one prompt at a time. `source`: as for `load_model`."""
    with _process(source, device, _one, max_tokens=max_tokens) as run:
        yield run


@contextmanager
def hugging_face_batch(
    source: str, max_tokens: int, batch: int, device: str = "cpu"
) -> Iterator[Callable[[Sequence[list[int]]], float]]:
    """A function that answers prompts in left-padded batches of `batch` and returns tokens per second."""
    with _process(source, device, _many, max_tokens=max_tokens, batch=batch) as run:
        yield run


@contextmanager
def hugging_face_token(source: str) -> Iterator[Callable[[int], float]]:
    """A function from a context length to the seconds of one token's forward pass after it, without the overhead of `generate`."""
    with _process(source, "cpu", _token_s) as run:
        yield run
