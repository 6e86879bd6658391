"""What a published manifest says about the text of a calibration: digests and counts, so that whoever has the text can
recognise it.

Everybody who may generate may read a manifest, and it stays for ever. So it has neither prompts nor paths.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calibrator_service.calibration.spec import AnswerFile, CalibrationSpec, Source, TextFile
from shared.digests import PREFIX, digest_of
from shared.errors import NotFound

_PRIVATE = frozenset({"prompts", "path", "public_only"})


def source_record(source: Source) -> dict[str, Any]:
    """The record of a source. A file is read for its digest. Raises NotFound (FILE_NOT_FOUND), OSError."""
    record = {"kind": type(source).__name__, **without_texts(asdict(source))}
    if isinstance(source, TextFile | AnswerFile):
        path = Path(source.path)
        try:
            with path.open("rb") as file:
                digest = PREFIX + hashlib.file_digest(file, "sha256").hexdigest()
                record |= {"digest": digest, "size_bytes": file.tell()}
        except (FileNotFoundError, IsADirectoryError) as error:
            raise NotFound(f"there is no file {path}", reason="FILE_NOT_FOUND") from error
    return record


def published_spec(spec: CalibrationSpec, source: Mapping[str, Any]) -> dict[str, Any]:
    """The spec as a manifest has it, without the model's id, which has its own place.
    `source`: the record of its source."""
    record = {**asdict(spec), "source": dict(source)}
    del record["model_id"]
    return record


def without_texts(source: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a source, with a digest and a count in place of its prompts, and without its path."""
    shown = {name: value for name, value in source.items() if name not in _PRIVATE}
    if prompts := source.get("prompts"):
        shown |= {"digest": prompts_digest(prompts), "num_prompts": len(prompts)}
    return shown


def prompts_digest(prompts: Sequence[str]) -> str:
    """The digest of the prompts, in their order, as a JSON list without spaces and with ASCII characters
    only."""
    encoded = json.dumps(list(prompts), separators=(",", ":")).encode()
    return digest_of(encoded)
