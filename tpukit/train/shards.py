"""Tensors of which each rank writes its part, in files of torch.distributed.checkpoint (DCP)."""

import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tpukit.errors import JobError
from tpukit.io.files import sha256_of
from tpukit.io.process import output_sent_to

INDEX_FILE = ".metadata"
"""DCP's file that says where each part of a tensor lies."""
CLASSES = {
    metadata.__name__: {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    filesystem.__name__: {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(n for n, value in vars(torch).items() if type(value) is torch.dtype)},
}  # fmt: skip
"""All that an index consists of, by module."""
SUFFIX = ".distcp"
WRITING_TIMEOUT = timedelta(hours=2)
"""The longest that ranks wait for each other's shards to be written."""
Tensors = Mapping[str, Mapping[str, Tensor]]
"""By file (`model`) and name."""


def is_shard(name: str) -> bool:
    """Whether a file of a checkpoint holds, or describes, parts of tensors."""
    return name == INDEX_FILE or name.endswith(SUFFIX)


def group_of_writers() -> dist.ProcessGroup:
    """A group of all ranks whose messages do not meet those of the steps. Every rank calls it."""
    # Of DCP's own code.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", module=filesystem.__name__)
    with output_sent_to(os.devnull, 1):  # gloo logs each connection
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=WRITING_TIMEOUT)
        return group


def first_of_ranks(value: str | None, group: dist.ProcessGroup) -> str | None:
    """The first rank's that has a value; every rank calls it."""
    found: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return next((each for each in found if each is not None), None)


class _Writer(FileSystemWriter):
    """Sums each file where it was written; the main rank gets the sums."""

    def __init__(self, folder: Path, send: Callable[[Path], object] | None) -> None:
        super().__init__(folder)
        self.folder = folder
        self.send = send
        self.sums: dict[str, str] = {}
        self.missing: list[str] = []
        """Files that were sent nowhere, and are not here."""

    def storage_meta(self) -> metadata.StorageMeta:
        return metadata.StorageMeta()  # the same bytes from each run

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # DCP's makes the folder, which the first rank may be about to empty

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.folder.mkdir(parents=True, exist_ok=True)  # of another host
        written = super().write_data(plan, planner).value()
        for name in sorted({each.storage_data.relative_path for each in written}):
            digest = sha256_of(self.folder / name)
            is_sent = int(self.send is not None)
            written.append(WriteResult(metadata.MetadataIndex(name), is_sent, digest))
            if self.send is not None:
                self.send(self.folder / name)
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: metadata.Metadata, results: list[list[WriteResult]]) -> None:
        every = [each for of_rank in results for each in of_rank]
        sums = [each for each in every if isinstance(each.storage_data, str)]
        super().finish(metadata, [[e for e in every if not isinstance(e.storage_data, str)]])
        self.sums = {each.index.fqn: each.storage_data for each in sums}
        self.missing = [
            name
            for each in sums
            if not (each.size_in_bytes or (self.folder / (name := each.index.fqn)).exists())
        ]
        self.sums[INDEX_FILE] = sha256_of(self.folder / INDEX_FILE)


def write_shards(
    folder: Path,
    tensors: Tensors,
    group: dist.ProcessGroup,
    send: Callable[[Path], object] | None = None,
) -> dict[str, str]:
    """Writes the tensors that the ranks of a group hold together, each its own part of them.

    Every rank calls it. Returns the SHA-256 of each file, on the group's first rank. Raises what
    the first rank that failed raised, on every rank; JobError where the first one lacks a file.

    send: called with each file that this rank has written, before the first rank ends.
    """
    flat = {f"{file}/{name}": t for file, named in tensors.items() for name, t in named.items()}
    writer = _Writer(folder, send)
    try:
        save(
            flat, storage_writer=writer, process_group=group,
            planner=DefaultSavePlanner(flatten_state_dict=False),
        )  # fmt: skip
    except CheckpointException as failed:
        first, _ = failed.failures[min(failed.failures)]
        raise first from failed
    if writer.missing:
        raise JobError(
            f"The shards of a checkpoint lie on several hosts: {writer.missing[0]} is not in"
            f" {folder.parent} of the first one.",
            "Give --results-dir a folder that all hosts share.",
            id="checkpoint-write",
        )
    return writer.sums


class _Unpickler(pickle.Unpickler):
    """Reads DCP's index and runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not a part of an index")
        return super().find_class(module, name)


class Shards(FileSystemReader):
    """Reads such files: any rank alone, all of a tensor or its own part, however many wrote it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / INDEX_FILE).open("rb") as file:
            self._index: metadata.Metadata = _Unpickler(file).load()

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        return self._index

    def shapes(self, file: str) -> dict[str, Tensor]:
        """Its tensors without values, by name."""
        return {
            key.removeprefix(f"{file}/"): torch.empty(
                value.size, dtype=value.properties.dtype, device="meta"
            )
            for key, value in self._index.state_dict_metadata.items()
            if key.startswith(f"{file}/") and isinstance(value, metadata.TensorStorageMetadata)
        }

    def fill(self, file: str, targets: Mapping[str, Tensor]) -> None:
        """Reads into tensors on the host or a GPU; of a sharded one, this rank's part."""
        flat: dict[str, Any] = {f"{file}/{name}": t.detach() for name, t in targets.items()}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings(action="ignore"):  # that no rank is asked
            load(flat, storage_reader=self, planner=planner, no_dist=True)
