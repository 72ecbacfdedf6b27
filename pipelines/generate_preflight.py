"""What a server has to prove before it answers rows, from the recipe and the first prompts."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq

from actors.config import AttachedServers
from actors.preflight import Admission, ProbePrompt
from pipelines.generate_worker import expectation_of, target_vocab_size
from pipelines.recipe import Recipe
from pipelines.response_row import decoder_of
from pipelines.template import load_tokenizer


def admission_of(recipe: Recipe, prompt_files: Iterable[Path]) -> Admission:
    """What every server is asked before it may answer rows: what it is, the first prompt of each
    of the files, and which texts it has for the profile's markers."""
    decode = decoder_of(load_tokenizer(recipe.target))
    profile, servers = recipe.target.profile, recipe.generate.servers
    return Admission(
        expectation_of(recipe),
        vocab_size=target_vocab_size(Path(recipe.target.path)),
        probes=tuple(
            ProbePrompt(tuple(_first_prompt(path)), profile.stop_token_ids) for path in prompt_files
        ),
        decode=decode,
        markers={decode([one]): one for one in profile.marker_ids.values()},
        gateway=isinstance(servers, AttachedServers) and servers.gateway,
    )


def _first_prompt(path: Path) -> list[int]:
    group = pq.ParquetFile(path).iter_batches(batch_size=1, columns=["prompt_ids"])
    ids: list[int] = next(group)["prompt_ids"][0].as_py()
    return ids
