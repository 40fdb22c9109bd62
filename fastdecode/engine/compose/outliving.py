"""The journal of an engine, and the sequences that R-workers have kept from an earlier engine."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace

from fastdecode.api.config import EngineConfig
from fastdecode.core.held import KnownTokens
from fastdecode.core.optional import optional
from fastdecode.core.placing import UNLIMITED
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.types import RWorkerInfo
from fastdecode.engine.compose.backends import journal_copies
from fastdecode.journal.journal import Journal
from fastdecode.journal.places import Folder
from fastdecode.journal.records import Run
from fastdecode.scheduler import Scheduler
from fastdecode.scheduler.prefix.adopted import Held

logger = logging.getLogger(__name__)


def make_journal(
    config: EngineConfig,
    fingerprint: str,
    backend: AttentionBackend,
    r_workers: list[RWorkerInfo],
    run: Run,
    cleanup: ExitStack,
) -> Journal:
    """Return the journal that keeps requests and tokens for a later engine, if ``config`` asks for one.
    ``fingerprint``: see ``KeptJournal``. If R-workers hold sequences of an earlier engine, take the journal over from
    that engine, in case it is only suspended.
    """
    if config.journal is None:
        return Journal()
    takes_over = config.stands_by or any(worker.held for worker in r_workers)
    folder = config.journal_folder
    place = Folder(folder, takes_over) if folder else journal_copies(backend)
    cleanup.callback(place.close)
    epoch = max(worker.epoch for worker in r_workers)
    journal: Journal = optional("journal").KeptJournal(place, fingerprint, run.name, epoch)
    cleanup.callback(journal.close)
    if folder is None and not journal.was_found and (names := [each.name for each in r_workers if each.kept_of]):
        logger.warning(
            "session %s: R-worker %s has kept sequences, but the R-workers that kept the journal are lost: this "
            "engine does not know the earlier requests",
            config.session, ", ".join(names),
        )  # fmt: skip
    if folder and config.session is not None:
        cleanup.callback(optional("pulse").Pulse(folder).close)
    return journal


def resume_session(scheduler: Scheduler, r_workers: list[RWorkerInfo], journal: Journal, keeps: bool) -> None:
    """Register the cached tokens that R-workers have kept of the sequences in ``journal``, so that these continue.
    ``keeps``: R-workers keep their caches for a later engine too, so cache ids are recorded in the journal.
    """
    scheduler.store.names.is_wanted = keeps
    held = {index: worker.held for index, worker in enumerate(r_workers) if worker.held}
    placing = scheduler.limits.placing
    in_one_place = not placing.twice and placing.segment_tokens == UNLIMITED
    known = journal.cached_tokens(in_one_place)
    if held:
        _adopt(scheduler, r_workers, held, journal, known)
    elif keeps and any(each.token_ids for each in known.values()):
        logger.warning("no R-worker has kept caches of the session: this engine computes them again")
    if keeps and not in_one_place:
        # If an R-worker is lost in the first step, other R-workers have cached wrong rows of its sequences. Without the
        # number of correct rows in the journal, a later engine would use the wrong ones.
        adopted = {each.sequence_id: scheduler.store.adopted.num_adopted(each.sequence_id) for each in known.values()}
        journal.reached({each: adopted[each] for each, *_, tokens in known.values() if adopted[each] < len(tokens)})


def _adopt(
    scheduler: Scheduler, r_workers: list[RWorkerInfo], held: Held, journal: Journal, known: dict[int, KnownTokens]
) -> None:
    """Keep the tokens that R-workers hold of ``known`` sequences, and release all other held sequences."""
    ends = (1 + each.cache_id for several in held.values() for each in several)
    journal.next_sequence_id = max(journal.next_sequence_id, *ends)
    lowest_name = min(journal.lowest_name, *(each.cache_id for several in held.values() for each in several))
    ours = {index: several for index, several in held.items() if _wrote(journal, r_workers[index])}
    foreign = {index: several for index, several in held.items() if index not in ours}
    scheduler.store.prefixes.adopt(foreign, {}, lowest_name)
    for index, num_tokens in scheduler.store.prefixes.adopt(ours, known, lowest_name).items():
        r_workers[index] = replace(r_workers[index], held=())
        name = r_workers[index].name
        logger.warning("R-worker %s has kept %d tokens of the session, which continues", name, num_tokens)


def _wrote(journal: Journal, r_worker: RWorkerInfo) -> bool:
    """Return whether ``r_worker`` kept the cache of the run that wrote ``journal``, not of another run."""
    return r_worker.kept_of.rpartition(" ")[2] in ("", journal.before)
