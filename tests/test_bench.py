"""``meshnorm bench``: what is timed, what is refused, and what is written."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshnorm
from meshnorm.benching import baseline, providers
from meshnorm.benching.correctness import Inputs, fault_of_backward, fault_of_forward
from meshnorm.benching.job import Job, Result
from meshnorm.benching.measure import measure
from meshnorm.benching.plot import widest_batches
from meshnorm.benching.providers import EPS, Provider, find_providers
from meshnorm.benching.report import COLUMNS, comparisons
from meshnorm.benching.warming import units, warm_up
from meshnorm.cli import bench, main


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(bench, "REP_MS", {"cpu": 1.0})
    monkeypatch.setenv("COLUMNS", "240")


def _lines(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


# --- a run ---


def test_a_run_shows_a_table_a_pass_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.csv"
    asked = ["--shapes", "8x16,5x24", "--providers", "meshnorm,eager", "--dtype", "fp32", "--csv", str(file)]
    assert main(["bench", *asked]) == 0
    words = capsys.readouterr().out
    for expected in ("forward, µs", "backward, µs", "8×16", "5×24", torch.__version__, "threads", "GB/s", str(file)):
        assert expected in words
    lines = _lines(file)
    assert tuple(lines[0]) == COLUMNS
    assert [(line["m"], line["n"], line["provider"], line["pass"]) for line in lines] == [
        (m, n, provider, which)
        for m, n in (("8", "16"), ("5", "24"))
        for provider in ("meshnorm", "eager")
        for which in ("forward", "backward")
    ]
    for line in lines:
        assert float(line["device_us"]) > 0 and float(line["percent_of_copy"]) > 0 and float(line["copy_gb_s"]) > 0
        assert line["reason"] == line["graph_us"] == line["host_us"] == line["peak_mib"] == ""
        assert line["torch"] == torch.__version__ and line["meshnorm"] == meshnorm.__version__
        assert line["machine"] and re.fullmatch(r"\d{4}-\d\d-\d\d", line["date"])
        assert line["dtype"] == "float32"


def test_one_pass_may_be_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    asked = ["--shapes", "8x16", "--providers", "meshnorm", "--passes", "backward", "--quick", "--csv", str(file)]
    assert main(["bench", *asked]) == 0
    assert [line["pass"] for line in _lines(file)] == ["backward"]


def test_the_default_is_every_provider_on_the_shapes_of_the_device() -> None:
    parser = argparse.ArgumentParser()
    bench.add_to(parser.add_subparsers())
    options = parser.parse_args(["bench"])
    assert options.providers == "meshnorm,eager,compile,liger,quack,fla"
    job = bench.job_of(options)
    assert job.shapes == ((4096, 4096), (1024, 1024), (65536, 128))
    assert job.passes == ("forward", "backward") and job.dtype == "bfloat16"
    assert len(bench.parse_shapes(bench.DEFAULT_SHAPES["cuda"])) == 15


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib; install meshnorm[bench]")
    file = tmp_path / "out.png"
    asked = ["--shapes", "8x16,8x32", "--providers", "meshnorm,eager", "--plot", str(file)]
    assert main(["bench", *asked]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_takes_the_most_rows_of_each_width() -> None:
    shapes = ((64, 4096), (32768, 4096), (1, 4096), (8, 128))
    results = [Result("meshnorm", "1", m, n, "bfloat16", "forward", device_us=1.0) for m, n in shapes]
    assert [(r.m, r.n) for r in widest_batches(results)] == [(8, 128), (32768, 4096)]


def test_percent_is_of_4_and_6_bytes_an_element_in_bf16_and_twice_that_in_fp32() -> None:
    def percent(dtype: str, which: str) -> float | None:
        return Result("", "", 1000, 1000, dtype, which, device_us=100.0).percent_of_copy(copy_gb_s=100.0)

    assert percent("bfloat16", "forward") == pytest.approx(40)  # 4e6 bytes in 100 µs are 40 GB/s
    assert percent("bfloat16", "backward") == pytest.approx(60)
    assert percent("float32", "forward") == pytest.approx(80)
    assert Result("", "", 1, 1, "bfloat16", "forward").percent_of_copy(100.0) is None


# --- who is timed ---


def test_providers_that_are_missing_are_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shapes", "8x16", "--providers", "meshnorm,liger,quack,fla"]) == 0
    words = capsys.readouterr().out
    for name in ("liger", "quack", "fla"):
        assert f"not timed: {name}: needs a CUDA GPU" in words


def test_a_provider_that_does_not_import_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("liger_kernel", "quack", "fla"):
        monkeypatch.setitem(sys.modules, package, None)
    found, missing = find_providers(["meshnorm", "liger", "quack", "fla"], "cuda")
    assert [provider.name for provider in found] == ["meshnorm"]
    assert set(missing) == {"liger", "quack", "fla"}
    assert all("import" in why or "No module" in why for why in missing.values()), missing


def _measured(norm: Callable[[Tensor, Tensor], Tensor]) -> list[Result]:
    job = Job(((8, 16),), "bfloat16", ("forward", "backward"), "cpu", 1.0)
    return list(measure(job, [Provider("one", "1", lambda: norm)]))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def test_a_wrong_y_is_not_timed() -> None:
    def one_element_off(x: Tensor, weight: Tensor) -> Tensor:
        y = _norm(x, weight)
        return y * torch.ones_like(y).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1.05, dtype=y.dtype))

    for result in _measured(one_element_off):
        assert result.device_us is None
        assert result.reason.startswith("wrong: y differs at 1 of 128 elements; y[3, 5] is ")


def test_a_wrong_gradient_is_not_timed_while_the_forward_is() -> None:
    def no_weight_gradient_of_row_0(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat((_norm(x[:1], weight.detach()), _norm(x[1:], weight)))

    forward, backward = _measured(no_weight_gradient_of_row_0)
    assert forward.reason == "" and forward.device_us
    assert backward.device_us is None and backward.reason.startswith("wrong: dW differs")


def test_what_raises_is_shown_with_its_reason() -> None:
    def refuses(x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("rows of 16 are too wide\nfor this kernel")

    assert [result.reason for result in _measured(refuses)] == ["RuntimeError: rows of 16 are too wide"] * 2


def test_a_failing_meshnorm_is_status_1_and_a_failing_other_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = providers._Source("torch", False, lambda: lambda: lambda x, weight: x)
    for name, status in (("meshnorm", 1), ("eager", 0)):
        with monkeypatch.context() as patch:
            patch.setitem(providers.SOURCES, name, wrong)
            assert main(["bench", "--shapes", "8x16", "--providers", "meshnorm,eager"]) == status
        words = capsys.readouterr().out
        assert f"{name} 8×16 forward: wrong: y differs" in words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (300, 1000)])
def test_the_bounds_pass_rounding_and_catch_the_absence_of_a_row(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    inputs = Inputs.drawn(*shape, dtype, torch.Generator().manual_seed(1))
    leaves = (inputs.x.clone().requires_grad_(), inputs.weight.clone().requires_grad_())
    y = meshnorm.rms_norm(*leaves, EPS)
    dx, dw = torch.autograd.grad(y, leaves, inputs.dy)
    assert fault_of_forward(inputs, y.detach()) == ""
    assert fault_of_backward(inputs, dx, dw) == ""
    y = y.detach().clone()
    y[-1] = torch.nan
    assert fault_of_forward(inputs, y)
    if shape[1] > 1:  # with one element a row, dX is 0
        dx[-1] = 0
        assert fault_of_backward(inputs, dx, dw).startswith("wrong: dX")
    assert "shape" in fault_of_forward(inputs, y[:, :0])


def test_the_best_other_of_each_shape_is_what_meshnorm_is_compared_with() -> None:
    def result(provider: str, m: int, device_us: float | None, graph_us: float | None = None) -> Result:
        return Result(provider, "1", m, 128, "bfloat16", "forward", device_us=device_us, graph_us=graph_us)

    results = [
        result("meshnorm", 9, 10.0),
        result("eager", 9, 40.0),
        result("liger", 9, None),
        result("quack", 9, 20.0),
    ]
    results += [result("meshnorm", 8, 9.0, 4.0), result("eager", 8, 1.0, 2.0), result("meshnorm@HEAD", 8, 1.0, 1.0)]
    large, small = comparisons(results)
    assert large.startswith("forward: ") and "2.00 times as long" in large and "2.00 (9×128, beside quack)" in large
    assert small.startswith("forward in a CUDA graph: ") and "0.50 (8×128, beside eager)" in small
    assert comparisons([result("meshnorm", 9, 10.0), result("meshnorm@HEAD", 9, 10.0)]) == []


# --- compiled before ---


def test_what_compiles_runs_each_shape_once_in_other_processes() -> None:
    job = Job(((8, 16), (5, 24)), "bfloat16", ("forward", "backward"), "cpu", 1.0)
    assert units(job, ["meshnorm", "eager"]) == [("meshnorm", 8, 16), ("meshnorm", 5, 24)]
    before = dict(os.environ)
    done = sorted(warm_up(job, ["meshnorm", "eager", "liger"]))
    assert dict(os.environ) == before
    assert [unit for unit in done if unit[0] == "meshnorm"] == [("meshnorm", 5, 24, ""), ("meshnorm", 8, 16, "")]
    assert [unit[3] for unit in done if unit[0] == "liger"] == ["needs a CUDA GPU"] * 2


@pytest.mark.parametrize("when", ["compiling", "measuring the copy"])
def test_an_interrupt_before_anything_is_timed_writes_nothing(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from meshnorm.benching import measure, timing

    def ended(*_: object) -> Iterator[Result]:
        raise KeyboardInterrupt

    monkeypatch.setattr(*((measure, "measure") if when == "compiling" else (timing, "copy_bandwidth")), ended)
    file, plot = tmp_path / "found.csv", tmp_path / "found.png"
    file.write_text("of an earlier run")
    asked = ["--shapes", "64x32", "--providers", "meshnorm", "--csv", str(file), "--plot", str(plot)]
    assert main(["bench", "--quick", *asked]) == 1
    assert file.read_text() == "of an earlier run" and not plot.exists()
    assert "no file is written" in capsys.readouterr().err


def test_an_interrupt_does_not_wait_for_what_still_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = tuple((8, 16 * n) for n in range(1, 40))
    began = time.monotonic()
    compiled = warm_up(Job(shapes, "bfloat16", ("forward",), "cpu", 1.0), ["meshnorm"])
    next(compiled)
    first = time.monotonic() - began
    with pytest.raises(KeyboardInterrupt):
        compiled.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert time.monotonic() - began < 2 * first + 5


# --- another revision ---


def _is_checkout() -> bool:
    try:
        baseline.commit_of("HEAD")
    except baseline.BaselineError:
        return False
    return True


@pytest.mark.skipif(not _is_checkout(), reason="compares with a commit, and this is no git checkout of meshnorm")
def test_a_baseline_is_timed_beside_the_present(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    asked = ["--shapes", "8x16", "--providers", "meshnorm", "--baseline", "HEAD", "--csv", str(file)]
    assert main(["bench", *asked]) == 0
    lines = _lines(file)
    assert [line["provider"] for line in lines] == ["meshnorm"] * 2 + ["meshnorm@HEAD"] * 2
    assert all(float(line["device_us"]) > 0 for line in lines)
    assert baseline.commit_of("HEAD").startswith(lines[-1]["version"])


@pytest.mark.skipif(not _is_checkout(), reason="asks a git checkout of meshnorm, which this is not")
def test_a_revision_that_is_not_there_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shapes", "8x16", "--baseline", "no-such-branch"]) == 2
    assert "no-such-branch: this checkout has no such revision" in capsys.readouterr().err


def test_a_baseline_without_git_or_checkout_is_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(baseline, "_PACKAGE", tmp_path)
    if baseline.shutil.which("git"):
        assert main(["bench", "--shapes", "8x16", "--baseline", "HEAD"]) == 2
        assert "needs a git checkout" in capsys.readouterr().err
    monkeypatch.setattr(baseline.shutil, "which", lambda name: None)
    assert main(["bench", "--shapes", "8x16", "--baseline", "HEAD"]) == 2
    assert "needs git" in capsys.readouterr().err


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "8"], "'8' is no shape to time"),
        (["--shapes", "8x16x4"], "'8x16x4' is no shape to time"),
        (["--shapes", "8x0"], "'8x0' is no shape to time"),
        (["--shapes", "8xmany"], "'8xmany' is no shape"),
        (["--providers", "meshnorm,apex"], "'apex' is none of meshnorm, eager"),
        (["--providers", "quack"], "quack: needs a CUDA GPU"),
        (["--passes", "sideways"], "'sideways' is none of forward, backward"),
        (["--csv", "no/such/folder/out.csv"], "no such folder"),
        (["--plot", "out.pdf"], "name a .png file"),
    ],
)
def test_a_bad_bench_is_status_2_and_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("meshnorm bench: ") and words in err and err.count("\n") == 1


def test_no_such_dtype_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "--dtype", "int8"])
    assert left.value.code == 2
    assert "int8" in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench, "find_spec", lambda name: None if name == "matplotlib" else importlib.util.find_spec(name)
    )
    assert main(["bench", "--shapes", "8x16", "--plot", "out.png"]) == 2
    assert "install meshnorm[bench]" in capsys.readouterr().err


# --- on a GPU ---


@pytest.mark.gpu
def test_a_gpu_run_takes_graph_host_and_memory_figures_too(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    asked = ["--shapes", "64x4096,8192x1024", "--providers", "meshnorm,eager", "--quick", "--csv", str(file)]
    assert main(["bench", *asked]) == 0
    for line in _lines(file):
        assert line["reason"] == ""
        assert all(float(line[name]) > 0 for name in ("device_us", "host_us", "peak_mib", "percent_of_copy"))
        assert (line["graph_us"] != "") == (line["m"] == "64")


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent as on POSIX")
def test_an_interrupted_run_keeps_what_it_has_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from meshnorm.benching import measure as room

    whole = room.measure

    def ended_early(*args: object) -> Iterator[Result]:
        for count, result in enumerate(whole(*args)):  # type: ignore[arg-type]
            if count == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            yield result

    monkeypatch.setattr(room, "measure", ended_early)
    file = tmp_path / "found.csv"
    shapes = ["--shapes", "64x32,32x64", "--providers", "meshnorm,eager"]
    assert main(["bench", "--quick", *shapes, "--csv", str(file)]) == 1
    assert len(file.read_text().splitlines()) == 3
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is not signal.default_int_handler


def test_the_module_runs_from_the_command_line() -> None:
    path = os.pathsep.join(filter(None, [str(Path(meshnorm.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "meshnorm", "bench", "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        timeout=120,
    )
    assert done.returncode == 0
    for option in ("--shapes", "--dtype", "--providers", "--passes", "--baseline", "--csv", "--plot", "--quick"):
        assert option in done.stdout
