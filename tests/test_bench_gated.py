"""``benchmarks/gated.py``: each way that needs no other library runs and is right. Timing needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def gated() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        import gated

        yield gated


def test_it_times_what_is_right(gated: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.csv"
    arguments = ["--device", "cpu", "--shapes", "64x128:32,64x128", "--ways", "meshnorm,eager,fla", "--rep-ms", "1"]
    rows = gated.main([*arguments, "--csv", str(table)])
    assert [row[::2][:2] for row in rows] == [
        (f"64x128:{group} {order}", way)
        for group, order in ((32, "gate, norm"), (128, "norm, gate"))
        for way in ("meshnorm", "eager")
    ]
    assert all(float(number) > 0 for row in rows for number in row[3:5])
    assert len(table.read_text().splitlines()) == 1 + len(rows)
    words = capsys.readouterr().out
    assert "GB/s" in words and "Error" in words  # fla does not take the first, and is not here or needs a GPU


def test_what_is_wrong_is_not_timed(gated: ModuleType) -> None:
    shape = gated.Shape(32, 64, 16, False)
    given = gated.Given.drawn(shape, torch.float32, "cpu")
    assert gated.fault(shape, gated.composition(shape), given) == ""
    other = gated.composition(shape._replace(group=64))
    assert gated.fault(shape, other, given).startswith("y is off by")
