"""Data on this machine: copies of addresses, and data sets of the Hugging Face hub by name
(`hf://OWNER/NAME`, `hf://OWNER/NAME/CONFIG`)."""

import re
from pathlib import Path

from tpukit.errors import DataError
from tpukit.io.files import replacing_folder
from tpukit.io.folders import cache_folder
from tpukit.io.lock import exclusive
from tpukit.io.mirror import local_copy
from tpukit.io.parquet import merge_parquet, pyarrow_of

CONVERTED = "refs/convert/parquet"
"""The branch of a data set on which the hub keeps it as CONFIG/SPLIT/NUMBER.parquet."""
SECONDS_TO_ANSWER = 10.0
"""Of the hub's server."""
NAME = re.compile(r"hf:/+(?:datasets/)?([\w.-]+/[\w.-]+)(?:/([\w.-]+))?/?")


def local_data(path: str | Path) -> Path:
    """A data path on this machine: the path itself, or a folder with a data set of the hub, where
    each split is a table (`train.parquet`). Raises `DataError`."""
    found = NAME.fullmatch(str(path))
    if re.fullmatch(r"hf:/+[^/]*", str(path)):
        raise DataError(f"{path}: not a data set's name.", "Give hf://OWNER/NAME or .../CONFIG.")
    if found is None:
        return local_copy(path)
    pyarrow_of(str(path))
    name, config = found.groups()
    return tables_of(_download(name), name, config)


def is_hub_data(path: str | Path) -> bool:
    """Whether a path names a data set of the hub."""
    return NAME.fullmatch(str(path)) is not None


def is_hub_silent() -> bool:
    """Whether the hub's server gives no answer in `SECONDS_TO_ANSWER`: its client would ask again
    for minutes, for what its cache has too. Give it `local_files_only=is_hub_silent()`."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False  # its client asks nobody
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except Exception:  # those of the session's own library
        return True
    return False


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, repo_type="dataset", revision=CONVERTED, allow_patterns="*.parquet",
                local_files_only=is_hub_silent(),
            )
        )  # fmt: skip
    except Exception as error:
        raise DataError(
            f"hf://{name}: it could not be downloaded from the Hub ({type(error).__name__}).",
            "Check the name (OWNER/NAME); a private or gated one needs HF_TOKEN. Without a network"
            " bring its files along and give their folder.",
        ) from error


def tables_of(snapshot: Path, name: str, config: str | None) -> Path:
    """A folder with a table for each split of one configuration, kept in the cache."""
    known = sorted(path.name for path in snapshot.iterdir() if path.is_dir())
    chosen = config or ("default" if "default" in known else known[0] if len(known) == 1 else "")
    if chosen not in known:
        raise DataError(
            f"hf://{name} has the configurations {', '.join(known)}.",
            f"Name one: hf://{name}/{known[0] if known else 'CONFIG'}.",
        )
    folder = cache_folder() / "hub" / "--".join((*name.split("/"), chosen, snapshot.name[:12]))
    with exclusive(folder.with_suffix(".lock"), wait=True):
        if not folder.is_dir():
            with replacing_folder(folder) as made:
                for split in sorted((snapshot / chosen).iterdir()):
                    # Of sets above 5 GB the hub converts the beginning.
                    table = made / f"{split.name.removeprefix('partial-')}.parquet"
                    merge_parquet(sorted(split.glob("*.parquet")), table)
    return folder
