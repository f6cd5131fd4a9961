"""Transfers that happen when a test says so, in any order, with any outcome."""

from __future__ import annotations

from tiercache.transfer import Carrier, Completion, Erase, Job, PageOutcome, writes_disk


class ManualTransfers:
    """Jobs wait until `run` picks one. Bytes really move, by the same carrier as on threads."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._done: list[Completion] = []
        self.waiting: list[Job] = []

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def cancel(self, job: Job) -> bool:
        for index, waiting in enumerate(self.waiting):
            if waiting is job:
                del self.waiting[index]
                return True
        return False

    def completions(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self.run_all()

    def run(self, index: int = 0, *, fault: PageOutcome | None = None) -> Job:
        """Carries out the waiting job at `index`; with `fault` it moves nothing and fails so."""
        job = self.waiting.pop(index)
        if fault is None:
            self._done.append(self._carrier.carry(job))
        else:
            count = 1 if isinstance(job, Erase) else int(job.pages.size)
            self._done.append(Completion(job, (fault,) * count, 0.0, error="scripted"))
        return job

    @property
    def runnable(self) -> list[int]:
        """Indices `run` may be given: any order, except that DISK is written by one thread."""
        writes = [i for i, job in enumerate(self.waiting) if writes_disk(job)]
        return [i for i in range(len(self.waiting)) if i not in writes[1:]]

    def run_all(self) -> None:
        while self.waiting:
            self.run()
