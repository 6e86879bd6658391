"""Where settings of the services and of the gateway come from. Only this module reads the environment for them.

Every field has a variable `NEAP_<NAME>`. The listen addresses are `NEAP_WORKER_LISTEN` and `NEAP_CALIBRATOR_LISTEN`
(and `NEAP_WORKER_HEALTH_LISTEN`, `NEAP_CALIBRATOR_HEALTH_LISTEN`, `NEAP_CALIBRATOR_METRICS_LISTEN`), so that both
services can run from one environment. Variables of the gateway's own settings begin with `NEAP_GATEWAY_`. Lists are
comma-separated in variables; their flags are repeated. Flags win over variables, variables over defaults. A service
does not start if a variable NEAP_.. is set that nothing reads, because a misspelt name would leave a setting at its
default.

`description` of a field is its help text and its entry in the page of settings (`make docs`): it gives the unit and the
meaning of the default. `shared.settings_flags` makes the flags.

Whether traces are exported is decided here, from OpenTelemetry's own variables.
The SDK reads its other variables itself.
"""

import argparse
import difflib
import os
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from shared.errors import InvalidInput
from shared.gateway_settings import GatewaySettings
from shared.process_settings import ProcessSettings
from shared.security_settings import ClientSettings
from shared.service_settings import CalibratorSettings, WorkerSettings
from shared.settings_flags import add_flags

PREFIX = "NEAP_"
# Variables that the command line, the build and the tests read.
_OTHER_VARIABLES = frozenset({"NEAP_TRACEBACK", "NEAP_BUILD_CUDA", "NEAP_FUZZ_S", "NEAP_FUZZ_SEED"})
# Kubernetes sets these in every pod for each Service whose name begins with "neap-" (NEAP_WORKER_SERVICE_HOST,
# NEAP_WORKER_PORT, ..).
_SERVICE_LINK = re.compile(
    r"NEAP_\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)

B = TypeVar("B", bound=BaseSettings)
S = TypeVar("S", bound=ProcessSettings)


def settings_from_command_line(kind: type[S], program: str, argv: Sequence[str] | None = None) -> S:
    """Build settings from flags, then environment variables, then defaults.
    Exits with a usage text for flags that do not parse.

    Raises InvalidInput (reason BAD_CONFIGURATION) for values that are out of range, and for a variable NEAP_.. that
    nothing reads.
    """
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    add_flags(parser, kind)
    flags = vars(parser.parse_args(argv))
    if problems := unknown_variables():
        raise InvalidInput("; ".join(problems), reason="BAD_CONFIGURATION")
    return make_settings(kind, **flags)


def known_variables() -> frozenset[str]:
    """Every variable NEAP_.. that a service, a client, the build or a test reads."""
    names = set(_OTHER_VARIABLES)
    for kind in (WorkerSettings, CalibratorSettings, GatewaySettings, ClientSettings):
        for name, field in kind.model_fields.items():
            alias: Any = field.validation_alias or kind.model_config["env_prefix"] + name
            names |= {str(choice) for choice in getattr(alias, "choices", [alias])}
    return frozenset(name.upper() for name in names if name.upper().startswith(PREFIX))


def unknown_variables() -> list[str]:
    """Return a sentence for each variable NEAP_.. that nothing reads, with the most similar known name.
    Values are never shown."""
    known = known_variables()
    problems = []
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper in known or _SERVICE_LINK.fullmatch(upper):
            continue
        ends = sorted(other.removeprefix(PREFIX) for other in known)
        near = difflib.get_close_matches(upper.removeprefix(PREFIX), ends, n=1)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
        problems.append(f"the variable {name} is not known{hint}")
    return problems


def make_settings(kind: type[B], **values: Any) -> B:
    """Build `kind` from keyword values that are not None, then environment variables, then defaults.
    Raises InvalidInput (reason BAD_CONFIGURATION)."""
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg']}" for problem in error.errors()
        )
        raise InvalidInput(problems, reason="BAD_CONFIGURATION") from error
