"""The positions that a configuration names, and where checks begin."""

import pytest
import transformers as hf

from shared.model.borders import NUM_CHECKED, borders, context_limit, crossing_length, origins
from tests.families import BORDER, BORDERED, FAMILIES, LLAMA_LIKE


@pytest.mark.parametrize("family", [name for name in BORDERED if not name.endswith("-sliding")])
def test_a_border_is_seen_and_crossed(family):
    config = FAMILIES[family]()
    assert BORDER in borders(config, 128)
    places = origins(config, 128)
    assert any(place < BORDER - 1 and place + NUM_CHECKED - 1 > BORDER for place in places[1:])
    assert places[0] == 0
    assert places[-1] == 128 - NUM_CHECKED


def test_sizes_and_counts_are_no_positions():
    config = hf.LlamaConfig(hidden_size=576, intermediate_size=1536, num_attention_heads=9)
    assert borders(config, context_limit(config)) == ()
    assert origins(config, context_limit(config)) == (0, 2048 - NUM_CHECKED)


@pytest.mark.parametrize("value", [50, 50.0, [50, 3], {"some": {"thing": 50}}, {"0": 50}])
def test_a_field_that_nobody_knows_is_taken_for_a_position(value):
    config = hf.LlamaConfig(**LLAMA_LIKE, warm_region=value)
    assert borders(config, 128) == (50,)
    assert origins(config, 128) == (0, 46, 119)
    assert crossing_length(config, 128, 480) == 50 + NUM_CHECKED
    assert crossing_length(config, 128, 40) == 24


@pytest.mark.parametrize("context", [1, 5, 9, 10, 14])
def test_checks_stay_within_a_short_context(context):
    config = FAMILIES["phi3-longrope"]()
    for place in origins(config, context):
        assert place == 0 or place + NUM_CHECKED <= context


def test_a_limit_is_found_under_any_name():
    assert context_limit(hf.GPT2Config(n_positions=77)) == 77
    assert context_limit(hf.MptConfig()) == 4096
