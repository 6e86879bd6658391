"""Batched decoding equals Hugging Face's, row by row."""

import pytest
import torch

from calibrator_service.calibration.text.batch_decode import (
    LOOP_PERIOD,
    LOOP_TAIL,
    DecodeParams,
    decode_batch,
    is_repeating,
)
from shared.errors import Cancelled
from shared.model.loaded import LoadedModel

PROMPTS = [[0, 7, 9], [0, 6], [0, 11, 12, 20, 8, 9, 25], [0, 28, 5], [0, 10, 10, 3]]


def alone(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    output = loaded.model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, pad_token_id=1
    )
    return output[0, len(prompt) :].tolist()


def test_greedy_rows_equal_generate(counting: LoadedModel) -> None:
    together = decode_batch(counting, PROMPTS, DecodeParams(20, counting.eos_token_ids))
    assert together == [alone(counting, prompt, 20) for prompt in PROMPTS]


def test_dropping_ended_rows_does_not_change_the_others(counting: LoadedModel) -> None:
    free = decode_batch(counting, PROMPTS, DecodeParams(20))
    stop = free[2][3]
    stopped = decode_batch(counting, PROMPTS, DecodeParams(20, frozenset({stop})))
    for row, other in zip(stopped, free, strict=True):
        end = other.index(stop) + 1 if stop in other else len(other)
        assert row == other[:end]
    assert stopped[2][-1] == stop
    assert len({len(row) for row in stopped}) > 1


def test_sampling_is_repeatable_and_varied(counting: LoadedModel) -> None:
    def sample(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        params = DecodeParams(10, temperature=2.0, top_p=0.95)
        return decode_batch(counting, [[0]] * 8, params, generator=generator)

    assert sample(1) == sample(1) != sample(2)
    assert len({tuple(row) for row in sample(1)}) > 4


def test_a_small_nucleus_is_greedy(counting: LoadedModel) -> None:
    params = DecodeParams(10, temperature=1.0, top_p=1e-6)
    sampled = decode_batch(counting, PROMPTS, params, generator=torch.Generator().manual_seed(0))
    assert sampled == decode_batch(counting, PROMPTS, DecodeParams(10))


def test_cancelled_and_late_decoding(counting: LoadedModel) -> None:
    with pytest.raises(Cancelled):
        decode_batch(counting, PROMPTS, DecodeParams(10), should_stop=lambda: True)
    late = decode_batch(counting, PROMPTS, DecodeParams(10), is_late=lambda: True)
    assert [len(row) for row in late] == [1] * len(PROMPTS)
    assert decode_batch(counting, [], DecodeParams(10)) == []


def test_loops() -> None:
    assert is_repeating([1, 2, 3] * LOOP_TAIL)
    assert is_repeating([9, 8, 7] + [4] * LOOP_TAIL)
    assert not is_repeating([4] * (LOOP_TAIL - 1))
    assert not is_repeating(list(range(LOOP_TAIL)) * 2)
    assert not is_repeating(list(range(LOOP_PERIOD + 1)) * 9)
