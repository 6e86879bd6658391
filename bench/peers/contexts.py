"""Decoding after long documents: questions about the sources of Python's standard library, as many tokens of them as
asked for. The document's keys and values are reused from question to question."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.engines.serving import Answer
from bench.peers.figures import decoding_rate
from bench.peers.run import Prompts, Say, take_turns
from bench.table import head, row

# Of a question and the chat around it, at most.
QUESTION_TOKENS = 128
NUM_QUESTIONS = 8
# What is asked of a function: the answer's words are new, or mostly those of the document.
KINDS = {
    "new text": "In your own words, what is {name} for, and when would a program not use it?",
    "repeats the document": "Write {name} again, complete, with type hints.",
}
SOURCES = Path(statistics.__file__).parent


def questions(tokenizer: Any, encode: Callable[[str], list[int]], num_tokens: int) -> dict[str, Prompts]:
    """By kind, prompts with a document of `num_tokens` tokens in front."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("[a-z]*.py")))
    ids: list[int] = []
    while len(ids) < num_tokens:
        ids += tokenizer(next(texts))["input_ids"]
    document = tokenizer.decode(ids[:num_tokens])
    names = re.findall(r"^(?:def|class) (\w+)", document, re.MULTILINE)
    chosen = [names[index * len(names) // NUM_QUESTIONS] for index in range(NUM_QUESTIONS)]
    return {
        kind: [encode(f"{document}\n\n{question.format(name=name)}") for name in chosen]
        for kind, question in KINDS.items()
    }


def print_rates(
    contenders: Mapping[str, Callable[[Prompts], list[Answer]]],
    asked: Mapping[int, Mapping[str, Prompts]],
    num_rounds: int,
    failures: dict[str, str],
    say: Say,
) -> None:
    """`asked`: by the document's tokens and kind. An untimed answer reads each document; a rate is over all answers of
    a round, and its median over rounds. The last columns are ratios to the first contender."""
    rows: list[list[str]] = []
    for length, kinds in asked.items():
        for kind, prompts in kinds.items():
            tasks: Sequence[Prompts] = [[ids] for ids in prompts]
            say(f"{length} tokens, {kind}")
            take_turns(contenders, tasks[:1], 1, failures)
            found = take_turns(contenders, tasks, num_rounds, failures, say)
            rates = [statistics.median(map(decoding_rate, found.get(name, [[]]))) for name in contenders]
            rows.append([str(length), kind, *(f"{rate:.1f}" for rate in rates)])
            rows[-1] += [f"{rate / rates[0]:.2f}" for rate in rates[1:]]
    head("tokens of context", "the answer", *contenders, *(f"{name}, ratio" for name in [*contenders][1:]))
    for cells in rows:
        row(*cells)
