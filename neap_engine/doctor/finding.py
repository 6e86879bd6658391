"""The result of a check."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.errors import NeapError

Status = Literal["ok", "off", "broken"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    `status` is "ok", "off" for what does not work but is not needed by the settings, or "broken". `detail` is one line
    for people, and `advice` what to do about it. `facts` are the same figures for programs; their values can be written
    as JSON.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[], Finding]

    def finding(self) -> Finding:
        """Run the check. An exception is a finding, too."""
        try:
            return self.run()
        except NeapError as error:
            return Finding(self.name, "broken", f"{error.message} [{error.reason}]{_cause(error)}")
        except Exception as error:
            return Finding(self.name, "broken", f"{type(error).__name__}: {error}")


def missing(name: str, is_needed: bool, detail: str, advice: str = "") -> Finding:
    """Return the finding for what does not work: broken if the settings need it."""
    return Finding(name, "broken" if is_needed else "off", detail, advice)


def _cause(error: NeapError) -> str:
    # neap's messages leave out the texts of other libraries, because clients see them. Here the operator does.
    cause = error.__cause__
    if cause is None:
        return ""
    return f" ({type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]})"
