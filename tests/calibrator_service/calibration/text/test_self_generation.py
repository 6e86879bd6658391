"""Self-generated text: greedy answers to well-formed prompts, in shards that a later run reuses."""

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import processors

from calibrator_service.calibration.text import seed_prompts, self_generation
from calibrator_service.calibration.text.chat import PromptFormat
from calibrator_service.calibration.text.self_generation import SelfGenerationConfig, SelfGenerator
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from shared.errors import Cancelled, Corrupt, InvalidInput
from shared.model.loaded import LoadedModel
from tests.calibrator_service.calibration.conftest import make_tokenizer

CONFIG = SelfGenerationConfig(rows=4, max_new_tokens=8)
USER, BOT, EOS = 2, 3, 1


def is_greedy(loaded: LoadedModel, sequence: TokenSequence) -> bool:
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor([sequence.tokens])).logits[0]
    start = sequence.answer_start
    return logits[start - 1 : -1].argmax(-1).tolist() == list(sequence.tokens[start:])


def first(
    loaded: LoadedModel, folder: Path, count: int, config: SelfGenerationConfig = CONFIG
) -> list[list[TokenSequence]]:
    return list(itertools.islice(SelfGenerator(loaded, config, folder).shards(), count))


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
    assert turn is not None
    assert turn.opening == (0, USER)
    assert EOS in turn.stop_ids
    # Hot, because the model is sure of how it counts.
    magpie = first(counting, tmp_path, 3, replace(CONFIG, temperature=4.0))[2]
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
    shards = first(counting, tmp_path, 99, replace(CONFIG, prompts=prompts))
    assert [len(shard) for shard in shards] == [4, 2] * 4
    asked = {tuple(PromptFormat(counting).encode_user(p)) for p in prompts}
    rounds = [[*shards[begin], *shards[begin + 1]] for begin in range(0, 8, 2)]
    for number, sequences in enumerate(rounds):
        assert {s.tokens[: s.answer_start] for s in sequences} == asked
        assert all(s.is_greedy == (number == 0) for s in sequences)
    assert all(is_greedy(counting, sequence) for sequence in rounds[0])
    assert not all(is_greedy(counting, sequence) for sequence in rounds[2])
    assert len({sequence.tokens for sequence in itertools.chain(*rounds)}) > 6


def test_shards_are_reused(counting, tmp_path):
    written = first(counting, tmp_path / "a", 3)
    # A run that died after the first shard writes the same second and third.
    first(counting, tmp_path / "b", 1)
    assert first(counting, tmp_path / "b", 3) == written
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(
        p.name for p in (tmp_path / "b").iterdir()
    )
    times = [path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()]
    assert first(counting, tmp_path / "a", 3) == written
    assert [path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()] == times


def test_another_seed_or_length_gives_another_text(counting, base_model, tmp_path):
    paths = {
        SelfGenerator(loaded, config, tmp_path).path(0)
        for loaded in (counting, base_model)
        for config in (CONFIG, replace(CONFIG, seed=1), replace(CONFIG, max_new_tokens=9))
    }
    # Both fixtures have the same weights, so the same fingerprint.
    assert len(paths) == 3
    assert first(counting, tmp_path / "x", 1) != first(
        counting, tmp_path / "x", 1, replace(CONFIG, seed=1)
    )


def test_once_late_no_task_about_passages_is_started(counting, tmp_path):
    generator = SelfGenerator(counting, CONFIG, tmp_path)
    steps: list[int] = []
    num_seed_steps = 0

    def is_late() -> bool:
        return num_seed_steps > 0 and len(steps) > num_seed_steps

    shards = []
    for shard in generator.shards(is_late=is_late, on_tokens=steps.append):
        shards.append(shard)
        num_seed_steps = num_seed_steps or len(steps)
    assert len(shards) == 2
    assert 1 <= len(shards[1]) <= CONFIG.rows // 2


def test_a_late_shard_is_not_kept(counting, tmp_path):
    clock = itertools.count()
    shards = list(SelfGenerator(counting, CONFIG, tmp_path).shards(is_late=lambda: next(clock) > 3))
    assert len(shards) == 1
    assert not list(tmp_path.iterdir())


def test_cancel(counting, tmp_path):
    with pytest.raises(Cancelled):
        list(SelfGenerator(counting, CONFIG, tmp_path).shards(should_stop=lambda: True))
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
    texts = [seed_prompts.seed_prompt(rng) for _ in range(300)]
    assert len(set(texts)) > 250
    texts += [seed_prompts.passage_prompt(rng), seed_prompts.follow_up(rng)]
    tasks = [seed_prompts.passage_task(rng, ["PASSAGE"]) for _ in range(50)]
    assert all("PASSAGE" in task for task in tasks)
    wide = [seed_prompts.seed_prompt(rng, wide=True) for _ in range(600)]
    assert len(set(wide)) > 500
    assert not any(re.search(seed_prompts.PLACEHOLDER, text) for text in [*texts, *wide])


def test_later_prompts_are_of_more_kinds(counting, tmp_path, monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr(self_generation, "CORE_PROMPTS", 12)
    monkeypatch.setattr(
        seed_prompts, "seed_prompt", lambda rng, *, wide: asked.append(wide) or f"w{len(asked)}"
    )
    first(counting, tmp_path, 7)
    assert asked == [False] * 4 + [True] * 8  # shards 0, 3 and 6 of 4 rows
