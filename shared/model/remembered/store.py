"""The folder with what starts of a service remember: one folder per entry, named by its key.

    KEY/facts.json      {"digest": .., "key": .., "facts": .., "packed": ..}: facts by name, and the table of the file
                        below
    KEY/packed          matrices packed for the kernels
    contents/NAME.json  the digest of a model's files, by their places

Files are written beside their places and renamed, so a reader sees a whole file or none, and several processes may
write the same. `facts.json` is written last. A damaged entry is removed. If the folder cannot be read or written, a
start works without it and says so once.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import structlog

from shared.files import mark_used, write_atomically
from shared.model.remembered.facts import Facts
from shared.model.remembered.key import State, build_of, content_of, files_of, is_settled, key_of, sample_of, state_of
from shared.model.remembered.packed import MappedFile, PackedMatrices, Table

log = structlog.get_logger("neap.model")

_FACTS, _PACKED, _CONTENTS = "facts.json", "packed", "contents"
# What a killed process has left is removed after this time.
_ABANDONED_S = 3600.0


class StartEntry:
    """What is known of one model, loaded in one way. `facts` and `matrices` are empty if nothing is known yet.
    `find_folder`: where it is, which may take reading the model's files. Raises what that raises."""

    def __init__(
        self, store: "StartStore", find_folder: Callable[[], Path], files: tuple[Path, ...], state: State
    ) -> None:
        self._store, self._find_folder, self._files, self._state = store, find_folder, files, state
        self._table: Table = {}
        self._written: dict[str, Any] = {}
        self._mapped: MappedFile | None = None
        self._unwritten: PackedMatrices | None = None
        self.facts = Facts(keep=self.keep)
        self.matrices = PackedMatrices()
        # Where nothing is remembered, the digest of the model's files can wait until something is.
        if is_settled(state) and store.is_empty():
            self._checked = None
            return
        _ = self._folder
        try:
            self._read()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._discard(error)
        self._checked = self._mapped.checked() if self._mapped else None

    @cached_property
    def _folder(self) -> Path:
        return self._find_folder()

    def _read(self) -> None:
        record = json.loads((self._folder / _FACTS).read_bytes())
        if record.pop("digest") != _digest(record):
            raise ValueError("facts.json is damaged")
        if record["key"] != self._folder.name:
            raise ValueError("it belongs to something else")
        table = record["packed"]
        if table:
            self._mapped = MappedFile(self._folder / _PACKED, table)
            self.matrices = PackedMatrices(self._mapped.matrices)
        self._table, self.facts = table, Facts(record["facts"], self.keep)
        self._written = self.facts.known()
        with suppress(OSError):
            mark_used(self._folder / _FACTS)

    def check(self) -> None:
        """Waits until the mapped matrices are checked. If they are damaged, removes the entry and forgets it. To be
        called before one of them is taken."""
        if self._checked is not None and not self._checked.result():
            self._discard(ValueError("packed is damaged"))
        self._checked = None

    def _discard(self, why: Exception) -> None:
        log.warning(
            "what an earlier start remembered is damaged; it is made anew", folder=str(self._folder), reason=str(why)
        )
        shutil.rmtree(self._folder, ignore_errors=True)
        self._table, self._written, self._mapped = {}, {}, None
        self.facts.forget()
        self.matrices.forget()

    def keep_matrices(self) -> None:
        """Has `keep` write the packed matrices, if this start has made them. To be called before they are dropped."""
        matrices, self.matrices = self.matrices, PackedMatrices()  # the model has them
        if self._mapped is None and 0 < matrices.num_bytes <= self._store.max_bytes:
            self._unwritten = matrices

    def _write_matrices(self, matrices: PackedMatrices) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f"{uuid.uuid4().hex}.part"
        try:
            with part.open("x+b") as file:
                table = matrices.write(file)
                file.flush()
                os.fsync(file.fileno())
                part.rename(self._folder / _PACKED)
                self._table = table
                try:
                    matrices.map(file.fileno(), table)
                except OSError as error:
                    log.warning("packed matrices stay in memory of this process alone", errno=error.errno)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def keep(self) -> None:
        """Writes what this start has made and found out, for the next one. A disk takes seconds for the matrices."""
        facts, matrices, self._unwritten = self.facts.known(), self._unwritten, None
        if (facts == self._written and matrices is None) or not self._is_unchanged():
            return
        if matrices is not None:
            self._store.attempt(partial(self._write_matrices, matrices))
        self._store.attempt(partial(self._write_facts, facts))

    def _write_facts(self, facts: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        record = {"key": self._folder.name, "facts": facts, "packed": self._table}
        data = json.dumps(record | {"digest": _digest(record)}).encode()
        write_atomically(self._folder / _FACTS, data)
        self._written = facts
        mark_used(self._folder / _FACTS)
        self._store.make_room(self._folder)

    def _is_unchanged(self) -> bool:
        """Whether what was loaded is what the key stands for."""
        try:
            _ = self._folder  # which may read the files
            return state_of(self._files) == self._state
        except OSError:
            return False


class StartStore:
    """The entries in `folder`, of at most `max_bytes` bytes together.
    The least recently used ones are removed first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self.max_bytes = folder, max_bytes
        self._has_failed = False

    def entry(self, source: str | Path, options: Mapping[str, Any]) -> StartEntry | None:
        """What is known of the model at `source`, loaded with `options`, by this build on this machine. None if its
        files cannot be read, or are not in a folder."""
        files = files_of(source)
        try:
            state = state_of(files)
            build = build_of()

            def find_folder() -> Path:
                return self._folder / key_of(self._content(files, state), options, build)

            return StartEntry(self, find_folder, files, state) if files else None
        except OSError:
            return None  # loading it says why

    def is_empty(self) -> bool:
        """Whether there is no entry."""
        return next(self._folder.glob(f"*/{_FACTS}"), None) is None

    def _content(self, files: tuple[Path, ...], state: State) -> str:
        places = json.dumps([file[0] for file in state])
        path = self._folder / _CONTENTS / f"{hashlib.sha256(places.encode()).hexdigest()}.json"
        seen = {"state": state, "sample": sample_of(files)}
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_bytes())
            if record.pop("digest") == _digest(record) and record["seen"] == seen:
                return str(record["content"])
        content = content_of(files)
        if is_settled(state) and state_of(files) == state:
            record = {"seen": seen, "content": content}
            self.attempt(lambda: self._write_content(path, record))
        return content

    def _write_content(self, path: Path, record: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record | {"digest": _digest(record)}).encode())

    def attempt(self, write: Callable[[], None]) -> None:
        """Calls `write`. If the disk refuses, says so once, and the service goes on."""
        try:
            write()
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "nothing is remembered for the next start: the folder cannot be written",
                    folder=str(self._folder),
                    errno=error.errno,
                )
            self._has_failed = True

    def make_room(self, latest: Path) -> None:
        """Removes entries until the others fit, but never `latest`, and what a killed process has left."""
        entries = []
        for folder in self._folder.iterdir():
            with suppress(OSError):
                for part in folder.glob("*.part"):
                    if time.time() - part.stat().st_mtime > _ABANDONED_S:
                        part.unlink()
                if folder.name != _CONTENTS:
                    used = (folder / _FACTS).stat().st_mtime_ns if (folder / _FACTS).exists() else 0
                    entries.append((used, sum(p.stat().st_size for p in folder.iterdir()), folder))
        total = sum(size for _, size, _ in entries)
        for _, size, folder in sorted(entries):
            if total <= self.max_bytes:
                return
            if folder != latest:
                shutil.rmtree(folder, ignore_errors=True)
                total -= size


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
