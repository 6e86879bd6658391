"""pydantic-ai: agents with tools and with output types, over chats and responses, streamed and not."""

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Stay(BaseModel, extra="forbid"):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


url, body = sys.argv[1], json.loads(sys.argv[2])
settings = {"temperature": 0, "max_tokens": 200, "extra_body": body}


async def main() -> None:
    texts = set()
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="unused"))
        agent = Agent(model, instructions="Book.", model_settings=settings)
        result = await agent.run("hello")
        texts.add(result.output)
        assert result.usage.output_tokens
        async with agent.run_stream("hello") as stream:
            texts.add(await stream.get_output())
        assert (await agent.run("more", message_history=result.all_messages())).output
        for form in (NativeOutput, ToolOutput):
            typed = Agent(model, output_type=form(Stay), model_settings=settings)
            assert isinstance((await typed.run("hello")).output, Stay)
            async with typed.run_stream("hello") as stream:
                assert isinstance(await stream.get_output(), Stay)
        called = []
        using = Agent(model, output_type=ToolOutput(Stay), model_settings=settings)

        @using.tool_plain
        def weather(city: Literal["Rome", "Oslo"], called: list[str] = called) -> str:
            """Tell the weather."""
            called.append(city)
            return "sunny"

        assert isinstance((await using.run("hello")).output, Stay)
    assert len(texts) == 1
    assert texts.pop()


asyncio.run(main())
