"""The command line: ``meshnorm`` and ``python -m meshnorm``. One file for each verb."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import meshnorm
from meshnorm.errors import MeshnormError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit status."""
    from meshnorm.cli import bench, check, env, plan

    parser = argparse.ArgumentParser(prog="meshnorm", description="RMSNorm for every layout.")
    parser.add_argument("--version", action="version", version=f"meshnorm {meshnorm.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (env, plan, check, bench):
        verb.add_to(verbs)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except MeshnormError as error:
        print(f"meshnorm {options.verb}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        print(f"meshnorm {options.verb} needs {error.name} for its tables: install meshnorm[cli]", file=sys.stderr)
        return 2
