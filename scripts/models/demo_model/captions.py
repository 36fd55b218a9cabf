"""The demo model's prompt language: phrases of a few words, one per object, separated by commas.

``large red circle left, small blue square right, white background``. Any word of a phrase
may be left out. The empty caption describes nothing and is the negative prompt.
"""

from __future__ import annotations

SIZES = ("small", "large")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple")
SHAPES = ("circle", "square", "triangle", "diamond", "ring", "cross")
POSITIONS = ("left", "right", "top", "bottom", "centre")
BACKGROUND = "background"
BACKGROUNDS = ("white", "grey", "black")

# The four slots of a phrase, each with its possible words.
PLACES = (SIZES, (*COLOURS, *BACKGROUNDS), (*SHAPES, BACKGROUND), POSITIONS)
# Number 0 means that the slot is empty.
WORDS = ("", *(word for place in PLACES for word in place))
NUMBERS = {word: number for number, word in enumerate(WORDS)}
_PLACE = {word: index for index, place in enumerate(PLACES) for word in place}

Phrase = tuple[int, ...]
NOTHING: Phrase = (0,) * len(PLACES)


def numbers(caption: str) -> list[Phrase]:
    """The word numbers of each phrase, in the order of PLACES; at least one phrase.

    Raises ValueError for an unknown word or for two words in the same slot.
    """
    phrases = [_phrase(text) for text in caption.lower().split(",") if text.strip()]
    return phrases or [NOTHING]


def _phrase(text: str) -> Phrase:
    found = list(NOTHING)
    for word in text.split():
        place = _PLACE.get(word)
        if place is None:
            raise ValueError(f"The demo's model does not know {word!r}. It knows: {', '.join(WORDS[1:])}.")
        if found[place]:
            raise ValueError(
                f"{WORDS[found[place]]!r} and {word!r} cannot both be in the phrase {text.strip()!r}. "
                "Separate phrases with commas."
            )
        found[place] = NUMBERS[word]
    return tuple(found)
