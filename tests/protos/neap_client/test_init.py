"""The names of the package."""

import ast
import pydoc
import subprocess
import sys
from pathlib import Path

import neap_client


def test_a_star_import_and_help_have_every_name():
    names: dict[str, object] = {}
    exec("from neap_client import *", names)
    assert names.keys() - {"__builtins__"} == set(neap_client.__all__)
    page = pydoc.plain(pydoc.render_doc(neap_client))
    for name in neap_client.__all__:
        assert name in dir(neap_client)
        assert name in page
    assert "client.wait_ready()" in page


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(neap_client.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = [alias.asname for node in block.body for alias in node.names]  # type: ignore[attr-defined]
    assert sorted(seen) == sorted(neap_client.__all__)


def test_errors_alone_import_no_grpc():
    program = "import sys, neap_client; neap_client.errors.NeapError; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
