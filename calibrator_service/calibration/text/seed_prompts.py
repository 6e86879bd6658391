"""Prompts from templates (`seed_prompts.json`) whose placeholders are filled at random.
They contain no prompts of a benchmark."""

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_name("seed_prompts.json").read_text(encoding="utf-8"))
    return data


def seed_prompt(rng: random.Random, *, wide: bool = False) -> str:
    """One prompt. Every category (translation, QA, maths, writing, ...) is equally likely.
    `wide`: of many more categories."""
    prompts: dict[str, list[str]] = _data()["prompts"]
    if wide:
        prompts = prompts | _data()["wide_prompts"]
    return _fill(rng, rng.choice(prompts[rng.choice(list(prompts))]))


def passage_prompt(rng: random.Random) -> str:
    """A prompt that asks for a passage, which `passage_task` uses."""
    return _fill(rng, rng.choice(_data()["passages"]))


def passage_task(rng: random.Random, passages: list[str]) -> str:
    """A task (summarise, answer, translate, ...) about one of `passages`, which the model wrote."""
    tasks: dict[str, list[str]] = _data()["passage_tasks"]
    template = rng.choice(tasks[rng.choice(list(tasks))])
    return _fill(rng, template, passages)


def follow_up(rng: random.Random) -> str:
    """A second message that fits any answer."""
    return _fill(rng, rng.choice(_data()["follow_ups"]))


def _fill(rng: random.Random, template: str, passages: list[str] | None = None) -> str:
    values: dict[str, list[str]] = _data()["values"]

    def choose(match: re.Match[str]) -> str:
        options = passages if match[1] == "passage" and passages else values[match[1]]
        return rng.choice(options)

    return PLACEHOLDER.sub(choose, template)
