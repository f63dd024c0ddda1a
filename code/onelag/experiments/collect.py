"""Finds the results of given configurations without computing anything."""

from collections.abc import Sequence
from pathlib import Path

from onelag.data import load_source
from onelag.experiments.runner import Job
from onelag.report.store import Result, list_results
from onelag.training.config import digest
from onelag.training.fingerprint import code_fingerprint, resolved


class Collector:
    """The results of one tier, indexed by configuration and data.

    A result of the present code is preferred; one of an earlier version of the code is given where there is no other, and counted in `stale`:
    figures stay reproducible from committed results, while `onelag reproduce` recomputes what the present code would decide anew.
    """

    def __init__(self, folder: Path):
        self.stale = 0
        self._by_config: dict[str, list[Result]] = {}
        for result in list_results(folder):
            key = _key(result.config, result.provenance["corpus_sha256"], result.provenance["tokenizer_sha256"])
            self._by_config.setdefault(key, []).append(result)

    def __bool__(self) -> bool:
        return bool(self._by_config)

    def find(self, jobs: Sequence[Job]) -> list[Result | None]:
        """One result per job, in order; None where there is none."""
        return [self._find(job) for job in jobs]

    def _find(self, job: Job) -> Result | None:
        source = load_source(job.config.data.corpus, job.config.data.tokenizer)
        candidates = self._by_config.get(_key(resolved(job.config), source.corpus_sha256, source.tokenizer_sha256), [])
        if not candidates:
            return None
        code = code_fingerprint(job.config)
        current = [result for result in candidates if result.provenance["code_sha256"] == code]
        self.stale += not current
        return max(current or candidates, key=lambda result: result.provenance["start"])


def _key(config: dict, corpus_sha256: str, tokenizer_sha256: str) -> str:
    return digest([config, corpus_sha256, tokenizer_sha256])
