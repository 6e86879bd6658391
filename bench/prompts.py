"""Spec-Bench prompts: 120 of the 480, those of every fourth id (Xia et al., 2401.07851; Apache-2.0). Or prompts of
another file, which are of one kind if they have no category."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from shared.engine.request.prompt import encode_prompt
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

DEFAULT_FILE = Path(__file__).parent / "data" / "spec_bench_dev.jsonl"
TASKS = {
    "translation": "translation",
    "summarization": "summarisation",
    "qa": "QA",
    "math_reasoning": "maths",
    "rag": "RAG",
}
MULTI_TURN, ONE_KIND = "multi-turn", "one kind"
MAX_CHARACTERS = 600
PLAIN_TEXT_NOTE = "the model has no chat template: prompts are sent as plain text"


Prompt = TypeVar("Prompt")


@dataclass(frozen=True)
class BenchPrompt:
    """`turns`: the user's messages. Each later turn follows the model's answer to the one before it."""

    task: str
    turns: tuple[str, ...]


def read_prompts(path: Path = DEFAULT_FILE, per_task: int = 0) -> list[BenchPrompt]:
    """All prompts, or `per_task` of each of Spec-Bench's six tasks, evenly spaced. Tasks alternate."""
    by_task: Mapping[str, list[BenchPrompt]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line.strip():
            continue
        record = json.loads(line)
        task = TASKS.get(record["category"], MULTI_TURN) if "category" in record else ONE_KIND
        by_task[task].append(BenchPrompt(task, tuple(_turns(record))))
    chosen = [_spread(prompts, per_task) for prompts in by_task.values()]
    # Tasks alternate, so that a run that is cut short covers all of them.
    return [prompt for turn in zip_longest(*chosen) for prompt in turn if prompt is not None]


def read_texts(path: Path, count: int) -> Sequence[str]:
    """`count` prompts, evenly spaced over a file of JSON lines; the first turn of several. Raises `InvalidInput`."""
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    texts: list[str] = []
    for record in map(json.loads, lines):
        texts += _turns(record)[:1]
    if not texts or len(texts) < len(lines):
        raise InvalidInput(f"{path} has no prompts, or a line without turns, prompt or question")
    return _spread(texts, count)


def encode_turns(loaded: LoadedModel, turns: Sequence[str]) -> list[int]:
    """Token ids of a conversation, the user's turn first and last: as a chat, or as plain text for a model without a
    template."""
    if not takes_chat(loaded):
        return list(encode_prompt(loaded, plain_text(turns)))
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return list(encode_prompt(loaded, messages))


def first_turns(loaded: LoadedModel, path: Path, per_task: int) -> list[list[int]]:
    """The first turns of `read_prompts` as token ids. Prints a note if they are sent as plain text."""
    if not takes_chat(loaded):
        print(PLAIN_TEXT_NOTE)
    return [encode_turns(loaded, prompt.turns[:1]) for prompt in read_prompts(path, per_task)]


def short_texts(path: Path, per_task: int) -> list[str]:
    """The first turns of `read_prompts` that have at most MAX_CHARACTERS characters."""
    texts = [prompt.turns[0] for prompt in read_prompts(path, per_task)]
    return [text for text in texts if len(text) <= MAX_CHARACTERS]


def takes_chat(loaded: LoadedModel) -> bool:
    return loaded.tokenizer is not None and bool(loaded.tokenizer.chat_template)


def plain_text(turns: Sequence[str]) -> str:
    """The turns as paragraphs."""
    return "\n\n".join(turns)


def _turns(record: Mapping[str, Any]) -> list[str]:
    fields = [record[name] for name in ("prompt", "question") if name in record]
    return list(record.get("turns", fields))


def _spread(prompts: Sequence[Prompt], count: int) -> Sequence[Prompt]:
    """`count` of the prompts, evenly spaced so that every category of a task occurs; all for 0."""
    if not count or count >= len(prompts):
        return prompts
    return [prompts[index * len(prompts) // count] for index in range(count)]
