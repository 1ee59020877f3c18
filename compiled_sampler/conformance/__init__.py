"""The conformance suite: is a sampler, any sampler, right and deterministic?

An adapter wraps the sampler and declares its choices (``Semantics``); questions on its law, determinism, randomness,
verification and robustness are asked of it, each with a bound on its false alarms and the smallest fault it finds.
``python -m compiled_sampler.conformance --target package.module:adapter`` prints the answers.

To read: ``adapter`` (what is asked), ``evidence`` (the law, and tests of it), ``bench`` and ``rows`` (what is drawn
with), ``question``, then ``questions``; ``suite`` asks them all. ``ours`` and ``peers`` are adapters.
"""

try:
    import rich  # noqa: F401
    import scipy  # noqa: F401
except ImportError as error:
    raise ImportError(f"{error}: pip install 'compiled-sampler[conformance]'") from error

from compiled_sampler.conformance.adapter import Adapter, Drafted, Params, Semantics, Target, Verified
from compiled_sampler.conformance.bench import FULL, QUICK, Bench, Effort
from compiled_sampler.conformance.question import Outcome, Question, Result, ask
from compiled_sampler.conformance.suite import chosen, run

__all__ = [
    "FULL",
    "QUICK",
    "Adapter",
    "Bench",
    "Drafted",
    "Effort",
    "Outcome",
    "Params",
    "Question",
    "Result",
    "Semantics",
    "Target",
    "Verified",
    "ask",
    "chosen",
    "run",
]
