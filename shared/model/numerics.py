"""What may be promised of a runner's tokens, and an id of the bits that it gives.

Policy `exact` verifies drafts in passes over several tokens, beside other requests. Its tokens are those of `full`, and
those of a request do not depend on the others, if a token gets the same bits in every pass. Neap's kernels give them,
on a CPU, and on a GPU where they are asked for. Other code rounds differently in longer passes. There, each token is
still one that the full model chose in the pass that verified it, but where its two best choices are nearly equal,
another pass may choose the other one.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import structlog
import torch
from torch import Tensor

from shared import ops
from shared.model.borders import origins
from shared.model.cache import KVCache, refuse_if_out_of_memory
from shared.model.company import why_not_in_company
from shared.model.dtypes import dtype_name
from shared.model.loaded import LoadedModel
from shared.model.paged_runner import PagedRunner
from shared.model.ragged import RaggedSequence
from shared.model.runner import Runner

log = structlog.get_logger("neap.model")

# Tokens of the passes that are compared: a prompt in two pieces, one token, and a few beside another sequence's.
_PIECE, _PROMPT, _FEW, _OTHER = 2, 19, 4, 6
# Paths that give the bits of a narrower one unless inputs of matmuls are rounded to bfloat16.
_ALIKE_UNROUNDED = {"avx512bf16": "avx512", "i8mm": "neon"}


@dataclass(frozen=True)
class Numerics:
    """`is_exact`: whether `exact` gives the tokens of `full`, alone and in any company; if not, `why_not` says why.

    `id`: two workers that are exact have the same one if they give the same bits, and only then. It depends on the
    model, the formats of weights, keys and values, the kernels in use, torch, the library of constraints, and the
    number of ranks. It does not depend on the number of threads. It says how workers that are not exact compute, but no
    two of their passes need agree.
    """

    id: str
    is_exact: bool
    why_not: str = ""


@dataclass(frozen=True)
class Promise:
    """What was tried: `is_exact` and `why_not` as in `Numerics`. `facts`: what decides answers beside the model, as
    JSON gives it."""

    facts: dict[str, Any]
    is_exact: bool
    why_not: str = ""

    def of_model(self, loaded: LoadedModel) -> Numerics:
        """Blocks until the model's fingerprint is known."""
        facts = self.facts | {"model": loaded.text_fingerprint}
        text = json.dumps(facts, sort_keys=True, default=str)
        return Numerics(hashlib.sha256(text.encode()).hexdigest()[:16], self.is_exact, self.why_not)

    def tell(self, loaded: LoadedModel) -> None:
        """Logs it."""
        known = {"model_id": loaded.model_id}
        if loaded.identity.is_known:
            known["numerics_id"] = self.of_model(loaded).id
        if self.is_exact:
            log.info("exact gives the tokens of full", **known)
        else:
            log.warning("exact may differ from full at near ties", why=self.why_not, **known)


def numerics_of(runner: Runner) -> Numerics:
    """As `promise_of`. Blocks until the model's fingerprint is known."""
    return promise_of(runner).of_model(runner.loaded)


@torch.inference_mode()
def promise_of(runner: Runner) -> Promise:
    """Runs a few passes of random tokens. What an earlier start has found out is repeated if one pass gives other bits
    than it did then.

    To be called by the thread that uses the runner.
    """
    facts = runner.loaded.facts
    name = f"numerics, {runner.loaded.context_length}, {runner.records}, {runner.compiles}"
    bits = _digest(_few_logits(runner))
    known = facts.earlier.get(name)
    if known is not None and known["bits"] == bits:
        runner.counters.reset()
        return Promise(**known["promise"])
    if known is not None:
        log.warning("the model gives other bits than at an earlier start; its promise is tried anew")
    promise = _try(runner, bits)
    facts.note(name, {"bits": bits, "promise": asdict(promise)})
    return promise


def _few_logits(runner: Runner) -> Tensor:
    """The logits [T, V] of a few tokens."""
    count = min(_FEW, runner.loaded.context_length)
    ids = runner.ids([index % runner.loaded.vocabulary_size for index in range(1, count + 1)])
    state = runner.run(ids, runner.new_cache(count), first=0, last=runner.num_layers, base=0)
    return runner.logits(state[0])


def _try(runner: Runner, bits: str) -> Promise:
    """`bits`: those of a pass of all layers."""
    loaded = runner.loaded
    tried, agree = _probe(runner)
    why_not = _why_not(loaded, agree)
    if not why_not and isinstance(runner, PagedRunner):
        why_not = why_not_in_company(runner)
    runner.counters.reset()
    facts = _facts(runner) | {"bits": [bits, tried], "torch functions": _digest(_torch_functions())}
    if why_not:
        facts["threads"] = torch.get_num_threads()
    return Promise(facts, not why_not, why_not)


def _why_not(loaded: LoadedModel, agree: bool) -> str:
    """Why a token's bits depend on the pass. Empty if they do not: passes `agree`, and nothing is known that makes
    others differ."""
    report, invariance = loaded.acceleration, loaded.invariance
    if invariance is not None and invariance.left_alone:
        name, reason = next(iter(invariance.left_alone.items()))
        return f"{name} {reason}"
    if loaded.device.type != "cpu" and invariance is None:
        return f"products on {loaded.device.type} are rounded by the number of tokens in a pass"
    if report is None and invariance is None:
        return "the model runs its own modules instead of neap's kernels"
    if agree:
        return ""
    left_alone = report.left_alone if report is not None else {}
    reason = left_alone.get("attention") or next(iter(left_alone.values()), "")
    return "a token's bits depend on what else is in a pass" + (reason and f": {reason}")


def _probe(runner: Runner) -> tuple[str, bool]:
    """The digest of the logits of sequences across every border, each in one pass as deep as the runner tries, and
    whether they are the same in several passes."""
    loaded = runner.loaded
    length = min(_PROMPT + 1 + _FEW, loaded.context_length)
    digest, agree = hashlib.sha256(), True
    for place in origins(loaded.model.config, loaded.context_length, length):
        try:
            logits, is_same = _tried_at(runner, place, length)
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            refuse_if_out_of_memory(error)
            if not place:
                raise
            continue  # the model makes something as long as the text, and cannot begin late
        digest.update(_bytes(logits))
        agree = agree and is_same
        del logits  # before the next ones are made: the logits of a large vocabulary take megabytes
    return digest.hexdigest(), agree


def _tried_at(runner: Runner, place: int, length: int) -> tuple[Tensor, bool]:
    """The logits [T, V] in one pass of a sequence whose positions begin at `place`, and whether they are the same in
    several passes, the last of them in company."""
    loaded, depth = runner.loaded, runner.tried_depth
    prompt = max(1, length - 1 - _FEW)
    ids = torch.randint(loaded.vocabulary_size, (length + _OTHER,), generator=torch.Generator().manual_seed(0)).tolist()
    sequence, others = ids[:length], ids[length:][: loaded.context_length]
    whole, cache, beside = (runner.new_cache(n) for n in (length, length, len(others)))
    whole.origin = cache.origin = place

    def run(tokens: list[int], base: int, into: KVCache) -> Tensor:
        return runner.run(runner.ids(tokens), into, first=0, last=depth, base=base, read_length=place + length)

    expected = runner.logits(run(sequence, 0, whole))[0]
    pieces = pairwise(sorted({0, min(_PIECE, prompt), prompt}))
    parts = [run(sequence[start:end], start, cache) for start, end in pieces]
    parts += [run(sequence[prompt : prompt + 1], prompt, cache)] if length > prompt else []
    last = sequence[prompt + 1 :]
    if last and runner.supports_ragged:
        sequences = [
            RaggedSequence(beside, 0, len(others)),
            RaggedSequence(cache, prompt + 1, len(last), read_length=place + length),
        ]
        together = runner.run_ragged(runner.ids(others + last), sequences, first=0, last=depth)
        parts.append(together[:, len(others) :])
    elif last:
        parts.append(run(last, prompt + 1, cache))
    rows = expected.split([part.shape[1] for part in parts])
    return expected, all(torch.equal(alone, runner.logits(part)[0]) for alone, part in zip(rows, parts, strict=True))


def _facts(runner: Runner) -> dict[str, object]:
    """What decides answers beside the model.
    What else does, such as the formats of weights, shows in the bits of the probe."""
    loaded, report = runner.loaded, runner.loaded.acceleration
    facts: dict[str, object] = {
        "kv": dtype_name(loaded.kv_dtype),
        "device": loaded.device.type,
        "path": cpu_path(loaded),
        "constraints": version("llguidance"),  # says which tokens they allow
    }
    if loaded.ranks is not None:
        facts["ranks"] = loaded.ranks.size  # what each adds up, and so every bit
    if loaded.device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(loaded.device)
        facts["runner"] = (runner.records, runner.compiles)
    if report is None or report.left_alone or report.row_invariant:
        facts["torch"] = torch.__version__  # runs a part of the model
    return facts


def cpu_path(loaded: LoadedModel) -> str:
    """The name of the CPU kernels that decide the model's bits. Empty if none of them runs."""
    if loaded.acceleration is None:
        return ""
    path = ops.cpu_bits()
    return path if loaded.compute_dtype == torch.bfloat16 else _ALIKE_UNROUNDED.get(path, path)


def _torch_functions() -> Tensor:
    """What torch's functions give: those of rotary angles at far positions, and those that modules and sampling
    call."""
    turns = torch.arange(0, 1 << 17, 37.0)[:, None] * torch.logspace(0, -5, 8)
    x = torch.linspace(-12, 12, 4096)
    rest = [x.exp(), x.tanh(), x.sigmoid(), x.erf(), x.softmax(0), x.cumsum(0)]
    return torch.cat([part.flatten() for part in (turns.cos(), turns.sin(), *rest)])


def _digest(numbers: Tensor) -> str:
    return hashlib.sha256(_bytes(numbers)).hexdigest()


def _bytes(numbers: Tensor) -> Any:
    """The numbers as float32, in memory that hashes can read."""
    return numbers.detach().float().cpu().contiguous().view(torch.uint8).numpy().data
