"""Prompts as token ids: those of a file, or the product's seed prompts."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibrator_service.calibration.text.seed_prompts import seed_prompt
from shared.errors import InvalidInput

SEED = 7
# The fields that a prompt may have, in files of JSON lines; the first turn is used of several.
FIELDS = ("turns", "prompt", "question")


def read_texts(path: Path | None, count: int) -> list[str]:
    """`count` prompts, evenly spaced over the file's; seed prompts without a file. Raises `InvalidInput` if the file has none."""
    if path is None:
        rng = random.Random(SEED)
        return [seed_prompt(rng) for _ in range(count)]
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    texts = [_text(json.loads(line), path) for line in lines]
    if not texts:
        raise InvalidInput(f"{path} has no prompts")
    count = min(count, len(texts))
    return [texts[index * len(texts) // count] for index in range(count)]


def encode(tokenizer: Any, text: str) -> list[int]:
    """As a chat of one message, or as plain text for a model without a template."""
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])


def groups(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Groups of `size` prompts, by index, for requests that run at once: those with the longest answers, so that all run for long.

    `lengths`: tokens of each prompt's reference answer. At least one group; a prompt repeats only if there are fewer than `size`.
    """
    longest = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if len(longest) < size:
        return [[longest[index % len(longest)] for index in range(size)]]
    return [longest[first : first + size] for first in range(0, len(longest) // size * size, size)]


def _text(record: Any, path: Path) -> str:
    for field in FIELDS:
        if isinstance(record, dict) and field in record:
            value = record[field]
            return str(value[0] if field == "turns" else value)
    raise InvalidInput(f"a line of {path} has none of the fields {', '.join(FIELDS)}")
