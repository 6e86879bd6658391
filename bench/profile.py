"""Shows where the time of one decode step goes, on a CPU.

    python -m bench.profile --model DIR [--router FOLDER] [--dtype float32] [--tokens 1 4 8 16] [--context 200]
        [--steps 20]

A step of N tokens is that of N requests by policy full, whose prompts have --context tokens: all go through one verify
pass, and one token of each is chosen and delivered. With --router, it is that of N requests by exact, the first turns
of Spec-Bench. Medians in ms over --steps steps, and their share of the whole step. What is not a matrix should take at
most a fifth each; what takes more is marked with !.

- matrices: the products in layers, with the activation between them.
  They read the weights, which are most of the step's bytes.
- norms, attention: of all layers; norms also the final one. rotary: with head norms and writing keys and values.
- head: the product with the LM head, and which of its numbers are the largest.
- verify: comparing drafts with these. exits: the kernel that drafts with an exit's head.
- Python: everything else of the step, from one step's start to the next one's: drafting and planning, embedding, masks
  and angles, calling layers, waking threads, committing, decoding text, delivering events. Layers that do not run as
  one op are in it, too.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bench.answers import answer_all
from bench.gpu import weight_bytes
from bench.machine import described
from bench.options import add_dtypes, each_model, load, make_parser
from bench.prompts import DEFAULT_FILE, first_turns
from bench.stopwatch import ClockStopwatch, medians_s
from bench.table import head, row
from shared import ops
from shared.engine import step as step_module
from shared.engine.engine import Engine
from shared.engine.request.sequence import DecodingSequence
from shared.engine.step import Decoder
from shared.engine.verification import verify
from shared.ladder import native_chain
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.contiguous_runner import GatedModel
from shared.model.loaded import LoadedModel
from shared.ops.chains import draft_chains
from shared.ops.layer import profile_layers

TITLES = ("matrices", "head", "norms", "rotary", "attention", "verify", "exits", "Python")
MATRICES = TITLES[:2]
LARGEST_SHARE = 0.2
# Lower token ids are often special.
FIRST_TOKEN = 16
# The first steps touch memory.
WARM_UP_STEPS = 3
# What `exact` gives at most, so that no request ends before the steps that are wanted.
MOST_TOKENS_PER_STEP = 4

Sample = dict[str, float]


class StepProfile:
    """Seconds per step, by title, of the steps in which `num_requests` requests decode and none is in prefill."""

    def __init__(self, num_requests: int) -> None:
        self.samples: list[Sample] = []
        self._num_requests = num_requests
        self._spent: Sample = {}
        self._began_s: float | None = None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within it, the engine's own functions note their time."""
        replaced = [
            (Decoder, "step", self._at_steps(Decoder.step)),
            (GatedModel, "normed", self._timed("final norm", GatedModel.normed)),
            (GatedModel, "choices", self._timed("choices", GatedModel.choices)),
            (step_module, "verify", self._timed("verify", verify)),
            (native_chain, "draft_chains", self._timed("exits", draft_chains)),
        ]
        with ExitStack() as stack:
            stack.callback(profile_layers, False)
            for place in replaced:
                stack.enter_context(mock.patch.object(*place))
            yield

    def _timed(self, title: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            result = function(*args, **kwargs)
            self._spent[title] = self._spent.get(title, 0.0) + time.perf_counter() - start_s
            return result

        return timed

    def _at_steps(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def noted(decoder: Decoder, batch: Sequence[DecodingSequence], *args: Any) -> Any:
            now_s, layers = time.perf_counter(), profile_layers(True)
            if self._began_s is not None:
                self._add(now_s - self._began_s, layers)
            decodes = all(sequence.num_generated for sequence in batch)
            is_wanted = decodes and len(batch) == self._num_requests
            self._began_s, self._spent = (time.perf_counter() if is_wanted else None), {}
            return step(decoder, batch, *args)

        return noted

    def _add(self, total_s: float, layers: Sample) -> None:
        spent = self._spent
        sample = {
            "matrices": layers["matmuls"],
            "head": spent["choices"] - spent.get("final norm", 0.0),
            "norms": layers["norms"] + spent.get("final norm", 0.0),
            "rotary": layers["place"],
            "attention": layers["attention"],
            "verify": spent["verify"],
            "exits": spent.get("exits", 0.0),
        }
        self.samples.append(sample | {"Python": total_s - sum(sample.values())})


def prompts_of(loaded: LoadedModel, num_requests: int, context: int) -> list[list[int]]:
    """Prompts of `context` tokens each."""
    num_usual_tokens = loaded.vocabulary_size - FIRST_TOKEN
    return [[FIRST_TOKEN + (number + at) % num_usual_tokens for at in range(context)] for number in range(num_requests)]


def measure(
    loaded: LoadedModel, prompts: Sequence[list[int]], num_steps: int, ladder: Ladder | None = None
) -> list[Sample]:
    """The samples of `num_steps` steps of a request for each prompt: by full, or by exact with a ladder."""
    num_requests, context = len(prompts), max(map(len, prompts))
    profile = StepProfile(num_requests)
    # Prompts are read one after another, so the first request generates while others are still in prefill.
    max_tokens = num_steps + WARM_UP_STEPS + 2 + num_requests * (1 + context // 32)
    if ladder is not None:
        max_tokens *= MOST_TOKENS_PER_STEP
    with profile.measuring(), Engine(loaded, ladder, prefix_cache_bytes=0, max_running=num_requests) as engine:
        engine.warm_up()
        policy = DepthPolicy("exact" if ladder else "full")
        answer_all(engine, prompts, policy, max_tokens=max_tokens, ignore_eos=True)
    return profile.samples[WARM_UP_STEPS : WARM_UP_STEPS + num_steps]


def cells(samples: Sequence[Sample]) -> list[str]:
    """The cells of a row: the whole step, then each title's time and share."""
    medians = {title: statistics.median(each[title] for each in samples) for title in TITLES}
    total = statistics.median(sum(each.values()) for each in samples)
    found = [f"{1e3 * total:.1f}"]
    for title, seconds in medians.items():
        share = seconds / total
        mark = " !" if title not in MATRICES and share > LARGEST_SHARE else ""
        found.append(f"{1e3 * seconds:.2f} ({share:.0%}){mark}")
    return found


def against_reading(loaded: LoadedModel, step_s: float) -> str:
    """A step of one token beside all threads reading as many bytes as its matrices have, the median of nine times."""
    num_bytes = weight_bytes(loaded.model)
    reading_s = medians_s({"": ClockStopwatch(9).floor(num_bytes)}, 9)[""]
    share = reading_s / step_s
    return f"reading {num_bytes / 1e6:.0f} MB takes {1e3 * reading_s:.1f} ms: {share:.2f} of a step of one token"


def main() -> None:
    parser = make_parser(__doc__, many=True)
    add_dtypes(parser)
    parser.add_argument("--router", type=Path, nargs="+", help="one for each model: profiles exact")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--context", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=20)
    for options in each_model(parser):
        print(f"{described('cpu')}, {ops.cpu_isa()}")
        head("tokens", "step", *TITLES)
        loaded = load(options)
        ladder = read_ladder(options.router) if options.router else None
        told = ""
        for count in options.tokens:
            if ladder is None:
                prompts = prompts_of(loaded, count, options.context)
            else:
                prompts = first_turns(loaded, DEFAULT_FILE, 0)[:count]
            samples = measure(loaded, prompts, options.steps, ladder)
            row(count, *cells(samples))
            if count == 1 and ladder is None:
                told = against_reading(loaded, statistics.median(sum(each.values()) for each in samples))
        print(told)
        del loaded
        gc.collect()  # models hold cycles, and the next one needs the memory


if __name__ == "__main__":
    main()
