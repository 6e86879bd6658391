"""The names of the library, which are loaded when one of them is used."""

import pydoc
import subprocess
import sys

import neap_engine
from neap_engine import face


def test_the_import_loads_nothing_and_a_name_all_of_it():
    program = (
        "import sys, neap_engine; before = 'torch' in sys.modules;"
        "neap_engine.NeapError; print(before, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False True\n", done.stderr


def test_a_star_import_and_help_have_every_name():
    names: dict[str, object] = {}
    exec("from neap_engine import *", names)
    assert names.keys() - {"__builtins__"} == set(face.__all__) <= set(dir(neap_engine))
    page = pydoc.plain(pydoc.render_doc(neap_engine))
    assert not [name for name in face.__all__ if name not in page]


def test_a_name_that_there_is_not():
    assert not hasattr(neap_engine, "generate")
