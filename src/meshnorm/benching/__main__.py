"""``python -m meshnorm.benching JOB.json RESULTS.json``: times the meshnorm that is imported, and no other.

How ``baseline.py`` times another revision: in a process of its own, with that revision first on the path.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import meshnorm
from meshnorm.benching.job import Job
from meshnorm.benching.measure import measure
from meshnorm.benching.providers import find_providers
from meshnorm.benching.warming import warm_up


def main(job_file: str, results_file: str) -> None:
    job = Job.of_json(json.loads(Path(job_file).read_text()))
    providers, _ = find_providers(["meshnorm"], job.device)
    if job.device == "cuda":
        list(warm_up(job, ["meshnorm"]))
    results = [asdict(result) for result in measure(job, providers)]
    Path(results_file).write_text(json.dumps({"package": meshnorm.__file__, "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
