"""LiteLLM: chats and responses, streamed and not, tools and structured output."""

import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel, Field


class Stay(BaseModel, extra="forbid"):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


url, body = sys.argv[1], json.loads(sys.argv[2])
asked = {"api_base": f"{url}/v1", "api_key": "unused", "temperature": 0, "num_retries": 0}
chat = {"model": "hosted_vllm/tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
chat |= {**asked, "extra_body": body}
response = {**asked, "model": "openai/tiny", "input": "hello", "max_output_tokens": 200}
response["extra_body"] = body
function = {"name": "book", "parameters": Stay.model_json_schema(), "strict": True}

texts = set()
for model in ("hosted_vllm/tiny", "openai/tiny"):
    given = {**chat, "model": model}
    texts.add(litellm.completion(**given).choices[0].message.content)
    chunks = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
    texts.add("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens
    Stay.model_validate_json(litellm.completion(**given, response_format=Stay).choices[0].message.content)
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    [call] = litellm.completion(**given, **tools, parallel_tool_calls=False).choices[0].message.tool_calls
    Stay.model_validate_json(call.function.arguments)
texts.add(litellm.responses(**response).output[0].content[0].text)
deltas = [event for event in litellm.responses(**response, stream=True) if event.type == "response.output_text.delta"]
texts.add("".join(event.delta for event in deltas))
[item] = litellm.responses(**response, tools=[{"type": "function", **function}], tool_choice="required").output
Stay.model_validate_json(item.arguments)
assert len(texts) == 1, texts
assert texts.pop()
