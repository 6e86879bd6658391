"""Torch's functions under `RowInvariant`: the bits of a row do not depend on the rows beside it or on threads."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared import ops
from shared.model.substitution.experts import experts
from shared.model.substitution.row_invariant import RowInvariant, row_invariant, watched
from shared.model.weights.lazy import LazyWeight, as_parameter
from shared.model.weights.stored import Packed
from tests.families import build_family

# Each of them rounds its scalar tails differently, which the first test checks too.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "method": lambda x: x.sigmoid(),
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "softplus": F.softplus,
    "module": nn.SiLU(),
}
# Parts of 2000 rows, so that torch's own threads cut them at other places.
PARTS = (1, 3, 996, 1000)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_and_threads_do_not_matter(name: str) -> None:
    function, x = FUNCTIONS[name], 3 * torch.randn(2000, 37)

    def in_parts(f: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([f(part) for part in x.split(PARTS)])

    assert not torch.equal(torch.cat([function(row) for row in x.split(1)]), function(x))
    invariant = row_invariant(function)
    expected = invariant(x)
    torch.testing.assert_close(expected, function(x))
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(in_parts(invariant), expected)
    torch.set_num_threads(threads)
    strided = torch.stack([x, x], -1).select(-1, 0)
    assert torch.equal(invariant(strided), expected)


def test_matmuls_with_packed_parameters_run_the_kernel() -> None:
    x, weight, bias = torch.randn(7, 20), torch.randn(30, 20), torch.randn(30)
    packed = Packed(ops.pack_linear(weight), 30, 20, "float32")
    with torch.no_grad(), RowInvariant():
        out = F.linear(x, as_parameter(LazyWeight(packed)), bias)
        plain = F.linear(x, weight, bias)
    assert torch.equal(out, ops.packed_linear(x, packed.packed, 30, bias))
    torch.testing.assert_close(plain, out)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_gives_a_query_the_bits_that_it_gets_alone(masked: bool) -> None:
    q, (k, v) = torch.randn(1, 4, 6, 8), torch.randn(2, 1, 4, 9, 8)
    mask = torch.ones(6, 9, dtype=torch.bool).tril(3)[None, None]
    attend = row_invariant(F.scaled_dot_product_attention)
    out = attend(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    for row in range(6):
        seen = row + 4
        own = mask[:, :, row : row + 1, :seen] if masked else None
        alone = attend(q[:, :, row : row + 1], k[:, :, :seen], v[:, :, :seen], attn_mask=own)
        assert torch.equal(alone, out[:, :, row : row + 1])
    biased = torch.zeros(1, 4, 6, 9)
    torch.testing.assert_close(attend(q, k, v, attn_mask=biased), F.scaled_dot_product_attention(q, k, v))


def test_the_modules_that_call_such_functions_themselves_are_found() -> None:
    model = build_family("mixtral")
    with watched(model) as callers, torch.no_grad():
        model(torch.tensor([[3, 4, 5]]))
    own = {name: module for name, module in model.named_modules() if module in callers}
    assert callers[own["model.layers.0.mlp.gate"]] == {"weight"}
    assert "model.layers.0.mlp" not in own
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_give_a_token_the_bits_that_it_gets_alone(family: str) -> None:
    module = build_family(family).model.layers[0].mlp.experts
    num_experts, hidden, tokens = module.num_experts, module.hidden_dim, 50
    x, shares = torch.randn(tokens, hidden), torch.rand(tokens, 2)
    index = torch.stack([torch.randperm(num_experts)[:2] for _ in range(tokens)])
    found = experts(module).forward
    with torch.no_grad():
        out = found(x, index, shares)
        torch.testing.assert_close(out, module(x, index, shares), atol=1e-4, rtol=1e-4)
        alone = [found(x[i : i + 1], index[i : i + 1], shares[i : i + 1]) for i in range(tokens)]
    assert torch.equal(torch.cat(alone), out)
    nobody = index.masked_fill(index == 0, num_experts)  # a number beyond the last stands for none
    without = shares.masked_fill(index == 0, 0)
    assert torch.equal(found(x, nobody, shares), found(x, index, without))
