"""Angles that depend on the length: which lengths have the same, and which tokens of a pass get which."""

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.errors import UnsupportedModel
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.model.ragged import RaggedSequence
from shared.model.regimes import Regimes, find_regimes
from tests.families import BORDER, FAMILIES, VOCABULARY_SIZE, build_family
from tests.reasons import raises

AGAIN = (BORDER + 1,)


@pytest.mark.parametrize(
    ("family", "rereads"), [("phi3-longrope", AGAIN), ("phimoe-longrope", AGAIN), ("llama-longrope", ())]
)
def test_regimes_begin_behind_the_original_maximum(family, rereads):
    regimes = find_regimes(build_family(family), 128)
    assert (regimes.starts, regimes.rereads) == ((1, BORDER + 1), rereads)
    assert [regimes.of(length) for length in (1, BORDER, BORDER + 1, 128)] == [0, 0, 1, 1]
    assert not find_regimes(build_family(family), BORDER).are_several


@pytest.mark.parametrize("family", sorted(n for n in FAMILIES if not n.endswith("-longrope")))
def test_other_families_have_one_regime(family):
    assert find_regimes(build_family(family), 128) == Regimes()


def test_where_the_next_reading_is_due():
    regimes = Regimes((1, 13, 41), (13, 41))
    assert [regimes.next_reread(n) for n in (1, 12, 13, 40, 41)] == [13, 13, 41, 41, None]
    assert Regimes().next_reread(5) is None
    assert regimes.agree(1, 12)
    assert not regimes.agree(12, 13)


class _Rotary(nn.Module):
    """Angles whose scale depends on the length of the pass."""

    def __init__(self, own: nn.Module, first_other: int) -> None:
        super().__init__()
        self._own, self._first_other = [own], first_other

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        scale = 1.0 if int(position_ids.max()) + 1 < self._first_other else 0.9
        return tuple(part * scale for part in self._own[0](x, position_ids))


def _with_rotary(first_other: int, **fields: int) -> PreTrainedModel:
    model = build_family("llama")
    model.config.update(fields)
    model.model.rotary_emb = _Rotary(model.model.rotary_emb, first_other)
    return model


@pytest.mark.parametrize("first_other", [40, 41, 42])
def test_a_change_near_a_named_position_is_found_exactly(first_other):
    assert find_regimes(_with_rotary(first_other, some_field=40), 128).starts == (1, first_other)


def test_a_change_that_no_field_names_is_refused_where_it_matters():
    with raises(UnsupportedModel, "LENGTH_NOT_SUPPORTED", match="with a context of 42 tokens"):
        ContiguousRunner(wrap_model(_with_rotary(60, some_field=40)))
    model = _with_rotary(60, some_field=40)
    assert not ContiguousRunner(wrap_model(model, context_length=42)).regimes.are_several


def test_a_dependence_inside_layers_is_refused_where_it_matters():
    def build() -> PreTrainedModel:
        model = build_family("llama")
        model.config.some_field = 40
        layer = model.model.layers[3]
        own = layer.forward

        def forward(state: Tensor, position_ids: Tensor, **rest: object) -> Tensor:
            scale = 1.0 if int(position_ids.max()) < 40 else 1.01
            return own(state, position_ids=position_ids, **rest) * scale

        layer.forward = forward
        return model

    with raises(UnsupportedModel, "LENGTH_NOT_SUPPORTED", match="read in pieces"):
        ContiguousRunner(wrap_model(build()))
    ContiguousRunner(wrap_model(build(), context_length=36))


@pytest.mark.parametrize("family", ["phi3-longrope", "llama-longrope"])
def test_each_token_of_a_pass_gets_the_angles_of_its_length(family):
    """One sequence read at once beyond the border, one before it, and one with drafts across it."""
    runner = ContiguousRunner(wrap_model(build_family(family), accelerate=True))
    depth = runner.num_layers
    cases = [(0, 20, 20), (0, 5, 5), (9, 8, 9)]  # base, tokens, read length
    ids = torch.randint(2, VOCABULARY_SIZE, (1, 20))
    alone, sequences = [], []
    for base, count, read in cases:
        caches = runner.new_cache(32), runner.new_cache(32)
        for cache in caches:
            if base:
                runner.run(ids[:, :base], cache, first=0, last=depth, base=0, read_length=read)
        part = ids[:, base : base + count]
        passes = [count] if read >= base + count else [1] * count
        states, at = [], base
        for piece in part.split(passes, 1):
            # What transformers itself does with one sequence: the largest position decides.
            states.append(runner.run(piece, caches[0], first=0, last=depth, base=at))
            at += piece.shape[1]
        alone.append(torch.cat(states, 1))
        sequences.append(RaggedSequence(caches[1], base, count, read_length=read))
    tokens = torch.cat([ids[:, base : base + count] for base, count, _ in cases], 1)
    together = runner.run_ragged(tokens, sequences, first=0, last=depth)
    assert torch.equal(together, torch.cat(alone, 1))
