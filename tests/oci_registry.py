"""Debian's docker-registry on loopback, over a folder."""

import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.servers import Server, free_ports

PROGRAM = "docker-registry"
CONFIGURATION = """version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {folder}/objects}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""
# The user "ann" with the password "secret", by bcrypt.
PASSWORDS = "ann:$2b$05$wsZxHTH4ubIlWQ5JgOag8uDPdV/shj7W1HiYaVygtg6L3jk9Oa/XC\n"
AUTHENTICATION = "auth: {{htpasswd: {{realm: neap, path: {folder}/passwords}}}}\n"


class OciRegistry(Server):
    """With `asks`, only the user "ann" may read and write, by the password "secret"."""

    def __init__(self, folder: Path, *, asks: bool = False) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)
        text = CONFIGURATION + AUTHENTICATION * asks
        (folder / "passwords").write_text(PASSWORDS)
        (folder / "config.yml").write_text(text.format(folder=folder, port=self.port))

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        program = shutil.which(PROGRAM)
        if program is None:
            pytest.skip(f"no {PROGRAM}: it is in Debian's package of that name and in no package of PyPI")
        return [program, "serve", str(self.folder / "config.yml")]

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.host}/v2/", timeout=5):
                return True
        except urllib.error.HTTPError as error:
            return error.code == 401
        except OSError:
            return False

    def blob(self, digest: str) -> Path:
        """Where the bytes of a digest are."""
        hexadecimal = digest.removeprefix("sha256:")
        return self.folder / "objects/docker/registry/v2/blobs/sha256" / hexadecimal[:2] / hexadecimal / "data"
