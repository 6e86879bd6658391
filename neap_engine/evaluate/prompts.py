"""Reads the prompts to answer."""

import json
from pathlib import Path

from shared.engine.request.prompt import encode_prompt
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel


def read_prompts(path: Path, loaded: LoadedModel) -> list[tuple[int, ...]]:
    """The token ids of each prompt in a JSONL file.
    A line is {"prompt": "text to continue"} or {"messages": [{"role", "content"}]}.

    Raises OSError, and `InvalidInput` with the number of the line (reason BAD_PROMPT_FILE, or that of
    `encode_prompt`).
    """
    prompts = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompts.append(_encoded(line, f"{path}:{number}", loaded))
    if not prompts:
        raise InvalidInput(f"{path} has no prompts", reason="BAD_PROMPT_FILE")
    return prompts


def _encoded(line: str, place: str, loaded: LoadedModel) -> tuple[int, ...]:
    try:
        record = json.loads(line)
        text, messages = record.get("prompt"), record.get("messages")
        if isinstance(text, str) and messages is None:
            return encode_prompt(loaded, text)
        if text is None and all(isinstance(message["content"], str) for message in messages):
            return encode_prompt(loaded, messages)
    except InvalidInput as error:
        raise InvalidInput(f"{place}: {error.message}", reason=error.reason) from error
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise _bad_line(place) from error
    raise _bad_line(place)


def _bad_line(place: str) -> InvalidInput:
    return InvalidInput(
        f'{place}: a line must be {{"prompt": "text"}} or {{"messages": [{{"role": .., "content": ..}}]}}',
        reason="BAD_PROMPT_FILE",
    )
