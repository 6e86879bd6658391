"""LlamaIndex: chats and responses, streamed and not, tools and structured output."""

import json
import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from llama_index.llms.openai_like.responses import OpenAILikeResponses
from pydantic import BaseModel, Field


class Stay(BaseModel, extra="forbid"):
    """A stay in a city."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


url, body = sys.argv[1], json.loads(sys.argv[2])
asked = {"model": "tiny", "api_base": f"{url}/v1", "api_key": "unused", "temperature": 0, "max_retries": 0}
asked |= {"is_function_calling_model": True, "additional_kwargs": {"extra_body": body}}
book = FunctionTool.from_defaults(lambda city, days: "booked", name="book", description="Book.", fn_schema=Stay)
hello = [ChatMessage(role="user", content="hello")]
texts = set()
for model in (
    OpenAILike(**asked, is_chat_model=True, max_tokens=200, should_use_structured_outputs=True),
    OpenAILikeResponses(**asked, max_output_tokens=200),
):
    texts.add(model.chat(hello).message.content)
    *_, last = model.stream_chat(hello)
    texts.add(last.message.content)
    answer = model.chat_with_tools([book], user_msg="hello", tool_required=True)
    [call] = model.get_tool_calls_from_response(answer)
    Stay.model_validate(call.tool_kwargs)
    result = ChatMessage(role="tool", content="booked", additional_kwargs={"tool_call_id": call.tool_id})
    assert model.chat([*hello, answer.message, result]).message.content
    assert isinstance(model.as_structured_llm(Stay).chat(hello).raw, Stay)
assert len(texts) == 1, texts
assert texts.pop()
