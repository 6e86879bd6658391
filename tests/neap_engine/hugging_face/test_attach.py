"""`generate` and pipelines keep their call shape and their output while an engine decodes for them."""

import threading

import pytest
import torch
import transformers as hf
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from neap_engine.hugging_face.attach import attach
from shared.errors import InvalidInput, PreconditionFailed
from shared.ladder.policy import DepthPolicy
from shared.model.cache_argument import CACHE_ARGUMENTS
from shared.model.loaded import wrap_model
from tests.fixed_costs import fixed_cost_engine
from tests.random_ladder import random_ladder
from tests.reasons import raises
from tests.tiers import tiered
from tests.waiting import wait_until
from tests.worker import build_model

TEXTS = ["hello hello hello he", "in the", "thin"]


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.values, self.has_ended = [], False

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.has_ended = True


class AfterTokens(StoppingCriteria):
    """Stops after a number of tokens, prompt included."""

    def __init__(self, count):
        self.count = count

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.count)


def same_answers(plain, model, **call):
    return torch.equal(plain.generate(**call), model.generate(**call))


@pytest.fixture
def one(tokenizer):
    return dict(tokenizer(TEXTS[0], return_tensors="pt"))


@pytest.fixture
def several(tokenizer):
    return dict(tokenizer(TEXTS, return_tensors="pt", padding=True))


@pytest.mark.parametrize("policy", ["full", "exact"])
@pytest.mark.parametrize(
    "options",
    tiered(
        [
            {"max_new_tokens": 24},
            {"max_length": 30},
            {"max_new_tokens": 24, "repetition_penalty": 1.3},
            {"generation_config": hf.GenerationConfig(max_new_tokens=24, eos_token_id=256)},
            {"max_new_tokens": 60, "eos_token_id": list(range(0, 263, 9))},
        ],
        [{"max_new_tokens": 24, "repetition_penalty": 1.3}],
    ),
    ids=lambda options: "-".join(options),
)
def test_greedy_answers_are_those_of_transformers(plain, model, one, options, policy):
    call = {**one, "do_sample": False, **options}
    if "generation_config" in call:
        del call["do_sample"]
    assert torch.equal(plain.generate(**call), model.generate(**call, policy=policy))


@pytest.mark.parametrize("eos", tiered([256, list(range(0, 263, 9))], [256]), ids=["model's eos", "many eos"])
def test_a_batch_is_padded_as_by_transformers(plain, model, several, eos):
    call = {**several, "max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": 256}
    found = model.generate(**call, do_sample=False)
    assert torch.equal(plain.generate(**call, do_sample=False), found)


def test_a_batch_may_be_larger_than_the_engine_runs_at_once(plain, model, tokenizer):
    call = dict(tokenizer(["hello there"[: 3 + n % 8] for n in range(40)], return_tensors="pt", padding=True))
    assert same_answers(plain, model, **call, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_an_eos_that_the_call_does_not_name_is_a_token_like_any_other(plain, tokenizer, one, policy):
    call = {**one, "max_new_tokens": 12, "do_sample": False, "eos_token_id": 256}
    expected = plain.generate(**call)
    own = build_model()
    own.generation_config.eos_token_id = expected[0, -5].item()
    loaded = wrap_model(own, tokenizer)
    with fixed_cost_engine(loaded, random_ladder(loaded, 0, agreement=0.9)) as engine, attach(engine, policy):
        assert torch.equal(expected, own.generate(**call))


def test_the_streamer_gets_what_transformers_gives_it(plain, model, one):
    expected, found = Recorder(), Recorder()
    for streamer, which in ((expected, plain), (found, model)):
        which.generate(**one, max_new_tokens=12, do_sample=False, streamer=streamer)
    assert found.values == expected.values
    assert found.has_ended


def test_text_streams_from_another_thread(plain, model, tokenizer, one):
    streamer = hf.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    call = {**one, "max_new_tokens": 12, "do_sample": False}
    thread = threading.Thread(target=model.generate, kwargs={**call, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    expected = plain.generate(**call)[0, one["input_ids"].shape[1] :]
    assert text == tokenizer.decode(expected)


def test_stop_strings_end_an_answer_where_transformers_ends_it(plain, model, tokenizer, one):
    call = {**one, "do_sample": False, "tokenizer": tokenizer, "max_new_tokens": 40}
    free = plain.generate(**call)[0]
    later = free[one["input_ids"].shape[1] + 4 :]
    stop = next(text for text in map(tokenizer.decode, later) if text.isascii())
    assert same_answers(plain, model, **call, stop_strings=[stop])
    config = hf.GenerationConfig(max_new_tokens=40, stop_strings=[stop])
    call = {**one, "tokenizer": tokenizer, "generation_config": config}
    found = model.generate(**call)
    assert torch.equal(plain.generate(**call), found)
    assert found.shape[1] < len(free)
    assert config.stop_strings == [stop]


def test_a_stopping_criterion_of_ones_own_is_asked_after_each_token(plain, model, one):
    criteria = StoppingCriteriaList([AfterTokens(20)])
    call = {**one, "max_new_tokens": 40, "do_sample": False, "stopping_criteria": criteria}
    found = model.generate(**call)
    assert torch.equal(plain.generate(**call), found)
    assert found.shape[1] == 20


def test_outputs_as_a_record(plain, model, one):
    call = {**one, "max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    assert torch.equal(plain.generate(**call).sequences, model.generate(**call).sequences)


def test_sampling_repeats_with_torchs_seed(model, one):
    def sampled(seed):
        torch.manual_seed(seed)
        return model.generate(**one, max_new_tokens=12, do_sample=True, temperature=0.8, num_return_sequences=3)

    first = sampled(1)
    assert torch.equal(first, sampled(1))
    assert not torch.equal(first, sampled(2))
    assert len({tuple(row.tolist()) for row in first}) == 3


def test_sampling_options_reach_the_engine(plain, model, one):
    """One candidate is left by each of these, so sampling gives the greedy answer."""
    greedy = plain.generate(**one, max_new_tokens=8, do_sample=False)
    for only in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}):
        call = {"top_k": 0, **only}
        assert torch.equal(greedy, model.generate(**one, max_new_tokens=8, do_sample=True, **call))


@pytest.mark.parametrize("prompt", [TEXTS[0], [{"role": "user", "content": "hello"}]], ids=["text", "chat"])
def test_a_pipeline_keeps_its_shape(plain, model, tokenizer, prompt):
    def answer(which):
        pipe = hf.pipeline("text-generation", model=which, tokenizer=tokenizer)
        return pipe(prompt, max_new_tokens=12, do_sample=False, return_full_text=False)

    assert answer(model) == answer(plain)


def test_a_pipeline_of_several_texts(plain, model, tokenizer):
    def answer(which):
        pipe = hf.pipeline("text-generation", model=which, tokenizer=tokenizer, batch_size=3)
        return pipe(TEXTS, max_new_tokens=12, do_sample=False)

    assert answer(model) == answer(plain)


def test_statistics_count_the_tokens_that_left_early(attached, model, one):
    found = model.generate(**one, max_new_tokens=16, do_sample=False)
    stats = attached.last_stats
    assert stats.total_tokens == found.shape[1] - one["input_ids"].shape[1]
    assert stats.total_exited + stats.remaining_tokens == stats.total_tokens
    assert f"{stats.total_tokens} tokens, {stats.total_exited} left early" in stats.summary()
    model.generate(**one, max_new_tokens=16, do_sample=False, policy=DepthPolicy("full"))
    assert attached.last_stats.exit_rate == 0.0


def ones(count, value=1):
    return torch.full((1, count), value)


REFUSED = {
    "beam search": {"num_beams": 2},
    "assisted generation": {"prompt_lookup_num_tokens": 3},
    "assistant_model": {"assistant_model": object()},
    "custom_generate": {"custom_generate": lambda *args, **kwargs: None},
    "cache_implementation='paged'": {"cache_implementation": "paged"},
    "cache_implementation='quantized'": {"cache_implementation": "quantized", "cache_config": {}},
    **{name: {name: hf.DynamicCache()} for name in ("cache_params", *CACHE_ARGUMENTS)},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "MinLengthLogitsProcessor": {"min_new_tokens": 3, "eos_token_id": 5},
    "sequence_bias": {"sequence_bias": [[[3, 4], 1.0]]},
    "NoRepeatNGramLogitsProcessor": {"no_repeat_ngram_size": 2},
    "TypicalLogitsWarper": {"do_sample": True, "typical_p": 0.5},
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": {"guidance_scale": 2.0},
    "PrefixConstrainedLogitsProcessor": {"prefix_allowed_tokens_fn": lambda row, ids: [1]},
    "TopKLogitsWarper": {"logits_processor": [hf.TopKLogitsWarper(5)]},
    "prompt_ignore_length": {"logits_processor": [hf.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=2)]},
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_an_engine_cannot_do_is_an_error(model, one, option):
    call = {"max_new_tokens": 8, "do_sample": False, **REFUSED[option]}
    with raises(InvalidInput, "UNSUPPORTED_OPTION") as raised:
        model.generate(**one, **call)
    assert raised.value.metadata["option"] == option


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("attention_mask", {"attention_mask": torch.tensor([[1, 1, 0]])}),
        ("attention_mask", {"attention_mask": torch.tensor([[1, 0, 1]])}),
        ("position_ids", {"position_ids": torch.tensor([[5, 6, 7]])}),
    ],
)
def test_prompts_that_are_not_plain_are_refused(model, option, given):
    with pytest.raises(InvalidInput) as raised:
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, **given)
    assert raised.value.metadata["option"] == option


def test_a_batch_needs_criteria_that_know_one_sequence(model, several):
    criteria = StoppingCriteriaList([AfterTokens(20)])
    with pytest.raises(InvalidInput, match="AfterTokens"):
        model.generate(**several, max_new_tokens=8, stopping_criteria=criteria)
    with pytest.raises(InvalidInput, match="streamer"):
        model.generate(**several, max_new_tokens=8, streamer=Recorder())


def test_a_failing_streamer_ends_the_request(engine, model, one):
    class Broken(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.values) == 3:
                raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        model.generate(**one, max_new_tokens=1500, do_sample=False, streamer=Broken())
    wait_until(lambda: engine.num_running == 0)


def test_detaching_gives_the_model_its_own_generate_back(engine, loaded, one):
    with attach(engine) as attached, raises(PreconditionFailed, "ALREADY_ATTACHED"):
        attach(engine)
    loaded.model.generate(**one, max_new_tokens=2, num_beams=2, do_sample=False)
    assert attached.last_stats is None
