"""Makes a package importable that this machine lacks: any name can be imported, none can be used.

A name that is used as a kernel raises; nothing here computes anything in silence.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


class Absent:
    """Any class or function of an absent package: fit for annotations, decorators and bases."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()

    def __init__(self, *args: Any, **options: Any) -> None:
        """A class may be built (a pipeline of image transforms); what it does is absent."""


def refuses(name: str) -> Callable[..., Any]:
    """A function that can be imported and not called."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError(f"{name} was called: this server has no such kernel (CPU stand-in)")

    return refuse


class Kernel:
    """What a decorator for kernels returns: launching it is an error."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.__module__ = function.__module__

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Launch it."""
        return refuses(f"{self.__module__}.{self.__name__}")()

    run = warmup = __call__

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        return self.__call__


class _Module(types.ModuleType):
    """A submodule whose names appear as they are asked for."""

    def __init__(self, name: str, names: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._names = names
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._names[name] if name in self._names else type(name, (Absent,), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str, names: Mapping[str, Any]) -> None:
        self._prefix, self._names = f"{package}.", names

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name, self._names)

    def exec_module(self, module: types.ModuleType) -> None:
        """Its names appear when they are asked for."""


def serve_submodules(package: str, names: Mapping[str, Any]) -> None:
    """Let any `import package.x.y` succeed; `names` are the ones that need to be something."""
    sys.meta_path.insert(0, _Finder(package, names))
