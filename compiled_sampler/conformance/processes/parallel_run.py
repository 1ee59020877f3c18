"""A run in processes: what the target compiles first, then the questions, each as soon as what it needs is there."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait

from compiled_sampler.conformance.account import Account
from compiled_sampler.conformance.asking import answered, ask, chosen
from compiled_sampler.conformance.bench import Bench
from compiled_sampler.conformance.processes.crew import ASKED, PREPARATION, Crew, has_many_processors
from compiled_sampler.conformance.processes.preparation import Part, do, in_words, preparations
from compiled_sampler.conformance.processes.worker import Worker
from compiled_sampler.conformance.question import Finding, Prepared, Question, Result
from compiled_sampler.conformance.questions.paths.sampling import MANY_ROWS
from compiled_sampler.conformance.targets import Setting, bench_of, setting_of

Group = tuple[Question, ...]
"""Questions that one process asks one after the other, since they load the same code."""


def pays(bench: Bench, questions: Sequence[Question]) -> bool:
    """Whether processes are worth their start, and the target can be made in them."""
    compiles = hasattr(bench.target, "preparations")
    is_long = compiles or len(questions) > 1 or any(each.deals for each in questions)
    return bench.name is not None and has_many_processors() and is_long


def groups_of(questions: Sequence[Question]) -> list[Group]:
    """Groups by section; wide questions alone, and before the others."""
    groups: dict[str, list[Question]] = {}
    for question in sorted(questions, key=lambda each: not (each.is_wide or each.deals)):
        alone = question.is_wide or question.deals
        groups.setdefault(question.name if alone else question.section, []).append(question)
    return [tuple(group) for group in groups.values()]


def answer(bench: Bench, questions: Sequence[Question], account: Account) -> None:
    """Ask all questions in processes; measurements when all else has ended.

    Args:
        bench: with a target that has a name.
        questions: to ask.
        account: takes the results.

    Raises:
        NotStarted: a process could not be started, not even in the place of one that ended.
    """
    groups = groups_of([each for each in questions if not each.is_measurement])
    last = groups_of([each for each in questions if each.is_measurement])
    with ThreadPoolExecutor(len(groups) + 1) as threads, _crew(bench, questions) as crew, account:
        parts = _started(crew, bench, [*groups, *last], account)
        asked = [threads.submit(_ask_group, crew, bench, group, parts[group], account) for group in groups]
        for each in as_completed(asked):
            each.result()  # what no question answers for, such as an interrupt
        for group in last:
            _ask_group(crew, bench, group, parts[group], account)


def _crew(bench: Bench, questions: Sequence[Question]) -> Crew:
    """Processes for all questions, and as many parts of them or of the preparation."""
    return Crew(2 * len(questions), bench.device, bench.effort.limit_s)


def _started(crew: Crew, bench: Bench, groups: Sequence[Group], account: Account) -> dict[Group, list[Future[None]]]:
    """The parts that each group needs, begun in the order of the target; all, where it names others for a group."""
    parts = dict.fromkeys(_needed(bench, [each for group in groups for each in group]))
    begun = {part: crew.submit(_preparing(part, len(parts), account), PREPARATION) for part in parts}
    found = {}
    for group in groups:
        needed = _needed(bench, group) if begun else []
        found[group] = [begun[part] for part in (needed if begun.keys() >= {*needed} else begun)]
    return found


def _needed(bench: Bench, questions: Sequence[Question]) -> list[Part]:
    """The parts that questions need; comparisons of many rows have vocabularies of their own."""
    names = [each.name for each in questions if not (each.deals and bench.effort.rows >= MANY_ROWS)]
    return preparations(bench, names) if names else []


def _preparing(part: Part, total: int, account: Account) -> Callable[[Worker], None]:
    """Lets a process do a part. What fails is no failure of the run: it is compiled when it is needed."""

    def work(worker: Worker) -> None:
        start, error = time.perf_counter(), ""
        try:
            worker.call(functools.partial(do, part))
        except Exception as raised:
            error = in_words(raised)
        account.prepare(total, Prepared(str(part), error, round(time.perf_counter() - start, 2)))

    return work


def _ask_group(crew: Crew, bench: Bench, group: Group, parts: Sequence[Future[None]], account: Account) -> None:
    """Ask questions once their parts have ended: here those that deal their work, others in a process."""
    wait(parts)
    if group[0].deals:
        (question,) = group
        account.begin(question)
        account.end(ask(setting_of(bench).bench(crew), question))
        return
    while group:
        group = crew.submit(functools.partial(_asked_there, bench, group, account), ASKED).result()


def _asked_there(bench: Bench, group: Group, account: Account, worker: Worker) -> Group:
    """Ask questions in a process; those that are left when it ended without an answer, which is one of the others."""
    for number, question in enumerate(group, start=1):
        account.begin(question)
        try:
            account.end(worker.call(functools.partial(_asked_here, setting_of(bench), question.name)))
        except Exception as error:
            account.end(answered(bench, question, functools.partial(_raised, error)))
            return group[number:]
    return ()


def _raised(error: Exception) -> Finding:
    raise error


def _asked_here(setting: Setting, name: str) -> Result:
    """The answer to one question, by a bench that the questions of this process share."""
    (question,) = chosen([name])
    return ask(bench_of(setting), question)
