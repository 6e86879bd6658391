"""The tables of `bench.decode`: ratios to full depth."""

import pytest

from bench.decode_figures import EXACT, FULL, print_tables, summarise
from neap_engine.evaluate.sides import TimedAnswer

TOKENS = tuple(range(11))


def _run(per_token_s: float, tokens: tuple[int, ...] = TOKENS) -> TimedAnswer:
    seconds = per_token_s * (len(tokens) - 1)
    return TimedAnswer(tokens, seconds, seconds, 20, 6, 4, verify_passes=5)


def test_a_side_is_compared_with_full_depth(capsys: pytest.CaptureFixture[str]) -> None:
    other = (*TOKENS[:-1], 99)
    print_tables(summarise({"QA": {FULL: [_run(0.04)], EXACT: [_run(0.02)], "other": [_run(0.032, other)]}}))
    _, speeds, depths = capsys.readouterr().out.split("| side | ")
    assert speeds.splitlines()[2:] == [
        "| full | 1.00 | **1.00** | 1.00 | 1.00 |",
        "| exact | 2.00 | **2.00** | 2.00 | 2.00 |",
        "| other | 1.25 | **1.25** | 1.25 | 1.25 |",
        "",
    ]
    assert depths.splitlines()[2::2] == [
        "| full | 25.0 | 2.0 | 2.00 | 4 / 6 | 1 of 1 |",
        "| other | 31.2 | 2.0 | 2.00 | 4 / 6 | 0 of 1 |",
    ]


def test_short_answers_are_left_out() -> None:
    short = [_run(0.04, TOKENS[:3])]
    assert summarise({"QA": {FULL: short, EXACT: short}}) == {}
