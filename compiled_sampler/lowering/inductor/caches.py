"""Where Inductor and Triton keep what they compile, and whether they may; on an unknown torch nothing is kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from compiled_sampler.lowering.inductor.versions import is_known


def folder(options: dict[str, Any]) -> Path | None:
    """Inductor's cache directory; None where its caches are turned off.

    Args:
        options: of one compilation.
    """
    if not is_known():
        return None
    import torch._inductor.config as config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    allowed = options.get("fx_graph_cache", config.fx_graph_cache)
    return Path(cache_dir()) if allowed and not config.force_disable_caches else None


def settings() -> list[tuple[str, Any]]:
    """Everything set in Inductor that its code depends on, by name."""
    import torch._inductor.config as config

    return sorted(config.save_config_portable().items())


def set_up_triton(device: torch.device) -> None:
    """Let Triton assemble and keep hand-written kernels as Inductor does its own, from the first one on.

    Inductor asks for both by environment variables, but not before it needs them; kernels launched earlier would lie in
    another directory, or be the work of another assembler, and the next process would compile them again. Worse, Triton
    asks the assembler for its version once a process, and looks for all kernels under that: Inductor's own, assembled
    by other processes, would not be found any more.
    """
    if device.type == "cuda" and is_known():
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))
        _set_triton_ptxas_path()
