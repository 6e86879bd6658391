"""Prints docs/reference.md, which `make docs` writes."""

import sys

from docs.generators.protos import file_section, proto_files
from docs.generators.reasons import Reason, collect_reasons

PREFACE = """# Reference

This page is made from the protos and the source by `make docs`.

- RPCs, messages and fields of each proto package, with the roles of the tokens that may call an RPC: below.
- [Reasons of errors](#reasons-of-errors).
- Settings: [settings.md](settings.md), made in the same way.
- Metrics: [metrics.md](metrics.md), which a test compares with what the services export.
- HTTP: [openai.md](openai.md).
"""

REASONS = """## Reasons of errors

The `reason` of an ErrorInfo (domain `neap`), of a failed job, and of the gateway's errors. Messages are for people and
may change; … stands for what a message fills in. A reason that begins with `GRPC_` and ends in the name of a code is
the client's, for a failure that gRPC itself reported.

| reason | code | messages | raised in |
|---|---|---|---|"""


def reference_page() -> str:
    """Return the page in Markdown."""
    sections = [file_section(file) for file in proto_files()]
    rows = [_row(name, reason) for name, reason in collect_reasons().items()]
    return "\n".join([PREFACE, *sections, REASONS, *rows]) + "\n"


def _row(name: str, reason: Reason) -> str:
    messages = "<br>".join(sorted(reason.messages)).replace("|", "\\|").replace("`", "")
    codes = ", ".join(sorted(reason.codes))
    modules = ", ".join(f"`{module}`" for module in sorted(reason.modules))
    return f"| `{name}` | {codes} | {messages} | {modules} |"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
