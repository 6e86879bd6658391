"""Arguments that the layer op refuses, each by its name."""

from dataclasses import replace

import pytest
import torch

from shared.ops.layer import LayerInputs, TensorTable, decoder_layers
from tests.shared.ops.test_layer import NOTHING, PLAIN, SMALL, _inputs, _weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "3 query heads cannot share 2 key heads"),
        ({"num_heads": 6}, r"a projection is a matrix \[32, 12\], want \[48, 12\]"),
        ({"intermediates": [17]}, r"gate is a matrix \[16, 12\], want \[17, 12\]"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"norms": [torch.ones(12)]}, "1 norms, 7 matrices, 0 biases and 0 places for 1 layers, want 6"),
        ({"norms": [torch.ones(12), torch.ones(11), *[NOTHING] * 4]}, "a norm must be contiguous with shape"),
        ({"norms": [torch.ones(12), torch.ones(3, 12), *[NOTHING] * 4]}, r"\[12\] or \[2, 12\], got \[3, 12\]"),
        ({"norms": [torch.ones(12), *[NOTHING] * 5]}, "an MLP after attention needs a norm"),
        ({"norms": [torch.ones(12)] * 2 + [torch.ones(7)] + [NOTHING] * 3}, "a head norm must be contiguous"),
        ({"norms": [torch.ones(12)] * 6, "parallel_mlp": True}, "a head norm must be"),
        ({"norms": [*[torch.ones(12)] * 2, *[NOTHING] * 3, torch.ones(12)], "parallel_mlp": True}, "cannot be normed"),
        ({"experts_per_token": 1}, "the experts are not a table"),
        ({"experts_per_token": -1}, "-1 experts per token"),
        ({"biases": [NOTHING] * 5}, "7 matrices, 5 biases"),
        ({"places": [0, 8, 32]}, "3 places for 1 layers"),
        ({"places": [0, 9, 0, 8, 0, 8]}, "heads of 8 from 0 on, 9 apart, exceed a projection of 32"),
        ({"places": [0, 8, 0, 8, -1, 8]}, "heads of 8 from -1 on"),
        ({"biases": [torch.ones(3)] + [NOTHING] * 6}, "a projection must be contiguous"),
        ({"biases": [NOTHING] * 6 + [torch.ones(3)]}, r"sinks must be contiguous with shape \[4\], got \[3\]"),
        ({"biases": [NOTHING] * 6}, "7 matrices, 6 biases"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"eps": -1.0}, "eps is negative"),
        ({"kv": {"bases": [7]}}, "cannot take 2 tokens from position 7 on"),
        ({"kv": {"bases": [3, 3]}}, "2 bases"),
        ({"kv": {"counts": [1]}}, "counts sum to 1 tokens, but x has 2"),
        ({"kv": {"keys": []}}, "0 caches of keys"),
        ({"num_layers": 0}, "0 layers"),
        ({"num_layers": 2}, "a cache of 1 layers of keys and 1 of values, for 2 layers"),
        ({"x": torch.zeros(1, 3, 12)}, "does not fit x"),
        ({"masks": [torch.ones(1, 1, 2, 3, dtype=torch.bool)]}, "mask has shape"),
        ({"masks": [PLAIN, PLAIN]}, "1 cos, 1 sin and 2 masks, for 1 sequences"),
        ({"inputs": []}, "0 cos, 0 sin"),
        ({"kinds": [0, 0]}, "2 kinds of 1 layers"),
        ({"kinds": [1]}, "kind 1 of 1"),
        ({"kinds": [-1]}, "kind -1 of 1"),
        ({"query_scales": torch.ones(3)}, r"query_scales \[3\] do not fit x"),
        ({"intermediates": [16, 16]}, "2 widths of MLPs, 1 of reads_kv and 0 of ends for 1 layers"),
        ({"reads_kv": [False, True]}, "1 widths of MLPs, 2 of reads_kv"),
        ({"reads_kv": [True], "num_heads": 6}, r"a projection is a matrix \[32, 12\], want \[48, 12\]"),
        ({"ends": [NOTHING] * 3}, "3 of ends for 1 layers"),
        ({"ends": [NOTHING] * 3 + [torch.ones(1)]}, "a scale needs a norm of what the MLP adds"),
        ({"ends": [NOTHING] * 3 + [torch.ones(2)]}, "a layer's scale must be"),
        ({"ends": [NOTHING] * 2 + [torch.ones(12), NOTHING]}, "need per_layer_inputs"),
        ({"per_layer_inputs": torch.ones(2, 2, 5)}, r"per_layer_inputs \[2, 2, 5\] do not fit x .* and 1 layers"),
        ({"captured": [1]}, "stop 1 is out of order, or not between 1 and 0"),
        ({"captured": [0]}, "stop 0 is out of order"),
    ],
)
def test_wrong_arguments_are_named(change: dict, message: str) -> None:
    weights, (x, cos, sin, kv, masks) = _weights(SMALL), _inputs(SMALL)
    kv = kv._replace(**change.pop("kv", {}))
    x, masks, kinds = change.pop("x", x), change.pop("masks", masks), change.pop("kinds", [])
    inputs = change.pop("inputs", [LayerInputs(cos, sin, masks)])
    captured, scales = dict.fromkeys(change.pop("captured", []), x), change.pop("query_scales", None)
    given = change.pop("per_layer_inputs", None)
    with pytest.raises(RuntimeError, match=message):
        decoder_layers(x, inputs, replace(weights, **change), kv, kinds, captured, scales, given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts_per_token": 4}, "4 of 3 experts cannot be chosen"),
        ({"intermediates": [17]}, r"experts have matrices \[16, 12\], want \[17, 12\]"),
        ({"biases": [NOTHING] * 5 + [torch.ones(12), NOTHING]}, "the biases of experts are in their table"),
        ({"biases": [NOTHING] * 4 + [torch.ones(4), NOTHING, NOTHING]}, r"router must be contiguous with shape \[3\]"),
    ],
)
def test_wrong_experts_are_named(change: dict, message: str) -> None:
    p = {**SMALL, "experts": 3}
    weights, (x, cos, sin, kv, _) = _weights(p), _inputs(p)
    with pytest.raises(RuntimeError, match=message):
        decoder_layers(x, [LayerInputs(cos, sin)], replace(weights, **change), kv)


def test_what_is_no_table_is_refused() -> None:
    weights, (x, cos, sin, kv, _) = _weights(SMALL), _inputs(SMALL)
    kv.keys[0].table = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="keys is not a table"):
        decoder_layers(x, [LayerInputs(cos, sin)], weights, kv)
    with pytest.raises(RuntimeError, match="at most 4 dimensions"):
        TensorTable([torch.zeros(1, 1, 1, 1, 1)])
