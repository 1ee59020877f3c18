"""Asks the questions of a run: one after the other, or side by side in processes where processors are many."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_sampler.conformance.account import Account, Progress
from compiled_sampler.conformance.asking import ask
from compiled_sampler.conformance.bench import Bench
from compiled_sampler.conformance.processes import parallel_run
from compiled_sampler.conformance.question import Question, Result


def run(bench: Bench, questions: Sequence[Question], progress: Progress | None = None) -> list[Result]:
    """The answers to all questions, in their order.

    Args:
        bench: with the target; one without a name cannot be made in another process.
        questions: to ask.
        progress: is told before and behind each question; None where nobody is.
    """
    account = Account(len(questions), progress)
    if parallel_run.pays(bench, questions):
        parallel_run.answer(bench, questions, account)
    else:
        for question in sorted(questions, key=lambda each: each.is_measurement):
            account.begin(question)
            account.end(ask(bench, question))
    return [account.results[each.name] for each in questions]
