"""Benchmarks on a GPU: full depth against the card's bandwidth, `exact` against full depth, and the router op alone.

    python -m bench.gpu [--shape llama-3.1-8b] [--depth 2 4] [--batch 1 8 32] [--rounds 3] [--share 0.8] [--tide FOLDER] [--json FILE]

The model has the shape's sizes, random bfloat16 weights, and exits whose agreement is set by construction (`bench.imposed`). So the
figures show the speed at a given acceptance rate, not the acceptance rate that a trained router reaches. Rates cover decoding alone:
from the time when every request has its first token until the first request ends. Policies take turns within a round; reported are
medians over rounds. `floor`: the time to read the weights of one pass, at the rate of a copy within the device's memory measured in
the same run (a copied byte counts twice). `--device cpu --shape tiny` only checks that the program works.
"""

import argparse
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.floor import weight_bytes
from bench.imposed import SHAPES, Imposed, impose
from bench.machine import described
from bench.stopwatch import captured, median_call_us
from bench.tide import LEGEND, TideTimes, tide_router
from shared.engine.engine import Engine
from shared.engine.request.handle import EngineEvent
from shared.engine.request.request import (
    Finished,
    GenerationRequest,
    StoppingParams,
    TokenChunk,
)
from shared.errors import NeapError
from shared.ladder.confidence_head import HIGHEST, LOWEST, ConfidenceHead, scalar_features
from shared.ladder.draws import confidence_weights
from shared.ladder.policy import DepthPolicy
from shared.ops import library
from shared.ops.exits import new_tickets, route

PROMPT_TOKENS = 32
MAX_TOKENS = 192
COPIED_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
ROUTER_WIDTH, ROUTER_TOKENS = 4096, (1, 2, 4, 8, 16, 32, 64)
CALLS_PER_GRAPH = 50


@dataclass(frozen=True)
class Rates:
    """Tokens per second of decoding; `identical`: every answer by exact was that by full."""

    depths: tuple[int, ...]
    batch: int
    full: float
    exact: float
    tokens_per_pass: float
    identical: bool


def copy_bytes_per_s(device: str, rounds: int = 9) -> float:
    """Bytes read plus written per second by a copy within the device's memory, the median of `rounds`."""
    source = torch.ones(COPIED_BYTES[torch.device(device).type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(rounds + 2):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    rate = 2 * source.numel() / statistics.median(seconds[2:])
    del source, target
    _free(
        device
    )  # otherwise a later small tensor could take a piece of the large block and keep it from being freed
    return rate


class _Answer:
    """Collects the tokens of one request and their times.

    `take` runs on the engine's thread: a consumer thread per request would take time from the engine.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.arrivals: list[tuple[float, int]] = []
        self.tokens_per_pass = 0.0
        self._ended = threading.Event()
        self._error: NeapError | None = None

    def take(self, event: EngineEvent) -> None:
        if isinstance(event, TokenChunk):
            self.arrivals.append((time.perf_counter(), len(event.tokens)))
            self.tokens += [token.token_id for token in event.tokens]
        elif isinstance(event, Finished):
            self.tokens_per_pass = event.depth.num_tokens / max(event.depth.num_verify_passes, 1)
        elif event is None:
            self._ended.set()
        else:
            self._error = event

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


def decode(
    engine: Engine, policy: DepthPolicy, prompts: list[list[int]]
) -> tuple[float, float, list[list[int]]]:
    """(tokens per second while all requests decode, mean tokens per verify pass, answers)."""
    answers = [_Answer() for _ in prompts]
    stopping = StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    for answer, prompt in zip(answers, prompts, strict=True):
        request = GenerationRequest(tuple(prompt), policy=policy, stopping=stopping)
        engine.submit(request, on_event=answer.take)
    for answer in answers:
        answer.wait()
    start = max(answer.arrivals[0][0] for answer in answers)
    end = min(answer.arrivals[-1][0] for answer in answers)
    count = sum(n for answer in answers for moment, n in answer.arrivals if start < moment <= end)
    per_pass = statistics.fmean(answer.tokens_per_pass for answer in answers)
    return count / (end - start), per_pass, [answer.tokens for answer in answers]


def compare(imposed: Imposed, batches: list[int], rounds: int) -> list[Rates]:
    """Exact and full in turns, at each number of requests at once."""
    found = []
    most = max(batches)
    depths = tuple(layer_exit.depth for layer_exit in imposed.ladder.exits)
    with Engine(imposed.loaded, imposed.ladder, max_running=most, max_queue=most) as engine:
        engine.warm_up()
        print(f"passes {engine.runner.description}", file=sys.stderr, flush=True)
        for batch in batches:
            rates: dict[str, list[float]] = {"full": [], "exact": []}
            per_pass, identical = [], True
            for index in range(rounds + 1):  # the first warms up
                # Other prompts each round, so that none matches a cached prefix of an earlier round.
                first = 1000 * index + 7 * batch
                prompts = [imposed.prompt(first + 50 * i, PROMPT_TOKENS) for i in range(batch)]
                full, _, expected = decode(engine, DepthPolicy("full"), prompts)
                exact, tokens_per_pass, answers = decode(engine, DepthPolicy("exact"), prompts)
                identical &= answers == expected
                if index:
                    rates["full"].append(full)
                    rates["exact"].append(exact)
                    per_pass.append(tokens_per_pass)
            full, exact = (statistics.median(rates[name]) for name in ("full", "exact"))
            line = Rates(depths, batch, full, exact, statistics.fmean(per_pass), identical)
            print(
                f"| {'+'.join(map(str, depths))} | {batch} | {full:.1f} | {exact:.1f} | {exact / full:.2f} | {line.tokens_per_pass:.2f} "
                f"| {'yes' if identical else 'NO'} |",
                flush=True,
            )
            found.append(line)
    return found


def router_us(
    device: str,
    tide: Mapping[int, TideTimes],
    timed: Callable[[Callable[[], object]], float] | None = None,
) -> dict[int, dict[str, float]]:
    """Microseconds for norm and confidence head, by number of tokens and contender; PyTorch eager and compiled.

    `timed` returns the microseconds of one call; by default it measures in a CUDA graph. `tide`: TIDE's times to print beside.
    """
    timed = timed or _graph_us
    router = ConfidenceHead(ROUTER_WIDTH).to(device).requires_grad_(False)
    weights = confidence_weights(router)
    found: dict[int, dict[str, float]] = {}
    for tokens in ROUTER_TOKENS:
        # float32, as exit heads return it.
        adapted = torch.randn(tokens, ROUTER_WIDTH, device=device)
        logits = torch.randn(tokens, 64, device=device)
        top = logits.topk(2).values.contiguous()
        log_mass, distance = (
            logits.logsumexp(-1),
            torch.ones(tokens, dtype=torch.int64, device=device),
        )
        tickets = new_tickets(tokens, torch.device(device))

        def plain(adapted: Tensor, logits: Tensor, distance: Tensor) -> Tensor:
            probabilities: Tensor = router(adapted, scalar_features(logits, distance))
            return probabilities

        eager = partial(plain, adapted, logits, distance)
        compiled = partial(torch.compile(plain, dynamic=False), adapted, logits, distance)
        own = partial(route, adapted, weights, top, log_mass, distance, LOWEST, HIGHEST, tickets)
        found[tokens] = {
            "neap": timed(own),
            "PyTorch": timed(eager),
            "PyTorch compiled": timed(compiled),
        }
        cells = [f"{us:.1f}" for us in found[tokens].values()]
        if tokens in tide:
            cells.append(tide[tokens].printed())
            found[tokens] |= {"TIDE": tide[tokens].us, "TIDE kernel": tide[tokens].kernel_us}
        print(f"| {tokens} | {' | '.join(cells)} |", flush=True)
    return found


def _graph_us(run: Callable[[], object]) -> float:
    """Microseconds of one call among many in a CUDA graph, the median of several replays."""
    return median_call_us(captured(run, CALLS_PER_GRAPH).replay, CALLS_PER_GRAPH)


def _depths(text: str) -> tuple[int, ...]:
    return tuple(int(depth) for depth in text.split("+"))


def _free(device: str) -> None:
    """Releases unused memory. The collector is needed because a gate and its layer refer to each other."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument(
        "--depth", type=_depths, nargs="+", default=[(2,), (4,)], metavar="D or D+D", help="of exits; each its own ladder"
    )  # fmt: skip
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--share", type=float, default=0.8, help="of tokens on which the exit is right"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tide", type=Path, help="TIDE's unpacked package: see bench.tide")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    on_gpu = torch.device(options.device).type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error(
            "there is no CUDA device; --device cpu --shape tiny checks that the program works"
        )
    if on_gpu and not library.runs_on("cuda"):
        parser.error("neap's kernels are not built for CUDA: run python -m shared.ops.build first")
    if options.tide and not on_gpu:
        parser.error("--tide needs a GPU: TIDE has no CPU kernels")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    machine = described(options.device)
    print(machine)
    try:
        # First, because a failing build takes a minute.
        tide = tide_router(options.tide, ROUTER_WIDTH, ROUTER_TOKENS) if options.tide else {}
    except NeapError as error:
        parser.error(error.message)
    speed = copy_bytes_per_s(options.device)
    print(f"a copy within memory: {speed / 1e9:.0f} GB/s, read and written")
    figures: dict[str, object] = {"machine": machine, "copy_bytes_per_s": speed}
    if on_gpu:
        columns = [
            "N",
            "neap",
            "PyTorch",
            "compiled",
            *(["TIDE", "its kernel alone"] if tide else []),
        ]
        print(f"\nrouter, D {ROUTER_WIDTH}, us in a CUDA graph; (loop): by events, see bench.tide")
        if tide:
            print(
                f"{LEGEND}\nscores of TIDE's kernel are off by {max(t.error for t in tide.values()):.1e} at most"
            )
        print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        figures["router_us"] = router_us(options.device, tide)
    print(f"\n{options.shape}, {dtype}, an exit that is right at {options.share:.0%} of tokens")
    print("| exits at | requests | full tokens/s | exact | exact / full | tokens per pass | same |")
    print("|---|---|---|---|---|---|---|")
    rates: list[Rates] = []
    for depths in options.depth:
        imposed = impose(SHAPES[options.shape], depths, options.share, device=options.device, dtype=dtype)  # fmt: skip
        num_bytes = weight_bytes(imposed.loaded)
        least_s = num_bytes / speed
        rates += compare(imposed, options.batch, options.rounds)
        del imposed
        _free(options.device)
        figures |= {"floor_s": least_s, "rates": [asdict(line) for line in rates]}
        if options.json:  # after every ladder, so that a later failure loses nothing
            options.json.write_text(json.dumps(figures, indent=1))
    alone = [line.full for line in rates if line.batch == 1]
    if alone:
        share = statistics.median(alone) * least_s
        print(
            f"\nfull depth alone: {num_bytes / 1e9:.2f} GB a pass, floor {least_s * 1000:.2f} ms, {share:.0%} of it reached"
        )


if __name__ == "__main__":
    main()
