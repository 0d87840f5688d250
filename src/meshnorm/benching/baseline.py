"""Another revision of meshnorm as a provider: exported from this checkout's git, timed in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import meshnorm
from meshnorm.errors import MeshnormError

from .job import Job, Result

_PACKAGE = Path(meshnorm.__file__).resolve().parent
_INSIDE = "src/meshnorm"  # where the package lies in the repository


class BaselineError(MeshnormError, RuntimeError):
    """The revision to compare with is not to be had, or does not run."""


def commit_of(revision: str) -> str:
    """The commit's full hash. Raises BaselineError where git, the checkout or the revision is missing."""
    if shutil.which("git") is None:
        raise BaselineError("--baseline needs git, which is not on the PATH")
    top = _git("rev-parse", "--show-toplevel")
    if top.returncode or (Path(top.stdout.decode().strip()) / _INSIDE).resolve() != _PACKAGE:
        raise BaselineError(
            f"--baseline needs a git checkout of meshnorm, and {_PACKAGE} is in none: run from one, with PYTHONPATH=src"
        )
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", revision + "^{commit}")
    if found.returncode:
        raise BaselineError(f"--baseline {revision}: this checkout has no such revision; git log lists those it has")
    return found.stdout.decode().strip()


def measure_baseline(job: Job, revision: str) -> list[Result]:
    """What ``measure`` finds for meshnorm as it was at ``revision``; the provider's name is meshnorm@REV.

    The code that times is the present one, copied into the exported package, so that both are timed alike.
    """
    commit = commit_of(revision)
    with tempfile.TemporaryDirectory(prefix="meshnorm-baseline-") as folder:
        room = Path(folder).resolve()
        _export(commit, revision, room)
        found = _run(job, revision, room)
    if not Path(found["package"]).resolve().is_relative_to(room):
        raise BaselineError(f"--baseline {revision}: another meshnorm came first on the path, {found['package']}")
    name = f"meshnorm@{revision}"
    return [replace(Result(**result), provider=name, version=commit[:12]) for result in found["results"]]


def _export(commit: str, revision: str, room: Path) -> None:
    archive = room / "revision.zip"
    done = _git("archive", "--format=zip", f"--output={archive}", commit, _INSIDE, at_top=True)
    if done.returncode:
        raise BaselineError(f"--baseline {revision} holds no {_INSIDE}: {done.stderr.decode().strip()}")
    with zipfile.ZipFile(archive) as zipped:
        zipped.extractall(room)
    benching = room / _INSIDE / "benching"
    shutil.rmtree(benching, ignore_errors=True)
    shutil.copytree(_PACKAGE / "benching", benching, ignore=shutil.ignore_patterns("__pycache__"))


def _run(job: Job, revision: str, room: Path) -> dict:
    job_file, results_file = room / "job.json", room / "results.json"
    job_file.write_text(json.dumps(job.as_json()))
    path = os.pathsep.join(filter(None, [str(room / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "meshnorm.benching", str(job_file), str(results_file)],
        cwd=room,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise BaselineError(f"--baseline {revision} ended with status {done.returncode}: {lines[-1]}")
    return json.loads(results_file.read_text())


def _git(*arguments: str, at_top: bool = False) -> subprocess.CompletedProcess[bytes]:
    place = _PACKAGE.parents[1] if at_top else _PACKAGE
    return subprocess.run(["git", "-C", str(place), *arguments], capture_output=True)
