"""What a run leaves behind: per case and contestant the verdict and the figures, and the JSON file of it all."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .cases import OURS, Work
from .timing import Timing

__all__ = ["Result", "Row", "Run"]

SCHEMA = 2  # of the JSON files; raise it when a field changes its meaning


@dataclass(frozen=True)
class Row:
    """One contestant of a case: its error against the float64 reference, and its time or its extra memory.

    A contestant whose result is wrong has neither: it was not measured.
    """

    contestant: str
    error: float
    error_allowed: float
    timing: Timing | None = None
    extra_bytes: int | None = None

    @property
    def right(self) -> bool:
        return self.error <= self.error_allowed  # False for NaN


@dataclass(frozen=True)
class Result:
    """One case. The case is named by suite, name, shape and dtype; these four match cases of two files.

    `least_seconds` is the time that its work takes at the measured peak of the process that ran it.
    """

    suite: str
    name: str
    shape: str
    dtype: str
    work: Work
    rows: list[Row]
    least_seconds: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.suite, self.name, self.shape, self.dtype

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if not row.right]

    @property
    def times(self) -> dict[str, float]:
        """Median seconds of each contestant that was timed."""
        return {row.contestant: row.timing.median for row in self.rows if row.timing}

    @property
    def extra_bytes(self) -> dict[str, int]:
        return {row.contestant: row.extra_bytes for row in self.rows if row.extra_bytes is not None}

    @property
    def percent_of_peak(self) -> float | None:
        """Of ours."""
        seconds = self.times.get(OURS)
        return 100 * self.least_seconds / seconds if self.least_seconds and seconds else None

    def speedup(self, contestant: str) -> float | None:
        """The contestant's time over ours: above 1, mha_ext is faster. None if either was not timed."""
        times = self.times
        return times[contestant] / times[OURS] if {contestant, OURS} <= times.keys() else None


@dataclass
class Run:
    """Everything that a JSON file holds."""

    machine: dict[str, Any]
    quick: bool
    peaks: dict[str, float] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Run:
        """Raises ValueError for a file that `save` did not write."""
        try:
            data = json.loads(path.read_text())
            if data["schema"] != SCHEMA:
                raise ValueError(f"{path} has schema {data['schema']}, this version reads {SCHEMA}")
            return cls(data["machine"], data["quick"], data["peaks"], [_result(result) for result in data["results"]])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no result of 'mha-ext bench --json': {error!r}") from error


def _result(data: dict[str, Any]) -> Result:
    return Result(**{**data, "work": Work(**data["work"]), "rows": [_row(row) for row in data["rows"]]})


def _row(data: dict[str, Any]) -> Row:
    return Row(**{**data, "timing": data["timing"] and Timing(**data["timing"])})
