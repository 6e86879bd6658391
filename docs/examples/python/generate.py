"""Streams one answer: python generate.py 127.0.0.1:7071 MODEL PROMPT"""

import sys

from neap_client import NeapClient, generate_request


def main(target: str, model: str, prompt: str) -> None:
    with NeapClient(target) as client:
        request = generate_request(model, prompt, max_tokens=32)
        for event in client.generate(request, timeout_s=60):
            print(event.chunk.text + event.finished.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
