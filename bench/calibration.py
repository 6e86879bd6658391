"""What a calibration from nothing is worth: exact against full on prompts of another kind, by the seconds that it took.

    python -m bench.calibration --model FILE [--dtype float32] [--budgets 150 900] [--requests FILE.jsonl --learned 200] [--router DIR]

Each budget is a calibration of its own, as `neap calibrate --budget` runs it. Then each prompt is answered at full depth and with
every router in turn, so that a busy machine slows all sides alike. `--router`: more routers, which take part as they are.
`--requests`: prompts of one kind, a JSON object with "prompt" on each line. The last `--held-out` of them are measured instead of
Spec-Bench; a router that goes on from the first --router with `--learned` others takes part.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import neap_engine

from bench.machine import described
from bench.options import add_prompts, make_parser, parsed
from bench.prompts import encode_turns, first_turns
from calibrator_service.calibration.pipeline import CalibrationResult
from shared.configured_model import dtype_named
from shared.engine.request.request import Finished
from shared.ladder.ladder import Ladder
from shared.model.load import load_model
from shared.model.loaded import LoadedModel


@dataclass
class Side:
    """A router, None at full depth, and what it took so far."""

    name: str
    ladder: Ladder | None
    decode_s: float = 0.0
    num_tokens: int = 0
    num_passes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.decode_s, 1e-9)

    def answer(self, engine: neap_engine.Engine, prompt: list[int], max_tokens: int) -> list[int]:
        policy = neap_engine.DepthPolicy("full" if self.ladder is None else "exact")
        handle = engine.submit(prompt, self.ladder, policy=policy, max_tokens=max_tokens)
        tokens: list[int] = []
        for event in handle.events():
            if isinstance(event, Finished):
                self.decode_s += event.decode_s
                self.num_passes += event.depth.num_deep_passes
            else:
                tokens += [token.token_id for token in event.tokens]
        self.num_tokens += len(tokens)
        return tokens


def compare(
    loaded: LoadedModel, sides: Sequence[Side], prompts: Sequence[list[int]], max_tokens: int
) -> None:
    """Answers every prompt with every side in turn and prints one row of a table for each."""
    differing = 0
    with neap_engine.Engine(loaded, prefix_cache_bytes=0) as engine:
        for side in sides:
            if side.ladder is not None:
                engine.prepare(side.ladder)
        for number, prompt in enumerate(prompts):
            first = number % len(sides)
            order = [*sides[first:], *sides[:first]]
            answers = [side.answer(engine, prompt, max_tokens) for side in order]
            differing += any(answer != answers[0] for answer in answers)
    print("| router | tokens/s | of full | tokens per pass |\n|---|---|---|---|")
    for side in sides:
        ratio = side.tokens_per_s / sides[0].tokens_per_s
        per_pass = side.num_tokens / max(side.num_passes, 1)
        print(f"| {side.name} | {side.tokens_per_s:.1f} | {ratio:.2f} | {per_pass:.2f} |")
    print(f"{differing} of {len(prompts)} answers differ between the sides", flush=True)


def calibrated(loaded: LoadedModel, spec: neap_engine.CalibrationSpec, **options: object) -> Side:
    """A router, and a line about what it learned."""
    started_s = time.monotonic()
    result: CalibrationResult = neap_engine.calibrate(loaded, spec, **options)  # type: ignore[arg-type]
    seconds = time.monotonic() - started_s
    figures = result.report["rungs"].get("depth-0", {})
    print(
        f"{seconds:.0f} s: {result.report['tokens']['total']:,} tokens learned from and measured on; the exit's first draft agrees on "
        f"{figures.get('agreement_1', 0):.3f} of {figures.get('positions', 0)} held-out positions; left out: {result.report['left_out'] or 'nothing'}",
        flush=True,
    )
    return Side(f"{seconds:.0f} s", result.ladder)


def main() -> None:
    parser = make_parser(__doc__)
    add_prompts(parser, per_task=4)
    parser.add_argument("--dtype", help="format that weights are kept in; default: the file's")
    parser.add_argument("--budgets", type=float, nargs="*", default=[150.0], help="seconds")
    parser.add_argument("--router", type=Path, action="append", default=[])
    parser.add_argument("--requests", type=Path)
    parser.add_argument("--learned", type=int, default=200, help="requests that are learned")
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parsed(parser)
    loaded = load_model(options.model, dtype=dtype_named(options.dtype) if options.dtype else None)
    sides = [Side("full", None)]
    sides += [calibrated(loaded, _within(budget)) for budget in options.budgets]
    sides += [Side(str(path), neap_engine.read_router(path)) for path in options.router]
    if options.requests is None:
        prompts = first_turns(loaded, options.prompts, options.per_task)
    else:
        prompts = _one_kind(loaded, sides, options)
    compare(loaded, sides, prompts, options.max_tokens)
    print(described(loaded.device))


def _within(budget_s: float) -> neap_engine.CalibrationSpec:
    return neap_engine.CalibrationSpec(time_budget_s=budget_s)


def _one_kind(
    loaded: LoadedModel, sides: list[Side], options: argparse.Namespace
) -> list[list[int]]:
    """The held-out prompts of one kind. Adds a side that has learned others of the kind."""
    texts = [json.loads(line)["prompt"] for line in options.requests.read_text().splitlines()]
    source = neap_engine.SelfGenerated(prompts=tuple(texts[: options.learned]))
    spec = neap_engine.CalibrationSpec(source=source, time_budget_s=options.budgets[0])
    parent = neap_engine.read_parent(options.router[0]) if options.router else None
    with tempfile.TemporaryDirectory() as folder:
        side = calibrated(loaded, spec, parent=parent, work_dir=Path(folder))
    sides.append(replace(side, name=f"and {options.learned} requests of the kind"))
    return [encode_turns(loaded, [text]) for text in texts[-options.held_out :]]


if __name__ == "__main__":
    main()
