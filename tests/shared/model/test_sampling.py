"""Which parameters a request may have, and that drafting does not change the distribution of tokens."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import chdtrc

from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model import host_choices
from shared.model.loaded import wrap_model
from shared.model.sampling import SamplingParams, uniform_at
from tests.families import FAMILIES
from tests.fixed_costs import fixed_cost_engine
from tests.scripted_ladder import ScriptedLadder

NUM_SEEDS = 1200
SIGNIFICANCE = 1e-4


def test_positions_and_seeds_have_numbers_of_their_own() -> None:
    numbers = {uniform_at(seed, position) for seed in range(30) for position in range(30)}
    assert len(numbers) == 900
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize("seed", [0, 1, 77, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**32, 2**63 - 1])
def test_numbers_are_those_of_philox(seed: int, position: int) -> None:
    assert uniform_at(seed, position) == np.random.Generator(np.random.Philox(key=seed, counter=position)).random()


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
        {"presence_penalty": 2.1},
        {"presence_penalty": math.nan},
        {"frequency_penalty": -2.1},
        {"logit_bias": {3: 100.1}},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": [3]},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"min_tokens": -1},
        {"bad_words": ((),)},
        {"bad_words": ((1,) * 65,)},
        {"bad_words": ("word",)},
        {"bad_words": 3},
        {"bad_words": ((1,),) * 513},
    ],
)
def test_senseless_parameters_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(bad))):
        SamplingParams(**bad)


def _pairs(policy: DepthPolicy, prompt: list[int]) -> tuple[Counter[tuple[int, ...]], torch.Tensor]:
    """The frequency of each pair of tokens after the prompt over many seeds, and the true probabilities [V, V]."""
    config = FAMILIES["llama"]()
    config.vocab_size, config.num_hidden_layers, config.initializer_range = 5, 2, 0.6
    torch.manual_seed(4)
    import transformers

    loaded = wrap_model(transformers.LlamaForCausalLM(config).float())
    # A draft at every position, always the same token, so that it is sometimes accepted.
    ladder = ScriptedLadder(lambda context: (2, 0.9))
    counts: Counter[tuple[int, ...]] = Counter()
    with fixed_cost_engine(loaded, ladder) as engine:  # type: ignore[arg-type]
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
    pairs = zip(observed_bins, [bin * scale for bin in expected_bins], strict=True)
    return float(chdtrc(len(observed_bins) - 1, sum((seen - due) ** 2 / due for seen, due in pairs)))


@pytest.mark.full
def test_sampling_in_exact_keeps_the_full_models_distribution() -> None:
    counts, truth = _pairs(DepthPolicy("exact", max_drafts=2), [1, 3])
    assert _p_value(counts, truth) > SIGNIFICANCE


@pytest.mark.full
def test_the_test_would_see_a_wrong_acceptance_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that accepts every fairly probable draft, instead of accepting with its probability, must fail the
    test."""
    right = host_choices.token_at

    def too_kind(uniform: float, scores: Any, sampling: SamplingParams) -> int:
        is_probable = torch.from_numpy(scores).softmax(0)[2] > 0.15
        return 2 if is_probable else right(uniform, scores, sampling)

    monkeypatch.setattr(host_choices, "token_at", too_kind)
    counts, truth = _pairs(DepthPolicy("exact", max_drafts=2), [1, 3])
    assert _p_value(counts, truth) < SIGNIFICANCE
