"""LangChain: chats and responses, streamed and not, tools, structured output, and an agent."""

import json
import sys
from typing import Literal

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Stay(BaseModel, extra="forbid"):
    """A stay in a city."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


called = []


@tool(args_schema=Stay)
def book(city: str, days: int) -> str:
    """Book a stay."""
    called.append((city, days))
    return "booked"


url, body = sys.argv[1], json.loads(sys.argv[2])
texts = set()
for uses_responses in (False, True):
    model = ChatOpenAI(
        model="tiny",
        base_url=f"{url}/v1",
        api_key="unused",
        temperature=0,
        max_tokens=200,
        max_retries=0,
        use_responses_api=uses_responses,
        extra_body=body,
    )
    answer = model.invoke("hello")
    texts.add(answer.text)
    assert answer.usage_metadata["output_tokens"]
    assert "".join(chunk.text for chunk in model.stream("hello")) == answer.text
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Stay, method=method).invoke("hello"), Stay)
    bound = model.bind_tools([book], tool_choice="book")
    [call] = bound.invoke("hello").tool_calls
    Stay.model_validate(call["args"])
    whole = None
    for chunk in bound.stream("hello"):
        whole = chunk if whole is None else whole + chunk
    assert [again["args"] for again in whole.tool_calls] == [call["args"]]
    conversation = [HumanMessage("hello"), whole, ToolMessage("booked", tool_call_id=whole.tool_calls[0]["id"])]
    longer = model.bind_tools([book]).invoke(conversation)
    assert longer.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]
    before = len(called)
    messages = create_agent(model, [book]).invoke({"messages": ["hello"]}, {"recursion_limit": 60})["messages"]
    assert messages[-1].type == "ai"
    assert len(called) == before + sum(message.type == "tool" for message in messages)
assert len(texts) == 1, texts
assert texts.pop()
