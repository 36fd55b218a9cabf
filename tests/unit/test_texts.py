"""Sentences with their template and values."""

from __future__ import annotations

import copy
import json
import pickle

from compile_cache.texts import Text, words_of


def test_a_text_is_its_english_sentence_and_knows_its_parts() -> None:
    text = Text("{size}: {result}", size="64x64", result=Text("{time}/step", time="21 ms"))
    assert text == "64x64: 21 ms/step"
    assert json.loads(json.dumps({"text": text, "words": text.words})) == {
        "text": "64x64: 21 ms/step",
        "words": {
            "text": "{size}: {result}",
            "values": {"size": "64x64", "result": {"text": "{time}/step", "values": {"time": "21 ms"}}},
        },
    }


def test_one_of_something_is_singular() -> None:
    assert Text("compiled {count} regions in {time}", count=1, time="2 s") == "compiled 1 region in 2 s"
    assert Text("compiled {count} regions in {time}", count=11, time="2 s") == "compiled 11 regions in 2 s"


def test_texts_in_a_row_keep_their_words_and_plain_strings_stay_as_they_are() -> None:
    row = Text.joined(", ", [Text("stopped"), "int8 products"])
    assert row == "stopped, int8 products"
    assert row.words == {"join": ", ", "parts": [{"text": "stopped", "values": {}}, "int8 products"]}
    assert (words_of("plain"), words_of(7)) == ("plain", "7")


def test_a_value_with_braces_is_not_filled_in() -> None:
    assert Text("not compiled: {why}", why="{code} of a pack") == "not compiled: {code} of a pack"


def test_a_copy_is_the_same_text() -> None:
    text = Text("not compiled: {why}", why="{code} of a pack")
    for copied in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert (copied, copied.words, type(copied)) == (text, text.words, Text)


def test_a_sentence_has_a_capital_letter_in_english_only() -> None:
    sentence = Text("cancelled").as_sentence()
    assert (sentence, sentence.words) == ("Cancelled", {"text": "cancelled", "values": {}})
