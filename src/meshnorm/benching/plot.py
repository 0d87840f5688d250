"""Forward and backward as percent of the copy bandwidth over the width, one line a provider, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .job import Result
from .report import Setting

_COLORS = {"meshnorm": "#d1495b", "eager": "#8d99ae", "compile": "#2e86ab", "liger": "#edae49", "quack": "#66a182"}
_OTHERS = "#7b5ea7"


def draw(file: Path, results: Sequence[Result], setting: Setting) -> None:
    """Of the shapes of one width N the one with the most rows is drawn."""
    from matplotlib.figure import Figure

    passes = list(dict.fromkeys(result.which for result in results))
    providers = list(dict.fromkeys(result.provider for result in results))
    figure = Figure(figsize=(6 * len(passes), 4.4), layout="constrained")
    panels = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
    for which, panel in zip(passes, panels, strict=True):
        for provider in providers:
            mine = [result for result in results if (result.which, result.provider) == (which, provider)]
            _line(panel, provider, widest_batches(mine), setting)
        widths = sorted({result.n for result in results})
        panel.set_xscale("log", base=2)
        panel.set_xticks(widths, [str(width) for width in widths], rotation=60, fontsize=8)
        panel.minorticks_off()
        panel.set(title=which, xlabel="N, elements a row")
        panel.axhline(100, color="#444444", linewidth=1.0, linestyle="--", zorder=1)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylim(bottom=0)  # of all panels, once all lines are there
    panels[0].set_ylabel("% of copy bandwidth")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=max(1, len(names)), frameon=False)
    dtype = results[0].dtype if results else ""
    figure.suptitle(
        f"RMSNorm, {dtype}, {setting.machine}, copy {setting.copy_gb_s:,.0f} GB/s; meshnorm {setting.meshnorm}, "
        f"torch {setting.torch}, triton {setting.triton}; {setting.date}",
        fontsize=8,
    )
    figure.savefig(file, format="png", dpi=150)


def widest_batches(results: Sequence[Result]) -> list[Result]:
    """Of each width the result with the most rows, in the order of widths."""
    found: dict[int, Result] = {}
    for result in sorted(results, key=lambda result: (result.n, result.m)):
        found[result.n] = result
    return list(found.values())


def _line(panel: Any, provider: str, results: Sequence[Result], setting: Setting) -> None:
    # a missing point breaks the line, and does not bridge what was refused
    percents = [result.percent_of_copy(setting.copy_gb_s) for result in results]
    points = [float("nan") if percent is None else percent for percent in percents]
    base, _, revision = provider.partition("@")
    panel.plot(
        [result.n for result in results],
        points,
        label=provider,
        color=_COLORS.get(base, _OTHERS),
        linestyle="--" if revision else "-",
        linewidth=2.2 if provider == "meshnorm" else 1.3,
        marker="o",
        markersize=3.5,
        zorder=3 if provider == "meshnorm" else 2,
    )
