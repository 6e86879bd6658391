"""What a router learns from served traffic by itself: exact with it, and with the one that it started from, against
full.

    python -m bench.learning --model FILE --router FOLDER --requests FILE.jsonl [--served 200] [--random]
    python -m bench.learning --model FILE --router FOLDER --requests FILE.jsonl --drift FILE.jsonl [--windows 4]

A worker that keeps its answers and a calibration service that learns from them run with their settings, but for the
number of new tokens that begins a job: it is what `--served` requests have. These are sent one after another, greedy,
and nothing else is done until the alias `latest` names the next version. Then the last `--held-out` requests of the
file, which are not kept, are answered at full depth, by the first router and by the learned one, in turn. `--random`:
prompts of random tokens and answers drawn at temperature 1, of which nothing can be learned. `--drift`: the requests
turn into those of this file, in windows of `--served` of them. After each window the service learns, and held-out
prompts, mixed as in the next window, say whether the newest router is slower than the first.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path

from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import generate_request

from bench.machine import described
from bench.options import make_parser, parsed
from bench.prompts import read_texts
from bench.table import head, row
from bench.worker import MODEL_ID, READY_S, publish_router, worker_process
from demo.answers import Measured, ask
from neap_engine.cli.processes import ServiceProcess
from shared.errors import InvalidInput, Unavailable
from shared.registry.factory import open_registry
from shared.registry.registry import Registry

ALIAS = "latest"
FULL = "full"
RANDOM_TOKENS = 64

Prompt = str | pb.TokenIds
Window = tuple[Sequence[Prompt], Sequence[Prompt]]  # served, held out


def main() -> None:
    parser = make_parser(__doc__, router=True)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--served", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds that the job may take")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--drift", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    options = parsed(parser)
    windows = (
        drifting(options) if options.drift else [divided(read_texts(options.requests, num_prompts(options)), options)]
    )
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        registry_path = folder / "registry"
        publish_router(options.router, registry_path)
        registry = stack.enter_context(closing(open_registry(str(registry_path))))
        worker = worker_process(options.model, registry_path, folder / "worker.log", ["--learn", "default=1"])
        address = stack.enter_context(worker).wait_complete(READY_S)
        client = stack.enter_context(NeapClient(address, timeout_s=3600.0))
        if options.random:
            vocabulary_size = client.get_model(MODEL_ID).vocabulary_size
            windows = [divided([random_prompt(vocabulary_size, n) for n in range(num_prompts(options))], options)]
        print(described("cpu"))
        ratios = [learn_and_measure(client, registry, folder, window, options) for window in windows]
        print(f"learned over first, the least of {len(ratios)} windows: {min(ratios):.2f}")


def num_prompts(options: argparse.Namespace) -> int:
    return int(options.served + options.held_out)


def divided(prompts: Sequence[Prompt], options: argparse.Namespace) -> Window:
    return prompts[: options.served], prompts[options.served :]


def drifting(options: argparse.Namespace) -> list[Window]:
    """No prompt comes twice. The first window is of --requests alone, the last of --drift. What is held out of a window
    is mixed as the next one is."""
    kinds = [iter(read_texts(path, 0)) for path in (options.requests, options.drift)]
    draw = random.Random(0)

    def mixed(count: int, number: int) -> list[str]:
        num_new = round(count * min(number / max(options.windows - 1, 1), 1.0))
        prompts = [*islice(kinds[0], count - num_new), *islice(kinds[1], num_new)]
        if len(prompts) < count:
            raise InvalidInput(f"the files have too few prompts for {options.windows} windows")
        draw.shuffle(prompts)
        return prompts

    return [(mixed(options.served, n), mixed(options.held_out, n + 1)) for n in range(options.windows)]


def learn_and_measure(
    client: NeapClient, registry: Registry, folder: Path, window: Window, options: argparse.Namespace
) -> float:
    """How much faster than the first router the newest one is, on the prompts that are held out."""
    served, held_out = window
    num_tokens = serve(client, served, options)
    print(f"{len(served)} requests served, {num_tokens:,} tokens", flush=True)
    learned_s = wait_learned(options, folder, registry, num_tokens)
    sides = {FULL: 0, "the first router": 1, "the learned router": registry.resolve(MODEL_ID, ALIAS).version}
    print(f"learned and published {learned_s:.0f} s after the last request", flush=True)
    return print_table(measure(client, held_out, sides, options))


def random_prompt(vocabulary_size: int, seed: int) -> pb.TokenIds:
    return pb.TokenIds(ids=random.Random(seed).choices(range(vocabulary_size), k=RANDOM_TOKENS))


def request_of(
    prompt: Prompt, options: argparse.Namespace, version: int | None, *, is_kept: bool
) -> pb.GenerateRequest:
    """`version`: 0 for full depth; None for the default alias."""
    return generate_request(
        MODEL_ID,
        prompt,
        policy=FULL if version == 0 else "exact",  # type: ignore[arg-type]
        router=version or "",
        max_tokens=options.max_tokens,
        temperature=1.0 if options.random else 0.0,
        seed=0,
        learn=None if is_kept else "never",
    )


def serve(client: NeapClient, prompts: Sequence[Prompt], options: argparse.Namespace) -> int:
    """The tokens of prompts and answers."""
    num_tokens = 0
    for prompt in prompts:
        answer = ask(client, request_of(prompt, options, None, is_kept=True))
        num_tokens += answer.num_prompt_tokens + len(answer.token_ids)
    return num_tokens


def wait_learned(options: argparse.Namespace, folder: Path, registry: Registry, num_tokens: int) -> float:
    """The seconds until the alias names another version. The service runs no longer than that."""
    began_s, before = time.monotonic(), registry.resolve(MODEL_ID, ALIAS).version
    flags = ["--model", f"{MODEL_ID}={options.model}", "--registry", str(folder / "registry"), "--learn-from-traffic"]
    flags += ["--data-dir", str(folder / "calibrator"), "--learn-budget-s", str(options.budget)]
    # Counts of kept tokens and of usage differ by what ends an answer.
    flags += ["--learn-tokens", str(num_tokens * 9 // 10), "--learn-interval-s", "0"]
    with ServiceProcess("calibrator", "calibrator_service", flags, folder / "calibrator.log") as calibrator:
        while registry.resolve(MODEL_ID, ALIAS).version == before:
            calibrator.check_alive()
            if time.monotonic() - began_s > READY_S + options.budget:
                raise Unavailable(f"nothing was learned; {(folder / 'calibrator.log').read_text()[-2000:]}")
            time.sleep(1.0)
    return time.monotonic() - began_s


def measure(
    client: NeapClient, prompts: Sequence[Prompt], sides: Mapping[str, int], options: argparse.Namespace
) -> dict[str, list[Measured]]:
    """The answers of each side that have a speed. Sides take turns."""
    found: dict[str, list[Measured]] = {name: [] for name in sides}
    names = list(sides)
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first is a warm-up
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answer = ask(client, request_of(prompt, options, sides[name], is_kept=False))
            if number and answer.has_speed:
                found[name].append(answer)
    return found


def print_table(found: Mapping[str, list[Measured]]) -> float:
    """Returns how much faster the learned router is than the first."""
    full = found[FULL]
    head("side", "tokens/s, median", "over full, median of pairs", "tokens per pass", "answers of full")
    for name, own in found.items():
        same = sum(o.token_ids == f.token_ids for o, f in zip(own, full, strict=True))
        rate = statistics.median(answer.tokens_per_s for answer in own)
        passes = statistics.mean(answer.tokens_per_pass for answer in own)
        row(name, f"{rate:.1f}", f"{_over(own, full):.2f}", f"{passes:.2f}", f"{same} of {len(own)}")
    first, learned = (found[name] for name in list(found)[1:])
    over = _over(learned, first)
    print(f"learned over first, median of pairs: {over:.2f}", flush=True)
    return over


def _over(own: Sequence[Measured], others: Sequence[Measured]) -> float:
    return statistics.median(o.tokens_per_s / other.tokens_per_s for o, other in zip(own, others, strict=True))


if __name__ == "__main__":
    main()
