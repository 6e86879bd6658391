"""Drafting against plain decoding, chosen by the measured tokens per second."""

import random

import pytest

from shared.engine.drafting.adaptive import MIN_STEPS, AdaptiveDrafting

ALONE = (1, 1)


def run(
    adaptive: AdaptiveDrafting,
    tokens: dict[bool, float],
    seconds: dict[bool, float],
    steps: int,
    shape: tuple[int, int] = ALONE,
) -> tuple[float, list[bool]]:
    """Tokens per second and choices of so many steps, with tokens that vary between steps."""
    draw = random.Random(1)
    choices, sum_tokens, sum_seconds = [], 0, 0.0
    for _ in range(steps):
        drafts = adaptive.choose(shape)
        got = int(tokens[drafts] + draw.random())
        adaptive.record(shape, drafts, got, seconds[drafts])
        choices.append(drafts)
        sum_tokens += got
        sum_seconds += seconds[drafts]
    return sum_tokens / sum_seconds, choices


@pytest.mark.parametrize(("drafting", "plain"), [(1.9, 1.0), (1.2, 1.0), (0.9, 1.0), (0.5, 1.0), (1.0, 1.0)])
def test_the_rate_comes_close_to_that_of_the_faster_kind(drafting: float, plain: float) -> None:
    adaptive = AdaptiveDrafting()
    tokens, seconds = {True: 16 * drafting, False: 16 * plain}, {True: 1.0, False: 1.0}
    learning, _ = run(adaptive, tokens, seconds, 100)
    assert learning > 0.8 * max(tokens.values())
    rate, _ = run(adaptive, tokens, seconds, 600)
    assert rate > 0.97 * max(tokens.values())


def test_a_first_request_drafts() -> None:
    _, choices = run(AdaptiveDrafting(), {True: 2.0, False: 1.0}, {True: 1.0, False: 1.0}, MIN_STEPS)
    assert all(choices)


def test_the_choice_follows_a_change() -> None:
    adaptive = AdaptiveDrafting()
    seconds = {True: 1.0, False: 1.0}
    run(adaptive, {True: 32.0, False: 16.0}, seconds, 200)
    _, choices = run(adaptive, {True: 8.0, False: 16.0}, seconds, 600)
    assert sum(choices[300:]) < 30
    _, choices = run(adaptive, {True: 32.0, False: 16.0}, seconds, 1500)
    assert sum(choices[1200:]) > 270


def test_batches_of_other_sizes_are_measured_separately() -> None:
    adaptive = AdaptiveDrafting()
    seconds = {True: 1.0, False: 1.0}
    run(adaptive, {True: 8.0, False: 16.0}, seconds, 200, shape=(16, 16))
    _, choices = run(adaptive, {True: 32.0, False: 16.0}, seconds, 200, shape=(8, 16))
    assert sum(choices[100:]) > 90


def test_batches_of_nearly_the_same_size_share_measurements() -> None:
    adaptive = AdaptiveDrafting()
    tokens, seconds = {True: 8.0, False: 16.0}, {True: 1.0, False: 1.0}
    run(adaptive, tokens, seconds, 200, shape=(16, 16))
    _, choices = run(adaptive, tokens, seconds, 50, shape=(13, 14))
    assert sum(choices) < 5
