"""Rates come from the times of tokens alone, and ratios compare the same format of weights."""

import math

import pytest

from bench.peers.engines.serving import Answer
from bench.peers.figures import Row, batch_decoding_rate, batch_rate, decoding_rate, num_same, print_table, rates


def answer(*times_s: float) -> Answer:
    return Answer(list(range(len(times_s))), list(times_s))


def steady(first_s: float, step_s: float, count: int) -> Answer:
    return answer(*(first_s + step_s * index for index in range(count)))


def test_one_request_counts_from_its_first_token() -> None:
    # A prompt pass of 5 s, then 9 tokens in 0.9 s.
    assert math.isclose(decoding_rate([[steady(5.0, 0.1, 10)]]), 10.0)
    # Tokens that come with the first take no time, so they are not counted.
    together = answer(*[1.0] * 4, *[2.0] * 6)
    assert math.isclose(decoding_rate([[together]]), 6.0)


def test_short_answers_are_not_timed() -> None:
    long, short = steady(0.0, 0.1, 11), steady(0.0, 9.0, 3)
    assert math.isclose(decoding_rate([[long], [short]]), 10.0)
    assert math.isnan(decoding_rate([[short]]))


def test_several_requests_count_whole_and_while_all_decode() -> None:
    first, second = answer(1.0, 2.0, 3.0, 4.0), answer(2.0, 3.0)
    assert math.isclose(batch_rate([[first, second]]), 6 / 4)
    # From 2.0, when both have a token, to 3.0, when one ends: one token each.
    assert math.isclose(batch_decoding_rate([[first, second]]), 2.0)


def test_an_empty_answer_is_no_error() -> None:
    calls = [[answer(), answer(1.0, 2.0)]]
    assert batch_rate(calls) == 1.0
    assert math.isnan(batch_decoding_rate(calls))


def test_tokens_are_the_same_whether_or_not_the_end_is_returned() -> None:
    reference = [Answer([5, 6, 2], [1.0] * 3), Answer([5, 6], [1.0] * 2)]
    calls = [[Answer([5, 6], [1.0] * 2)], [Answer([5, 7], [1.0] * 2)]]
    assert num_same(calls, reference, end_ids=[2]) == 1
    assert num_same(calls, reference, end_ids=[]) == 0


def test_rates_are_medians_over_rounds() -> None:
    single = [[[steady(0.0, step_s, 11)]] for step_s in (0.1, 0.5, 0.05)]
    several = [[[steady(1.0, 1.0, 4)] * 2] for _ in range(3)]
    one, whole, decoding = rates(single, several)
    assert math.isclose(one, 10.0)
    assert (whole, decoding) == (2.0, 2.0)
    assert all(map(math.isnan, rates([], [])))


def test_ratios_are_to_ours_with_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    def row(engine: str, weights: str, one: float, several: float) -> Row:
        base = (f"neap full {weights}", f"neap exact {weights}")
        return Row(engine, weights, base, one, several, 1.0, 2, 2, 1.0, 2 * 10**9)

    print_table(
        [
            row("neap full", "float32", 30.0, 60.0),
            row("neap exact", "float32", 45.0, 90.0),
            row("other", "float32", 20.0, 30.0),
            row("other", "int8", 50.0, float("nan")),
        ],
        batch=8,
        reference="HF float32",
    )
    lines = capsys.readouterr().out.strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[4][-4:] == ["1.50", "2.25", "2.00", "3.00"]
    assert cells[5][-4:] == ["-"] * 4
    assert cells[5][2:4] == ["50.0", "-"]
    assert {len(line) for line in cells} == {12}
