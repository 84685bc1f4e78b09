"""Where the samples of one eval set lie, by what a reader may write into a URL."""

from __future__ import annotations

import re
from pathlib import Path

from evald.point import Kind, PointKey
from evald.results.samples import point_samples_dir

#: the rule of run ids and names of eval sets: nothing that leads out of a directory.
_NAME = r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}"
_SET = re.compile(_NAME)
_RECORD_ID = re.compile(
    rf"(?P<run>{_NAME})/(?P<kind>step|baseline)/(?P<step>-?[0-9]{{1,15}})/r(?P<revision>[0-9]{{1,9}})"
)


def parse_record_id(text: str) -> PointKey:
    """Read the ``record_id`` of a terminal record; raises ValueError for anything else."""
    match = _RECORD_ID.fullmatch(text)
    if match is None:
        raise ValueError(
            f"cannot use record_id={text!r}: it must be a point's, such as run/step/40/r0"
        )
    return PointKey(match["run"], int(match["step"]), int(match["revision"]), Kind(match["kind"]))


def samples_file(results_dir: Path, record_id: str, set_name: str) -> Path:
    """Return the journal of one eval set of a point; it need not exist.

    Raises ValueError for text that is no point's record id or no name of a set.
    """
    key = parse_record_id(record_id)
    if not _SET.fullmatch(set_name):
        raise ValueError(f"cannot use set={set_name!r}: it must be the name of an eval set")
    return point_samples_dir(results_dir, key) / f"{set_name}.jsonl"
