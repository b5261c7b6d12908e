"""onnx and onnx-ir without what they import at their start and a process that plans or runs doesn't use.

Importing sympy, which onnx-ir does, is a third of the time to start; the JSON and text forms of models, joining,
cutting and converting them, which onnx imports, are 3 MiB. While one of the two packages is imported, the modules of
`LATE` are stood in for; each is imported once something is read from it, by then or later. Who imports such a module
elsewhere gets the module itself.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # which would import half a MiB that nobody else needs
    from importlib.abc import Loader, MetaPathFinder
else:
    Loader = MetaPathFinder = object

LATE = {
    "onnx": (
        "google.protobuf.json_format", "google.protobuf.text_format", "onnx.compose", "onnx.gen_proto", "onnx.parser",
        "onnx.printer", "onnx.utils", "onnx.version_converter",
    ),
    "onnx_ir": ("onnx_ir._symbolic_shapes", "sympy"),
}  # fmt: skip
"""By package what it imports at its start and reads only later, if ever."""


def install() -> None:
    """Let the first import of each package in this process leave out its part of `LATE`."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _StandIn(ModuleType):
    """Stands for the module of its name, and imports it when something is read from it."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # read while the package is still being imported
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.waiting = LATE.keys() - sys.modules.keys()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        self.waiting -= {name}
        if not self.waiting:
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, LATE[name])
        return spec


class _Loader(Loader):
    """A package's own loader, and the stand-ins around its work."""

    def __init__(self, own: Loader, late: tuple[str, ...]) -> None:
        self.own, self.late = own, late

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.own
        stand_ins = [_StandIn(name) for name in self.late if name not in sys.modules]
        sys.modules.update({one.__name__: one for one in stand_ins})
        try:
            self.own.exec_module(module)
        finally:
            for one in stand_ins:
                if sys.modules.get(one.__name__) is one:
                    del sys.modules[one.__name__]
                package, _, part = one.__name__.rpartition(".")
                if package in sys.modules and not hasattr(sys.modules[package], part):
                    setattr(sys.modules[package], part, one)  # as importing it would have done
