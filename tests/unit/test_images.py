"""What docs/images/draw.py makes of the results that are kept; the chart of speeds is tested in test_readme.py."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from infer.settings.paths import REPO_ROOT

FOLDER = REPO_ROOT / "docs" / "images"


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("draw")


def row(minute: float, tau: float, kind: str) -> dict[str, object]:
    return {"minute": minute, "tau": tau, "kind": kind}


def test_learning(draw: ModuleType) -> None:
    pair = draw.newest("smollm2-traffic-learns"), draw.newest("smollm2-traffic-stays")
    assert draw.learning(*pair) == (FOLDER / "learning.svg").read_text(encoding="utf-8")


def test_a_point_stands_at_its_hour_and_its_value(draw: ModuleType) -> None:
    # a point is the mean of eight windows, or of what is left of a kind
    learns = [row(minute, minute / 30, "edits") for minute in (26, 34) * 4]
    learns += [row(60, 2.0, "edits"), row(118, 1.2, "notes"), row(120, 1.8, "notes")]
    svg = draw.learning(learns, [row(9, 1.0, line["kind"]) for line in learns])
    wide, high = draw.RIGHT - draw.LEFT, draw.LOWER - draw.UPPER
    points = [(draw.LEFT + wide / 4, draw.LOWER), (draw.LEFT + wide / 2, draw.UPPER)]
    points.append((draw.LEFT + wide * 119 / 120, draw.LOWER - high / 2))
    assert f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"' in svg
    assert f'<path d="M{draw.LEFT + wide / 2:.1f} {draw.UPPER}V' in svg  # the shift, where the last of edits ended
    assert svg.count("<polyline") == 2
    assert ">edits<" in svg
    assert ">notes<" in svg
    assert ">2.0 hours<" in svg


def test_scaling(draw: ModuleType) -> None:
    assert draw.scaling(draw.newest("smollm2-scaling")) == (FOLDER / "scaling.svg").read_text(encoding="utf-8")


def test_a_point_stands_at_its_tokens_and_the_mean_of_the_sets(draw: ModuleType) -> None:
    def point(millions: float, *taus: float) -> dict[str, object]:
        sets = {f"set {n}": {"tau": tau, "by_position": [(tau - 1) / 2] * 2} for n, tau in enumerate(taus)}
        return {"tokens": millions * 1e6, "sets": sets}

    svg = draw.scaling([point(4, 3.0, 2.0), point(1, 2.0, 1.0), point(2, 2.0, 2.0)])
    eighth, middle = (draw.LOWER - draw.UPPER) / 8, draw.LEFT + draw.PLOT / 2
    for name, heights in {"set 0": (4, 4, 8), "set 1": (0, 4, 4), "mean": (2, 4, 6)}.items():
        places = zip((draw.LEFT, middle, draw.LEFT + draw.PLOT), heights, strict=True)
        points = " ".join(f"{x:.1f},{draw.LOWER - eighth * height:.1f}" for x, height in places)
        assert f'<polyline points="{points}"' in svg, name
    assert svg.count("<polyline") == 5  # two sets and their mean, two positions
    assert svg.count("<circle") == 15


def test_labels_stand_apart_in_their_order(draw: ModuleType) -> None:
    spaced = draw.spaced({"low": 100.0, "high": 20.0, "between": 25.0, "next": 26.0})
    assert spaced == {"high": 20.0, "between": 20.0 + draw.LINE, "next": 20.0 + 2 * draw.LINE, "low": 100.0}


def test_an_unknown_picture_is_named(
    draw: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["draw.py", "portrait"])
    assert draw.main() == 2
    assert "docs.images.draw learning" in capsys.readouterr().out
