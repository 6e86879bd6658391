"""Which modules are recognised as linear layers, norms and gated MLPs, and what replaces them."""

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation

from shared.model.substitution.linear import activation, gated_mlp, linear, norm, plain_norm
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


class _Shifted(_CentredNorm):
    """Subtracts no mean, but adds one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(-1, keepdim=True)


class _Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 8)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * self.act(self.b(x)))


def test_eps_is_found_among_other_small_numbers() -> None:
    module = _CentredNorm()
    module.dropout, module.eps = 1e-7, 1e-6
    x = torch.randn(2, 8) * 1e-2
    torch.testing.assert_close(norm(module).forward(x), module(x))
    module.forward = lambda x: reference.rms_norm(x, module.weight, module.eps)
    torch.testing.assert_close(norm(module).forward(x), module(x))


def test_layer_norms_are_found_with_and_without_a_bias() -> None:
    x = torch.randn(2, 8) + 3
    for module in (nn.LayerNorm(8, eps=1e-3), nn.LayerNorm(8, bias=False)):
        for parameter in module.parameters():
            parameter.data += torch.randn(8)
        found = norm(module)
        torch.testing.assert_close(found.forward(x), module(x))
        again = norm(module, form=found.form)
        assert torch.equal(again.forward(x), found.forward(x))


class _PlainNorm(nn.Module):
    def __init__(self, eps: float, power: float = -0.5) -> None:
        super().__init__()
        self.eps, self.power = eps, power

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps) ** self.power


def test_a_norm_without_a_weight_is_found_for_any_width() -> None:
    module = _PlainNorm(1e-3)
    found = plain_norm(module)
    for width in (8, 256, 5):
        x = torch.randn(3, 2, width) * 1e-2
        torch.testing.assert_close(found.forward(x), module(x))
        assert torch.equal(plain_norm(module, form=found.form).forward(x), found.forward(x))
    for other in (_PlainNorm(1e-3, -0.4), nn.Identity(), nn.Softmax(-1)):
        with pytest.raises(Unsuitable, match="without a weight"):
            plain_norm(other)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (NewGELUActivation(), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (nn.SiLU(), "silu"),
    ],
)
def test_activations_are_found_by_what_they_compute(module: nn.Module, name: str) -> None:
    x, found = torch.randn(5, 9), activation(module)
    assert found.form == name
    torch.testing.assert_close(found.forward(x), module(x))


@pytest.mark.parametrize("module", [nn.Dropout().eval(), nn.ReLU6(), nn.Mish(), nn.Identity(), nn.LeakyReLU(1e-4)])
def test_other_modules_without_parameters_are_no_activations(module: nn.Module) -> None:
    with pytest.raises(Unsuitable, match="none of the activations"):
        activation(module)


def test_look_alikes_are_not_substituted() -> None:
    with pytest.raises(Unsuitable, match="does more"):
        linear(_Scaled(8, 4))
    with pytest.raises(Unsuitable, match="neither an RMS norm nor a layer norm"):
        norm(_Shifted())
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
