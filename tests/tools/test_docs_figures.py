"""The pictures of the docs."""

from __future__ import annotations

import pytest

from megatron_magi import masks

pytest.importorskip("matplotlib", reason="draws")

from tools.docs_figures import masks_figure


def test_a_sheet_has_a_panel_a_mask_and_hides_the_rest() -> None:
    named = {name: masks.causal(n) for n, name in enumerate("abcde", start=8)}
    panels = masks_figure(named, columns=3).axes
    assert len(panels) == 6
    assert [p.get_title(loc="left") for p in panels if p.get_visible()] == list(named)
    assert [p.get_xlim()[1] for p in panels[:5]] == [8, 9, 10, 11, 12]
