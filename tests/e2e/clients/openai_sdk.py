"""The `openai` package: chats and responses, streamed and not, tools and structured output."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel, Field


class Stay(BaseModel, extra="forbid"):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


url, body = sys.argv[1], json.loads(sys.argv[2])
client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
asked = {"model": "tiny", "temperature": 0, "extra_body": body}
chat = {**asked, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
response = {**asked, "input": "hello", "max_output_tokens": 200}
function = {"name": "book", "parameters": Stay.model_json_schema(), "strict": True}

assert [model.id for model in client.models.list()] == ["tiny"]
text = client.chat.completions.create(**chat).choices[0].message.content
assert text
streamed = client.chat.completions.create(**chat, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
answer = client.responses.create(**response)
assert answer.output_text == text
deltas = client.responses.create(**response, stream=True)
assert "".join(event.delta for event in deltas if event.type == "response.output_text.delta") == text

parsed = client.chat.completions.parse(**chat, response_format=Stay).choices[0].message.parsed
assert isinstance(parsed, Stay)
assert client.responses.parse(**response, text_format=Stay).output_parsed == parsed
with client.responses.stream(**response, text_format=Stay) as stream:
    stream.until_done()
    assert stream.get_final_response().output_parsed == parsed

tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "parallel_tool_calls": False}
[call] = client.chat.completions.create(**chat, **tools).choices[0].message.tool_calls
Stay.model_validate_json(call.function.arguments)
tools["tools"] = [{"type": "function", **function}]
[item] = client.responses.create(**response, **tools).output
assert item.arguments == call.function.arguments
with client.responses.stream(**response, **tools) as stream:
    [again] = [event.item for event in stream if event.type == "response.output_item.done"]
assert again.arguments == item.arguments
result = {"type": "function_call_output", "call_id": item.call_id, "output": "booked"}
conversation = [{"role": "user", "content": "hello"}, item.model_dump(exclude_none=True), result]
assert client.responses.create(**{**response, "input": conversation}).usage.input_tokens > answer.usage.input_tokens
refused = None
try:
    client.responses.create(**response, previous_response_id=answer.id)
except openai.BadRequestError as error:
    refused = error.param
assert refused == "previous_response_id"
