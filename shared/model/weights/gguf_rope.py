"""How a .gguf file scales rotary embeddings, as a config of transformers says it.

Transformers takes the base of the frequencies from such a file and, for most families, nothing else. A model with
scaled frequencies would then answer as another model does, from the first position on. So the file's own statements are
translated here, and what has no translation is refused.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shared.errors import UnsupportedModel
from shared.model.weights.gguf_file import GgufContents

# The tensors of which `rope_scaling` makes a config. Transformers has no parameter for them.
FREQUENCIES = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
TENSORS = frozenset({FREQUENCIES, SHORT, LONG})
# What all models with the scaling of Llama 3.1 have, apart from its factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# A pair of inputs with such a factor is not rotated at all. A family whose heads are rotated in part says so itself.
UNROTATED = 1e20
# Keys of metadata after "rope.scaling.", and what they are called in a config.
NAMES = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# With YaRN, llama.cpp multiplies this by a factor of its own, and transformers does not.
LONGROPE_NAMES = {**NAMES, "attn_factor": "attention_factor"}
# These change nothing.
IGNORED = {"type", "finetuned"}

# The numbers of a tensor, by its name.
Numbers = Callable[[str], np.ndarray]


def rope_scaling(contents: GgufContents, numbers: Numbers) -> dict[str, Any] | None:
    """The `rope_scaling` of the config; None if frequencies are not scaled.

    Raises `UnsupportedModel` (reason ROPE_UNKNOWN) for scaling that transformers cannot do.
    """
    prefix = f"{contents.architecture}.rope.scaling."
    stated = {
        key.removeprefix(prefix): field.values[0]
        for key, field in contents.fields.items()
        if key.startswith(prefix) and key.removeprefix(prefix) not in IGNORED
    }
    kind = contents.fields.get(prefix + "type")
    name = str(kind.values[0]) if kind else "none"
    tensors = {entry.name for entry in contents.tensors}
    is_longrope = tensors >= {SHORT, LONG}
    names = LONGROPE_NAMES if is_longrope else NAMES
    if unknown := stated.keys() - names.keys():
        raise _unknown(f"it states rope.scaling.{min(unknown)}")
    scaling = {names[key]: value for key, value in stated.items()}
    if is_longrope:
        factors = {"short_factor": numbers(SHORT).tolist(), "long_factor": numbers(LONG).tolist()}
        return {"rope_type": "longrope", **scaling, **factors}
    if FREQUENCIES in tensors:
        if name != "none":
            raise _unknown(f"it has both {FREQUENCIES} and scaling of type {name}")
        return _llama3(contents, numbers(FREQUENCIES))
    if name in ("linear", "yarn"):
        # The original model's bounds are no whole numbers. Files do not say so, and llama.cpp rounds them.
        exact = {"truncate": False} if contents.architecture == "gpt-oss" and name == "yarn" else {}
        return {"rope_type": name, **scaling, **exact}
    if name != "none":
        raise _unknown(f"its scaling is of type {name}")
    return None


def llama3_factors(theta: float, num_pairs: int, factor: float) -> np.ndarray:
    """By how much Llama 3.1's scaling lowers the frequency of each pair of inputs: float64 [num_pairs].
    `theta`: the base of the frequencies."""
    wavelengths = 2 * math.pi * theta ** (np.arange(num_pairs) / num_pairs)
    turns = LLAMA3["original_max_position_embeddings"] / wavelengths
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clip(0.0, 1.0)
    factors: np.ndarray = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors


def _llama3(contents: GgufContents, factors: np.ndarray) -> dict[str, Any] | None:
    """The config of Llama 3.1's scaling that gives these factors [pairs of inputs]."""
    if (factors >= UNROTATED).any() or (factors == 1.0).all():
        return None
    factor = float(factors.max())
    base = contents.fields.get(f"{contents.architecture}.rope.freq_base")
    theta = float(base.values[0]) if base else 10000.0
    if not np.allclose(factors, llama3_factors(theta, len(factors), factor), rtol=1e-3):
        raise _unknown(f"{FREQUENCIES} is not that of Llama 3.1's scaling")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _unknown(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the file scales rotary embeddings in a way that transformers does not know: {what}", reason="ROPE_UNKNOWN"
    )
