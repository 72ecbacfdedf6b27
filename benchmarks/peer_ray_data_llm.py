"""The peer of the same kind: ray.data.llm's HTTP request processor on the same prompts.

`python -m benchmarks.peer_ray_data_llm URL PROMPTS_FOLDER OUTPUT_FOLDER`: asks with the settings
that served it best here, and keeps ids and text as Parquet. The server's log says how fast it was.
Exit 3 where ray.data.llm cannot be imported.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.bare_loop import request_body

# One actor, whose batches are one request each, as many at once as there may be in flight: inside a
# batch it waits for one answer before it sends the next request.
_BATCH_ROWS = 1
NOT_INSTALLED = 3


def main(url: str, prompts: Path, output: Path, in_flight: int) -> None:
    """Ask for all prompts and write the answers."""
    os.environ["RAY_DATA_DEFAULT_ASYNC_BATCH_UDF_MAX_CONCURRENCY"] = str(in_flight)
    import ray
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=300_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    config = HttpRequestProcessorConfig(
        url=f"{url}/generate", batch_size=_BATCH_ROWS, concurrency=1, qps=None, max_retries=3
    )
    processor = build_processor(config, preprocess=_ask, postprocess=_keep)
    processor(ray.data.read_parquet(str(prompts))).write_parquet(str(output))
    ray.shutdown()


def _ask(row: dict[str, Any]) -> dict[str, Any]:
    ids = [int(one) for one in row["prompt_ids"]]
    return {"sample_id": row["sample_id"], "payload": request_body(row["sample_id"], ids)}


def _keep(row: dict[str, Any]) -> dict[str, Any]:
    reply = row["http_response"]
    return {
        "sample_id": row["sample_id"],
        "output_ids": reply["output_ids"],
        "text": reply["text"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_ray_data_llm")
    parser.add_argument("url")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("in_flight", type=int)
    given = parser.parse_args()
    try:
        main(given.url, given.prompts, given.output, given.in_flight)
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(NOT_INSTALLED) from error
