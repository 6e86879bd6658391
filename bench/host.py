"""What a decode step takes of the host: the engine's steps over a device that takes no time, or a stated one.

    python -m bench.host [--requests 1 8 32 128] [--share .8] [--device-ms 0] [--steps 200] [--ahead]

The device counts in a fixed cycle of tokens. Its passes, its head and its exit return what was made before, so that
nothing but Python, the native drafting and the choice of tokens takes time. With --device-ms the numbers of a pass come
that much later than its launch, so that what the host does in between is hidden. Policy `exact` drafts with the tables
and an exit at depth 0 that is right at --share of all tokens, four drafts a call, with the costs that an H100 has for 8
billion parameters. One thread. Printed: medians in ms of a step, and of its parts; drafts of a step.

"ahead": the same requests on the device, over a tiny model whose replays run but do not count, as they would not on a
GPU: what the host does to launch a step and to handle the one before, with the texts of a byte-level tokenizer, all of
whose tokens it has seen. Its times are the thread's own, because it never waits. --ahead: nothing else.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.imposed import SHAPES, Imposed, impose
from bench.machine import described
from bench.options import make_parser
from bench.table import head, row
from shared.engine import step as step_module
from shared.engine.ahead.decoder import AheadDecoder
from shared.engine.drafting.chains import Drafting
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.drafting.speculation import settle
from shared.engine.memory.prefixes import Prefixes
from shared.engine.request.answer import TokenBytes
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.engine.request.sequence import DecodingSequence
from shared.engine.step import Decoder
from shared.engine.verification import verify
from shared.ladder.ladder import BoundLadder
from shared.ladder.policy import DepthPolicy
from shared.model.choosing import largest
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.inference import inference
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import Recorder, Work
from shared.model.runner import CapturedStates
from shared.ops import slots
from shared.ops.chains import Chains, ChainStart

DRAFTS = 4
COSTS = PassCosts(
    (7.23e-3,) * 9,
    exits=(ExitCost(1.5e-3, 0.15e-3, 0.0, DRAFTS),),
    wide=((16, 7.63e-3), (32, 9.2e-3), (64, 10.7e-3), (256, 16e-3)),
)
PROMPT_TOKENS, WARM_UP_STEPS = 32, 5
POLICIES = {"full": DepthPolicy("full"), "exact": DepthPolicy("exact")}
PARTS: dict[str, tuple[Any, str, Any]] = {
    "draft": (Drafting, "draft", Drafting.draft),
    "pass": (step_module, "settle", settle),
    "head": (Decoder, "_logits", Decoder._logits),
    "verify": (step_module, "verify", verify),
    "commit": (Decoder, "_commit", Decoder._commit),
}


class FreeRunner(ContiguousRunner):
    """Passes whose states carry their tokens, and logits that name the next token of the cycle. `ready_s`: when the
    numbers of the last pass are there."""

    _is_free = False  # while it is made, it tries the model

    def __init__(self, imposed: Imposed, device_s: float) -> None:
        super().__init__(imposed.loaded)
        self.device_s, self.ready_s = device_s, 0.0
        self._is_free = True
        size = imposed.loaded.vocabulary_size
        self.following = torch.zeros(size, dtype=torch.int64)
        self.following[imposed.cycle] = imposed.cycle.roll(-1)
        self._logits = torch.zeros(size, size)
        self._logits[torch.arange(size), self.following] = 1.0

    def run(self, token_ids: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return (
            self._states(token_ids, options.get("captured"))
            if self._is_free
            else super().run(token_ids, *arguments, **options)
        )

    def run_ragged(self, token_ids: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if self._is_free:
            return self._states(token_ids, options.get("captured"))
        return super().run_ragged(token_ids, *arguments, **options)

    def logits(self, state: Tensor, *, widens: bool = True) -> Tensor:
        return self._logits[state[:, 0]] if self._is_free else super().logits(state, widens=widens)

    def choices(self, states: Tensor) -> Tensor:
        return largest(self.logits(states)) if self._is_free else super().choices(states)

    def _states(self, token_ids: Tensor, captured: CapturedStates | None) -> Tensor:
        self.ready_s = time.perf_counter() + self.device_s
        states = token_ids[..., None].expand(1, -1, self.loaded.hidden_size)
        if captured is not None:
            self.prepare_capture(0, self.num_layers, captured)
            captured.update(dict.fromkeys(captured, states))
        return states

    def wait(self) -> None:
        time.sleep(max(self.ready_s - time.perf_counter(), 0.0))


class EmptyRunner(PagedRunner):
    """Passes without the layers, which add nothing to the states of an imposed model. On a GPU they leave the host's
    caches alone. On a CPU they would empty them."""

    _has_layers = True  # while it is made, it tries the model

    def __init__(self, imposed: Imposed, recorder: Recorder) -> None:
        super().__init__(imposed.loaded, kv_budget_bytes=1 << 28, recorder=recorder)
        self._has_layers = False

    @inference
    def _run_layers(self, first: int, last: int, bucket: int) -> None:
        if self._has_layers:
            super()._run_layers(first, last, bucket)
            return
        states = self._model.embed(self._tokens[bucket].ids[None])[0]
        for left in (self._leaving, *self._captured.values()):
            left[:bucket].copy_(states)


class UncountedRecorder:
    """Replays run the work, and `seconds` sums what they take."""

    records = True

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self, work: Work) -> Work:
        work()
        return partial(self.run, work)

    def run(self, work: Work) -> None:
        start_s = time.thread_time()
        work()
        self.seconds += time.thread_time() - start_s

    def close(self) -> None:
        pass


class FreeExit:
    """An exit that is right at a share of all tokens: not at every so many of the cycle."""

    reads_states = False

    def __init__(self, following: Tensor, share: float) -> None:
        size = len(following)
        drafted = torch.where(torch.rand(size) < share, following, (following + 1) % size)
        chain = [torch.arange(size)]
        for _ in range(DRAFTS):
            chain.append(drafted[chain[-1]])
        self._chains = torch.stack(chain[1:], 1)
        self._probabilities = torch.full((size, DRAFTS), share, dtype=torch.float64)
        self._outputs = torch.zeros(1, DRAFTS, 1)

    def propose(self, starts: Sequence[ChainStart]) -> Chains:
        newest = [start.tokens[-1] for start in starts]
        lengths = torch.tensor([min(DRAFTS, start.room) for start in starts])
        outputs = self._outputs.expand(len(starts), -1, -1)
        return Chains(self._chains[newest], self._probabilities[: len(starts)], lengths, outputs)


@contextmanager
def timed_parts(spent: dict[str, float], runner: FreeRunner) -> Iterator[None]:
    """Within it, `spent` sums the seconds of each part."""

    def timed(title: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            if title == "verify":
                runner.wait()
            start_s = time.perf_counter()
            result = function(*arguments, **options)
            spent[title] = spent.get(title, 0.0) + time.perf_counter() - start_s
            return result

        return noted

    with ExitStack() as stack:
        for title, (owner, name, function) in PARTS.items():
            stack.enter_context(mock.patch.object(owner, name, timed(title, function)))
        yield


def requested(imposed: Imposed, number: int, policy: str) -> GenerationRequest:
    return GenerationRequest(
        tuple(imposed.prompt(7 * number, PROMPT_TOKENS)),
        stopping=StoppingParams(ignore_eos=True, max_tokens=imposed.loaded.context_length - PROMPT_TOKENS),
        policy=POLICIES[policy],
    )


def decoding(runner: FreeRunner, imposed: Imposed, policy: str, count: int, share: float) -> tuple[Decoder, Any]:
    """`count` requests after their prompts."""
    bound: BoundLadder = imposed.ladder.bind(runner)
    bound._bound[0] = FreeExit(runner.following, share)  # type: ignore[call-overload]
    drafter = Drafter(runner, COSTS, bound if policy == "exact" else None)
    decoder, sequences = Decoder(runner), []
    for number in range(count):
        sequences.append(decoder.admit(requested(imposed, number, policy), drafter))
    while not all(sequence.num_generated for sequence in sequences):
        decoder.step(sequences)
    return decoder, sequences


def measure(runner: FreeRunner, imposed: Imposed, policy: str, count: int, options: argparse.Namespace) -> list[float]:
    """Medians in ms of a step and of its parts; and the drafts of a step."""
    samples: list[dict[str, float]] = []
    while len(samples) < options.steps:
        decoder, sequences = decoding(runner, imposed, policy, count, options.share)
        going: list[DecodingSequence] = sequences
        for number in range(options.steps):
            if any(sequence.is_finished for sequence in going):
                break
            drafted = sum(sequence.num_drafted for sequence in going)
            spent: dict[str, float] = {}
            with timed_parts(spent, runner):
                start_s = time.perf_counter()
                decoder.step(going)
                spent["step"] = time.perf_counter() - start_s
            spent["drafts"] = (sum(sequence.num_drafted for sequence in going) - drafted) / 1e3
            if number >= WARM_UP_STEPS:
                samples.append(spent)
    return [
        statistics.median(1e3 * sample.get(title, 0.0) for sample in samples) for title in ("step", *PARTS, "drafts")
    ]


def measure_ahead(imposed: Imposed, policy: str, count: int, num_steps: int) -> tuple[float, float]:
    """Medians of the host's ms of a step launched ahead, and of its drafts."""
    recorder = UncountedRecorder()
    runner = EmptyRunner(imposed, recorder)
    bound = imposed.ladder.bind(runner)
    drafter = Drafter(runner, COSTS, bound if policy == "exact" else None)
    plan = slots.plan
    samples: list[tuple[float, float]] = []
    with mock.patch.object(slots, "plan", lambda rows, args: recorder.run(partial(plan, rows, args))):
        while len(samples) < num_steps:
            decoder = AheadDecoder(runner, Prefixes(0), None)
            for _ in (*decoder.prepare(lambda work: 0.6e-3), *decoder.prepare_drafter(drafter, lambda work: 0.6e-3)):
                pass
            sequences = [decoder.admit(requested(imposed, number, policy), drafter) for number in range(count)]
            while min(sequence.num_generated for sequence in sequences) < WARM_UP_STEPS:
                decoder.turn(sequences)
            for _ in range(num_steps):
                drafted, recorder.seconds = sum(sequence.num_drafted for sequence in sequences), 0.0
                start_s = time.thread_time()
                decoder.turn(sequences)
                host_s = time.thread_time() - start_s - recorder.seconds
                if any(sequence.is_finished for sequence in sequences):
                    break
                samples.append((1e3 * host_s, sum(sequence.num_drafted for sequence in sequences) - drafted))
    host_ms, drafts = (statistics.median(column) for column in zip(*samples, strict=True))
    return host_ms, drafts


def letters(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of so many tokens, each a space and some letters."""
    tokens = islice((f"Ġ{''.join(each)}" for each in product("etaoinshrdlu", repeat=3)), size)
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="Ġeee"))
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    token_bytes = TokenBytes.of(found)
    assert token_bytes is not None
    for token_id in range(size):  # as after a while of serving
        assert token_bytes.texts[token_id]
    return found


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--device-ms", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ahead", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    imposed = impose(SHAPES["tiny"], (0,), options.share)
    runner = FreeRunner(imposed, options.device_ms / 1e3)
    print(described("cpu"), f"a device of {options.device_ms:g} ms")
    head("requests", "policy", "step", *PARTS, "drafts")
    for count in () if options.ahead else options.requests:
        for policy in POLICIES:
            *seconds, drafts = measure(runner, imposed, policy, count, options)
            row(count, policy, *(f"{each:.3f}" for each in seconds), f"{drafts:.1f}")
    on_device = impose(SHAPES["tiny"], (0,), options.share, accelerate=False)
    tokenizer = letters(on_device.loaded.vocabulary_size)
    on_device = replace(on_device, loaded=replace(on_device.loaded, tokenizer=tokenizer))
    gc.freeze()  # as a worker does when it is ready
    for count in options.requests:
        for policy in POLICIES:
            host_ms, drafts = measure_ahead(on_device, policy, count, options.steps)
            row(count, f"{policy}, ahead", f"{host_ms:.3f}", *[""] * len(PARTS), f"{drafts:.1f}")


if __name__ == "__main__":
    main()
