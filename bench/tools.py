"""Calls that a model makes of its own accord (`tool_choice: auto`), and whether they are valid.

    python -m bench.tools --model FILE --router FOLDER [--prompts 20] [--offered 3] [--earlier]

Every prompt is asked with so many tools, of which its own is one, with --earlier after a call of another tool,
greedily, under `full` and `exact`, which must give the same tokens. Arguments are checked by jsonschema, which the
grammar knows nothing of.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
from neap_client.inference.v1 import inference_pb2 as pb

from bench.machine import described
from bench.options import add_dtypes, each_model, load, make_parser
from bench.table import head, row
from inference_service.chat import ChatRequest
from shared.engine.engine import Engine
from shared.engine.request.prompt import encode_prompt
from shared.engine.request.request import (
    Finished,
    FinishReason,
    GenerationRequest,
    StoppingParams,
    TokenChunk,
)
from shared.ladder.folder import read_ladder
from shared.ladder.policy import DepthPolicy, PolicyName

FILE = Path("tests/neap_engine/gateway/tools.jsonl")
SYSTEM = "You are a helpful assistant. Use the tools where they help."
TIME: dict[str, Any] = {
    "name": "get_time",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def chat_of(records: list[Any], place: int, options: argparse.Namespace) -> pb.Chat:
    """The prompt at `place`, with its tool and those after it."""
    offered = [records[(place + i) % len(records)] for i in range(options.offered)]
    messages = [pb.ChatMessage(role="system", content=SYSTEM)]
    if options.earlier:
        offered.append(TIME)
        call = pb.ToolCall(id="abcdefgh1", name=TIME["name"], arguments='{"city": "Oslo"}')
        messages += [
            pb.ChatMessage(role="user", content="What time is it in Oslo?"),
            pb.ChatMessage(role="assistant", tool_calls=[call]),
            pb.ChatMessage(role="tool", content="12:40", tool_call_id=call.id),
            pb.ChatMessage(role="assistant", content="It is 12:40 in Oslo."),
        ]
    return pb.Chat(
        messages=[*messages, pb.ChatMessage(role="user", content=records[place]["prompt"])],
        tools=[
            pb.Tool(
                name=own["name"],
                description=own["name"].replace("_", " "),
                parameters=json.dumps(own["parameters"]),
            )
            for own in sorted(offered, key=lambda own: str(own["name"]))
        ],
    )


@dataclass
class Said:
    """`calls`: names and arguments by index. `is_cut`: the last call may not be whole."""

    tokens: list[int] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    is_cut: bool = False

    @property
    def whole_calls(self) -> list[list[str]]:
        return list(self.calls.values())[: -1 if self.is_cut else None]


def answered(engine: Engine, chat: ChatRequest, policy: PolicyName, max_tokens: int) -> Said:
    ids = encode_prompt(engine.loaded, chat.prompt)
    request = GenerationRequest(
        tuple(ids),
        stopping=StoppingParams(max_tokens=max_tokens),
        policy=DepthPolicy(policy),
        constraint=chat.constraint(None, ids),
        shown_special_ids=chat.shown_special_ids,
    )
    said, reader = Said(), chat.parser(ids)
    for event in engine.submit(request).events():
        if isinstance(event, Finished):
            said.is_cut = event.reason is FinishReason.LENGTH
            part = reader.finish(event.text)
        else:
            assert isinstance(event, TokenChunk)
            said.tokens += [token.token_id for token in event.tokens]
            part = reader.push(event.text)
        for call in part.calls:
            own = said.calls.setdefault(call.index, ["", ""])
            own[0] += call.name
            own[1] += call.arguments
    return said


def is_valid(arguments: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(arguments), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_dtypes(parser)
    parser.add_argument(
        "--file", type=Path, default=FILE, help="JSON lines: name, prompt, parameters"
    )
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--offered", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--earlier", action="store_true", help="the chat has had a call before")
    for options in each_model(parser):
        loaded = load(options)
        records = [json.loads(line) for line in options.file.read_text().splitlines()]
        schemas = {own["name"]: own["parameters"] for own in [*records, TIME]}
        places = range(min(options.prompts, len(records)))
        with Engine(loaded, read_ladder(options.router)) as engine:
            chats = [ChatRequest(chat_of(records, place, options), loaded) for place in places]
            pairs = [
                [answered(engine, chat, policy, options.max_tokens) for policy in ("full", "exact")]
                for chat in chats
            ]
        full, exact = zip(*pairs, strict=True)
        whole = [call for said in exact for call in said.whole_calls]
        print(described("cpu"))
        head("same tokens", "prompts with calls", "of their own tool", "whole calls", "valid ones")
        row(
            f"{sum(a.tokens == b.tokens for a, b in zip(full, exact, strict=True))} of {len(exact)}",
            sum(bool(said.calls) for said in exact),
            sum(
                any(name == records[place]["name"] for name, _ in exact[place].calls.values())
                for place in places
            ),
            len(whole),
            sum(is_valid(arguments, schemas[name]) for name, arguments in whole),
        )


if __name__ == "__main__":
    main()
