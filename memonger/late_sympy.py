"""onnx-ir without sympy until a dimension is computed with symbols: importing sympy is a third of the time to start.

onnx-ir imports it at its start. While onnx-ir is imported, the modules of `LATE` are stood in for; each is imported
once something is read from it, by then or later. Who imports sympy elsewhere gets sympy itself.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

LATE = ("sympy", "onnx_ir._symbolic_shapes")
"""What onnx-ir reads only where it computes with symbols: sympy, and its own module that reads sympy at its start."""


def install() -> None:
    """Let the first import of onnx-ir in this process leave out `LATE`; nothing where it is imported already."""
    if "onnx_ir" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _StandIn(ModuleType):
    """Stands for the module of its name, and imports it when something is read from it."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # read while onnx-ir is still being imported
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "onnx_ir":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """The package's own loader, and the stand-ins around its work."""

    def __init__(self, own: Loader) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.own
        stand_ins = [_StandIn(name) for name in LATE if name not in sys.modules]
        sys.modules.update({one.__name__: one for one in stand_ins})
        try:
            self.own.exec_module(module)
        finally:
            for one in stand_ins:
                if sys.modules.get(one.__name__) is one:
                    del sys.modules[one.__name__]
