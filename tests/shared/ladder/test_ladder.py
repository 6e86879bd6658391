"""A ladder in use: which model it accepts, which draft it prefers, and that an exit computes what its modules
compute."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calibrator_service.calibration.states.ngram_builder import NgramTableBuilder
from shared.errors import RouterMismatch
from shared.ladder.confidence import Confidence
from shared.ladder.confidence_head import ConfidenceHead, scalar_features
from shared.ladder.exit_head import NUM_STATES, ExitHead
from shared.ladder.exits import LayerExit
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.learned_ngrams import ClientNgrams, LearnedNgrams
from shared.ladder.proposers import Draft, Match
from shared.ladder.table_confidence import SIZES, TableConfidence, bins_of, fit_table_confidence
from shared.ladder.tables import SequenceTables, native_ladder
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel, wrap_model
from shared.ops.chains import ChainStart
from tests.chain_starts import begun
from tests.families import build_family
from tests.random_ladder import random_ladder

VOCABULARY = torch.tensor([1, 5, 9, 30])


def model(seed: int = 0) -> LoadedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    return wrap_model(LlamaForCausalLM(config), model_id="tiny")


def table_confidence(probability: float) -> TableConfidence:
    bias = float(np.log(probability / (1 - probability)))
    return TableConfidence(bias, [[0.0] * size for size in SIZES])


def ladder(loaded: LoadedModel, lookup: float = 0.3, ngrams: float = 0.6) -> Ladder:
    builder = NgramTableBuilder()
    builder.add(np.array([7, 7, 7]), np.array([8, 8, 8]))
    torch.manual_seed(1)
    exits = tuple(LayerExit(d, ExitHead(16, 24), ConfidenceHead(16, 8)) for d in (0, 2))
    return Ladder(
        ModelIdentity.of(loaded), table_confidence(lookup), builder.build(1 << 20),
        table_confidence(ngrams), exits, VOCABULARY,
    )  # fmt: skip


def test_names_are_in_draft_order() -> None:
    full = ladder(model())
    assert full.proposer_names == ("prompt-lookup", "ngram-table", "depth-0", "depth-2")
    assert replace(full, ngrams=None, exits=()).proposer_names == ("prompt-lookup",)


def test_another_model_is_refused_with_both_fingerprints() -> None:
    mine, other = model(0), model(1)
    with pytest.raises(RouterMismatch) as caught:
        ladder(mine).bind(ContiguousRunner(other))
    assert caught.value.metadata == {"router_fingerprint": mine.fingerprint, "model_fingerprint": other.fingerprint}


@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "vocabulary_size"])
def test_sizes_that_are_not_the_models_are_refused(field: str) -> None:
    loaded = model()
    mine = ladder(loaded)
    forged = replace(mine, model=replace(mine.model, **{field: getattr(mine.model, field) + 1}))
    with pytest.raises(RouterMismatch, match=f"{getattr(mine.model, field)}$"):
        forged.bind(ContiguousRunner(loaded))


def test_a_head_that_reads_projected_states_has_no_exits() -> None:
    """OPT with a `word_embed_proj_dim` of its own."""
    loaded = wrap_model(build_family("opt"))
    mine = random_ladder(loaded, 0)
    with pytest.raises(RouterMismatch, match="32 inputs of its head; this one has 16"):
        mine.bind(ContiguousRunner(loaded))
    replace(mine, exits=(), draft_vocabulary=None).bind(ContiguousRunner(loaded))


def test_an_exit_computes_what_its_modules_compute() -> None:
    loaded = model()
    mine = ladder(loaded)
    mine = replace(mine, exits=(replace(mine.exits[0], depth=1), mine.exits[1]))
    bound = mine.bind(ContiguousRunner(loaded))
    assert bound.state_depths == (1, 2)
    cases = ((0, 1), (1, 3), (1, 4), (1, 1))
    states, entering = torch.randn(len(cases), NUM_STATES, 16), torch.randn(len(cases), 16)
    starts = [
        ChainStart([7], place - 1, 1, 1.0, 1.0, 0.0, entering[row : row + 1]) for row, (_, place) in enumerate(cases)
    ]
    together = [bound.propose(index, begun(states, starts)) for index in range(2)]
    for row, (index, place) in enumerate(cases):
        found = bound.propose(index, [starts[row]._replace(begin=states[row])])
        [[token]], [[probability]] = found.tokens.tolist(), found.probabilities.tolist()
        assert together[index].tokens[row, 0] == token, "the result does not depend on the batch"
        assert together[index].probabilities[row, 0] == probability
        head = mine.exits[index].head
        adapted = head.adapted(head(states[row], entering[row]))
        logits = adapted @ loaded.parts.head.weight[VOCABULARY].T
        expected = mine.exits[index].confidence(adapted, scalar_features(logits, torch.tensor(place)))
        assert token == VOCABULARY[logits.argmax()]
        assert probability == pytest.approx(float(expected), abs=2e-3)  # 16 bits


class Tables(SequenceTables):
    def __init__(self, ladder: Ladder, tokens: list[int], *learned: ClientNgrams) -> None:
        super().__init__(native_ladder(ladder, ladder.model.vocabulary_size), Confidence(), *learned)
        self.append(tokens)

    def best(self, drafted: Sequence[int] = ()) -> Draft | None:
        return max(self.propose(drafted), key=lambda draft: draft.probability, default=None)


def test_the_proposer_with_the_higher_probability_drafts() -> None:
    loaded = model()
    context = [7, 3, 2, 7]  # after 7 prompt look-up proposes 3, the table 8
    by_table = Tables(ladder(loaded, 0.3, 0.6), context).best()
    by_lookup = Tables(ladder(loaded, 0.6, 0.3), context).best()
    assert by_table is not None
    assert by_lookup is not None
    assert (by_table.token, by_table.proposer) == (8, "ngram-table")
    assert (by_lookup.token, by_lookup.proposer) == (3, "prompt-lookup")
    assert by_table.probability == pytest.approx(0.6)


def test_drafts_chain_without_becoming_context() -> None:
    drafter = Tables(replace(ladder(model()), ngrams=None), [1, 2, 3, 4, 1])
    first = drafter.best()
    assert first is not None
    second = drafter.best([first.token])
    assert second is not None
    assert (first.token, second.token) == (2, 3)
    assert drafter.best([33]) is None
    drafter.append([33])
    assert drafter.best() is None
    drafter.append([5, 33])
    again = drafter.best()
    assert again is not None
    assert again.token == 5


def test_a_learned_table_drafts_with_the_confidence_of_the_ngram_table() -> None:
    mine, learned = ladder(model()), LearnedNgrams(1 << 16).of("ann")
    learned.learn([1, 2, 3, 5, 6], 3)
    later = Tables(mine, [30, 2, 3], learned)
    drafts = [later.best(), later.best([5])]
    assert [(d.token, d.proposer, d.probability) for d in drafts if d] == [
        (5, "learned", pytest.approx(0.6)),
        (6, "learned", pytest.approx(0.6)),
    ]
    assert Tables(mine, [30, 2, 3]).best() is None
    later.append([30, 1])
    assert later.best() is None


def test_each_routers_probability_depends_on_the_other_proposer() -> None:
    """Drafts on which both proposers agree are right more often, and the fitted router gives them a higher
    probability."""
    loaded = model()
    agreeing, differing = ([bins_of(Match(1, 1, 1, 1.0), Match(token, 1, 1, 1.0), 0)] * 50 for token in (1, 2))
    confidence = fit_table_confidence(agreeing + differing, [True] * 50 + [False] * 50)
    mine = replace(ladder(loaded), lookup_confidence=confidence, ngram_confidence=table_confidence(0.01))
    differs = Tables(mine, [7, 3, 2, 7]).best()
    agrees = Tables(mine, [7, 8, 2, 7]).best()
    assert agrees is not None
    assert differs is not None
    assert agrees.probability > 0.8 > 0.2 > differs.probability
