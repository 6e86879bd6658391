"""Calibration from end to end, on a model that counts."""

import hashlib
import json
import math
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load

from calibrator_service.calibration.pipeline import CalibrationResult, calibrate
from calibrator_service.calibration.plan import QUICK_BUDGET_S, PassSizes, resolve
from calibrator_service.calibration.spec import (
    AnswerFile,
    CalibrationSpec,
    Progress,
    SelfGenerated,
    ServedTraffic,
    TextFile,
)
from calibrator_service.calibration.states.moments import Sums
from calibrator_service.calibration.text import engine_writer, stream
from shared.engine.engine import Engine
from shared.errors import Cancelled, Corrupt, InvalidInput
from shared.ladder.artefact import pack_ladder, unpack_ladder
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.model.loaded import LoadedModel, wrap_model
from tests.calibrator_service.calibration.conftest import make_tokenizer
from tests.families import build_family
from tests.reasons import raises
from tests.tiers import tiered

# Prompts, because the beginnings that the tiny model writes itself are nearly always the same few.
PROMPTS = tuple(f"w{7 * i % 24} w{(i // 24 + i) % 24}" for i in range(300))
SPEC = CalibrationSpec(
    source=SelfGenerated(prompts=PROMPTS, max_new_tokens=24), max_tokens=3000, exit_depths=(0, 2), confidence_width=16,
)  # fmt: skip


def assert_same_but_for_rounding(found: CalibrationResult, expected: CalibrationResult) -> None:
    """States from the engine that wrote a text and from a pass over it differ in their last bits, and so do heads that
    learned from them."""
    for name in ("tokens", "draft_vocabulary_coverage"):
        assert found.report[name] == expected.report[name], name
    ours, theirs = found.ladder, expected.ladder
    assert ours.proposer_names == theirs.proposer_names
    for name in ("prompt-lookup", "ngram-table"):
        assert found.report["proposers"][name] == expected.report["proposers"][name]
    for one, other in zip(ours.exits, theirs.exits, strict=True):
        alike = torch.cosine_similarity(one.head.fuse.flatten(), other.head.fuse.flatten(), 0)
        assert alike > 0.99
        assert one.agreement == pytest.approx(other.agreement, abs=0.03)


@pytest.fixture(scope="module")
def finished(base_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    heard: list[Progress] = []
    folder = tmp_path_factory.mktemp("finished")
    report, receive = engine_writer.EngineWriter._report, engine_writer._EngineAnswer.receive
    reported, first_events = threading.Event(), iter(range(30))

    def reporting(self: Any, *given: Any) -> None:
        report(self, *given)
        reported.set()

    def receiving(self: Any, event: Any) -> None:
        receive(self, event)
        if next(first_events, None) is not None:
            reported.clear()
            reported.wait(1.0)

    with pytest.MonkeyPatch.context() as patch:
        # So that progress is seen on a machine that writes all the text within one poll, or has no time for polls.
        patch.setattr(engine_writer, "POLL_S", 0.001)
        patch.setattr(engine_writer.EngineWriter, "_report", reporting)
        patch.setattr(engine_writer._EngineAnswer, "receive", receiving)
        result = calibrate(base_model, SPEC, work_dir=folder, progress=heard.append)
    return result, heard, folder


def test_every_proposer_learns(finished):
    result, _, _ = finished
    assert result.ladder.proposer_names == ("prompt-lookup", "ngram-table", "depth-0", "depth-2")
    proposers = result.report["proposers"]
    # Two tokens of context decide nearly everything about counting: the table and an exit behind two layers of
    # attention know them, where guessing the most frequent token would be right once in ten times.
    assert proposers["ngram-table"]["agreement"] > 0.8
    assert proposers["depth-2"]["agreement"] > 0.7
    assert proposers["depth-0"]["agreement"] > 0.5
    for name, figures in proposers.items():
        assert 0 < figures["coverage"] <= 1
        if name in ("prompt-lookup", "ngram-table"):  # an exit's confidence head has a few hundred samples
            assert figures["confidence_brier"] < 0.1
            assert figures["confidence_ece"] < 0.1
    assert result.report["draft_vocabulary_coverage"] > 0.95
    assert result.report["speed"]["num_answers"] > 0
    tokens = result.report["tokens"]
    assert tokens["heads"] > tokens["confidence"] > 0 < tokens["report"]
    assert tokens["total"] >= 3000


def test_what_all_proposers_say_is_learned_and_measured(finished):
    result, _, _ = finished
    joint, measured = result.report["joint"], result.report["proposers"]["depth-0"]["positions"]
    assert joint["agree"]["positions"] + joint["differ"]["positions"] == measured
    assert joint["agree"]["brier"] < joint["agree"]["brier_alone"]
    weights = result.ladder.joint_weights
    assert weights.agree != DEFAULT_WEIGHTS.agree
    assert weights.exit_alone == DEFAULT_WEIGHTS.exit_alone, "the tables know every context"


def test_progress_rises_through_the_phases(finished):
    _, heard, _ = finished
    fractions = [p.fraction for p in heard]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert list(dict.fromkeys(p.phase for p in heard)) == [
        "loading", "collecting", "training_heads", "training_confidence", "evaluating", "publishing",
    ]  # fmt: skip
    assert heard[-1].figures["tokens"] > 0
    assert "depth-2.agreement" in heard[-1].figures


def test_progress_moves_while_the_first_text_is_written(finished):
    _, heard, _ = finished
    writing = [p.fraction for p in heard if p.figures.get("generated_tokens") and not p.figures["tokens"]]
    assert len(set(writing)) > 10, "one step of all rows after the other"
    assert writing[-1] > 0.2


def test_the_published_ladder_is_the_measured_one(finished):
    result, _, _ = finished
    manifest, blobs = pack_ladder(result.ladder, result.report)
    again = unpack_ladder(manifest, blobs)
    states, entering = torch.randn(3, 32), torch.randn(32)
    for ours, theirs in zip(result.ladder.exits, again.exits, strict=True):
        assert torch.equal(ours.head(states, entering), theirs.head(states, entering))
    by_name = {proposer["name"]: proposer for proposer in manifest["proposers"]}
    assert by_name["depth-2"]["figures"]["agreement"] == result.report["proposers"]["depth-2"]["agreement"]


class Killed(BaseException):
    """Stands for the death of the process: no handler may catch it."""


PHASES = ("collecting", "training_heads", "training_confidence", "evaluating")


@pytest.mark.full
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_run_continues_to_the_same_ladder(base_model, tmp_path, finished, phase):
    def die(progress: Progress) -> None:
        if progress.phase == phase and progress.fraction > 0.2:
            raise Killed

    with pytest.raises(Killed):
        calibrate(base_model, SPEC, work_dir=tmp_path, progress=die)
    again = calibrate(base_model, SPEC, work_dir=tmp_path)
    assert_same_but_for_rounding(again, finished[0])


@pytest.mark.full
def test_recomputed_states_give_the_same_ladder(base_model, tmp_path, finished, monkeypatch):
    """As on a GPU, with tokens only on disk."""
    scale = PassSizes(rows=64, keeps_states=False)
    monkeypatch.setattr("calibrator_service.calibration.plan.pass_sizes_for", lambda _: scale)
    anew = calibrate(base_model, SPEC, work_dir=tmp_path)
    assert_same_but_for_rounding(anew, finished[0])
    assert list(tmp_path.rglob("tokens-*.safetensors"))
    for path in tmp_path.rglob("states-*.safetensors"):
        assert set(load(path.read_bytes())) == {"choices", "counts"}


def test_a_finished_run_adds_nothing_to_its_sums(base_model, finished, monkeypatch):
    result, _, folder = finished
    monkeypatch.setattr(Sums, "add", lambda *_: pytest.fail("added a chunk again"))
    assert_same_but_for_rounding(calibrate(base_model, SPEC, work_dir=folder), result)


@pytest.mark.parametrize("phase", tiered(PHASES[:3], {"collecting"}))
def test_cancel(base_model, tmp_path, phase):
    seen: list[str] = []
    with pytest.raises(Cancelled):
        calibrate(
            base_model,
            replace(SPEC, max_tokens=2000),
            work_dir=tmp_path,
            progress=lambda p: seen.append(p.phase),
            should_stop=lambda: phase in seen,
        )
    assert seen[-1] == phase


def test_a_proposer_at_the_last_layer_is_refused(base_model):
    for depth in (3, 4):
        with raises(InvalidInput, "EXIT_TOO_DEEP"):
            calibrate(base_model, replace(SPEC, exit_depths=(1, depth)))
    with pytest.raises(InvalidInput):
        resolve(replace(SPEC, draft_vocabulary_size=33), base_model)


@pytest.mark.full
def test_the_draft_vocabulary_has_the_models_most_frequent_choices(finished, base_model, tmp_path):
    spec = replace(SPEC, draft_vocabulary_size=6, max_tokens=2000)
    small = calibrate(base_model, spec, work_dir=tmp_path)
    vocabulary = small.ladder.draft_vocabulary
    assert len(vocabulary) == 6
    assert vocabulary.tolist() == sorted(vocabulary.tolist())
    full = finished[0].report["draft_vocabulary_coverage"]
    assert small.report["draft_vocabulary_coverage"] < full
    # Tokens outside count as disagreement.
    assert 0 < small.report["proposers"]["depth-2"]["agreement_1"] <= small.report["draft_vocabulary_coverage"]


@pytest.mark.full
def test_given_text_and_the_cosine_label(base_model, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(f"w{(i * j + j) % 24}" for j in range(200)) for i in range(40)))
    spec = CalibrationSpec(
        source=TextFile(str(path)), exit_depths=(2,), label="cosine", cosine_threshold=0.5,
        confidence_width=8, max_tokens=4000,
    )  # fmt: skip
    result = calibrate(base_model, spec)
    assert result.report["proposers"]["depth-2"]["agreement"] > 0.3
    assert 4000 <= result.report["tokens"]["total"] < 4600
    # A manifest is read by everybody who may generate.
    manifest, _ = pack_ladder(result.ladder, result.report)
    assert str(tmp_path) not in json.dumps(manifest)
    assert manifest["calibration"]["spec"]["source"] == {
        "kind": "TextFile",
        "field": "text",
        "digest": f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}",
        "size_bytes": path.stat().st_size,
    }


@pytest.mark.full
def test_heads_learn_chains_from_answers_that_were_given_before(base_model, tmp_path, monkeypatch):
    monkeypatch.setattr("calibrator_service.calibration.plan.MAX_EPOCHS", 30)
    path = tmp_path / "answers.jsonl"
    with path.open("w") as file:
        for number in range(300):
            tokens = [5 + number % 24, 5 + number // 24]
            while len(tokens) < 24:
                tokens.append((tokens[-1] - 3 - tokens[-2] % 2) % 24 + 5)
            kind = f"kind-{number % 8}"
            print(json.dumps({"prompt": tokens[:2], "answer": tokens[2:], "kind": kind}), file=file)
    spec = replace(SPEC, source=AnswerFile(str(path)), exit_depths=(0,))
    result = calibrate(base_model, spec)
    [layer_exit] = result.ladder.exits
    assert layer_exit.depth == 0
    figures = result.report["proposers"]["depth-0"]
    # The state of the last settled token and the newest token decide everything, and so does a chain's own output.
    for place in (1, 2, 3):
        assert figures[f"agreement_{place}"] > 0.8
    assert result.report["relaxed"]["num_answers"] > 0


@pytest.mark.full
def test_a_model_that_repeats_itself_ends(counting, monkeypatch):
    monkeypatch.setattr(stream, "MAX_STALE_SEQUENCES", 100)
    spec = replace(SPEC, source=SelfGenerated(prompts=("w1 w2",) * 1000), max_tokens=5000)
    with raises(InvalidInput, "TOO_LITTLE_TEXT"):
        calibrate(counting, spec)


def test_too_little_text(base_model, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("w1 " * 50)
    with raises(InvalidInput, "TOO_LITTLE_TEXT"):
        calibrate(base_model, CalibrationSpec(source=TextFile(str(path))))


@pytest.mark.parametrize("length", [2, 24, 200])
def test_a_pool_of_one_request_is_too_little_text(base_model, tmp_path, length):
    """However long its answer is: nothing is left to measure on."""
    answers = answers_file(tmp_path, [[5 + n % 20 for n in range(length)]])
    with raises(InvalidInput, "TOO_LITTLE_TEXT"):
        calibrate(base_model, CalibrationSpec(source=ServedTraffic("legal", answers.path)), work_dir=tmp_path)


@pytest.fixture
def _by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes as text is written, a second for TOKENS_PER_S tokens, so that a budget is as much on any machine."""
    now_s, add = [0.0], stream.CollectingProgress.add_written

    def add_written(self: stream.CollectingProgress, num_tokens: int) -> None:
        now_s[0] += num_tokens / TOKENS_PER_S
        add(self, num_tokens)

    monkeypatch.setattr(stream.CollectingProgress, "add_written", add_written)
    monkeypatch.setattr("calibrator_service.calibration.text.engine_writer.POLL_S", 0.001)
    for module in ("run", "text.stream"):
        clock = SimpleNamespace(monotonic=lambda: now_s[0])
        monkeypatch.setattr(f"calibrator_service.calibration.{module}.time", clock)


TOKENS_PER_S = 400


@pytest.mark.usefixtures("_by_tokens")
def test_a_time_budget_is_kept(counting):
    result = calibrate(counting, CalibrationSpec(time_budget_s=5.0))
    assert result.report["seconds"]["total"] < 10.0
    assert result.report["tokens"]["report"] > 0


def test_a_time_budget_that_is_too_short_is_named_as_the_cause(counting):
    with raises(InvalidInput, "BUDGET_TOO_SHORT") as caught:
        calibrate(counting, CalibrationSpec(time_budget_s=0.001))
    assert "time budget" in caught.value.message
    assert float(caught.value.metadata["needed_s"]) >= 0


@pytest.mark.usefixtures("_by_tokens")
@pytest.mark.full
@pytest.mark.parametrize("is_given", [False, True])
def test_a_run_that_is_killed_after_its_time_for_text_continues(counting, tmp_path, is_given):
    learned = []

    def die(progress: Progress) -> None:
        if progress.phase == "training_heads":
            learned.append(progress.figures["tokens"])
            raise Killed

    sequences = [[5 + (i + n) % 24 for n in range(40)] for i in range(24)] + [[5 + i, 6, 5 + i] for i in range(24)]
    source = answers_file(tmp_path, sequences) if is_given else SelfGenerated()
    spec = CalibrationSpec(time_budget_s=6.0, source=source)
    with pytest.raises(Killed):
        calibrate(counting, spec, work_dir=tmp_path, progress=die)
    [state] = tmp_path.glob("*/state.json")
    state.write_text(json.dumps({"elapsed_s": 5.5}))
    result = calibrate(counting, spec, work_dir=tmp_path)
    assert result.report["tokens"]["report"] > 0
    assert sum(result.report["tokens"].values()) >= learned[0]


def answers_file(folder: Path, sequences: list[list[int]]) -> AnswerFile:
    """A file of answers to prompts of one token."""
    path = folder / "answers.jsonl"
    with path.open("w") as file:
        for tokens in sequences:
            print(json.dumps({"prompt": tokens[:1], "answer": tokens[1:]}), file=file)
    return AnswerFile(str(path))


def test_fewer_tokens_than_features_publish_no_exit(base_model, tmp_path):
    """And the report says from how many positions its figures are."""
    source = answers_file(tmp_path, [[(i + n) % 24 + 5 for n in range(13)] for i in range(8)])
    result = calibrate(base_model, CalibrationSpec(source=source), work_dir=tmp_path)
    tokens = result.report["tokens"]
    assert tokens["heads"] < 5 * base_model.hidden_size
    proposers = result.report["proposers"]
    assert proposers["prompt-lookup"]["positions"] == tokens["report"] < 50
    assert 0 < proposers["depth-0"]["positions"] < 50
    assert "held-out positions are too few" in result.report["left_out"]["depth-0"]
    assert result.ladder.proposer_names == ("prompt-lookup", "ngram-table")
    manifest, blobs = pack_ladder(result.ladder, result.report)
    assert unpack_ladder(manifest, blobs).exits == ()
    assert manifest["proposers"][1]["figures"]["positions"] == tokens["report"]


@pytest.mark.full
def test_a_model_that_answers_one_token_gets_no_exit(tmp_path, monkeypatch):
    """Always naming the commonest token is right everywhere: no exit is better."""
    monkeypatch.setattr("calibrator_service.calibration.plan.DEFAULT_NEW_TOKENS", 24)
    model = build_family("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    loaded = wrap_model(model, make_tokenizer(chat=False), model_id="one-token")
    source = answers_file(tmp_path, [[i + 5, *(i * n % 24 + 5 for n in range(1, 24))] for i in range(24)])
    result = calibrate(loaded, CalibrationSpec(source=source), work_dir=tmp_path)
    assert result.report["commonest_token"] == 1.0
    assert "commonest token on 100.0%" in result.report["left_out"]["depth-0"]
    assert result.ladder.proposer_names == ("prompt-lookup", "ngram-table")


def test_nothing_is_published_if_nothing_agrees(base_model, tmp_path):
    """No two sequences share a token, and they are too few for an exit."""
    source = answers_file(tmp_path, [list(range(5 + 6 * i, 11 + 6 * i)) for i in range(4)])
    with raises(InvalidInput, "TOO_LITTLE_TEXT") as caught:
        calibrate(base_model, CalibrationSpec(source=source), work_dir=tmp_path)
    assert "agrees with the model nowhere" in caught.value.message


def test_damaged_sums_in_the_work_folder(base_model, finished, tmp_path):
    folder = shutil.copytree(finished[2], tmp_path / "copy")
    [path] = folder.glob("*/sums.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Corrupt):
        calibrate(base_model, SPEC, work_dir=folder)


def test_without_limits_the_quick_budget_applies(counting):
    def bounds(spec: CalibrationSpec) -> tuple[float, float]:
        plan = resolve(spec, counting)
        return plan.max_tokens, plan.budget_s

    assert bounds(CalibrationSpec()) == (math.inf, QUICK_BUDGET_S)
    assert bounds(CalibrationSpec(max_tokens=9)) == (9, math.inf)
    assert bounds(CalibrationSpec(time_budget_s=7.0)) == (math.inf, 7.0)
    assert bounds(CalibrationSpec(max_tokens=9, time_budget_s=7.0)) == (9, 7.0)


@pytest.mark.full
def test_a_model_that_cannot_have_exits_gets_the_tables_and_the_reason(tmp_path):
    """The LM head of this model reads states of another width than its layers have."""
    loaded = wrap_model(build_family("opt"), make_tokenizer(chat=False), model_id="opt")
    path = tmp_path / "answers.jsonl"
    counting = [(5 + number) % 24 + 5 for number in range(80)]
    lines = [{"prompt": counting[i : i + 2], "answer": counting[i + 2 : i + 26]} for i in range(48)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = CalibrationSpec(source=AnswerFile(str(path)), max_tokens=1000)
    result = calibrate(loaded, spec)
    assert result.ladder.proposer_names == ("prompt-lookup", "ngram-table")
    assert "reads states of width" in result.report["left_out"]["depth-0"]
    manifest, blobs = pack_ladder(result.ladder, result.report)
    ladder = unpack_ladder(manifest, blobs)
    with Engine(loaded, ladder) as engine:
        full, exact = (
            engine.generate(tuple(counting[:20]), policy=policy, max_tokens=20, ignore_eos=True)
            for policy in ("full", "exact")
        )
    assert exact.token_ids == full.token_ids
