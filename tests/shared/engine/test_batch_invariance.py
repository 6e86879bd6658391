"""A request's tokens do not depend on the other sequences of its batches.
Random arrivals, pauses, cancels and shared prefixes."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.memory.prefixes import Prefixes
from shared.engine.request import admission as admission_module
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.engine.request.sequence import DecodingSequence
from shared.engine.step import Decoder
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.ladder.policy import DepthPolicy
from shared.ladder.proposers import exit_name
from shared.ladder.tables import SequenceTables
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.runner import captured_depths
from shared.model.sampling import SamplingParams
from shared.ops.chains import Chains, ChainStart
from tests.families import NUM_LAYERS, VOCABULARY_SIZE, load_family
from tests.scripted_tables import native_script
from tests.tiers import tiered

# With the dtype of keys and values. The layers of Llama and Mistral are one op each.
FAMILIES = {
    "llama": (torch.float32, torch.float32),
    "llama, keys in bfloat16": (torch.float32, torch.bfloat16),
    "mistral-sliding": (torch.bfloat16, torch.float32),
    "gpt2": (torch.float16, torch.float32),
    "gemma3-sliding": (torch.float32, torch.float32),
    "gpt-oss-sliding": (torch.bfloat16, torch.float32),
}
SCHEDULES_PER_FAMILY = 30
DEPTH = 2
STEM = tuple(random.Random(7).choices(range(2, VOCABULARY_SIZE), k=40))
# Drafting, exits and mixed lengths all happen: a pass grows a little with every token.
COSTS = PassCosts(tuple(1.0 + 0.05 * n for n in range(7)), exits=(ExitCost(0.01, 0.002),), wide=((32, 4.0),))


class _Drafts(SequenceTables):
    """One sequence's tables: right, wrong or silent, as drawn for the position."""

    def __init__(self, right: dict[tuple[int, ...], int], seed: int, *arguments: Any) -> None:
        self._right, self._tokens, self._seed = right, list[int](), seed
        super().__init__(*arguments, script=native_script(self._draft))

    def append(self, tokens: Sequence[int]) -> None:
        super().append(tokens)
        self._tokens += tokens

    def _draft(self, drafted: Sequence[int]) -> tuple[int, float] | None:
        context = (*self._tokens, *drafted)
        draw = random.Random(f"{self._seed}/{len(context)}")
        kind = draw.random()
        if kind < 0.2:
            return None
        wrong = draw.randrange(VOCABULARY_SIZE)
        token = self._right.get(context, wrong) if kind < 0.75 else wrong
        return token, draw.choice([0.3, 0.6, 0.9])


class _Ladder:
    """Stands in for a bound ladder. Its exit's drafts depend on the state and are mostly wrong."""

    ladder = None
    depths = (DEPTH,)
    names = (exit_name(DEPTH),)
    agreements = (0.9,)
    joint_weights = DEFAULT_WEIGHTS
    state_depths = (DEPTH,)
    kept_depths = captured_depths(NUM_LAYERS)

    def __init__(self, right: dict[tuple[int, ...], int], seed: int) -> None:
        self._right, self._seed = right, seed
        self.num_shared = 0

    def tables(self, *arguments: Any) -> _Drafts:
        return _Drafts(self._right, self._seed, *arguments)

    def propose(self, index: int, starts: Sequence[ChainStart]) -> Chains:
        self.num_shared += len(starts) > 1
        tokens, probabilities, outputs = [], [], []
        for start in starts:
            begin = start.begin
            assert begin is not None
            assert start.entering is not None
            assert torch.isfinite(begin).all()
            assert torch.isfinite(start.entering).all()
            number = int(start.entering[-1].abs().sum() * 1000)
            tokens.append([number % VOCABULARY_SIZE])
            probabilities.append([(number % 10) / 10])
            outputs.append(begin[-1:] if begin.dim() == 2 else begin[None])
        return Chains(
            torch.tensor(tokens),
            torch.tensor(probabilities, dtype=torch.float64),
            torch.ones(len(starts), dtype=torch.int64),
            torch.stack(outputs),
        )


def draw_request(draw: random.Random) -> GenerationRequest:
    prompt = tuple(draw.randrange(2, VOCABULARY_SIZE) for _ in range(draw.choice([1, 3, 9, 21])))
    if draw.random() < 0.6:  # some of these are nothing but the stem
        prompt = (*STEM[: draw.choice([17, 30, 40])], *prompt[1:])
    hot = SamplingParams(temperature=1.3, seed=draw.randrange(100), repetition_penalty=1.1)
    counted = replace(hot, temperature=draw.choice([0.0, 1.3]), presence_penalty=0.1, frequency_penalty=0.4)
    return GenerationRequest(
        prompt,
        sampling=draw.choice([SamplingParams(), SamplingParams(), hot, counted]),
        stopping=StoppingParams(max_tokens=draw.choice([1, 4, 13])),
        policy=DepthPolicy(draw.choice(["exact", "exact", "full"]), max_drafts=draw.choice([0, 0, 3])),
    )


def run_alone(decoder: Decoder, request: GenerationRequest, drafter: Drafter) -> list[int]:
    sequence = decoder.admit(request, drafter)
    tokens: list[int] = []
    while not sequence.is_finished:
        for chunk in decoder.step([sequence])[0]:
            tokens += [token.token_id for token in chunk.tokens]
        assert sequence.failure is None
    return tokens


@pytest.fixture(scope="module", params=tiered(FAMILIES, {"llama, keys in bfloat16"}))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.manual_seed(0)
    family = request.param.partition(",")[0]
    kv_dtype, compute_dtype = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("model")
    loaded = load_family(folder, family, compute_dtype, kv_dtype=kv_dtype, compute_dtype=compute_dtype)
    made = Decoder(ContiguousRunner(loaded), Prefixes(200))
    assert made.runner.supports_ragged
    return made


def test_other_sequences_in_the_batch_change_no_token(decoder, monkeypatch):
    monkeypatch.setattr(admission_module, "MAX_PREFILL_TOKENS", 12)
    monkeypatch.setattr(admission_module, "MIN_PREFILL_TOKENS", 5)
    drafted = shared_passes = shared_exits = cancelled = lent = 0
    alone = Decoder(decoder.runner)
    for schedule in range(SCHEDULES_PER_FAMILY):
        draw = random.Random(schedule)
        plain = Drafter(decoder.runner, COSTS)
        requests = [draw_request(draw) for _ in range(draw.randint(2, 6))]
        expected = [run_alone(alone, request, plain) for request in requests]
        right: dict[tuple[int, ...], int] = {}
        for request, answer in zip(requests, expected, strict=True):
            text = (*request.prompt_ids, *answer)
            right |= {text[:end]: text[end] for end in range(len(request.prompt_ids), len(text))}
        ladder = _Ladder(right, schedule)
        drafter = Drafter(decoder.runner, COSTS, ladder)  # type: ignore[arg-type]
        arriving, running = list(range(len(requests))), {}
        answers: dict[int, list[int]] = {index: [] for index in arriving}
        while arriving or running:
            if arriving and (not running or draw.random() < 0.4):
                index = arriving.pop(0)
                request = requests[index]
                running[index] = decoder.admit(request, drafter)
            if len(running) > 1 and draw.random() < 0.03:
                gone = draw.choice(list(running))
                decoder.prefixes.insert(running.pop(gone))
                cancelled += 1
            turn = [index for index in running if draw.random() < 0.8] or list(running)
            shared_passes += len(turn) > 1
            results = decoder.step([running[index] for index in turn])
            for index, chunks in zip(turn, results, strict=True):
                answers[index] += [t.token_id for chunk in chunks for t in chunk.tokens]
                sequence: DecodingSequence = running[index]
                assert sequence.failure is None
                if sequence.is_finished:
                    drafted += sequence.num_drafted
                    lent += sequence.num_cached
                    decoder.prefixes.insert(running.pop(index))
                    assert answers[index] == expected[index], (schedule, index)
                else:  # a cancelled one stops here, so far right, too
                    assert answers[index] == expected[index][: len(answers[index])]
        shared_exits += ladder.num_shared
    assert drafted > SCHEDULES_PER_FAMILY
    assert shared_exits > SCHEDULES_PER_FAMILY // 2
    assert shared_passes > 3 * SCHEDULES_PER_FAMILY
    assert cancelled > 0
    assert lent > 10 * SCHEDULES_PER_FAMILY
