"""The table of formats: each format's exact beside its own full depth, and its full depth beside the first format's."""

from bench.decode_formats import print_formats, tables_by_format
from bench.sides import Run

TOKENS = tuple(range(11))


def _run(per_token_s: float, tokens: tuple[int, ...] = TOKENS) -> Run:
    seconds = per_token_s * (len(tokens) - 1)
    return Run(tokens, seconds, seconds, deep_passes=5)


def test_a_line_per_format(capsys) -> None:
    other = (*TOKENS[:-1], 99)
    results = {
        "QA": {
            "float32 full": [_run(0.04)],
            "float32 exact": [_run(0.02)],
            "Q8_0 full": [_run(0.02, other)],
            "Q8_0 exact": [_run(0.016, other)],
        }
    }
    print_formats(tables_by_format(results, ["float32", "Q8_0"]))
    lines = capsys.readouterr().out.strip().splitlines()[2:]
    assert lines == [
        "| float32 | 25.0 | 50.0 | 2.00 | 1.00 | 2.00 | 1 of 1 | 1 of 1 |",
        "| Q8_0 | 50.0 | 62.5 | 1.25 | 2.00 | 2.00 | 1 of 1 | 0 of 1 |",
    ]


def test_short_answers_are_left_out() -> None:
    short = [_run(0.04, TOKENS[:3])]
    assert tables_by_format({"QA": {"a full": short, "a exact": short}}, ["a"]) == {}
