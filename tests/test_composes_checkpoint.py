"""Distributed checkpoints: saved on one mesh, loaded on another, trained on; equal to a training that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from composed import (
    SPREADS,
    Recipe,
    assert_close,
    batches,
    drawn_model,
    loss_of,
    named_parameters,
    optimizer_for,
    train,
    whole,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from meshnorm.checking.ranks import RankPool

Ranks = Callable[[int], RankPool]
ADAMW = Recipe()
# The way and the norm that saves, those that load. "torch" is torch.nn.RMSNorm: a checkpoint does not tell them apart.
RESHARDED = [
    ("fsdp × tp", "module", "fsdp", "converted"),
    ("fsdp × tp", "converted", "one process", "torch"),
    ("fsdp", "converted", "fsdp × tp", "module"),
    ("fsdp × cp", "module", "hsdp", "converted"),
    ("tp", "module", "fsdp × cp of DTensors", "converted"),
    ("cp of DTensors", "torch", "tp", "module"),
    ("one process", "torch", "fsdp × cp", "converted"),
    ("ddp", "converted", "cp of DTensors", "module"),
]


def _run(ranks: Ranks, way: str, function: Callable[..., None], *arguments: object) -> None:
    world = 1
    for _, size in SPREADS[way].dims:
        world *= size
    if world == 1:
        function(way, *arguments)
    else:
        ranks(world).run(function, way, *arguments)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, way: str, data: list[Tensor]) -> None:
    spread = SPREADS[way]
    for x in data:
        optimizer.zero_grad()
        loss_of(model(spread.cut(x, spread.mesh) if spread.dims else x)).backward()
        optimizer.step()


def _spread_model(way: str, kind: str) -> nn.Module:
    spread, model = SPREADS[way], drawn_model(kind)
    return spread.apply(model, spread.mesh) if spread.dims else model


def _saves(way: str, kind: str, path: str) -> None:
    model = _spread_model(way, kind)
    optimizer = optimizer_for(model, ADAMW)
    _step(model, optimizer, way, batches(4)[:2])
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=path, no_dist=way == "one process")


def _loads_and_goes_on(way: str, kind: str, path: str) -> None:
    model = _spread_model(way, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    optimizer = optimizer_for(model, ADAMW)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=path, no_dist=way == "one process")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    _step(model, optimizer, way, batches(4)[2:])
    exact = drawn_model("torch")
    train(exact, SPREADS["one process"], Recipe(steps=4))
    found = {name: whole(parameter) for name, parameter in named_parameters(model)}
    assert_close(found, {name: p.detach() for name, p in exact.named_parameters()}, 1e-9)


@pytest.mark.parametrize(("saved_by", "kind", "loaded_by", "other_kind"), RESHARDED)
def test_a_checkpoint_is_resharded_and_training_goes_on(
    ranks: Ranks, tmp_path: Path, saved_by: str, kind: str, loaded_by: str, other_kind: str
) -> None:
    _run(ranks, saved_by, _saves, kind, str(tmp_path))
    _run(ranks, loaded_by, _loads_and_goes_on, other_kind, str(tmp_path))
