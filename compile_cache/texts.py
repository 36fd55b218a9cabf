"""Sentences for users that a front end can translate. Plain data: no torch, no ComfyUI."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_NOUNS = "region|size|capture|time|step|attention kernel|image|channel|block|OneDiff node|call|eager call|replay"
_ONE = re.compile(rf"(?<![\d.])1 ({_NOUNS}|region compile|region load)s\b")

Words = str | dict[str, Any]


class Text(str):
    """An English sentence that keeps its template and values: `Text("compiling {number} of {total}", ...)`.

    All other code can use it as an ordinary string. `words`: {"text": template, "values": {...}}, or
    {"join": separator, "parts": [...]}; a value or a part may be such words too. web/words.js renders them.
    """

    words: Words

    def __new__(cls, template: str, **values: object) -> Text:
        """Fill in the values. Write a counted noun in the plural: "1 regions" becomes "1 region"."""
        said = {name: words_of(value) for name, value in values.items()}
        return _made(_ONE.sub(r"1 \1", template.format(**values)), {"text": template, "values": said})

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (str(self), self.words)  # a copy has no template to format

    @classmethod
    def joined(cls, separator: str, parts: Iterable[str]) -> Text:
        """Join the parts, like `separator.join`."""
        all_parts = list(parts)
        words: Words = {"join": separator, "parts": [words_of(part) for part in all_parts]}
        return _made(separator.join(all_parts), words)

    def as_sentence(self) -> Text:
        """Return the text with a capital first letter. `words` is unchanged: translations have no capitals."""
        return _made(self[:1].upper() + self[1:], self.words)


def _made(english: str, words: Words) -> Text:
    made = str.__new__(Text, english)
    made.words = words
    return made


def words_of(text: object) -> Words:
    """Return the words of a Text; for anything else its plain string, which every language shows unchanged."""
    return text.words if isinstance(text, Text) else str(text)
