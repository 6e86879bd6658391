"""The names of the library, which are loaded when one of them is used (test_threads.py)."""

import pydoc

import neap_engine
from neap_engine import face


def test_a_star_import_and_help_have_every_name():
    names: dict[str, object] = {}
    exec("from neap_engine import *", names)
    assert names.keys() - {"__builtins__"} == set(face.__all__) <= set(dir(neap_engine))
    page = pydoc.plain(pydoc.render_doc(neap_engine))
    assert not [name for name in face.__all__ if name not in page]


def test_a_name_that_there_is_not():
    assert not hasattr(neap_engine, "generate")
