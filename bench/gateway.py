"""Cost of the HTTP gateway beside plain gRPC: `python -m bench.gateway --model DIR`.

The same greedy request is streamed from one worker by gRPC and through the gateway, in turn, by one client. Printed are
the ratios of each pair's time per token and time to first token, because the machine is shared: their median and
quartiles.
"""

import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from neap_client import NeapClient
from neap_client.requests import generate_request

from bench.options import each_model, make_parser
from bench.table import head, row
from bench.worker import MODEL_ID, serving
from neap_engine.cli.processes import ServiceProcess

PROMPT = "Write a short story about a ship that is lost at sea."


def by_grpc(client: NeapClient, num_tokens: int) -> Iterator[bool]:
    """Whether there are tokens in each event."""
    request = generate_request(MODEL_ID, PROMPT, policy="full", max_tokens=num_tokens, ignore_eos=True)
    with client.generate(request) as stream:
        for event in stream:
            yield event.HasField("chunk")


def by_http(client: httpx.Client, num_tokens: int) -> Iterator[bool]:
    """The same through the gateway."""
    body = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "neap": {"policy": "full"},
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                yield bool(event["choices"][0]["delta"].get("content"))


def times_s(events: Iterator[bool], num_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and per further token."""
    start_s, first_s = time.perf_counter(), 0.0
    for has_tokens in events:
        if has_tokens and not first_s:
            first_s = time.perf_counter()
    return first_s - start_s, (time.perf_counter() - first_s) / (num_tokens - 1)


def measure(model: str, pairs: int, num_tokens: int) -> None:
    # The services end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(model, None) as worker,
        ServiceProcess("gateway", "neap_engine.gateway", ["--workers", worker], Path(folder) / "log") as gateway,
        NeapClient(worker) as grpc_client,
        httpx.Client(base_url=f"http://{gateway._read_address(time.monotonic() + 60)}", timeout=600) as http_client,
    ):
        for _ in range(pairs + 1):
            ours = times_s(by_grpc(grpc_client, num_tokens), num_tokens)
            found.append((ours, times_s(by_http(http_client, num_tokens), num_tokens)))
    found = found[1:]  # the first pair warms up
    head("", "gateway / gRPC, median", "quartiles")
    for index, name in ((1, "time per token"), (0, "time to the first token")):
        ratios = [http[index] / grpc[index] for grpc, http in found]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row(name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    print(
        f"a token by gRPC: {statistics.median(grpc[1] for grpc, _ in found) * 1e3:.2f} ms; median of the differences: "
        f"{statistics.median(http[1] - grpc[1] for grpc, http in found) * 1e6:.0f} us"
    )


def main() -> None:
    parser = make_parser(__doc__, many=True)
    parser.add_argument("--pairs", type=int, default=10, help="of streams, two at least")
    parser.add_argument("--tokens", type=int, default=128, help="of a stream, two at least")
    for options in each_model(parser):
        measure(options.model, options.pairs, options.tokens)


if __name__ == "__main__":
    main()
