"""The effect of swapping routers on running streams: gaps between tokens while an alias rests, moves, or gets new
versions.

    python -m bench.swap --model DIR --router FOLDER [--seconds 20] [--rounds 3] [--every 5.0] [--width 4]

One worker serves `width` streams at all times. Each of `rounds` rounds has three phases of `seconds` each. `rest`: the
alias does not change. `moves`: every `every` seconds it moves back and forth between two loaded versions.
`publications`: every `every` seconds it gets a newly published version, which the worker loads, binds and tests beside
the streams. A time counts for the phase it falls in. All versions hold the same ladder, so only the swap makes a
difference. Prompts are the first turns of Spec-Bench of at most 600 characters; greedy, policy exact, at most 32
tokens. Client and worker share the machine. The exit status is 1 if a request failed.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from bench.load import chat, shuffled
from bench.machine import described
from bench.options import add_prompts, each_model, make_parser
from bench.prompts import short_texts
from bench.streams import FINISHED, Stream, StreamClient, percentile, spread_ms
from bench.table import head, row
from bench.worker import MODEL_ID, READY_S, worker_process
from shared.ladder.folder import read_router_folder
from shared.registry.factory import open_registry
from shared.registry.registry import Registry

ALIAS = "latest"
PHASES = ("rest", "moves", "publications")


@dataclass
class Phase:
    """`windows`: (begin, end) per round, in `time.perf_counter()` seconds. `swaps`: how often the alias changed."""

    windows: list[tuple[float, float]] = field(default_factory=list)
    swaps: int = 0


async def run_phases(options: argparse.Namespace, actions: dict[str, Callable[[], object]]) -> dict[str, Phase]:
    """Runs the phases, round after round. In each, runs its action every `options.every` seconds."""
    phases = {name: Phase() for name in PHASES}
    for _ in range(options.rounds):
        for name, phase in phases.items():
            begin_s = time.perf_counter()
            end_s = begin_s + options.seconds
            while time.perf_counter() < end_s:
                phase.swaps += name != "rest"
                await asyncio.to_thread(actions[name])
                await asyncio.sleep(min(options.every, max(end_s - time.perf_counter(), 0)))
            phase.windows.append((begin_s, time.perf_counter()))
    return phases


async def measure(
    target: str, options: argparse.Namespace, actions: dict[str, Callable[[], object]]
) -> tuple[list[Stream], dict[str, Phase]]:
    """Runs streams beside the phases. Returns all streams, and the phases by name."""
    texts = short_texts(options.prompts, options.per_task)
    async with StreamClient(target) as client:
        await client.warm_up(chat(texts[0], "exact", 4))
        total_s = options.seconds * len(PHASES) * options.rounds
        phases = asyncio.create_task(run_phases(options, actions))
        requests = shuffled(texts, "exact", 0)
        streams = await client.closed_loop(requests, options.width, total_s)
        return streams, await phases


def print_table(streams: list[Stream], phases: dict[str, Phase]) -> None:
    head("alias", "swaps", "versions", "gaps", "gap p50 / p99 / max, ms", "first token p50 / p99, s")  # fmt: skip
    for name, phase in phases.items():
        gaps = [gap for s in streams for window in phase.windows for gap in s.gaps_s(*window)]
        begun = [
            stream
            for stream in streams
            if stream.deliveries and any(a <= stream.arrival_s < b for a, b in phase.windows)
        ]
        firsts = [stream.first_token_s for stream in begun]
        first = f"{percentile(firsts, 50):.2f} / {percentile(firsts, 99):.2f}"
        versions = len({stream.router_version for stream in begun})
        row(name, phase.swaps, versions, len(gaps), spread_ms(gaps), first)


def alias_actions(registry: Registry, folder: Path) -> dict[str, Callable[[], object]]:
    """The change that each phase makes to the alias, by phase. Publishes versions 1 and 2."""
    manifest, blobs = read_router_folder(folder)
    numbers = count(1)

    def publish() -> int:
        number = next(numbers)
        # Equal manifests would be one version; the number makes them differ.
        return registry.publish(MODEL_ID, {**manifest, "bench": number}, blobs, request_id=f"swap-{number}").version

    pair = publish(), publish()
    sides = count()
    return {
        "rest": lambda: None,
        "moves": lambda: registry.set_alias(MODEL_ID, ALIAS, pair[next(sides) % 2]),
        "publications": publish,
    }


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_prompts(parser, 0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between swaps")
    parser.add_argument("--width", type=int, default=4, help="streams running at once")
    for options in each_model(parser):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "registry"
            with closing(open_registry(str(path))) as registry:
                actions = alias_actions(registry, options.router)
                flags = ["--log-level", "warning", "--prefix-cache-mb", "0"]
                with worker_process(options.model, path, Path(folder) / "log", flags) as worker:
                    target = worker.wait_complete(READY_S)
                    streams, phases = asyncio.run(measure(target, options, actions))
        print(f"{described('cpu')}, client and worker on this machine, {options.width} streams")
        print_table(streams, phases)
        failed = Counter(stream.outcome for stream in streams if stream.outcome != FINISHED)
        versions = len({stream.router_version for stream in streams})
        print(f"{len(streams)} requests by {versions} versions; failed: {dict(failed) or 'none'}")
        if failed:
            sys.exit(1)


if __name__ == "__main__":
    main()
