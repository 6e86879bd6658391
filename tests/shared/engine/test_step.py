"""Decode steps: verification, rejection, final drafts and counts."""

from typing import Any

import pytest
import torch

from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.request.admission import prefill_budget
from shared.engine.request.request import FinishReason, GenerationRequest, TokenChunk
from shared.engine.request.sequence import DecodingSequence
from shared.engine.step import Decoder
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.ladder.tables import SequenceTables
from shared.model import distribution
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.model.sampling import SamplingParams
from tests.device_waits import Reads
from tests.families import NUM_LAYERS, VOCABULARY_SIZE, build_family
from tests.fixed_costs import fixed_cost_engine
from tests.known_answer import DRAFTING, NUM_NEW, PROMPT, right
from tests.scripted_ladder import ScriptedLadder

COSTS = PassCosts((1.0, 1.1, 1.2, 1.3, 1.4))


def test_right_drafts_save_layer_executions(loaded, answer):
    right_token = right(answer)
    with fixed_cost_engine(loaded, ScriptedLadder(lambda context: (right_token(context), 0.9))) as engine:
        exact = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW)
        full = engine.generate(PROMPT, policy="full", max_tokens=NUM_NEW)
    assert exact.token_ids == full.token_ids
    # The first token is the prompt's; then four drafts and the verify pass' own token at a time: 5+5+5+5 and a last 3.
    assert exact.stats.num_verify_passes == 5
    assert exact.stats.num_layer_executions == 5 * NUM_LAYERS
    assert exact.stats.num_token_layers == 23 * NUM_LAYERS
    assert full.stats.num_layer_executions == 23 * NUM_LAYERS
    assert exact.stats.num_drafted == exact.stats.num_accepted == 18
    assert exact.stats.exits == {"full": (NUM_LAYERS, 6), "prompt-lookup": (0, 18)}


def test_wrong_drafts_change_nothing_but_the_counts(loaded, answer):
    ladder = ScriptedLadder(lambda context: (len(context) % VOCABULARY_SIZE, 0.9))
    with fixed_cost_engine(loaded, ladder) as engine:
        exact = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW)
    assert list(exact.token_ids) == answer
    assert exact.stats.num_drafted > exact.stats.num_accepted


@pytest.mark.parametrize("is_right", [True, False])
def test_each_verified_place_is_recorded_once(loaded, answer, is_right, monkeypatch):
    right_token, num_places = right(answer), []
    monkeypatch.setattr(SequenceTables, "record", lambda _, tokens: num_places.append(len(tokens)))
    ladder = ScriptedLadder(lambda context: ((right_token(context) + (not is_right)) % VOCABULARY_SIZE, 0.9))
    with fixed_cost_engine(loaded, ladder) as engine:
        stats = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW).stats
    assert len(num_places) == stats.num_verify_passes
    # Behind a wrong draft nothing is known.
    assert sum(num_places) == stats.num_accepted + stats.num_verify_passes
    assert (stats.num_accepted > 0) == is_right


def test_an_exit_sees_the_models_own_states(loaded, answer):
    right_token = right(answer)
    ladder = ScriptedLadder(exits=lambda context: (right_token(context), 0.9), depths=(2,))
    with fixed_cost_engine(loaded, ladder) as engine:
        exact = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW)
        ids = torch.tensor([[*PROMPT, *answer]])
        states = ContiguousRunner(loaded).capture(ids, [2, NUM_LAYERS])
    assert list(exact.token_ids) == answer
    assert exact.stats.exits["depth-2"][0] == 2
    asked = ladder.seen_states
    position = len(PROMPT)
    matched = 0
    for _, state, deep_state, distance in asked:
        expected = states[2][0, position + distance - 1]
        assert torch.allclose(expected, state, atol=1e-4)
        # `distance` positions back stands the last settled token.
        assert torch.allclose(states[NUM_LAYERS][0, position - 1], deep_state, atol=1e-4)
        matched += 1
        if distance == 4:
            position += 5
    assert matched == 18


def test_rejected_drafts_leave_nothing_settled(loaded, answer, monkeypatch):
    """After a rejection exits must see the last settled token's state, not that of the draft that was dropped."""
    right_token = right(answer)
    asked_after: list[int] = []
    num_pending: list[int] = []
    emit = DecodingSequence.emit

    def counted(sequence: DecodingSequence, *columns: Any) -> list[TokenChunk]:
        chunks = emit(sequence, *columns)
        num_pending.append(len(sequence.tokens) - sequence.num_settled)
        return chunks

    def exits(context: list[int]) -> tuple[int, float]:
        asked_after.append(len(context))
        is_wrong = len(context) % 3 == 0
        return ((right_token(context) + is_wrong) % VOCABULARY_SIZE, 0.9)

    monkeypatch.setattr(DecodingSequence, "emit", counted)
    ladder = ScriptedLadder(exits=exits, depths=(2,))
    with fixed_cost_engine(loaded, ladder) as engine:
        exact = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW)
        ids = torch.tensor([[*PROMPT, *answer]])
        states = ContiguousRunner(loaded).capture(ids, [NUM_LAYERS])[NUM_LAYERS][0]
    assert list(exact.token_ids) == answer
    assert exact.stats.num_drafted > exact.stats.num_accepted > 0
    assert set(num_pending) == {1}  # the last token chosen has been nowhere yet
    for length, (_, _, deep_state, distance) in zip(asked_after, ladder.seen_states, strict=True):
        assert torch.allclose(states[length - 1 - distance], deep_state, atol=1e-4)


def test_layer_exits_reuse_the_shallow_layers_in_the_verify_pass(loaded, answer):
    right_token = right(answer)
    ladder = ScriptedLadder(exits=lambda context: (right_token(context), 0.9), depths=(2,))
    with fixed_cost_engine(loaded, ladder) as engine:
        exact = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW)
    # Every token runs every layer exactly once: nothing shallow is repeated by the verify pass.
    assert exact.stats.num_token_layers == 23 * NUM_LAYERS


def test_relaxed_accepts_sure_drafts_and_computes_their_keys_and_values(loaded, answer):
    def table(context: list[int]) -> tuple[int, float] | None:
        turn = (len(context) - len(PROMPT)) % 4
        return (7, 0.9) if turn in (1, 2) else None

    with fixed_cost_engine(loaded, ScriptedLadder(table)) as engine:
        policy = DepthPolicy("relaxed", threshold=0.8)
        relaxed = engine.generate(PROMPT, policy=policy, max_tokens=NUM_NEW)
        strict = engine.generate(PROMPT, policy=DepthPolicy("relaxed", threshold=0.95), max_tokens=NUM_NEW)
    assert list(strict.token_ids) == answer
    tokens = list(relaxed.token_ids)
    assert [tokens[i] for i in (1, 2, 5, 6, 9, 10)] == [7] * 6
    assert relaxed.stats.num_accepted == relaxed.stats.num_drafted == tokens.count(7)
    assert relaxed.stats.num_verify_passes == NUM_NEW - 1 - relaxed.stats.num_accepted
    assert strict.stats.num_relaxed == 0 < relaxed.stats.num_relaxed
    # What the full model says after exactly these tokens, the final early ones included.
    with torch.no_grad():
        logits = loaded.model(torch.tensor([[*PROMPT, *tokens]])).logits[0]
    for index, token in enumerate(tokens):
        if relaxed.tokens[index].proposer == "full":
            assert token == int(logits[len(PROMPT) + index - 1].argmax())


def test_drafts_behind_the_end_of_an_answer_are_none_of_its_tokens(loaded, answer):
    right_token = right(answer)

    def table(context: list[int]) -> tuple[int, float]:
        return (right_token(context) if len(context) <= len(PROMPT) + 2 else 7, 0.9)

    with fixed_cost_engine(loaded, ScriptedLadder(table)) as engine:
        policy = DepthPolicy("relaxed", threshold=0.8, max_drafts=4)
        ended = engine.generate(PROMPT, policy=policy, max_tokens=NUM_NEW, stop_token_ids=frozenset([answer[2]]))
        longer = engine.generate(PROMPT, policy=policy, max_tokens=NUM_NEW)
    assert list(ended.token_ids) == answer[:2]
    assert ended.stats.num_relaxed == 0 < longer.stats.num_relaxed


def test_a_margin_accepts_near_choices_and_keeps_keys_and_values_exact(loaded, answer):
    """Every second token is drafted as the model's second choice."""

    @torch.no_grad()
    def scores(tokens: list[int]) -> torch.Tensor:
        return loaded.model(torch.tensor([tokens])).logits[0].double()

    def second(context: list[int]) -> tuple[int, float] | None:
        order = scores(context)[-1].argsort(descending=True)
        return int(order[len(context) % 2]), 0.9

    rows = scores([*PROMPT, *answer])[len(PROMPT) - 1 :].topk(2).values
    margin = float((rows[:, 0] - rows[:, 1]).median())
    with fixed_cost_engine(loaded, ScriptedLadder(second)) as engine:
        policy = DepthPolicy("relaxed", margin=margin, max_drafts=4)
        relaxed = engine.generate(PROMPT, policy=policy, max_tokens=NUM_NEW, ignore_eos=True)
        exact = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW, ignore_eos=True)
    assert list(exact.token_ids) == answer
    assert exact.stats.num_relaxed == 0
    # One pass over the served text: what the full model says after exactly these tokens.
    logits = scores([*PROMPT, *relaxed.token_ids])[len(PROMPT) - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(1, torch.tensor(relaxed.token_ids)[:, None])[:, 0]
    assert float(gaps.max()) <= margin + 1e-4
    assert relaxed.stats.num_relaxed == int((gaps > 1e-4).sum()) > 0
    assert relaxed.stats.num_accepted < relaxed.stats.num_drafted, "no draft was beyond the margin"
    chosen = [gap for gap, token in zip(gaps, relaxed.tokens, strict=True) if token.proposer == "full"]
    assert max(chosen) < 1e-4


def test_a_margin_is_refused_where_it_has_no_meaning(loaded):
    policy = DepthPolicy("relaxed", margin=0.1)
    for sampling in (SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=1.1)):
        with pytest.raises(InvalidInput) as refused:
            GenerationRequest(PROMPT, sampling=sampling, policy=policy)
        assert refused.value.reason == "MARGIN_NEEDS_GREEDY"
    for name in ("full", "exact"):
        with pytest.raises(InvalidInput):
            DepthPolicy(name, margin=0.1)


def test_min_layers_keeps_shallow_proposers_out(loaded, answer):
    right_token = right(answer)
    ladder = ScriptedLadder(lambda context: (3, 0.2), lambda context: (right_token(context), 0.9), depths=(0, 2))
    with fixed_cost_engine(loaded, ladder) as engine:
        result = engine.generate(PROMPT, policy=DepthPolicy("exact", min_layers=1, max_drafts=3), max_tokens=NUM_NEW)
        none = engine.generate(PROMPT, policy=DepthPolicy("exact", min_layers=3, max_drafts=3), max_tokens=NUM_NEW)
    assert set(result.stats.exits) == {"depth-2", "full"}
    assert none.stats.num_drafted == 0
    assert list(result.token_ids) == list(none.token_ids) == answer


def test_sampling_in_exact_gives_the_tokens_of_full_for_the_same_seed(loaded):
    sampling = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=11)
    generator = torch.Generator().manual_seed(3)

    def table(context: list[int]) -> tuple[int, float]:
        return int(torch.randint(0, VOCABULARY_SIZE, (1,), generator=generator)), 0.9

    with fixed_cost_engine(loaded, ScriptedLadder(table)) as engine:
        full = engine.generate(PROMPT, policy="full", sampling=sampling, max_tokens=NUM_NEW)
        right = {len(PROMPT) + i: t for i, t in enumerate(full.token_ids)}
        engine_ladder = ScriptedLadder(lambda c: (right.get(len(c), 0), 0.9) if len(c) % 3 else table(c))
    with fixed_cost_engine(loaded, engine_ladder) as engine:
        exact = engine.generate(PROMPT, policy=DRAFTING, sampling=sampling, max_tokens=NUM_NEW)
    assert exact.token_ids == full.token_ids
    assert exact.stats.num_accepted > 5


def test_an_eos_among_accepted_drafts_ends_the_answer(loaded, answer, monkeypatch):
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [answer[3], 96])
    stopping = wrap_model(loaded.model)
    right_token = right(answer)
    end = answer.index(answer[3])
    with fixed_cost_engine(stopping, ScriptedLadder(lambda context: (right_token(context), 0.9))) as engine:
        exact = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW)
        full = engine.generate(PROMPT, policy="full", max_tokens=NUM_NEW)
        ignored = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW, ignore_eos=True)
        stopped = engine.generate(PROMPT, policy="full", max_tokens=NUM_NEW, stop_token_ids=frozenset([answer[1]]))
    assert exact.finished.reason is FinishReason.EOS
    assert list(exact.token_ids) == list(full.token_ids) == answer[: end + 1]
    assert list(ignored.token_ids) == answer
    assert stopped.finished.reason is FinishReason.STOP_TOKEN
    assert list(stopped.token_ids) == answer[: answer.index(answer[1])]


def test_logprobs_are_the_full_models(loaded, answer):
    right_token = right(answer)
    with fixed_cost_engine(loaded, ScriptedLadder(lambda context: (right_token(context), 0.9))) as engine:
        result = engine.generate(PROMPT, policy=DRAFTING, max_tokens=8, logprobs=3)
    with torch.no_grad():
        logits = loaded.model(torch.tensor([[*PROMPT, *answer]])).logits[0]
    for index, token in enumerate(result.tokens):
        expected = logits[len(PROMPT) + index - 1].log_softmax(-1)
        assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-4)
        assert [t for t, _ in token.alternatives] == expected.topk(3).indices.tolist()


def test_a_step_of_mixed_requests_reads_the_device_once(loaded, monkeypatch):
    """Greedy, penalised, sampled, with log-probabilities and without: as on a GPU, where each read waits."""
    monkeypatch.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())
    accelerated = wrap_model(build_family("llama"), accelerate=True)
    decoder = Decoder(ContiguousRunner(accelerated))
    assert decoder.runner.supports_ragged
    ladder = ScriptedLadder(lambda context: (len(context) % 7, 0.9))
    drafter = Drafter(decoder.runner, COSTS, ladder)  # type: ignore[arg-type]
    batch = []
    for index, sampling in enumerate(
        (
            SamplingParams(),
            SamplingParams(repetition_penalty=1.3),
            SamplingParams(temperature=0.7, seed=1),
            SamplingParams(temperature=0.9, top_k=30, top_p=0.8, min_p=0.1, seed=2),
        )
    ):
        for logprobs in (None, 0, 4):
            request = GenerationRequest(
                tuple(PROMPT[: 1 + index]), sampling=sampling, policy=DRAFTING, logprobs=logprobs
            )
            batch.append(decoder.admit(request, drafter))
    for is_decoding in (False, True):  # the prompts, then drafts
        with Reads() as reads:
            results = decoder.step(batch)
        assert all(results)
        assert reads.found == ["tolist"]
        drafted = sum(sequence.num_drafted for sequence in batch)
        assert (drafted > len(batch)) == is_decoding


@pytest.mark.parametrize(("num_reading", "num_decoding", "tokens"), [(1, 0, 256), (8, 0, 256), (4, 4, 160), (1, 7, 88)])
def test_more_prompt_tokens_the_fewer_streams_wait_for_them(num_reading, num_decoding, tokens):
    assert prefill_budget(num_reading, num_decoding) == tokens
