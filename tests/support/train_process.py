"""`python -m tests.support.train_process JOB.json STEP`: train in a process of its own.

At STEP, if it is not 0, the process kills itself with SIGKILL.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.one_rank import one_rank
from training.loop import TrainJob, train_rows


def main() -> None:
    job = TrainJob.model_validate_json(Path(sys.argv[1]).read_text())
    fatal = int(sys.argv[2])

    def on_step(step: int) -> None:
        if step == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    with one_rank():
        assert dist.get_world_size() == 1
        train_rows(job, rank=0, world=1, device=torch.device("cpu"), on_step=on_step)


if __name__ == "__main__":
    main()
