"""Statistics of loading rows with answers: sequences made of them, and rows left out."""

import dataclasses
import threading

from absl import logging

from jaxrl_llm.data.tasks import Split


@dataclasses.dataclass
class RowReport:
    """Counts rows as they are read, and logs the counts.

    In-memory rows are reported once, by `log`. Streamed rows are reported after 1, 2, 4, 8, ...
    rows if there is anything unusual.
    """

    split: Split
    noun: str  # "sequences" or "pairs", for the texts
    reports_progress: bool = False
    num_rows: int = 0
    num_sequences: int = 0
    num_long: int = 0
    num_equal: int = 0
    num_rewritten: int = 0  # turns that are trained as the template rewrites them
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    @property
    def only_reason(self) -> str:
        """The reason why no row is left, if it is not their length."""
        if not self.num_equal or self.num_long:
            return ""
        return "have a chosen answer that equals the rejected one; correct them"

    def count(
        self, *, num_sequences: int, num_long: int = 0, num_equal: int = 0, num_rewritten: int = 0
    ) -> None:
        """Counts one row and the sequences made of it."""
        with self._lock:  # threads read ahead
            self.num_rows += 1
            self.num_sequences += num_sequences
            self.num_long += num_long
            self.num_equal += num_equal
            self.num_rewritten += num_rewritten
            if self.reports_progress and not self.num_rows & (self.num_rows - 1):
                self.log()

    def log(self) -> None:
        """Logs the number of sequences if it is not one per row, and warns about dropped rows."""
        rows = f"{self.split} split: {self.num_rows} rows"
        so_far = " so far" if self.reports_progress else ""
        total = self.num_sequences + self.num_long + self.num_equal
        if total > self.num_rows:
            logging.info("%s%s gave %d %s", rows, so_far, self.num_sequences, self.noun)
        if self.num_long:
            message = "%s split: dropped %d of %d %s longer than trainer.max_sequence_tokens%s"
            noun = self.noun if total > self.num_rows else "rows"
            logging.warning(message, self.split, self.num_long, total, noun, so_far)
        if self.num_equal:
            message = "%s split: dropped %d of %d pairs whose chosen answer equals the rejected%s"
            logging.warning(message, self.split, self.num_equal, self.num_rows, so_far)
        if self.num_rewritten:
            logging.warning(
                "%s%s have %d turns that are trained as the chat template rewrites them once others"
                " follow (mostly without their thinking), not as they are sampled;"
                " data.rewritten_turns='split' trains them as they are sampled",
                rows,
                so_far,
                self.num_rewritten,
            )
