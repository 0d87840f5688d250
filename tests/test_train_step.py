"""``benchmarks/train_step.py`` on tiny models: norms changed and changed back, held against the original, reported."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import meshnorm

pytest.importorskip("transformers", reason="Transformers is not installed: pip install meshnorm[transformers]")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield importlib.import_module("train_step")
    sys.modules.pop("train_step", None)


def test_a_run_writes_each_providers_figures_or_why_there_are_none(bench, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--tiny", "--steps", "3", "--models", "llama-1b", "qwen3-1.7b", "--commit", "abc", "--out"]
    providers = ["original", "liger", "meshnorm", "nothing"]
    assert bench.main([*arguments, str(tmp_path / "in" / "found"), "--providers", *providers]) == 0
    with (tmp_path / "in" / "found.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["provider"]) for row in rows] == [
        (model, provider) for model in ("llama-1b", "qwen3-1.7b") for provider in providers
    ]
    assert [row["norms"] for row in rows] == ["5"] * 4 + ["9"] * 4
    for row in rows:
        assert "meshnorm at abc" in row["setting"]
        if row["provider"] == "liger":
            assert row["reason"] == "RuntimeError: needs a CUDA GPU" and not row["step_ms"]
        else:
            assert row["steps"] == "3" and float(row["tokens_per_second"]) > 0 and row["norms_percent"]
    words = (tmp_path / "in" / "found.txt").read_text()
    printed = capsys.readouterr().out
    assert all(line in printed for line in words.splitlines())
    assert words.count("not timed: RuntimeError: needs a CUDA GPU") == 2


def test_a_norm_that_computes_something_other_is_not_timed(bench, monkeypatch, capsys) -> None:
    def wrong(model, norms) -> None:
        for norm in norms:
            norm.forward = lambda x, own=norm.forward: own(x) * 1.5

    monkeypatch.setitem(bench.PROVIDERS, "wrong", ("", wrong))
    size = bench.tiny(bench.SIZES["llama-1b"])
    original, found = bench.measure("tiny", size, ["original", "wrong"], 1, CPU, 0.0)
    assert original.step_ms and found.step_ms is None
    assert found.reason.startswith("loss ") or found.reason.startswith("gradient norm ")
    assert bench.why_off((float("nan"), 1.0), (1.0, 1.0)).startswith("loss nan")


def test_norms_are_changed_back_and_keep_their_parameters(bench) -> None:
    model = bench.build(bench.tiny(bench.SIZES["qwen3-1.7b"]), CPU)
    parameters, kinds = list(model.parameters()), [type(module) for module in model.modules()]
    norms = bench.Norms(model)
    for provider in ("meshnorm", "nothing"):
        norms.add(provider)
        assert [type(module) for module in model.modules()] == kinds
    norms.use("meshnorm")
    assert len(meshnorm.convert(model).left) == 9
    norms.use("nothing")
    assert norms.modules[0](parameters[0]) is parameters[0]
    norms.use("original")
    assert len(meshnorm.convert(model).swapped) == 9
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))


def test_a_batch_that_does_not_fit_is_halved(bench, monkeypatch, capsys) -> None:
    tried = []

    def measure(name, size, *others):
        tried.append(size.batch)
        if size.batch > 1:
            raise torch.OutOfMemoryError
        return ["found"]

    monkeypatch.setattr(bench, "measure", measure)
    assert bench.fitting("tiny", bench.SIZES["llama-1b"], [], 1, CPU, 0.0) == ["found"]
    assert tried == [4, 2, 1] and "batch 4 does not fit" in capsys.readouterr().out
