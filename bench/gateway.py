"""Cost of the HTTP gateway beside plain gRPC: `python -m bench.gateway --model DIR`.

The same greedy request is streamed from one worker by gRPC and through the gateway, in turn, by one client. Printed are the ratios of
each pair's time per token and time to first token, because the machine is shared: their median and quartiles.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2

LISTENING = "listening on "
PROMPT = "Write a short story about a ship that is lost at sea."


@contextmanager
def service(module: str, *flags: str) -> Iterator[str]:
    """Yield HOST:PORT of a service that runs until the block is left."""
    command = [sys.executable, "-m", module, "--listen", "127.0.0.1:0", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(LISTENING):
                raise SystemExit(f"{module} does not start")
            yield line.removeprefix(LISTENING).strip()
        finally:
            process.terminate()


def stream_grpc(client: NeapClient, num_tokens: int) -> tuple[float, float]:
    """Return (time to first token, time per further token), both in seconds."""
    request = inference_pb2.GenerateRequest(
        model_id="bench",
        chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=PROMPT)]),
        stopping=inference_pb2.Stopping(max_tokens=num_tokens, ignore_eos=True),
        depth=inference_pb2.DepthPolicy(full=inference_pb2.Full()),
    )
    start_s = time.perf_counter()
    first_s = 0.0
    with client.generate(request) as stream:
        for event in stream:
            if event.HasField("chunk") and not first_s:
                first_s = time.perf_counter()
    return first_s - start_s, (time.perf_counter() - first_s) / (num_tokens - 1)


def stream_http(client: httpx.Client, num_tokens: int) -> tuple[float, float]:
    """Return the same of a stream through the gateway."""
    body = {
        "model": "bench",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "neap": {"policy": "full"},
    }
    start_s = time.perf_counter()
    first_s = 0.0
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if not first_s and event["choices"][0]["delta"].get("content"):
                first_s = time.perf_counter()
    return first_s - start_s, (time.perf_counter() - first_s) / (num_tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder or .gguf file")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of streams [default: 10]")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a stream [default: 128]")
    options = parser.parse_args()
    if options.pairs < 2 or options.tokens < 2:
        parser.error("--pairs and --tokens must be at least 2")
    # The services end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ratios: list[tuple[float, float]] = []
    times: list[tuple[float, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        service(
            "inference_service", "--model", f"bench={options.model}", "--data-dir", folder
        ) as worker,
        service("neap_engine.gateway", "--workers", worker) as gateway,
        NeapClient(worker) as grpc_client,
        httpx.Client(base_url=f"http://{gateway}", timeout=600) as http_client,
    ):
        grpc_client.wait_ready(timeout_s=600)
        for pair in range(options.pairs + 1):
            by_grpc = stream_grpc(grpc_client, options.tokens)
            by_http = stream_http(http_client, options.tokens)
            if pair:  # the first pair warms up
                ratios.append((by_http[0] / by_grpc[0], by_http[1] / by_grpc[1]))
                times.append((by_grpc[1], by_http[1]))
    for index, name in enumerate(("time to first token", "time per token")):
        low, middle, high = statistics.quantiles([ratio[index] for ratio in ratios], n=4)
        print(f"{name}: gateway / gRPC {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
    extra_s = statistics.median(http - grpc for grpc, http in times)
    print(f"median time per token by gRPC: {statistics.median(t[0] for t in times) * 1e3:.2f} ms")
    print(f"median of the differences: {extra_s * 1e6:.0f} us per token")


if __name__ == "__main__":
    main()
