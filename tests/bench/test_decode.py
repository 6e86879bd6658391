"""The tables of `bench.decode`: ratios, and each format's exact beside its own full depth."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.decode import answers_in
from bench.decode_figures import EXACT, FULL, print_tables, summarise
from bench.forms import Form
from neap_engine.evaluate.sides import TimedAnswer
from shared.ladder.artefact import pack_ladder
from shared.ladder.folder import write_router_folder
from shared.model.loaded import wrap_model
from tests.worker import build_ladder, build_model, build_tokenizer

TOKENS = tuple(range(11))


def _run(per_token_s: float, tokens: tuple[int, ...] = TOKENS) -> TimedAnswer:
    seconds = per_token_s * (len(tokens) - 1)
    return TimedAnswer(tokens, seconds, seconds, 20, 6, 4, verify_passes=5)


def test_a_format_is_compared_with_itself_and_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    other = (*TOKENS[:-1], 99)
    results = {
        "QA": {
            "float32 full": [_run(0.04)],
            "float32 exact": [_run(0.02)],
            "Q8_0 full": [_run(0.02, other)],
            "Q8_0 exact": [_run(0.016, other)],
        }
    }
    bases = {side: f"{side.split()[0]} full" for side in results["QA"]}
    print_tables(summarise(results, bases))
    _, speeds, depths = capsys.readouterr().out.split("| side | ")
    assert speeds.splitlines()[2:] == [
        "| float32 full | 1.00 | **1.00** | 1.00 | 1.00 |",
        "| float32 exact | 2.00 | **2.00** | 2.00 | 2.00 |",
        "| Q8_0 full | 1.00 | **1.00** | 1.00 | 1.00 |",
        "| Q8_0 exact | 1.25 | **1.25** | 1.25 | 1.25 |",
        "",
    ]
    assert depths.splitlines()[0].endswith("| identical to full | identical to float32 full |")
    assert depths.splitlines()[2::3] == [
        "| float32 full | 25.0 | 2.0 | 2.00 | 4 / 6 | 1 of 1 | 1 of 1 |",
        "| Q8_0 exact | 62.5 | 2.0 | 2.00 | 4 / 6 | 1 of 1 | 0 of 1 |",
    ]


def test_short_answers_are_left_out() -> None:
    short = [_run(0.04, TOKENS[:3])]
    assert summarise({"QA": {FULL: short, EXACT: short}}) == {}


def test_a_router_answers_in_a_format_that_it_was_not_made_for(tmp_path: Path) -> None:
    model = build_model()
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    ladder = build_ladder(wrap_model(build_model()))
    other = replace(ladder, model=replace(ladder.model, fingerprint="another"))
    write_router_folder(tmp_path / "router", *pack_ladder(other, {}))
    run = answers_in(Form("float16", str(tmp_path)), tmp_path / "router", 6)
    full, exact = (run((policy, [3, 4, 5, 3, 4])) for policy in (FULL, EXACT))
    assert len(full.token_ids) == 6
    assert exact.token_ids == full.token_ids
