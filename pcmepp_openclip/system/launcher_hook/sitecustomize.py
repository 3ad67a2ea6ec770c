"""Registers the plugin when, and only when, a program imports open_clip. Put on PYTHONPATH by `launcher.py`.

Python imports one `sitecustomize` at its start; if the environment has one of its own, it is run too.
"""

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterOpenClip:
    """A finder that adds `import pcmepp_openclip` to the end of open_clip's own import."""

    def __init__(self):
        self.asking = False

    def find_spec(self, name, path=None, target=None):
        if name != "open_clip" or self.asking:
            return None
        self.asking = True  # the other finders answer
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            stock = spec.loader.exec_module

            def exec_module(module):
                stock(module)
                importlib.import_module("pcmepp_openclip")

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterOpenClip())
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
_this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401  the environment's own
except ImportError as error:
    sys.modules["sitecustomize"] = _this
    if error.name != "sitecustomize":  # there is one, and it is broken: Python reports that
        raise
