"""The captions that the demo's model understands."""

from __future__ import annotations

import pytest

from scripts.models.demo_model import captions


def test_words_may_be_in_any_order_and_may_be_left_out() -> None:
    assert captions.numbers("left circle RED large") == captions.numbers("large red circle left")
    assert captions.numbers("red circle")[0] == (0, captions.NUMBERS["red"], captions.NUMBERS["circle"], 0)
    assert captions.numbers("") == [captions.NOTHING] == captions.numbers(" , ")


def test_an_unknown_word_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"does not know 'lighthouse'\. It knows: small, large, red"):
        captions.numbers("red lighthouse")
    with pytest.raises(ValueError, match=r"'red' and 'blue' cannot both be in the phrase 'red circle blue'"):
        captions.numbers("red circle blue, white background")
