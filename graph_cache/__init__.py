"""CUDA-graph variants of any callable: captured, replayed, evicted.

A callable ``fn(**tensors) -> NamedTuple of tensors`` is registered with the layout of its inputs. ``warmup`` captures
one *variant* a bucket of rows; ``run`` copies a batch into the inputs of the smallest fitting variant, replays it and
copies the results out. A variant that is missing is never an error: a larger bucket, a callable that covers this one,
or the callable itself serves the batch, and the statistics say which and why.

Dims used in every docstring::

    R  rows of one batch                  B  bucket: the rows a variant was captured with, R <= B
    T  tail: the dimensions after dim 0   M  the largest bucket

Contract of a registered callable:

* it is called with keywords only and returns a NamedTuple of tensors whose dim 0 is the rows of its inputs;
* row i of its results depends on row i of its inputs alone, and on its own rows of ragged ones (``BufferSpec.times``),
  whatever the other rows hold;
* it writes none of its inputs, and what it sets up lazily is set up after two calls.

Memory: one input buffer ``[M, *T]`` an input name and one output buffer ``[M, *T]`` an output of a callable, shared by
all variants; captured intermediates share one graph pool. So runs are ordered by the stream they are issued on: use
one cache from one thread, and from one stream at a time (or order the streams with events).
"""

from graph_cache.buckets import BucketLadder
from graph_cache.buffers import BufferSpec
from graph_cache.cache import GraphCache
from graph_cache.capture import CaptureBackend, CudaBackend
from graph_cache.errors import CaptureError
from graph_cache.key import Binding, VariantKey
from graph_cache.statistics import CacheStatistics

__all__ = [
    "Binding",
    "BucketLadder",
    "BufferSpec",
    "CacheStatistics",
    "CaptureBackend",
    "CaptureError",
    "CudaBackend",
    "GraphCache",
    "VariantKey",
]
