"""torchvision: SGLang imports it for image models, which are not served here."""

import enum
import importlib

from stand_in import serve_submodules

__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


serve_submodules("torchvision", {"InterpolationMode": InterpolationMode})


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"torchvision.{name}")
