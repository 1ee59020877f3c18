"""The tensors of a model in a safetensors file, read and written without that library.

The format: eight bytes with the length of a header, a JSON header that says dtype, shape and place of each tensor, and
the numbers one after the other, little-endian.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
_LENGTH_BYTES, _ALIGNMENT = 8, 8


def write_bfloat16(path: Path, weights: Weights) -> None:
    """Store tensors, rounded to bfloat16.

    Args:
        path: of the file.
        weights: floating-point tensors by name.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    content = bytearray()
    for name, tensor in weights.items():
        numbers = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        offsets = [len(content), len(content) + len(numbers)]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        content += numbers
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    path.write_bytes(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded + bytes(content))


def read_bfloat16(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a file by name, converted from bfloat16.

    Args:
        path: of the file.
        dtype: of the result, wide enough to hold every bfloat16: float32 or float64.

    Raises:
        ValueError: a tensor of another dtype.
    """
    content = bytearray(path.read_bytes())
    begin = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = json.loads(content[_LENGTH_BYTES:begin])
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path.name} must hold bfloat16 tensors, got {entry['dtype']} for {name}")
        first, last = (begin + offset for offset in entry["data_offsets"])
        numbers = torch.frombuffer(content[first:last], dtype=torch.bfloat16)
        found[name] = numbers.view(entry["shape"]).to(dtype)
    return found
