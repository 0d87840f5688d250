"""CPU ranks, started once and used many times.

A rank is a process with torch imported, one thread, and a gloo process group of all its peers. Starting one costs
seconds, running a function on it milliseconds, so a :class:`RankPool` is started once and then handed functions::

    with RankPool(4) as pool:
        sums = pool.run(all_reduced, 3)    # all_reduced(3) on every rank; the results in rank order

On Linux the ranks are forked from a server process that has imported torch and nothing more: 8 ranks on 2 cores are
ready in 2.1 s, where spawning each took 5.4 s.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

_PRELOAD = ["torch", "torch.distributed.tensor"]


class RankError(RuntimeError):
    """A function failed, or did not come back, on some rank.

    ``failures`` maps each rank that raised to its traceback, ``unanswered`` names the ranks that were still busy.
    """

    def __init__(self, what: str, failures: Mapping[int, str], unanswered: tuple[int, ...] = (), waited: float = 0.0):
        self.failures = dict(failures)
        self.unanswered = unanswered
        lines = []
        if self.failures:
            lines.append(f"{what} failed on {_name(self.failures)}")
        if unanswered:
            lines.append(f"{what} had not come back from {_name(unanswered)} after {waited:.0f} s")
        told: dict[str, list[int]] = {}
        for rank, text in sorted(self.failures.items()):
            told.setdefault(text, []).append(rank)
        for text, ranks in told.items():
            lines += ["", f"{_name(ranks)}:", text.rstrip()]
        super().__init__("\n".join(lines))


class PerRank(tuple):
    """An argument of :meth:`RankPool.run` that differs from rank to rank: rank r gets item r."""


class RankPool:
    """``world_size`` CPU ranks with a gloo process group, started at the first :meth:`run`, kept until :meth:`close`.

    ``timeout`` bounds each :meth:`run` in seconds; ``collective_timeout`` bounds each single collective on the ranks;
    ``grace`` is how long the others may still take once one rank has failed. The ranks inherit the environment as it
    was when the first pool of this process started. They end with the process that made them, whichever way it ends.
    """

    def __init__(
        self, world_size: int, *, timeout: float = 120.0, collective_timeout: float = 60.0, grace: float = 10.0
    ):
        self.world_size = world_size
        self.timeout = timeout
        self.collective_timeout = collective_timeout
        self.grace = grace
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the ranks; empty while none are running."""
        return tuple(rank.process.pid or 0 for rank in self._ranks)

    def start(self) -> None:
        """Start the ranks, and wait until all of them have met. Does nothing where they are running."""
        if self._ranks:
            return
        # The store lives here, on a port that the system picked: no port is guessed, no file is left behind.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context, host = _context(), os.getpid()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.world_size, self._store.port, self.collective_timeout),
                name=f"meshnorm rank {rank} of {self.world_size} for {host}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(rank, process, ours))
        _LIVE.add(self)
        try:
            self._collect("starting the ranks")
        except BaseException:
            self._kill()
            raise

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank, inside the process group; the results in rank order.

        The function is one that the ranks can import (of a module, not a lambda); arguments and results are pickled.
        A :class:`PerRank` argument gives each rank its own.

        Raises :class:`RankError` where any rank raised or did not come back in time. The pool can be used again
        after it: with the same processes where all came back and still agree, with fresh ones otherwise.
        """
        what = getattr(function, "__qualname__", repr(function))
        jobs = [
            pickle.dumps((function, [_own(a, r) for a in args], {k: _own(v, r) for k, v in kwargs.items()}))
            for r in range(self.world_size)
        ]
        self.start()
        try:
            for rank, job in zip(self._ranks, jobs, strict=True):
                rank.pipe.send_bytes(job)
            return self._collect(what)
        except RankError as error:
            if error.unanswered or not self._in_step(error):
                self._kill()
            raise
        except BaseException:  # an interrupt, a test's own time limit: the ranks are in the middle of something
            self._kill()
            raise

    def close(self) -> None:
        """Destroy the process groups and end the ranks. The pool would start anew at the next :meth:`run`."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.pipe.send_bytes(b"")
        until = time.monotonic() + 10.0
        for rank in self._ranks:
            rank.process.join(max(0.0, until - time.monotonic()))
        self._kill()

    def __enter__(self) -> RankPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, what: str) -> list[Any]:
        """One answer from every rank, or RankError."""
        results: list[Any] = [None] * self.world_size
        failures: dict[int, str] = {}
        waiting = {rank.pipe: rank for rank in self._ranks}
        began = time.monotonic()
        until = began + self.timeout
        while waiting and (left := until - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)  # pyright: ignore[reportArgumentType]
                try:
                    came_back, results[rank.number] = pickle.loads(rank.pipe.recv_bytes())
                except (EOFError, OSError):
                    rank.process.join(1.0)
                    came_back = False
                    results[rank.number] = f"the process ended with exit code {rank.process.exitcode}"
                if not came_back:
                    failures[rank.number] = results[rank.number]
                    until = min(until, time.monotonic() + self.grace)
        if failures or waiting:
            unanswered = tuple(rank.number for rank in waiting.values())
            raise RankError(what, failures, unanswered, time.monotonic() - began)
        return results

    def _in_step(self, error: RankError) -> bool:
        """Whether the ranks that came back from a failure can go on as they are."""
        # A failed collective leaves gloo's connections closed, in whichever group it was.
        if any("gloo" in text or "exit code" in text for text in error.failures.values()):
            return False
        # One rank may have raised where the others had one collective more: then their counts differ from here on.
        timeout, self.timeout = self.timeout, self.grace
        try:
            for rank in self._ranks:
                rank.pipe.send_bytes(pickle.dumps((_rank_sum, [], {})))
            expected = self.world_size * (self.world_size - 1) // 2
            return self._collect("checking the ranks") == [expected] * self.world_size
        except (RankError, OSError):
            return False
        finally:
            self.timeout = timeout

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()
        self._ranks = []
        self._store = None
        _LIVE.discard(self)


class _Rank:
    """What the parent holds of a rank."""

    def __init__(self, number: int, process: Any, pipe: multiprocessing.connection.Connection):
        self.number = number
        self.process = process
        self.pipe = pipe


_LIVE: weakref.WeakSet[RankPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_LIVE):
        pool._kill()


def _context() -> Any:
    """The way of starting processes: forked from a server with torch imported where that is safe."""
    if sys.platform == "linux":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        return context
    return multiprocessing.get_context("spawn")


def _own(value: Any, rank: int) -> Any:
    return value[rank] if isinstance(value, PerRank) else value


def _name(ranks: Any) -> str:
    ranks = sorted(ranks)
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


# What follows runs on the ranks.


def _serve(
    pipe: multiprocessing.connection.Connection, rank: int, world_size: int, port: int, collective_timeout: float
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback:  # the host's name may resolve to an address that cannot be reached
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    timeout = datetime.timedelta(seconds=collective_timeout)

    def join() -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)

    pipe.send_bytes(_answer(join, [], {}))
    with contextlib.suppress(EOFError, OSError):
        while job := pipe.recv_bytes():
            try:
                function, args, kwargs = pickle.loads(job)
            except Exception:
                answer = pickle.dumps((False, traceback.format_exc()))
            else:
                answer = _answer(function, args, kwargs)
            pipe.send_bytes(answer)
        if dist.is_initialized():
            dist.destroy_process_group()


def _answer(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException as error:  # SystemExit and pytest's outcomes included: the rank itself stays
        lines = traceback.format_exception(type(error), error, _below_here(error))
        return pickle.dumps((False, "".join(lines)))


def _below_here(error: BaseException) -> Any:
    """The traceback without this file's own frame."""
    below = error.__traceback__
    return below.tb_next if below is not None and below.tb_next is not None else below


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _rank_sum() -> float:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()
