"""SGLang's own kernels: the published wheel holds CUDA code only, and a plain CPU path needs none.

`torch.ops.sgl_kernel` stays empty on purpose: what SGLang finds there it takes for the AMX build.
"""

from stand_in import refuses

__version__ = "0.0.0+cpu"


def __getattr__(name: str):
    # The operators of a CPU build are imported by name; whatever else is missing SGLang bears.
    if name.startswith("__") or not name.endswith("_cpu"):
        raise AttributeError(name)
    return refuses(f"sgl_kernel.{name}")
