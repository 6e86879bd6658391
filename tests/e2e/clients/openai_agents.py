"""openai-agents: an agent that calls a tool and answers, over responses and over chats, streamed and not."""

import asyncio
import json
import sys
from typing import Literal

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from pydantic import BaseModel, Field

called = []


class Stay(BaseModel, extra="forbid"):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


@function_tool
def book(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
    """Book a stay."""
    called.append((city, days))
    return "booked"


url, body = sys.argv[1], json.loads(sys.argv[2])
settings = {"temperature": 0, "max_tokens": 200, "extra_body": body}


async def main() -> None:
    calling = ModelSettings(**settings, tool_choice="required", parallel_tool_calls=False)
    booking = Agent(name="a", model="tiny", instructions="Book.", tools=[book], model_settings=calling)
    typed = Agent(name="b", model="tiny", output_type=Stay, model_settings=ModelSettings(**settings))
    texts = set()
    for uses_responses in (True, False):
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="unused", use_responses=uses_responses)
        config = RunConfig(model_provider=provider, tracing_disabled=True)
        result = await Runner.run(booking, "hello", run_config=config)
        # The loop asks again with the result, then with a free choice.
        assert result.new_items[-1].type == "message_output_item"
        texts.add(result.final_output)
        streamed = Runner.run_streamed(booking, "hello", run_config=config)
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds
        texts.add(streamed.final_output)
        assert isinstance((await Runner.run(typed, "hello", run_config=config)).final_output, Stay)
        again = await Runner.run(
            booking, [*result.to_input_list(), {"role": "user", "content": "more"}], run_config=config
        )
        assert again.final_output
    assert len(called) == 6
    assert len(texts) == 1


asyncio.run(main())
