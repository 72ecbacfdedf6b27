"""Triton: SGLang's kernel modules import it; on a CPU none of them is launched."""

import importlib

from stand_in import Kernel, serve_submodules

__version__ = "3.0.0"


def jit(function=None, **options):
    return Kernel if function is None else Kernel(function)


def autotune(*args, **options):
    return lambda kernel: kernel


heuristics = autotune


class Config:
    def __init__(self, kwargs, num_warps=4, num_stages=2, **rest):
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


serve_submodules("triton", {"jit": jit})


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"triton.{name}")
