"""The promises of the rank pool."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from meshnorm.checking.ranks import PerRank, RankError, RankPool


def _whoami(factor: int, *, plus: int = 0) -> int:
    return dist.get_rank() * factor + plus


def _sum_over_ranks(value: float) -> torch.Tensor:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return total


def _raise_on(*ranks: int) -> int:
    if dist.get_rank() in ranks:
        raise ValueError(f"no luck on {dist.get_rank()}")
    return dist.get_rank()


def _miss_a_collective() -> None:
    if dist.get_rank() == 1:
        raise KeyError("left early")
    dist.all_reduce(torch.ones(1))


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(3600)


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def _gone(pid: int, within: float = 10.0) -> bool:
    """Whether the process ended, or is a zombie that only waits to be reaped, before ``within`` seconds passed."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_results_come_in_rank_order(pool4: RankPool) -> None:
    assert pool4.run(_whoami, 10, plus=1) == [1, 11, 21, 31]


def test_each_rank_gets_its_own_argument(pool4: RankPool) -> None:
    sums = pool4.run(_sum_over_ranks, PerRank([1.0, 2.0, 3.0, 4.0]))
    assert [total.item() for total in sums] == [10.0] * 4


def test_the_same_processes_serve_every_run(pool2: RankPool) -> None:
    assert pool2.run(os.getpid) == pool2.run(os.getpid) == list(pool2.pids)


def test_an_error_names_its_rank_and_leaves_the_pool_usable(pool4: RankPool) -> None:
    pool4.start()
    before = pool4.pids
    with pytest.raises(RankError, match="no luck on 2") as raised:
        pool4.run(_raise_on, 2)
    assert set(raised.value.failures) == {2}
    assert raised.value.unanswered == ()
    assert "_raise_on failed on rank 2" in str(raised.value)
    assert "in _raise_on" in raised.value.failures[2]
    assert [total.item() for total in pool4.run(_sum_over_ranks, 1.0)] == [4.0] * 4
    assert pool4.pids == before


def test_every_failing_rank_is_named(pool4: RankPool) -> None:
    with pytest.raises(RankError, match="failed on ranks 0, 3") as raised:
        pool4.run(_raise_on, 0, 3)
    assert set(raised.value.failures) == {0, 3}


def test_a_function_that_the_ranks_cannot_import_is_an_error_here(pool2: RankPool) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):  # which of them depends on the Python
        pool2.run(lambda: 0)
    assert pool2.run(_whoami, 1) == [0, 1]


def test_a_missed_collective_does_not_make_the_next_run_wrong() -> None:
    with RankPool(2, collective_timeout=2.0) as pool:
        with pytest.raises(RankError, match="left early") as raised:
            pool.run(_miss_a_collective)
        assert set(raised.value.failures) | set(raised.value.unanswered) == {0, 1}
        assert [total.item() for total in pool.run(_sum_over_ranks, 1.0)] == [2.0] * 2


def test_a_hang_is_bounded_and_names_who_did_not_answer() -> None:
    with RankPool(2, timeout=1.0) as pool:
        hung = pool.pids
        began = time.monotonic()
        with pytest.raises(RankError, match="had not come back from rank 1 after 1 s") as raised:
            pool.run(_hang_on, 1)
        assert time.monotonic() - began < 5.0
        assert raised.value.unanswered == (1,)
        assert all(_gone(pid) for pid in hung)
        pool.timeout = 60.0
        assert pool.run(_whoami, 1) == [0, 1]


def test_a_rank_that_died_is_named() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankError, match="exit code -9") as raised:
            pool.run(_die_on, 0)
        assert set(raised.value.failures) == {0}
        assert pool.run(_whoami, 1) == [0, 1]


def test_close_ends_every_rank() -> None:
    pool = RankPool(2)
    pool.start()
    pids = pool.pids
    pool.close()
    assert pool.pids == ()
    assert all(_gone(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; every other system starts its ranks by spawning")
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_no_rank_outlives_the_process_that_started_it(end: str) -> None:
    program = (
        "import time\n"
        "from meshnorm.checking.ranks import RankPool\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(2)\n"
        "    pool.start()\n"
        "    print(*pool.pids, flush=True)\n"
        f"    {'time.sleep(3600)' if end == 'kill' else 'pass'}\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if end == "kill":
        parent.kill()
    parent.wait(30)
    parent.stdout.close()
    assert all(_gone(pid) for pid in pids)
