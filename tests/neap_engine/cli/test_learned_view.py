import pytest

from neap_engine.cli.learned_view import learned_lines
from tests.manifests import real_manifest

TOKENS = {"heads": 700, "confidence": 200, "report": 1100, "total": 2000}


def test_it_says_what_was_learned_and_on_how_much_it_was_measured():
    proposers = [
        {"name": "prompt-lookup", "figures": {"agreement": 0.123}},
        {"name": "ngram-table", "figures": {"agreement": 0.2}},
        {"name": "depth-0", "figures": {"agreement": 0.25}},
        {"name": "depth-4"},
    ]
    assert list(learned_lines({"proposers": proposers, "calibration": {"tokens": TOKENS}})) == [
        "learned from 900 tokens",
        "guessed right, of 1,100 tokens that it did not learn from: repeated text 12%, n-gram table 20%, exit at depth "
        "0 25%",
    ]


@pytest.mark.parametrize(("measured", "claims"), [(199, False), (200, True)])
def test_it_claims_nothing_from_few_tokens(measured, claims):
    tokens = {"report": measured, "total": 2000}
    proposers = [{"name": "prompt-lookup", "figures": {"agreement": 0.5}}]
    said = list(learned_lines({"proposers": proposers, "calibration": {"tokens": tokens}}))
    assert any("repeated text 50%" in line for line in said) == claims
    assert any(f"not known (only {measured} positions)" in line for line in said) != claims


def test_it_reads_what_a_calibration_writes():
    learned, guessed, speed, *_ = learned_lines(real_manifest())
    tokens = real_manifest()["calibration"]["tokens"]
    assert learned == f"learned from {tokens['heads'] + tokens['confidence']:,} tokens"
    assert f"{tokens['report']:,}" in guessed
    assert "exit at depth 0 51%" in guessed
    assert speed.startswith("answers 1.61 times as fast as full depth")


def test_it_says_how_much_faster_it_answers():
    speed = {"num_answers": 12, "speed_up": 1.42, "low": 1.2, "high": 1.61, "tokens_per_pass": 1.8}
    assert list(learned_lines({"calibration": {"speed": speed}})) == [
        "answers 1.42 times as fast as full depth on the machine that calibrated it: the median of 12 held-out "
        "prompts, half of them 1.20 to 1.61, 1.80 tokens per pass"
    ]


def test_it_says_how_well_it_knows_which_guesses_are_right():
    def figures(count: int) -> dict[str, float]:
        return {"positions": count, "agreement": 0.5, "brier": 0.1234, "brier_alone": 0.25}

    joint = {"tables_unsure": figures(200), "agree": figures(199), "differ": {"positions": 0}}
    assert list(learned_lines({"calibration": {"joint": joint}})) == [
        "Brier score of how sure it is of a guess, 0 is best (in brackets: of one proposer alone): where tables are "
        "unsure 0.123 (0.250), where tables and exits agree not known (only 199 positions), where they differ not "
        "known (only 0 positions)"
    ]


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        {"calibration": 7},
        {"calibration": {"joint": 7}},
        {"calibration": {"speed": 7}},
        {"calibration": {"speed": {"speed_up": "x"}}},
        {"calibration": {"joint": {"agree": 7, "differ": {"positions": "x"}}}},
        {"calibration": {"joint": {"agree": {"positions": 300, "brier": "x"}}}},
        {"calibration": {"tokens": []}},
        {"calibration": {"tokens": {"total": "x", "report": 1}}},
        {"calibration": {"tokens": TOKENS}, "proposers": [{"name": "prompt-lookup", "figures": 5}]},
        {"calibration": {"tokens": TOKENS}, "proposers": [7]},
        {"calibration": {"tokens": TOKENS}, "proposers": 7},
    ],
)
def test_a_manifest_of_another_form_says_less(manifest):
    assert not any("guess" in line for line in learned_lines(manifest))
