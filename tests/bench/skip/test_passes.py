"""Tokens that leave for good, and layers that are left out: exact where an exact answer is known."""

import copy

import pytest
import torch
from torch import Tensor

from bench.skip.passes import Batch, Skip, Uniform
from bench.skip.scores import written
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.model.ragged import RaggedSequence
from tests.families import NUM_LAYERS, VOCABULARY_SIZE, build_family

LENGTHS = (7, 4, 9)
DEPTH = 2
LEFT = (2, 3, 8, 14)  # positions in the batch; none is a sequence's first


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_family("llama")


@pytest.fixture
def runner(model):
    return ContiguousRunner(wrap_model(copy.deepcopy(model), accelerate=True))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2, VOCABULARY_SIZE, (1, sum(LENGTHS)))


def batch(runner, ids: Tensor, may_leave: bool = True) -> Batch:
    sequences = [RaggedSequence(runner.new_cache(length), 0, length) for length in LENGTHS]
    return Batch(ids, sequences, torch.full((ids.shape[1],), may_leave))


def states_at(runner, ids: Tensor) -> list[Tensor]:
    """The full model's states [T, D] at each depth."""
    own = batch(runner, ids)
    found = [runner.embed(ids)[0]]
    for layer in range(NUM_LAYERS):
        hidden = None if layer == 0 else found[-1][None]
        found.append(
            runner.run_ragged(ids, own.sequences, first=layer, last=layer + 1, hidden=hidden)[0]
        )
    return found


def leave_at(positions: tuple[int, ...]):
    """An exit that proposes the number of the position, and at which `positions` leave. It must be asked about all positions."""

    def ask(states: Tensor) -> tuple[Tensor, Tensor]:
        leaves = torch.zeros(len(states), dtype=torch.bool)
        leaves[list(positions)] = True
        return torch.arange(len(states)), leaves

    return ask


def skip(substitutes, positions: tuple[int, ...] = LEFT) -> Skip:
    return Skip({DEPTH: leave_at(positions)}, substitutes)


def test_with_the_true_states_as_substitutes_the_others_are_those_of_the_full_model(runner, ids):
    true = states_at(runner, ids)
    substitutes = {
        (DEPTH, layer): lambda _, layer=layer: true[layer][list(LEFT)]
        for layer in range(DEPTH + 1, NUM_LAYERS)
    }
    outcome = skip(substitutes).run(runner, batch(runner, ids))
    stayed = [i for i in range(ids.shape[1]) if i not in LEFT]
    torch.testing.assert_close(outcome.states[stayed], true[NUM_LAYERS][stayed])
    assert outcome.depths.tolist() == [DEPTH if i in LEFT else NUM_LAYERS for i in range(20)]
    assert outcome.tokens.tolist() == [i if i in LEFT else -1 for i in range(20)]


def test_a_token_sees_what_was_substituted_before_it_in_its_own_sequence_alone(runner, ids):
    own = {(DEPTH, layer): lambda states: states for layer in range(DEPTH + 1, NUM_LAYERS)}
    true = states_at(runner, ids)[NUM_LAYERS]
    outcome = skip(own, (8,)).run(runner, batch(runner, ids))
    same = [
        bool(torch.allclose(a, b, atol=1e-5)) for a, b in zip(outcome.states, true, strict=True)
    ]
    # The second sequence holds the positions 7 to 10.
    assert [i for i, equal in enumerate(same) if not equal] == [8, 9, 10]


def test_without_substitutes_the_last_deep_state_stands_in(runner, ids):
    true = states_at(runner, ids)
    stands_in = {
        (DEPTH, layer): lambda _, layer=layer: true[layer][[1, 1]]
        for layer in range(DEPTH + 1, NUM_LAYERS)
    }
    expected = skip(stands_in, (2, 3)).run(runner, batch(runner, ids))
    found = skip(None, (2, 3)).run(runner, batch(runner, ids))
    torch.testing.assert_close(found.states[4:], expected.states[4:])


def test_the_same_layers_run_as_in_a_model_without_the_others(model, runner, ids):
    kept = [0, 1, 4, 5]
    shorter = copy.deepcopy(model)
    shorter.model.layers = torch.nn.ModuleList([shorter.model.layers[i] for i in kept])
    for index, layer in enumerate(shorter.model.layers):
        layer.self_attn.layer_idx = index
    shorter.config.num_hidden_layers = len(kept)
    with torch.inference_mode():
        expected = shorter(ids[:, : LENGTHS[0]]).logits[0]
    outcome = Uniform(kept).run(runner, batch(runner, ids))
    torch.testing.assert_close(
        runner.logits(outcome.states[: LENGTHS[0]]), expected, atol=1e-4, rtol=1e-4
    )
    assert set(outcome.depths.tolist()) == {len(kept)}


def test_an_answer_does_not_depend_on_the_others_and_its_layers_are_counted(runner, ids):
    own = {(DEPTH, layer): lambda states: states for layer in range(DEPTH + 1, NUM_LAYERS)}

    def ask(states: Tensor) -> tuple[Tensor, Tensor]:
        tokens = runner.logits(states).argmax(-1)
        return tokens, tokens % 2 == 0

    policy = Skip({DEPTH: ask}, own)
    prompts = [ids[0, :7].tolist(), ids[0, 7:11].tolist(), ids[0, 11:].tolist()]
    together = written(runner, policy, prompts, 8)
    alone = [written(runner, policy, [prompt], 8) for prompt in prompts]
    assert [one.answers[0] for one in alone] == together.answers
    assert DEPTH < together.layers < NUM_LAYERS
    assert together.layers == pytest.approx(sum(one.layers for one in alone) / 3)
