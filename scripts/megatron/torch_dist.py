"""Reads the tensors of a checkpoint in the format torch_dist."""

import io
import pathlib
import sys

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata


def fail(text):
    sys.exit(f"megatron_checkpoint: {text}")


class Checkpoint:
    """The tensors of a folder, each read on its own."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        marker = self.folder / "latest_checkpointed_iteration.txt"
        if marker.exists():
            self.folder /= f"iter_{int(marker.read_text()):07d}"
        if not (self.folder / ".metadata").exists():
            fail(f"'{self.folder}': no file .metadata, as a checkpoint in the format torch_dist has")
        metadata = FileSystemReader(self.folder).read_metadata()
        self.places = metadata.storage_data
        self.tensors = {key: value for key, value in metadata.state_dict_metadata.items()
                        if isinstance(value, TensorStorageMetadata)
                        and not key.startswith(("optimizer.", "chained_"))}
        self.read_keys = set()

    def arguments(self):
        common = torch.load(self.folder / "common.pt", map_location="cpu", weights_only=False)
        return common.get("args")

    def shape(self, key):
        return list(self.tensors[key].size)

    def read(self, key, first=None):
        """Reads the tensor, or element `first` of its first dimension."""
        self.read_keys.add(key)
        entry = self.tensors[key]
        size = list(entry.size)
        begin, end = (0, size[0]) if first is None else (first, first + 1)
        whole = torch.empty([end - begin] + size[1:], dtype=entry.properties.dtype)
        found = 0
        for chunk in entry.chunks:
            start, stop = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
            low, high = max(start, begin), min(stop, end)
            if low >= high:
                continue
            part = self._load(key, chunk)[low - start:high - start]
            where = [slice(low - begin, high - begin)] + [
                slice(offset, offset + length)
                for offset, length in zip(chunk.offsets[1:], chunk.sizes[1:])]
            whole[tuple(where)] = part
            found += part.numel()
        if found != whole.numel():
            fail(f"'{self.folder}': tensor '{key}': found {found} of {whole.numel()} elements")
        return whole if first is None else whole[0]

    def _load(self, key, chunk):
        place = self.places[MetadataIndex(key, chunk.offsets)]
        with open(self.folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        return torch.load(data, map_location="cpu", weights_only=True).reshape(list(chunk.sizes))
