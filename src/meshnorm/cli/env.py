"""``meshnorm env``: versions, devices, links, and which code path this machine takes."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from typing import Any

import torch

import meshnorm
from meshnorm.kernels import kernels_for


def add_to(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "env",
        help="versions, devices, links, and the code path this machine takes",
        description="What meshnorm finds on this machine, which code path it takes here, and why.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    for name, value in facts():
        print(f"{name:<14}{value}")
    return 0


def facts() -> list[tuple[str, str]]:
    """What there is to know, as (name, words)."""
    found = [
        ("meshnorm", meshnorm.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"),
        ("triton", _version("triton")),
        ("distributed", _distributed()),
    ]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            (
                f"cuda:{index}",
                f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
                f"{properties.multi_processor_count} multiprocessors, capability {properties.major}.{properties.minor}",
            )
        )
    for first in range(count):
        peers = [
            str(other) for other in range(count) if other != first and torch.cuda.can_device_access_peer(first, other)
        ]
        if peers:
            found.append((f"link cuda:{first}", f"peer access to cuda:{', cuda:'.join(peers)}"))
    found.append(("cpu", f"{torch.get_num_threads()} threads for torch"))
    found.append(("path, cpu", "blocks of rows in plain torch (kernels/cpu.py)"))
    found.append(("path, cuda", _cuda_path(count)))
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _distributed() -> str:
    if not torch.distributed.is_available():
        return "not in this build of torch: plain tensors only"
    backends = [
        name
        for name, there in (
            ("gloo", torch.distributed.is_gloo_available),
            ("nccl", torch.distributed.is_nccl_available),
            ("mpi", torch.distributed.is_mpi_available),
        )
        if there()
    ]
    return f"available with {', '.join(backends) or 'no backend'}"


def _cuda_path(count: int) -> str:
    if not count:
        return "none, since torch finds no CUDA device"
    module = kernels_for(torch.device("cuda", 0)).__name__.rpartition(".")[2]
    if module == "cpu":
        return "plain torch, since Triton is not installed: install triton for the fused kernels"
    return "Triton, one reading of the data a pass; a hidden-sharded x is read twice, around one all-reduce"
