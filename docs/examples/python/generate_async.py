"""Streams several answers at once: python generate_async.py 127.0.0.1:7071 MODEL PROMPT.."""

import asyncio
import sys

from neap_client import AsyncNeapClient, generate_request
from neap_client.errors import NeapError


async def answer(client: AsyncNeapClient, model: str, prompt: str) -> str:
    request = generate_request(model, prompt, max_tokens=32)
    # Leaving the block cancels the call, whatever has happened.
    async with client.generate(request, timeout_s=60) as stream:
        try:
            async for _ in stream:
                pass
        except NeapError as error:
            return f"{stream.text} [{error.reason}: {error.message}]"
        return stream.text


async def main(target: str, model: str, *prompts: str) -> None:
    async with AsyncNeapClient(target) as client:
        for text in await asyncio.gather(*(answer(client, model, prompt) for prompt in prompts)):
            print(text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
