"""The table of formats: each format's exact beside its own full depth, and its full depth beside the first format's."""

from dataclasses import replace
from pathlib import Path

from bench.decode_figures import EXACT, FULL
from bench.decode_formats import answers_in, print_formats, tables_by_format
from bench.forms import Form
from neap_engine.evaluate.sides import TimedAnswer
from shared.ladder.artefact import pack_ladder
from shared.ladder.folder import write_router_folder
from shared.model.loaded import wrap_model
from tests.worker import build_ladder, build_model, build_tokenizer

TOKENS = tuple(range(11))


def _run(per_token_s: float, tokens: tuple[int, ...] = TOKENS) -> TimedAnswer:
    seconds = per_token_s * (len(tokens) - 1)
    return TimedAnswer(tokens, seconds, seconds, verify_passes=5)


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
