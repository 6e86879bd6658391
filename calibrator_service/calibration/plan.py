"""What "choose for me" means, decided by measurements on SmolLM2-135M."""

import math
from dataclasses import dataclass, replace

import torch

from calibrator_service.calibration.spec import MAX_NEW_TOKENS, CalibrationSpec, SelfGenerated
from calibrator_service.calibration.states.collect import CHUNK_POSITIONS, PASS_TOKENS
from calibrator_service.calibration.text.splits import PATTERN
from calibrator_service.calibration.training.heads import TrainParams
from shared.errors import InvalidInput
from shared.ladder.heads import default_rank
from shared.model.load import LoadedModel

QUICK_BUDGET_S = 150.0
THOROUGH_TOKENS = 700_000
ARTEFACT_BYTES = 8_000_000
# Shares of a time budget at which the phases end.
COLLECTING_ENDS, RISK_TEXT_ENDS, HEADS_END, ROUTERS_END = 0.5, 0.63, 0.86, 0.93
# Prompts of the risk split where time does not decide: a risk of nothing is told from one in fifty then.
RISK_PROMPTS = 300
MAX_STATE_BYTES = 4 << 30
MAX_DEFAULT_VOCABULARY = 8192
# Heads see each position at most so often, and so many positions in all where that is fewer; twice in any case.
MAX_EPOCHS, MIN_EPOCHS, TRAINED_POSITIONS = 6, 2, 120_000_000
# On a GPU a step's time is that of launching it, so batches grow until this many steps are left.
LEAST_STEPS, LARGEST_BATCH = 3000, 4096
HEADS_SHARE = PATTERN.count("heads") / len(PATTERN)


def quick(model_id: str = "") -> CalibrationSpec:
    """Under three minutes on two cores with a model of the demo's size: what is done unasked."""
    return bounded(CalibrationSpec(model_id=model_id))


def thorough(model_id: str = "") -> CalibrationSpec:
    """Hours on two cores, minutes on a GPU; the artefact has at most ARTEFACT_BYTES."""
    return CalibrationSpec(model_id=model_id, max_tokens=THOROUGH_TOKENS)


def bounded(spec: CalibrationSpec) -> CalibrationSpec:
    """A spec that ends: with neither `max_tokens` nor a time budget it gets the quick preset's budget."""
    if spec.max_tokens or spec.time_budget_s is not None:
        return spec
    return replace(spec, time_budget_s=QUICK_BUDGET_S)


@dataclass(frozen=True)
class Scale:
    """How much goes through the model at once: see `Collector`."""

    rows: int
    pass_tokens: int = PASS_TOKENS
    chunk_positions: int = CHUNK_POSITIONS
    keeps_states: bool = True


@dataclass(frozen=True)
class Plan:
    """A spec with every choice made. Tokens are those learnt from: answers of generated text, all of given text."""

    depths: tuple[int, ...]
    draft_vocabulary_size: int
    rank: int
    max_tokens: float
    max_new_tokens: int
    scale: Scale
    table_bytes: int
    training: TrainParams
    budget_s: float

    @property
    def rows(self) -> int:
        """Decoded together."""
        return self.scale.rows


def resolve(spec: CalibrationSpec, loaded: LoadedModel) -> Plan:
    """Raises `InvalidInput` for a rung at the last layer or beyond, and for a draft vocabulary larger than the model's."""
    depths = tuple(sorted(set(spec.rung_depths))) or default_depths(loaded.num_layers)
    if depths[-1] >= loaded.num_layers:
        raise InvalidInput(
            f"a rung at depth {depths[-1]} of {loaded.num_layers} layers skips nothing",
            reason="RUNG_TOO_DEEP",
            metadata={"depth": str(depths[-1]), "num_layers": str(loaded.num_layers)},
        )
    if spec.draft_vocabulary_size > loaded.vocabulary_size:
        raise InvalidInput(
            f"a draft vocabulary of {spec.draft_vocabulary_size} tokens is larger than the model's "
            f"{loaded.vocabulary_size}"
        )
    size = spec.draft_vocabulary_size or min(loaded.vocabulary_size, MAX_DEFAULT_VOCABULARY)
    budget_s = bounded(spec).time_budget_s or math.inf
    rank = default_rank(loaded.hidden_size)
    affine = 2 * loaded.hidden_size * 2 * loaded.hidden_size
    gated = 2 * 5 * rank * loaded.hidden_size
    exit_bytes = (
        gated if spec.head_form == "gated" else affine
    ) + 2 * spec.router_width * loaded.hidden_size
    source = spec.source
    asked = source.max_new_tokens if isinstance(source, SelfGenerated) else 0
    return Plan(
        depths=depths,
        draft_vocabulary_size=size,
        rank=rank,
        max_tokens=spec.max_tokens or math.inf,
        max_new_tokens=asked or MAX_NEW_TOKENS,
        scale=scale_of(loaded),
        table_bytes=max(ARTEFACT_BYTES - 100_000 - len(depths) * exit_bytes - 4 * size, 1 << 20),
        training=training(spec, loaded.device),
        budget_s=budget_s,
    )


def default_depths(num_layers: int) -> tuple[int, ...]:
    """Depth 0, and an eighth of the model where that is another depth."""
    return tuple(sorted({0, num_layers // 8}))


def scale_of(loaded: LoadedModel) -> Scale:
    """On a GPU a pass over little takes as long as one over much: hundreds of kernels are launched, whatever they do."""
    rows = rows_together(loaded)
    if loaded.device.type == "cpu":
        return Scale(rows)
    return Scale(rows, pass_tokens=32_768, chunk_positions=65_536, keeps_states=False)


def training(spec: CalibrationSpec, device: torch.device) -> TrainParams:
    """How the heads are trained on `spec.max_tokens`, or, with only a time budget, on whatever comes."""
    if not spec.max_tokens:
        return TrainParams(seed=spec.seed)
    positions = HEADS_SHARE * spec.max_tokens
    epochs = max(MIN_EPOCHS, min(MAX_EPOCHS, int(TRAINED_POSITIONS / positions)))
    params = TrainParams(seed=spec.seed, epochs=epochs)
    if device.type == "cpu":
        return params
    batch_size = params.batch_size
    while batch_size < LARGEST_BATCH and positions * epochs >= 2 * batch_size * LEAST_STEPS:
        batch_size *= 2
    return replace(params, batch_size=batch_size)


def rows_together(loaded: LoadedModel) -> int:
    """Rows decoded together: 64 on a CPU, fewer where their keys and values would take more than about 2 GiB; on a GPU up to 2,048,
    of whose whole memory (what is free at the moment must not decide what is written) they may take a quarter."""
    config = loaded.model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = loaded.model.dtype.itemsize
    token_bytes = 2 * loaded.num_layers * heads * width * element
    most, budget = 64, 2 << 30
    if loaded.device.type == "cuda":
        most, budget = 2048, torch.cuda.get_device_properties(loaded.device).total_memory // 4
    return int(min(most, max(4, budget // (token_bytes * 512))))
