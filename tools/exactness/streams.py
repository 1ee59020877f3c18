"""Do verified drafts leave the stream alone under ``match``, and is every verification the same bits on every path?

    python -m tools.exactness.streams [--requests 100000] [--control] [--json FILE]

Requests have 0 to 8 drafts from one of four drafters: the target itself, random ids (some no token), the argmax, and a
drafter with other logits that races on the target's noise. Under ``match`` the tokens of eager torch on the CPU are
compared with those of the plain sampler, row after row. Under every rule each path is compared with eager torch on the
CPU: without CUDA, eager torch in the mode that covers everything, and compiled stages; with CUDA, eager torch, replayed
variants of modes that cover the one asked for, and an outer graph. Rows are those of ``exactness.determinism``. The
exit status is 1 when anything differs. With ``--control`` the drafts differ on the reference side, and the exit status
is 1 unless every path then does.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from compiled_sampler import Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.modes import Verification
from tools.exactness.comparison import reported
from tools.exactness.drafted_batches import job, stream
from tools.exactness.hard_rows import mixed_requests
from tools.exactness.processes import in_processes
from tools.exactness.verification_paths import BATCH, NUM_REQUESTS, RULES, Job, V, direct, paths_of

SHARE_OF_MATCH = 10
"""Batches under ``match`` for each batch under another rule, whose stages take longer."""
STREAM = "plain sampler, row after row"


class Reference(NamedTuple):
    """A batch and what eager torch on the CPU makes of it."""

    mode: str
    work: Job
    wanted: dict[Verification, VerifyOutputs]
    """By the rules that take this batch."""
    plain: VerifyOutputs
    """The ``stream``."""


def num_mismatches(wanted: VerifyOutputs, found: VerifyOutputs) -> int:
    """Requests of which any field differs."""
    wrong = torch.zeros(len(wanted.status), dtype=torch.bool)
    for want, have in zip(tensors_of(wanted), tensors_of(found), strict=True):
        wrong |= (want != have).view(len(wrong), -1).any(-1)
    return int(wrong.sum())


@functools.cache
def _eager() -> tuple[Sampler, list[SamplingParams]]:
    """A sampler of this process, and the requests that it holds."""
    requests = mixed_requests(V, NUM_REQUESTS, seed=V)
    sampler = Sampler(V, NUM_REQUESTS, backend="eager")
    for request in requests:
        sampler.add_request(request)
    return sampler, requests


def reference(number: int, rules: Sequence[Verification], control: bool) -> Reference:
    """A batch by its number; batches take modes in turn, and some of them all rules."""
    sampler, requests = _eager()
    mode = sampler.modes[number % len(sampler.modes)]
    work = job(sampler, requests, mode, seed=number)
    every = (number + number // len(sampler.modes)) % SHARE_OF_MATCH == SHARE_OF_MATCH - 1
    changed = work._replace(drafts=work.drafts ^ 1) if control else work
    wanted = {how: direct(sampler)(changed, mode.name, how) for how in rules if every or how.rule == "match"}
    return Reference(mode.name, work, wanted, stream(sampler, work))


class Count(NamedTuple):
    """What was compared by one rule on one path."""

    rule: str
    path: str
    requests: int
    mismatches: int


def compare(count: int, control: bool, rules: Sequence[Verification] = RULES) -> Iterator[Count]:
    """One count a batch, rule and path."""
    paths = paths_of(_eager()[1], rules)
    for number in range(-(-count // BATCH)):
        mode, work, wanted, plain = reference(number, rules, control)
        for how, want in wanted.items():
            if how.rule == "match":
                yield Count(how.rule, STREAM, BATCH, num_mismatches(want, plain._replace(status=want.status)))
            for name, path in paths.items():
                yield Count(how.rule, name, BATCH, num_mismatches(want, path(work, mode, how)))


def counts_of(count: int, control: bool) -> Iterator[Count]:
    """The counts of all rules. A process for each: most of the time goes into tracing, one stage after the other."""
    parts = [functools.partial(compare, count, control, (rule,)) for rule in RULES]
    yield from in_processes(parts)


def main() -> int:
    """Compare, print, store; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--control", action="store_true", help="change drafts: every path must differ")
    parser.add_argument("--json", help="store the counts in this file, after each batch")
    arguments = parser.parse_args()
    if arguments.requests < 1:
        parser.error(f"--requests must be at least 1, got {arguments.requests}")
    return reported(counts_of(arguments.requests, arguments.control), arguments.control, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
