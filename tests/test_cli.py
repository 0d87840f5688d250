"""The command line: what it prints, and what it exits with."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshnorm
from meshnorm import plan
from meshnorm.checking import ranks
from meshnorm.checking.case import Case, Outcome
from meshnorm.cli import main
from meshnorm.notation import parse_placements
from meshnorm.planning import Collective

SOURCE = Path(meshnorm.__file__).parents[1]


def _python(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` as a user would run it, on a wide terminal."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "COLUMNS": "240", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=timeout)


def _marks(text: str) -> str:
    """The last column of the table."""
    return "".join(re.findall(r"([✓✗]) │$", text, re.M))


# --- verbs ---


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    words = capsys.readouterr().out
    assert all(re.search(rf"^\s+{verb}\s+\S", words, re.M) for verb in ("env", "plan", "check"))


@pytest.mark.parametrize("arguments", [[], ["train"], ["plan"], ["plan", "--mesh", "dp=2"], ["env", "--loud"]])
def test_what_is_no_command_is_status_2_and_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: meshnorm" in capsys.readouterr().err


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"meshnorm {meshnorm.__version__}\n"


# --- env ---


def test_env_tells_versions_and_the_path_of_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    words = capsys.readouterr().out
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in words.splitlines())
    assert lines["meshnorm"] == meshnorm.__version__
    assert lines["python"].startswith(platform.python_version())
    assert lines["torch"].startswith(torch.__version__)
    assert "gloo" in lines["distributed"]
    assert "plain torch" in lines["path, cpu"]
    assert ("no CUDA device" in lines["path, cuda"]) == (not torch.cuda.is_available())
    assert len([name for name in lines if re.fullmatch(r"cuda:\d+", name)]) == torch.cuda.device_count()


# --- plan ---


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--weight", "none"], {"weight": None}),
        (["--weight", "plain", "--weight-grad", "deferred"], {"weight": "plain", "weight_grad": "deferred"}),
        (["--weight", "R,S(0)"], {"weight": parse_placements("R,S(0)")}),
        (["--dtype", "fp32", "--weight-dtype", "bf16"], {"dtype": torch.float32, "weight_dtype": torch.bfloat16}),
        (["--hidden", "gather"], {"hidden": "gather"}),
        (["--normalized-dims", "2"], {"normalized_shape": (8192, 4096)}),
        (
            ["--gate", "R,P", "--gate-dtype", "fp32", "--group-size", "512"],
            {"gate": parse_placements("R,P"), "gate_dtype": torch.float32, "group_size": 512},
        ),
    ],
)
def test_plan_prints_what_plan_returns(
    arguments: list[str], options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ["--mesh", "dp=2,tp=4", "--shape", "8,8192,4096", "--x", "S(0),S(2)"]
    assert main(["plan", *layout, *arguments]) == 0
    expected = plan((8, 8192, 4096), parse_placements("S(0),S(2)"), {"dp": 2, "tp": 4}, **options)
    assert capsys.readouterr().out == f"{expected}\n"


def test_plan_reads_the_output_placements(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["plan", "--mesh", "tp=4", "--shape", "8x8192x4096", "--x", "P"]
    assert main(layout) == 0
    assert "all_reduce over tp" in capsys.readouterr().out
    assert main([*layout, "--output", "S(1)"]) == 0
    assert "reduce_scatter over tp" in capsys.readouterr().out


def test_a_laptop_plans_a_mesh_of_16384_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--mesh", "pp=16,dp=128,tp=8", "--shape", "4096,8192,16384", "--x", "R,S(0),S(2)"]
    assert main(["plan", *layout]) == 0
    words = capsys.readouterr().out
    # 4096/128 · 8192 rows of one float32, over tp alone
    assert re.search(r"forward +all_reduce over tp of 1\.0 MiB\n", words)
    assert re.search(r"backward +all_reduce over tp of 1\.0 MiB\n", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--mesh": "dp"}, ["'dp'", "dp=2,cp=4"]),
        ({"--mesh": "dp=0,tp=2"}, ["'dp=0,tp=2'"]),
        ({"--mesh": "dp=2,dp=2"}, ["each name once"]),
        ({"--shape": "8,many"}, ["'8,many'", "8,8192,4096"]),
        ({"--shape": "-8,16"}, ["'-8,16'"]),
        ({"--shape": "8,4,0"}, ["normalized_shape", "(0,)"]),
        ({"--x": "S(0)"}, ["x has 1 placements", "2 dims"]),
        ({"--x": "S(0),S(3)"}, ["'tp'", "3 dims"]),
        ({"--x": "S(0),Q"}, ["'Q'", "S(dim)"]),
        ({"--x": "S(0),P(total)"}, ["'P(total)' is no placement"]),
        ({"--x": "SS(0,0),R"}, ["'SS(0,0)' is no placement"]),
        ({"--weight": "S(1),R"}, ["weight has S", "1 dims"]),
        ({"--weight": "sharded"}, ["'sharded'", "S(dim)"]),
        ({"--output": "S(1),S(2)"}, ["output_placements asks for S", "'dp'"]),
        ({"--normalized-dims": "0"}, ["--normalized-dims is 0"]),
        ({"--normalized-dims": "4"}, ["--normalized-dims is 4", "3 dims"]),
    ],
)
def test_a_bad_plan_is_status_2_and_one_line(
    change: dict, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"--mesh": "dp=2,tp=2", "--shape": "4,6,8", "--x": "S(0),S(2)"}
    arguments = [f"{name}={value}" for name, value in (good | change).items()]
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("meshnorm plan: ") and err.count("\n") == 1
    assert not [word for word in words if word not in err], err


def test_a_bad_plan_ends_the_process_with_status_2() -> None:
    done = _python("-m", "meshnorm", "plan", "--mesh", "dp=2", "--shape", "4,8", "--x", "S(2)")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("meshnorm plan: x has S")


# --- check ---


def test_check_starts_its_own_ranks_and_finds_every_layout_right() -> None:
    done = _python("-m", "meshnorm", "check", "--mesh", "cp=2", "--shape", "3,5,6")
    assert done.returncode == 0, done.stdout + done.stderr
    marks = _marks(done.stdout)
    assert len(marks) > 10 and set(marks) == {"✓"}
    assert f"{len(marks)} of {len(marks)} layouts right" in done.stdout
    assert "mesh cp=2, CPU ranks over gloo" in done.stdout
    for placement in ("R", "S(0)", "S(1)", "S(2)", "P"):
        assert re.search(rf"^│ {re.escape(placement)} ", done.stdout, re.M)
    # 3 · 5 rows of one float32 each way: planned, and seen
    assert re.search(
        r"S\(2\) .* all_reduce cp 60; all_reduce cp 60 +│ all_reduce cp 60; all_reduce cp 60 ", done.stdout
    )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="takes GPUs where there are any; tests/test_gpu_layouts.py has them"
)
def test_check_uses_the_ranks_that_torchrun_started() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshnorm", "check"]
    done = _python(*torchrun, "--mesh", "tp=2", "--shape", "3,6")
    assert done.returncode == 0, done.stdout + done.stderr
    marks = _marks(done.stdout)
    assert len(marks) > 5 and set(marks) == {"✓"}
    assert done.stdout.count("layouts right") == 1  # one rank speaks


class _Pool:
    """Stands in for a RankPool: the function's outcome is the one that the test made up."""

    outcome: Callable[[Case], Outcome]
    cases: list[Case]

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def run(self, function: Callable, case: Case) -> list[Outcome]:
        self.cases.append(case)
        return [Outcome({"y": 0.0, "dX": 0.0, "dW": 0.0})] * (self.world_size - 1) + [type(self).outcome(case)]

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> type[_Pool]:
    monkeypatch.setattr(ranks, "RankPool", _Pool)
    monkeypatch.setattr(_Pool, "cases", [], raising=False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "240")
    return _Pool


def test_one_difference_on_one_rank_is_status_1_and_told(
    pool: type[_Pool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = (Collective("all_reduce", "cp", 64),)

    def outcome(case: Case) -> Outcome:
        found = Outcome({"y": 1e-3, "dX": 2e-3, "dW": 3e-3}, planned, planned)
        if case.x == "S(1)" and case.weight == "plain":
            found.faults.append("dW is off by 7 times what rounding explains")
        return found

    monkeypatch.setattr(_Pool, "outcome", staticmethod(outcome), raising=False)
    assert main(["check", "--mesh", "cp=3"]) == 1
    words = capsys.readouterr().out
    marks = _marks(words)
    assert len(marks) == len(pool.cases) and marks.count("✗") == 1
    assert f"{len(marks) - 1} of {len(marks)} layouts right" in words
    assert "rank 2: dW is off by 7 times what rounding explains" in words
    assert re.search(r"S\(1\) .* plain .* 1\.0e-03 .* 2\.0e-03 .* 3\.0e-03 .* ✗ │$", words, re.M)


def test_check_covers_every_product_of_placements_and_every_kind_of_weight(
    pool: type[_Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Pool, "outcome", staticmethod(lambda case: Outcome()), raising=False)
    options = ["--dtype", "fp32", "--casting-mode", "gemma", "--offset", "1.0", "--shape", "4,6,8"]
    assert main(["check", "--mesh", "dp=2,tp=2", *options]) == 0
    kinds = ("R", "S(0)", "S(1)", "S(2)", "P")
    assert {case.x for case in pool.cases} == {f"{a},{b}" for a in kinds for b in kinds}
    hidden = [case for case in pool.cases if case.x == "S(1),S(2)"]
    assert {case.weight for case in hidden} == {"", "plain", "R,S(0)"}
    assert {case.hidden for case in hidden} == {"stats", "gather"}
    assert "reduced" in {case.weight_grad for case in hidden}
    for case in pool.cases:
        assert case.mesh == (("dp", 2), ("tp", 2)) and case.shape == (4, 6, 8)
        assert (case.dtype, case.casting_mode, case.offset) == (torch.float32, "gemma", 1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "cp"], "no mesh"),
        (["--mesh", "cp=65"], "at most 64"),
        (["--mesh", "cp=2", "--shape", "a,b"], "no shape"),
    ],
)
def test_a_bad_check_is_status_2_and_one_line(
    pool: type[_Pool], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("meshnorm check: ") and words in err and err.count("\n") == 1


def test_a_mesh_that_torchrun_did_not_start_is_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["check", "--mesh", "tp=4"]) == 2
    assert "--mesh has 4 ranks, but torchrun started 2" in capsys.readouterr().err


def test_without_rich_check_says_what_to_install(
    pool: type[_Pool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoRich(), *sys.meta_path])
    assert main(["check", "--mesh", "cp=2"]) == 2
    assert "install meshnorm[cli]" in capsys.readouterr().err


class _NoRich:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError(f"No module named {name!r}", name="rich")
