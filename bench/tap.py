"""What the tap (`--learn`) takes of a worker.

    python -m bench.tap --model FILE [--pairs 40] [--tokens 128]

First by itself: the time of its calls for an answer of --tokens tokens that come two a step, to a prompt of 200: on the
event loop for each step and at the end, and CPU time of the thread that writes, with the fsyncs of a folder. Then in a
worker process: requests in pairs, one with `learn: never` and one that is kept, in turns of who comes first; printed
are the median of the ratios of their times, and between which values half of them lie.
"""

import asyncio
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from functools import partial

from neap_client.inference.v1 import inference_pb2 as pb

from bench.machine import described
from bench.options import make_parser, parsed
from bench.streams import FINISHED, Stream, StreamClient
from bench.table import head, row
from bench.worker import MODEL_ID, serving
from inference_service.metrics import WorkerMetrics
from inference_service.tap import TakenAnswer, Tap
from shared.engine.request.request import Exit, GenerationRequest, TokenChunk
from shared.traffic.answer import ServedAnswer
from shared.traffic.traffic import open_traffic

PROMPT_TOKENS, PER_STEP, ANSWERS, DAY_S = 200, 2, 200, 24 * 3600.0


def seconds_of(clock: Callable[[], float], work: Callable[[], object]) -> float:
    began = clock()
    work()
    return clock() - began


def every_step(taken: TakenAnswer, chunk: TokenChunk, num_steps: int) -> None:
    for _ in range(num_steps):
        taken.add(chunk)


def alone(num_tokens: int) -> None:
    """Prints microseconds for each step and answer."""
    token_ids = [40_000 + number % 5 for number in range(PER_STEP)]
    chunk = TokenChunk(("a",) * PER_STEP, token_ids, (Exit(30, "full"),) * PER_STEP)
    steps = num_tokens // PER_STEP
    request = GenerationRequest(prompt_ids=tuple(range(1000, 1000 + PROMPT_TOKENS)))
    adding, keeping = [], []
    with tempfile.TemporaryDirectory() as folder:
        traffic = open_traffic(folder)
        tap = Tap(traffic, {"*": 1.0}, WorkerMetrics(), retention_s=DAY_S, is_idle=lambda: False)
        for _ in range(ANSWERS):
            taken = tap.take("default", "numerics")
            assert taken is not None
            adding.append(seconds_of(time.perf_counter, partial(every_step, taken, chunk, steps)) / steps)
            keeping.append(seconds_of(time.perf_counter, partial(taken.keep, MODEL_ID, request)))
        tap.close()
        ids = array("I", token_ids * steps)
        kept = [
            ServedAnswer(MODEL_ID, "default", 1, "numerics", 480_000, array("I", request.prompt_ids), ids)
            for _ in range(ANSWERS)
        ]
        writing = seconds_of(time.thread_time, lambda: traffic.write(kept)) / ANSWERS
    add, keep = statistics.median(adding), statistics.median(keeping)
    head("of the event loop, a step", "at an answer's end", "of the writer, an answer", "together, a step")
    row(*(f"{1e6 * seconds:.2f} us" for seconds in (add, keep, writing, add + (keep + writing) / steps)))


async def in_pairs(target: str, num_pairs: int, num_tokens: int) -> None:
    def request(learn: pb.Learn) -> pb.GenerateRequest:
        stopping = pb.Stopping(max_tokens=num_tokens, ignore_eos=True)
        depth = pb.DepthPolicy(full=pb.Full())
        return pb.GenerateRequest(model_id=MODEL_ID, text="Once", stopping=stopping, depth=depth, learn=learn)

    ratios: list[float] = []
    steps_s: list[float] = []
    async with StreamClient(target) as client:
        await client.warm_up(request(pb.LEARN_NEVER))
        for number in range(num_pairs):
            times: dict[pb.Learn, float] = {}
            for learn in (pb.LEARN_NEVER, pb.LEARN_UNSPECIFIED)[:: -1 if number % 2 else 1]:
                stream = await client.run(request(learn), Stream(time.perf_counter()))
                assert stream.outcome == FINISHED, stream.outcome
                times[learn] = time.perf_counter() - stream.arrival_s
            ratios.append(times[pb.LEARN_UNSPECIFIED] / times[pb.LEARN_NEVER])
            steps_s.append(times[pb.LEARN_NEVER] / num_tokens)
    first, middle, last = statistics.quantiles(ratios, n=4)
    head("ms a step", "kept over never, median", "half of the pairs")
    row(f"{1e3 * statistics.median(steps_s):.2f}", f"{middle:.4f}", f"{first:.4f} to {last:.4f}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    options = parsed(parser)
    print(described("cpu"))
    alone(options.tokens)
    with serving(options.model, None, ["--learn", "default=1"]) as target:
        asyncio.run(in_pairs(target, options.pairs, options.tokens))


if __name__ == "__main__":
    main()
