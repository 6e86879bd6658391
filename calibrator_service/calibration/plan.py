"""The choices that a spec leaves open, made from measurements on SmolLM2-135M."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from calibrator_service.calibration.spec import CalibrationSpec, SelfGenerated
from calibrator_service.calibration.text.splits import SPLIT_PATTERN
from shared.engine.memory.budget import available_bytes
from shared.errors import InvalidInput
from shared.ladder.exit_head import default_mlp_width
from shared.ladder.head_rows import head_width
from shared.ladder.proposers import exit_name
from shared.model.footprint import kv_token_bytes
from shared.model.loaded import LoadedModel
from shared.model.runner import captured_depths

# The budget of a spec without a limit: under three minutes on two cores with a model of the demo's size.
QUICK_BUDGET_S = 150.0
# Largest artefact with the default proposer.
ARTEFACT_BYTES = 16_000_000
# The n-gram table may have these in any case: heads of wide models alone may need more than ARTEFACT_BYTES.
LEAST_TABLE_BYTES = 4_000_000
DEFAULT_NEW_TOKENS = 128
DEFAULT_DEPTHS = (0,)
MAX_STATE_BYTES = 12 << 30
MAX_DEFAULT_VOCABULARY = 8192
# Tokens of one forward pass, padding included, and positions of one chunk of states, both on a CPU.
PASS_TOKENS = 2048
CHUNK_POSITIONS = 8192
# Training by gradients begins to pay with this much time and text; with less, heads are what the closed form gives.
TRAINING_BUDGET_S, TRAINING_TOKENS = 600.0, 60_000
# Memory per square of the hidden size: the sums of one exit in float32, and what solving it needs beside them, in
# float64.
SUM_BYTES, SOLVING_BYTES = 4 * (5 * 5 + 5 * 2), 8 * 3 * 4 * 4
# The width of a head whose block adds nothing.
LEAST_MLP_WIDTH = 32
# Heads are trained for at most MAX_EPOCHS epochs, for fewer if these have more than TRAINED_POSITIONS positions, and
# for at least MIN_EPOCHS.
MAX_EPOCHS, MIN_EPOCHS, TRAINED_POSITIONS = 6, 2, 120_000_000
# On a GPU the time of a training step is the time to launch it, so batches grow as long as this many steps are left.
MIN_STEPS, MAX_BATCH_SIZE = 3000, 4096
HEADS_SHARE = SPLIT_PATTERN.count("heads") / len(SPLIT_PATTERN)
# Keys and values of the rows that are decoded together: their memory on a CPU and the length it is computed for.
ROW_CACHE_BYTES, ROW_TOKENS = 2 << 30, 512
MIN_DECODED_ROWS = 4


@dataclass(frozen=True)
class HeadTraining:
    """How exit heads are trained: AdamW with a warm-up and a cosine schedule. `seconds`: time limit."""

    epochs: int = MAX_EPOCHS
    batch_size: int = 512
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    warm_up_share: float = 0.05
    seconds: float = math.inf
    seed: int = 0


@dataclass(frozen=True)
class PassSizes:
    """How much goes through the model at once, and whether states are kept on disk (see `states.collect.Collector`).
    `rows`: those that are decoded together."""

    rows: int
    pass_tokens: int = PASS_TOKENS
    chunk_positions: int = CHUNK_POSITIONS
    keeps_states: bool = True


@dataclass(frozen=True)
class Plan:
    """A spec with every choice made. `spec` itself has a limit: QUICK_BUDGET_S if it had none.

    `left_out`: name -> why, of the exits that the ladder would have by default and does not get. `max_tokens` counts
    tokens learned from: the answers of generated text, all tokens of given text. `table_bytes` bounds the n-gram table.
    `trains`: whether training by gradients follows the closed form; `mlp_width`: of the block that it trains. `solves`:
    whether there are heads to be made at all.
    `max_tokens` and `budget_s` are infinite if they do not bound the calibration.
    """

    spec: CalibrationSpec
    depths: tuple[int, ...]
    left_out: Mapping[str, str]
    draft_vocabulary_size: int
    max_tokens: float
    max_new_tokens: int
    sizes: PassSizes
    table_bytes: int
    training: HeadTraining
    trains: bool
    mlp_width: int
    budget_s: float
    solves: bool = True

    def with_given_heads(self, depths: Iterable[int], *, solves: bool) -> "Plan":
        """The plan of a ladder that may have another's heads, at these depths. It is small, so its table is. `solves`:
        whether own ones are solved, too, to be compared."""
        given = tuple(sorted(depths))
        return replace(self, depths=given, left_out={}, table_bytes=LEAST_TABLE_BYTES, trains=False, solves=solves)

    def captured_depths(self, num_layers: int) -> tuple[int, ...]:
        """The depths below L whose states heads learn from."""
        return tuple(sorted({*self.depths, *captured_depths(num_layers)})) if self.depths else ()


def resolve(spec: CalibrationSpec, loaded: LoadedModel) -> Plan:
    """Raises `InvalidInput` for a proposer at the last layer or beyond, for a draft vocabulary larger than the model's,
    and for proposer depths of a model that cannot have exits."""
    if not spec.max_tokens and spec.time_budget_s is None:
        spec = replace(spec, time_budget_s=QUICK_BUDGET_S)
    depths = tuple(sorted(spec.exit_depths)) or DEFAULT_DEPTHS
    left_out = {}
    if why := why_without_exits(loaded, len(depths)):
        if spec.exit_depths:
            raise InvalidInput(
                f"the model cannot have exits: {why}; without proposer depths it gets the tables alone",
                reason="EXITS_NOT_SUPPORTED",
            )
        left_out, depths = {exit_name(depth): why for depth in depths}, ()
    if max(depths, default=0) >= loaded.num_layers:
        raise InvalidInput(
            f"a proposer at depth {max(depths)} of {loaded.num_layers} layers skips nothing",
            reason="EXIT_TOO_DEEP",
            metadata={"depth": str(max(depths)), "num_layers": str(loaded.num_layers)},
        )
    if spec.draft_vocabulary_size > loaded.vocabulary_size:
        raise InvalidInput(
            f"a draft vocabulary of {spec.draft_vocabulary_size} tokens is larger than the model's "
            f"{loaded.vocabulary_size}"
        )
    vocabulary_size = spec.draft_vocabulary_size or min(loaded.vocabulary_size, MAX_DEFAULT_VOCABULARY)
    by_time = spec.time_budget_s is None or spec.time_budget_s >= TRAINING_BUDGET_S
    by_text = not spec.max_tokens or spec.max_tokens >= TRAINING_TOKENS
    trains = by_time and by_text
    mlp_width = default_mlp_width(loaded.hidden_size) if trains else LEAST_MLP_WIDTH
    other_bytes = 100_000 + len(depths) * exit_bytes(spec, loaded.hidden_size, mlp_width) + 4 * vocabulary_size
    source = spec.source
    max_new_tokens = source.max_new_tokens if isinstance(source, SelfGenerated) else 0
    max_new_tokens = max_new_tokens or DEFAULT_NEW_TOKENS
    sizes = pass_sizes_for(loaded)
    if spec.max_tokens:  # text is written in whole batches
        fewest = max(MIN_DECODED_ROWS, math.ceil(spec.max_tokens / max_new_tokens))
        sizes = replace(sizes, rows=min(sizes.rows, fewest))
    return Plan(
        spec=spec,
        depths=depths,
        left_out=left_out,
        draft_vocabulary_size=vocabulary_size,
        max_tokens=spec.max_tokens or math.inf,
        max_new_tokens=max_new_tokens,
        sizes=sizes,
        table_bytes=max(ARTEFACT_BYTES - other_bytes, LEAST_TABLE_BYTES),
        training=head_training(spec, loaded.device),
        trains=trains,
        mlp_width=mlp_width,
        budget_s=spec.time_budget_s or math.inf,
    )


def why_without_exits(loaded: LoadedModel, num_exits: int) -> str:
    """Why the model cannot have so many exits on this machine; empty if it can."""
    size = loaded.hidden_size
    if (width := head_width(loaded.parts.head)) != size:
        return f"the LM head reads states of width {width}, not of the model's {size}"
    needed = (num_exits * SUM_BYTES + SOLVING_BYTES) * size**2
    free = available_bytes(loaded.device)
    if needed > free:
        return f"its statistics need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
    return ""


def exit_bytes(spec: CalibrationSpec, hidden_size: int, mlp_width: int) -> int:
    """Size of the matrices of an exit's two heads in the artefact."""
    columns = 6 * hidden_size + 3 * mlp_width
    return 2 * hidden_size * (columns + spec.confidence_width)


def pass_sizes_for(loaded: LoadedModel) -> PassSizes:
    """A GPU gets larger passes: a small pass takes as long as a large one, because the launches of its kernels
    decide."""
    rows = num_decoded_rows(loaded)
    if loaded.device.type == "cpu":
        return PassSizes(rows)
    return PassSizes(rows, pass_tokens=32_768, chunk_positions=65_536, keeps_states=False)


def head_training(spec: CalibrationSpec, device: torch.device) -> HeadTraining:
    """For `spec.max_tokens`; the defaults if only time bounds the text, because then its amount is unknown."""
    params = HeadTraining(seed=spec.seed)
    if not spec.max_tokens:
        return params
    positions = HEADS_SHARE * spec.max_tokens
    epochs = max(MIN_EPOCHS, min(MAX_EPOCHS, int(TRAINED_POSITIONS / positions)))
    params = replace(params, epochs=epochs)
    if device.type == "cpu":
        return params
    batch_size = params.batch_size
    while batch_size < MAX_BATCH_SIZE and positions * epochs >= 2 * batch_size * MIN_STEPS:
        batch_size *= 2
    return replace(params, batch_size=batch_size)


def num_decoded_rows(loaded: LoadedModel) -> int:
    """Rows decoded together: at most 64 on a CPU and 2,048 on a GPU, fewer if their keys and values need too much
    memory.

    The limit is 2 GiB on a CPU and a quarter of a GPU's memory. It is the GPU's total memory: the memory that is free
    at the moment must not decide which text is written.
    """
    token_bytes = kv_token_bytes(loaded.model.config.get_text_config(decoder=True), loaded.model.dtype)
    max_rows, cache_bytes = 64, ROW_CACHE_BYTES
    if loaded.device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(loaded.device).total_memory
        max_rows, cache_bytes = 2048, total_bytes // 4
    return int(min(max_rows, max(MIN_DECODED_ROWS, cache_bytes // (token_bytes * ROW_TOKENS))))
