"""What is promised of the tokens, and the id of the bits: paths, formats and threads."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared import ops
from shared.model import numerics as module
from shared.model.cache import KVCache
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.numerics import Numerics, numerics_of
from tests.families import FAMILIES, USUAL, build_family
from tests.tiers import tiered

PATHS = ("avx512", "avx2", "portable", "neon")
# Adds its positions to the scores of attention in code of its own; and keeps torch's sums in its routers, which return
# several tensors.
VARIANT = {
    "falcon-alibi": "AttentionInterface",
    "llama4": "stores several matrices",
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    ops.set_cpu_isa("auto")


def accelerated(family: str, **options: torch.dtype) -> LoadedModel:
    return wrap_model(build_family(family), accelerate=True, **options)


def numerics(loaded: LoadedModel) -> Numerics:
    return numerics_of(ContiguousRunner(loaded))


def available_paths() -> list[str]:
    found = []
    for path in PATHS:
        try:
            ops.set_cpu_isa(path)
        except RuntimeError:
            continue
        found.append(path)
    return found


def bits(runner: ContiguousRunner, count: int) -> torch.Tensor:
    ids = torch.randint(97, (1, count), generator=torch.Generator().manual_seed(5))
    cache = runner.new_cache(count)
    return runner.logits(runner.run(ids, cache, first=0, last=runner.num_layers, base=0))


@pytest.mark.parametrize("family", tiered(sorted(FAMILIES), USUAL | {"falcon-alibi"}))
def test_every_family_keeps_the_promise_or_says_why_not(family: str) -> None:
    found = numerics(accelerated(family))
    assert found.is_exact == (family not in VARIANT)
    assert bool(found.why_not) != found.is_exact
    if not found.is_exact:
        assert found.why_not.startswith("a token's bits depend on what else is in a pass: ")
        assert VARIANT[family] in found.why_not


def test_a_model_with_its_own_modules_promises_nothing() -> None:
    found = numerics(wrap_model(build_family("llama")))
    assert not found.is_exact
    assert "own modules" in found.why_not


class RoundsLater(ContiguousRunner):
    """Rounds passes of one token in another way, beyond a border only."""

    def run(self, token_ids: torch.Tensor, cache: KVCache, **options: Any) -> torch.Tensor:
        states = super().run(token_ids, cache, **options)
        return states * (1 + 1e-6) if cache.origin and token_ids.shape[1] == 1 else states


def test_the_promise_is_tried_beyond_borders() -> None:
    found = numerics_of(RoundsLater(accelerated("llama")))
    assert found.why_not == "a token's bits depend on what else is in a pass"


@pytest.mark.parametrize("family", tiered(["llama", "mixtral", "gemma3-sliding", "falcon"], {"llama"}))
def test_an_id_is_shared_by_those_who_give_the_same_bits(family: str) -> None:
    runner = ContiguousRunner(accelerated(family))
    ids, logits = {}, {}
    for path in available_paths():
        ops.set_cpu_isa(path)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            ids[path, threads] = numerics_of(runner).id
            logits[path, threads] = bits(runner, 100)
    for one in ids:
        for other in ids:
            same = torch.equal(logits[one], logits[other])
            assert (ids[one] == ids[other]) == same == (one[0] == other[0])


def test_formats_that_change_bits_change_the_id() -> None:
    plain, kept = accelerated("llama"), accelerated("llama", kv_dtype=torch.bfloat16)
    again, other = accelerated("llama"), accelerated("llama-tied")
    assert numerics(plain).id == numerics(again).id
    assert len({numerics(one).id for one in (plain, kept, other)}) == 3


@pytest.mark.parametrize(
    ("isa", "unrounded", "rounded"),
    [
        ("avx512bf16", "avx512", "avx512bf16"),
        ("amx", "avx512", "avx512bf16"),
        ("i8mm", "neon", "i8mm"),
        ("dotprod", "neon", "neon"),
    ],
)
def test_sets_that_give_the_same_bits_have_one_name(
    isa: str, unrounded: str, rounded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = accelerated("llama")
    monkeypatch.setattr(ops, "cpu_isa", lambda: isa)
    assert module.cpu_path(loaded) == unrounded
    assert module.cpu_path(replace(loaded, compute_dtype=torch.bfloat16)) == rounded == ops.cpu_bits()


def test_a_pass_that_does_not_agree_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ContiguousRunner(accelerated("llama"))
    run = runner.run_ragged
    monkeypatch.setattr(runner, "run_ragged", lambda *a, **k: run(*a, **k) * (1 + 2**-22))
    found = numerics_of(runner)
    assert not found.is_exact
    assert found.why_not == "a token's bits depend on what else is in a pass"


def test_threads_are_part_of_the_id_where_they_may_change_bits() -> None:
    runner = ContiguousRunner(wrap_model(build_family("llama")))
    ids = set()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        ids.add(numerics_of(runner).id)
    assert len(ids) == 2


def test_the_id_names_the_library_of_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may allow other tokens."""
    loaded = accelerated("llama")
    before = numerics(loaded)
    monkeypatch.setattr(module, "version", lambda _: "0")
    assert numerics(loaded).id != before.id
