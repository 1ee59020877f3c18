"""CUDA graphs of any callable, one for each bucket of row counts: captured, replayed, evicted.

A callable ``fn(**tensors) -> NamedTuple of tensors`` is registered with the layout of its inputs. ``warmup`` captures
one *variant* for each bucket of rows; ``run`` copies a batch into the inputs of the smallest fitting variant, replays
it and copies the results out. A missing variant is never an error: a larger bucket, a callable that covers this one, or
the callable itself serves the batch, and the statistics say which and why. A caller that brings the same memory every
time says so by ``bind`` and ``bind_out``: variants captured afterwards work in place, and nothing is copied.

Dims used in every docstring::

    R  rows of one batch                  P  bucket: the rows a variant was captured with, R <= P
    T  tail: the dimensions after dim 0   M  the largest bucket

Contract of a registered callable:

* it is called with keywords only and returns a NamedTuple of tensors whose dim 0 is the rows of its inputs;
* row i of its results depends on row i of its inputs alone, and on its own rows of ragged ones (``BufferSpec.times``),
  whatever the other rows hold;
* it writes none of its inputs, and its lazy set-up is complete after two calls.

Memory: one input buffer ``[M, *T]`` for each input name that is not bound, ``times`` as many rows where a
``BufferSpec`` says so; one output buffer ``[M, *T]`` for each field of each layout of results; both are shared by all
callables and buckets, whose variants read and write the first rows. Captured intermediates share one graph pool, which
is about as large as the most that one variant holds at once: the largest bucket is captured first. So runs are ordered
by the stream they are issued on: use one cache from one thread, and from one stream at a time (or order the streams
with events).

Modules, from the entry point down::

    cache       GraphCache: register, bind, warmup, run, evict, statistics; LateCaptures
    routes      which variant serves a batch, and the counts of runs
    capture     captured callables, CaptureError; the CUDA backend that captures them
    buffers     inputs, outputs and bound tensors that graphs read and write; copies of several tensors in few launches
    mirror      numbers of the host: what changed goes to the device in one copy
    keys        buckets, bindings, keys of variants
    registry    callables and the layouts of their inputs, checks of a caller's tensors
"""

from graph_cache.buffers import copy_tensors
from graph_cache.cache import GraphCache, LateCaptures
from graph_cache.capture import CaptureBackend, CaptureError, CudaBackend
from graph_cache.keys import Binding, BucketLadder, VariantKey
from graph_cache.mirror import HostMirror, PinnedRing, part_of
from graph_cache.registry import BufferSpec, tensor_of
from graph_cache.routes import CacheStatistics

__all__ = [
    "Binding",
    "BucketLadder",
    "BufferSpec",
    "CacheStatistics",
    "CaptureBackend",
    "CaptureError",
    "CudaBackend",
    "GraphCache",
    "HostMirror",
    "LateCaptures",
    "PinnedRing",
    "VariantKey",
    "copy_tensors",
    "part_of",
    "tensor_of",
]
