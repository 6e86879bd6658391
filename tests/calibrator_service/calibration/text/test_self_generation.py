"""Self-generated text: greedy answers to well-formed prompts, in pieces that a later run reuses."""

import itertools
import random
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from calibrator_service.calibration.text import self_generation
from calibrator_service.calibration.text.chat import PromptFormat
from calibrator_service.calibration.text.engine_writer import EngineWriter
from calibrator_service.calibration.text.self_generation import SelfGenerationConfig, SelfGenerator
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from calibrator_service.calibration.text.writer import Pace
from shared.errors import Cancelled, Corrupt, InvalidInput
from shared.model.loaded import LoadedModel
from tests.calibrator_service.calibration.conftest import make_tokenizer

CONFIG = SelfGenerationConfig(max_new_tokens=8)
USER, BOT, EOS = 2, 3, 1


def is_greedy(loaded: LoadedModel, sequence: TokenSequence) -> bool:
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor([sequence.tokens])).logits[0]
    start = sequence.answer_start
    return logits[start - 1 : -1].argmax(-1).tolist() == list(sequence.tokens[start:])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(self_generation, "PIECE_ITEMS", 5)  # one of each kind


def pieces(
    loaded: LoadedModel, folder: Path, config: SelfGenerationConfig = CONFIG, **pace: Any
) -> Iterator[list[TokenSequence]]:
    writer = EngineWriter(loaded, rows=7)
    try:
        generator = SelfGenerator(loaded, config, folder)
        yield from generator.pieces(writer, Pace(**pace), folder / "rest.safetensors")
    finally:
        writer.close()


def first(
    loaded: LoadedModel, folder: Path, count: int, config: SelfGenerationConfig = CONFIG
) -> list[list[TokenSequence]]:
    with closing(pieces(loaded, folder, config)) as found:
        return list(itertools.islice(found, count))


class Late:
    """Late once `num_tokens` were written."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens

    def pace(self) -> dict[str, Any]:
        return {"is_late": lambda: self.num_left <= 0, "on_tokens": self.count}

    def count(self, num_tokens: int) -> None:
        self.num_left -= num_tokens


def test_answers_are_greedy_and_follow_the_template(counting, tmp_path):
    shards = first(counting, tmp_path, 3)
    assert len(shards) == 3
    for sequence in itertools.chain(*shards):
        assert sequence.tokens[0] == 0
        assert sequence.tokens[1] == USER
        assert sequence.tokens[sequence.answer_start - 1] == BOT
        assert 1 <= sequence.num_answer_tokens <= 8
        assert is_greedy(counting, sequence)


def test_magpie_prompts_are_written_by_the_model(counting, tmp_path):
    turn = PromptFormat(counting).user_turn
    assert turn.opening == (0, USER)
    assert EOS in turn.stop_ids
    # Hot, because the model is sure of how it counts.
    found = first(counting, tmp_path, 4, replace(CONFIG, temperature=4.0))
    # A piece has a template's prompt, a passage with two that follow, Magpie's, a template's, and Magpie's again.
    magpie = [piece[place] for piece in found for place in (4, 6)]
    assert [len(piece) for piece in found] == [7] * 4
    prompts = [s.tokens[2 : s.answer_start - 2] for s in magpie]
    assert all(s.tokens[s.answer_start - 2] == EOS for s in magpie)
    # Seed prompts are unknown words to this tokenizer; the model's own are not.
    assert any(token >= 5 for prompt in prompts for token in prompt)
    assert len(set(prompts)) == len(prompts) > 1


def test_without_a_chat_template_the_model_samples_the_beginning(base_model, tmp_path):
    sequences = first(base_model, tmp_path, 1)[0]
    assert all(s.tokens[0] == 0 and is_greedy(base_model, s) for s in sequences)
    assert len({s.tokens for s in sequences}) > 1


def test_prompts_of_a_base_model_get_the_workers_special_tokens(base_model, tmp_path):
    tokenizer = make_tokenizer(chat=False)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    loaded = replace(base_model, tokenizer=tokenizer)
    config = replace(CONFIG, prompts=("w1 w2", "w5"))
    prompts = {s.tokens[: s.answer_start] for s in first(loaded, tmp_path, 1, config)[0]}
    assert prompts == {(0, 6, 7), (0, 10)}


def test_without_a_tokenizer(counting, tmp_path):
    bare = replace(counting, tokenizer=None)
    assert all(is_greedy(bare, s) for s in first(bare, tmp_path, 1)[0])
    with pytest.raises(InvalidInput):
        SelfGenerator(bare, SelfGenerationConfig(prompts=("w1",)), tmp_path)


def test_given_prompts_are_answered_greedily_and_then_with_sampled_answers(counting, tmp_path):
    prompts = tuple(f"w{i} w{i + 1}" for i in range(6))
    found = list(pieces(counting, tmp_path, replace(CONFIG, prompts=prompts)))
    assert [len(piece) for piece in found] == [5, 5, 5, 5, 4, 0]
    asked = {tuple(PromptFormat(counting).encode_user(p)) for p in prompts}
    sequences = list(itertools.chain(*found))
    rounds = [sequences[begin : begin + 6] for begin in range(0, 24, 6)]
    for number, answers in enumerate(rounds):
        assert {s.tokens[: s.answer_start] for s in answers} == asked
        assert all(s.is_greedy == (number == 0) for s in answers)
    assert all(is_greedy(counting, sequence) for sequence in rounds[0])
    assert not all(is_greedy(counting, sequence) for sequence in rounds[2])
    assert len({sequence.tokens for sequence in sequences}) > 6


def test_a_single_prompt_and_one_token(counting, tmp_path):
    found = pieces(counting, tmp_path, replace(CONFIG, prompts=("w1",), max_new_tokens=1))
    assert [s.num_answer_tokens for s in itertools.chain(*found)] == [1] * 4


def test_answers_grow(counting, tmp_path, monkeypatch):
    """However slow the model is, there are soon answers to many prompts."""
    monkeypatch.setattr(self_generation, "FIRST_ANSWER_TOKENS", 3)
    monkeypatch.setattr(self_generation, "GROWTH_ITEMS", 5)
    found = first(counting, tmp_path, 4)
    assert [max(s.num_answer_tokens for s in piece) for piece in found] == [3, 6, 8, 8]


def test_pieces_are_reused(counting, tmp_path):
    written = first(counting, tmp_path / "a", 3)
    # A run that died after the first piece writes the same second and third.
    first(counting, tmp_path / "b", 1)
    assert first(counting, tmp_path / "b", 3) == written
    # So does one that lacks a piece in the middle.
    generator = SelfGenerator(counting, CONFIG, tmp_path / "b")
    generator.path(1).unlink()
    times = [generator.path(i).stat().st_mtime_ns for i in (0, 2)]
    assert first(counting, tmp_path / "b", 3) == written
    assert [generator.path(i).stat().st_mtime_ns for i in (0, 2)] == times


def test_another_seed_or_length_gives_another_text(counting, base_model, tmp_path):
    paths = {
        SelfGenerator(loaded, config, tmp_path).path(0)
        for loaded in (counting, base_model)
        for config in (CONFIG, replace(CONFIG, seed=1), replace(CONFIG, max_new_tokens=9))
    }
    # Both fixtures have the same weights, so the same fingerprint.
    assert len(paths) == 3
    assert first(counting, tmp_path / "x", 1) != first(counting, tmp_path / "x", 1, replace(CONFIG, seed=1))


def test_late_text_is_used_up_to_where_it_is_and_read_again(counting, tmp_path):
    whole = first(counting, tmp_path / "whole", 8)
    found = list(pieces(counting, tmp_path, **Late(200).pace()))
    *pieces_in_time, rest = found
    assert pieces_in_time == whole[: len(pieces_in_time)]
    assert pieces_in_time
    assert rest
    assert all(s.num_answer_tokens >= 1 and is_greedy(counting, s) for s in rest)
    begun = {s.prompt: s for piece in whole[len(pieces_in_time) :] for s in piece}
    unfinished = [s for s in rest if s.prompt in begun and s != begun[s.prompt]]
    assert all(s.tokens == begun[s.prompt].tokens[: len(s.tokens)] for s in unfinished)
    # The run may be killed later, and then all its time for text has passed.
    assert list(pieces(counting, tmp_path, is_late=lambda: True)) == found


def test_what_was_late_in_one_run_is_no_piece_of_another(counting, tmp_path):
    num_in_time = len(list(pieces(counting, tmp_path, **Late(200).pace()))) - 1
    (tmp_path / "rest.safetensors").unlink()
    assert len(list(tmp_path.iterdir())) == num_in_time
    assert first(counting, tmp_path, 4) == first(counting, tmp_path / "whole", 4)


def test_cancel(counting, tmp_path):
    with pytest.raises(Cancelled):
        list(pieces(counting, tmp_path, should_stop=lambda: True))
    assert not list(tmp_path.iterdir())


def test_a_damaged_shard_is_refused(tmp_path):
    path = tmp_path / "shard.safetensors"
    sequences = [TokenSequence((1, 2, 3), 2), TokenSequence((4,), 1)]
    write_shard(path, sequences)
    assert read_shard(path) == sequences
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(Corrupt):
        read_shard(path)


def test_seed_prompts():
    rng = random.Random(0)
    texts = [self_generation.seed_prompt(rng) for _ in range(300)]
    assert len(set(texts)) > 250
    texts += [self_generation.passage_prompt(rng), self_generation.follow_up(rng)]
    tasks = [self_generation.passage_task(rng, ["PASSAGE"]) for _ in range(50)]
    assert all("PASSAGE" in task for task in tasks)
    wide = [self_generation.seed_prompt(rng, wide=True) for _ in range(600)]
    assert len(set(wide)) > 500
    assert not any(re.search(self_generation.PLACEHOLDER, text) for text in [*texts, *wide])


def test_later_prompts_are_of_more_kinds(counting, tmp_path, monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr(self_generation, "CORE_PROMPTS", 10)
    monkeypatch.setattr(self_generation, "KINDS", (self_generation.TEMPLATE,))
    monkeypatch.setattr(self_generation, "seed_prompt", lambda rng, *, wide: asked.append(wide) or f"w{len(asked)}")
    first(counting, tmp_path, 4)
    assert asked[:20] == [False] * 10 + [True] * 10
