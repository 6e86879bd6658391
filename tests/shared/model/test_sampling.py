"""The sampler, and the claim that drafting does not bend its distribution."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference_service.engine.engine import Engine
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model.load import wrap_model
from shared.model.sampling import (
    MAX_PENALTY,
    MIN_TEMPERATURE,
    SamplingParams,
    choose,
    distribution,
    uniform_at,
)
from shared.ops import library
from tests.families import FAMILIES
from tests.scripted_ladder import ScriptedLadder

NUM_SEEDS = 1200
SIGNIFICANCE = 1e-4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.9, repetition_penalty=1.4),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.8, min_p=0.05, repetition_penalty=0.7),
    ],
)
def test_the_distribution_is_hugging_faces(params: SamplingParams) -> None:
    context = [3, 9, 9, 40]
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    for _ in range(20):
        logits = 3 * torch.randn(50)
        expected = processors(torch.tensor([context]), logits[None].clone())[0].softmax(-1)
        actual = distribution(logits, params, context)
        assert torch.equal(actual > 0, expected > 0)
        torch.testing.assert_close(actual.float(), expected, atol=1e-5, rtol=1e-4)


def test_choose_draws_from_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -math.inf, 0.5])
    expected = distribution(logits, SamplingParams(temperature=1.0), [])
    counts = Counter(
        choose(logits, SamplingParams(temperature=1.0, seed=seed), []) for seed in range(NUM_SEEDS)
    )
    assert counts[3] == 0
    kept = [i for i in range(5) if i != 3]
    result = chisquare([counts[i] for i in kept], [NUM_SEEDS * float(expected[i]) for i in kept])
    assert result.pvalue > SIGNIFICANCE


def test_positions_and_seeds_have_numbers_of_their_own() -> None:
    numbers = {uniform_at(seed, position) for seed in range(30) for position in range(30)}
    assert len(numbers) == 900
    assert all(0 <= number < 1 for number in numbers)
    assert uniform_at(2**64 - 1, 5) == uniform_at(2**64 - 1, 5)


def test_greedy_takes_the_largest_after_the_penalty() -> None:
    logits = torch.tensor([1.0, 1.5, 1.2])
    assert choose(logits, SamplingParams(), [1]) == 1
    assert choose(logits, SamplingParams(repetition_penalty=2.0), [1]) == 2


@pytest.mark.parametrize("temperature", [0.0, MIN_TEMPERATURE, 1.0, 1e308])
@pytest.mark.parametrize("penalty", [1 / MAX_PENALTY, 1.0, MAX_PENALTY])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_token_comes_of_the_most_extreme_parameters(
    temperature: float, penalty: float, scale: float
) -> None:
    logits = torch.linspace(-scale, scale, 50)
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    assert 0 <= choose(logits, params, list(range(50))) < 50
    if temperature == MIN_TEMPERATURE:
        assert choose(logits, params, [1]) == 49  # as good as greedy


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 5e-324},
        {"temperature": 1e-7},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": math.nan},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 101.0},
        {"seed": -1},
    ],
)
def test_senseless_parameters_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        SamplingParams(**bad)


def _pairs(policy: DepthPolicy, prompt: list[int]) -> tuple[Counter[tuple[int, ...]], torch.Tensor]:
    """How often each pair of tokens follows the prompt over many seeds, and the true probabilities [V, V]."""
    config = FAMILIES["llama"]()
    config.vocab_size, config.num_hidden_layers, config.initializer_range = 5, 2, 0.6
    torch.manual_seed(4)
    import transformers

    loaded = wrap_model(transformers.LlamaForCausalLM(config).float())
    # A draft at every position, right now and then, always the same token.
    ladder = ScriptedLadder(lambda context: (2, 0.9))
    counts: Counter[tuple[int, ...]] = Counter()
    with Engine(loaded, ladder) as engine:  # type: ignore[arg-type]
        for seed in range(NUM_SEEDS):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            result = engine.generate(prompt, policy=policy, sampling=sampling, max_tokens=3)
            counts[result.token_ids[1:]] += 1
    truth = torch.zeros(5, 5, dtype=torch.double)
    with torch.no_grad():
        first = loaded.model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        for a in range(5):
            second = loaded.model(torch.tensor([[*prompt, a]])).logits[0, -1].double().softmax(-1)
            for b in range(5):
                third = loaded.model(torch.tensor([[*prompt, a, b]])).logits[0, -1].double()
                truth[b] += first[a] * second[b] * third.softmax(-1)
    return counts, truth


def _p_value(counts: Counter[tuple[int, ...]], truth: torch.Tensor) -> float:
    expected = (truth * NUM_SEEDS).flatten()
    observed = torch.tensor([counts[a, b] for a in range(5) for b in range(5)], dtype=torch.double)
    common = expected >= 5
    rest = [float(observed[~common].sum())], [float(expected[~common].sum())]
    observed_bins = observed[common].tolist() + (rest[0] if rest[1][0] >= 5 else [])
    expected_bins = expected[common].tolist() + (rest[1] if rest[1][0] >= 5 else [])
    scale = sum(observed_bins) / sum(expected_bins)
    return float(chisquare(observed_bins, [bin * scale for bin in expected_bins]).pvalue)


def test_sampling_in_exact_keeps_the_full_models_distribution() -> None:
    counts, truth = _pairs(DepthPolicy("exact", max_drafts=2), [1, 3])
    assert _p_value(counts, truth) > SIGNIFICANCE


def test_the_test_would_see_a_wrong_acceptance_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting a draft whenever it is fairly probable, instead of with its probability, must not pass."""
    from inference_service.engine import verification

    right: Callable[..., int] = verification.choose

    def too_kind(logits: torch.Tensor, params: SamplingParams, context: list[int]) -> int:
        if len(context) > 2 and float(logits.softmax(-1)[2]) > 0.15:
            return 2
        return right(logits, params, context)

    monkeypatch.setattr(verification, "choose", too_kind)
    counts, truth = _pairs(DepthPolicy("exact", max_drafts=2), [1, 3])
    assert _p_value(counts, truth) < SIGNIFICANCE


def test_the_kernel_draws_what_pytorch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(2)) * 3
    everyone = [SamplingParams(temperature=1.0, top_k=40 * (s % 2), seed=s) for s in range(300)]
    assert library.runs_on("cpu")
    drawn = [choose(logits, params, [1, 2]) for params in everyone]
    monkeypatch.setattr(library, "runs_on", lambda device: False)
    assert drawn == [choose(logits, params, [1, 2]) for params in everyone]
