"""Which modules are recognised as linear layers, norms and gated MLPs, and what replaces them."""

import pytest
import torch
from torch import Tensor, nn

from shared.model.substitution.linear import gated_mlp, linear, rms_norm
from shared.model.substitution.match import Unsuitable
from shared.ops import reference


class _Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


class _CentredNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (8,), self.weight, None, self.eps)


class _Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 8)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * self.act(self.b(x)))


def test_eps_is_found_among_other_small_numbers() -> None:
    norm = _CentredNorm()
    norm.dropout, norm.eps = 1e-7, 1e-6
    norm.forward = lambda x: reference.rms_norm(x, norm.weight, norm.eps)
    x = torch.randn(2, 8) * 1e-2
    torch.testing.assert_close(rms_norm(norm).forward(x), norm(x))


def test_look_alikes_are_not_substituted() -> None:
    with pytest.raises(Unsuitable, match="does more"):
        linear(_Scaled(8, 4))
    with pytest.raises(Unsuitable, match="not an RMS norm"):
        rms_norm(_CentredNorm())
    with pytest.raises(Unsuitable, match="is not down"):
        gated_mlp(_Mlp(nn.ReLU()))
    with pytest.raises(Unsuitable, match="float64"):
        linear(nn.Linear(8, 4).double())


class _Clamped(_Mlp):
    """A gated MLP with a limit that usual input does not reach."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).clamp(-100, 100) * self.act(self.b(x).clamp(max=100)))


class _Rounded(nn.Linear):
    """Adds what shows on small input only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-6


def test_what_shows_on_large_or_small_input_is_seen() -> None:
    usual = torch.randn(5, 8)
    clamped, rounded = _Clamped(nn.SiLU()), _Rounded(8, 4, bias=False)
    torch.testing.assert_close(clamped(usual), _Mlp.forward(clamped, usual))
    with pytest.raises(Unsuitable, match="is not down"):
        gated_mlp(clamped)
    torch.testing.assert_close(rounded(usual), nn.Linear.forward(rounded, usual))
    with pytest.raises(Unsuitable, match="does more"):
        linear(rounded)


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(approximate="tanh")])
def test_a_gated_mlp_is_found_whatever_its_layers_are_called(act: nn.Module) -> None:
    module, x = _Mlp(act), torch.randn(5, 8)
    found = gated_mlp(module)
    torch.testing.assert_close(found.forward(x), module(x))
    for (source, name), packed in zip(found.sources, found.packed, strict=True):
        assert torch.equal(source.get_parameter(name), packed.dequantised())


def test_hooks_on_a_layer_keep_it_from_being_fused() -> None:
    module = _Mlp(nn.SiLU())
    module.a.register_forward_hook(lambda *_: None)
    with pytest.raises(Unsuitable, match="hooks"):
        gated_mlp(module)
