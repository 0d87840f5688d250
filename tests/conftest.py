"""What every test has: ranks to run on, Triton's interpreter where there is no GPU, and Hypothesis with a printed seed.

``MESHNORM_DRAWS=ci`` (the default) draws hundreds of examples for each property, ``thorough`` thousands, a number
that many. ``--hypothesis-seed`` repeats a run: the seed is in the header.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    # Triton reads it when a kernel is defined: before any module with kernels is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from meshnorm.checking.ranks import RankPool  # noqa: E402

_DRAWS = {"ci": 300, "thorough": 5000}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))
    # Hypothesis measures one draw; ranks that share two cores make some of them slow.
    settings = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    for name, draws in _DRAWS.items():
        hypothesis.settings.register_profile(name, max_examples=draws, **settings)
    asked = os.environ.get("MESHNORM_DRAWS", "ci")
    if asked not in _DRAWS:
        hypothesis.settings.register_profile(asked, max_examples=int(asked), **settings)
    hypothesis.settings.load_profile(asked)


def pytest_report_header(config: pytest.Config) -> list[str]:
    triton = "interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "compiled"
    device = torch.cuda.get_device_name() if CUDA else "no CUDA"
    return [
        f"torch {torch.__version__}, {device}, Triton kernels {triton}",
        f"hypothesis seed {config.option.hypothesis_seed}, {hypothesis.settings().max_examples} draws a property",
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; on a machine that has one: pytest -m gpu"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)``: a pool of n CPU ranks, started at its first use and kept for the whole session."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def pool2(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(2)


@pytest.fixture(scope="session")
def pool4(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


@pytest.fixture(scope="session")
def pool8(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(8)
