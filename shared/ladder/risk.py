"""The risk that a router publishes for the policy `relaxed`: on what share of prompts the output may differ from the
full model's.

It stands in the manifest. Learn-then-Test certifies it over whole greedy generations; the loss is 1 if any token
differs:

    "risk": {"loss": "generation_differs", "delta": 0.05, "num_prompts": 400, "max_new_tokens": 128,
             "bounds": [{"threshold": 0.97, "epsilon": 0.05}, ..], "engine": {"dtype": "float32", "compute_dtype":
             "float32", ..}, ..}

"margin_risk" is of the same form, with "margin" in place of "threshold". Each bound holds for its threshold and all
higher ones, or for its margin and all lower ones. All bounds of one table hold together with confidence 1 - delta. They
apply to prompts like those that the calibration drew, and to greedy answers without a repetition penalty. They cover an
answer's first max_new_tokens tokens, up to the first end-of-sequence token, or the whole answer if that field is
absent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import Corrupt

LOSS = "generation_differs"
# What a bound is about -> the manifest's key.
Setting = Literal["threshold", "margin"]
RISK_KEYS: Mapping[Setting, str] = {"threshold": "risk", "margin": "margin_risk"}
MAX_BOUNDS = 16
# The drafts of a chain that the certification takes into account. A worker drafts no more of them under policy relaxed.
CERTIFIED_DRAFTS = 8


@dataclass(frozen=True)
class RiskBound:
    """The output differs on at most a share `epsilon` of prompts at this threshold or margin and at all safer ones."""

    value: float
    epsilon: float


@dataclass(frozen=True)
class PublishedRisk:
    """`delta`: probability that the certification itself is wrong. `num_tokens`: the tokens of an answer that the
    bounds cover, or None for all. `kv_dtype` and `compute_dtype`: those in which the certified engine kept keys and
    values and multiplied; `device`: the type of its device. None if it is not known."""

    delta: float
    bounds: tuple[RiskBound, ...]
    num_tokens: int | None = None
    kv_dtype: str | None = None
    compute_dtype: str | None = None
    device: str | None = None
    setting: Setting = "threshold"

    @classmethod
    def of(cls, manifest: Mapping[str, Any], setting: Setting = "threshold") -> "PublishedRisk | None":
        """The risk in a manifest, or None if it has none.
        Raises `Corrupt` if it is not of the form in this module's docstring."""
        record = manifest.get(RISK_KEYS[setting])
        if record is None:
            return None
        try:
            bounds = tuple(RiskBound(_value(row[setting], setting), _share(row["epsilon"])) for row in record["bounds"])
            delta = _share(record["delta"])
            is_known = record["loss"] == LOSS
            num_tokens = record.get("max_new_tokens")
            engine = record.get("engine", {})
            kv_dtype, device = engine.get("dtype"), engine.get("device")
            # Older builds multiplied in the dtype of keys and values, and did not say so.
            compute_dtype = engine.get("compute_dtype", kv_dtype)
            if num_tokens is not None and (type(num_tokens) is not int or num_tokens < 1):
                raise ValueError(f"{num_tokens!r} is not a number of tokens")
            for name in (kv_dtype, compute_dtype, device):
                if name is not None and not isinstance(name, str):
                    raise ValueError(f"{name!r} is not the name of a dtype or device")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt("a field of the router's risk table is missing or not valid") from error
        if not is_known or not 1 <= len(bounds) <= MAX_BOUNDS:
            raise Corrupt("the router's risk table has an unknown loss, or not 1 to 16 bounds")
        return cls(delta, bounds, num_tokens, kv_dtype, compute_dtype, device, setting)

    def holds_in(self, kv_dtype: str, compute_dtype: str, device: str) -> bool:
        """Whether the bounds hold for an engine that keeps keys and values in `kv_dtype` and multiplies in
        `compute_dtype`, on this type of device.

        Rounded otherwise, answers may differ otherwise.
        Exits, too, keep their weights in other formats on other devices.
        """
        certified = (self.kv_dtype, self.compute_dtype, self.device)
        served = (kv_dtype, compute_dtype, device)
        return all(mine in (None, its) for mine, its in zip(certified, served, strict=True))

    def epsilon_at(self, value: float) -> float | None:
        """The smallest epsilon that holds at a request's threshold or margin; None if it is bolder than every certified
        one."""
        sign = 1 if self.setting == "threshold" else -1
        holding = [bound.epsilon for bound in self.bounds if sign * value >= sign * bound.value]
        return min(holding, default=None)


def _value(value: Any, setting: Setting) -> float:
    if setting == "threshold":
        return _share(value)
    number = float(value)
    if isinstance(value, bool) or not 0.0 < number < math.inf:
        raise ValueError(f"{value!r} is no margin")
    return number


def _share(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not (math.isfinite(number) and 0.0 < number < 1.0):
        raise ValueError(f"{value!r} is not in (0, 1)")
    return number
