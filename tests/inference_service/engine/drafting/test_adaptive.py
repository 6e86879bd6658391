"""Drafting against plain decoding, learnt from what steps yield."""

import random

import pytest

from inference_service.engine.drafting.adaptive import MIN_STEPS, AdaptiveDrafting

ALONE = (1, 1)


def run(
    worth: AdaptiveDrafting,
    tokens: dict[bool, float],
    seconds: dict[bool, float],
    steps: int,
    company: tuple[int, int] = ALONE,
) -> tuple[float, list[bool]]:
    """Tokens per second and choices of so many steps, with tokens that vary from step to step."""
    draw = random.Random(1)
    choices, sum_tokens, sum_seconds = [], 0, 0.0
    for _ in range(steps):
        drafts = worth.choose(company)
        got = int(tokens[drafts] + draw.random())
        worth.record(company, drafts, got, seconds[drafts])
        choices.append(drafts)
        sum_tokens += got
        sum_seconds += seconds[drafts]
    return sum_tokens / sum_seconds, choices


@pytest.mark.parametrize(
    ("drafting", "plain"), [(1.9, 1.0), (1.2, 1.0), (0.9, 1.0), (0.5, 1.0), (1.0, 1.0)]
)
def test_the_better_of_the_two_is_nearly_reached(drafting: float, plain: float) -> None:
    worth = AdaptiveDrafting()
    tokens, seconds = {True: 16 * drafting, False: 16 * plain}, {True: 1.0, False: 1.0}
    learning, _ = run(worth, tokens, seconds, 100)
    assert learning > 0.8 * max(tokens.values())
    rate, _ = run(worth, tokens, seconds, 600)
    assert rate > 0.97 * max(tokens.values())


def test_a_first_request_drafts() -> None:
    _, choices = run(
        AdaptiveDrafting(), {True: 2.0, False: 1.0}, {True: 1.0, False: 1.0}, MIN_STEPS
    )
    assert all(choices)


def test_what_was_better_may_become_worse() -> None:
    worth = AdaptiveDrafting()
    seconds = {True: 1.0, False: 1.0}
    run(worth, {True: 32.0, False: 16.0}, seconds, 200)
    _, choices = run(worth, {True: 8.0, False: 16.0}, seconds, 600)
    assert sum(choices[300:]) < 30
    _, choices = run(worth, {True: 32.0, False: 16.0}, seconds, 1500)
    assert sum(choices[1200:]) > 270


def test_each_company_is_judged_by_itself() -> None:
    worth = AdaptiveDrafting()
    seconds = {True: 1.0, False: 1.0}
    run(worth, {True: 8.0, False: 16.0}, seconds, 200, company=(16, 16))
    _, choices = run(worth, {True: 32.0, False: 16.0}, seconds, 200, company=(8, 16))
    assert sum(choices[100:]) > 90


def test_companies_nearly_as_large_learn_together() -> None:
    worth = AdaptiveDrafting()
    tokens, seconds = {True: 8.0, False: 16.0}, {True: 1.0, False: 1.0}
    run(worth, tokens, seconds, 200, company=(16, 16))
    _, choices = run(worth, tokens, seconds, 50, company=(13, 14))
    assert sum(choices) < 5
