"""A process group of one, as Ray Train would have made it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

_AS_RAY_TRAIN_SETS_IT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",  # the group exists already: nobody connects
}


@contextmanager
def one_rank() -> Iterator[None]:
    """The group stays until the process ends: DeepSpeed remembers it."""
    if not dist.is_initialized():
        store = dist.FileStore(tempfile.mkstemp()[1], 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over the same threads have the same bits
    try:
        with patch.dict(os.environ, _AS_RAY_TRAIN_SETS_IT):
            yield
    finally:
        torch.set_num_threads(threads)
