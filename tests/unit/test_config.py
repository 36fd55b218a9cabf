"""Settings: defaults, environment variables, and errors that name the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_cache.config import CacheConfig
from compile_cache.errors import UserError

MIB = 1024 * 1024
FLAGS = {"RESOLUTE_CAPTURE": "capture", "RESOLUTE_VERIFY": "verify"}


def test_an_empty_environment_gives_the_defaults() -> None:
    assert CacheConfig.from_environment({}) == CacheConfig()


def test_without_an_argument_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESOLUTE_BUDGET_MB", "7")
    assert CacheConfig.from_environment().budget_bytes == 7 * MIB


@pytest.mark.parametrize(("text", "megabytes"), [("0", 0), ("1", 1), (" 512 ", 512), ("100000", 100000)])
def test_the_budget_is_read_in_megabytes(text: str, megabytes: int) -> None:
    assert CacheConfig.from_environment({"RESOLUTE_BUDGET_MB": text}).budget_bytes == megabytes * MIB


@pytest.mark.parametrize("name", ["RESOLUTE_BUDGET_MB", *FLAGS])
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_variable_counts_as_absent(name: str, text: str) -> None:
    assert CacheConfig.from_environment({name: text}) == CacheConfig()


@pytest.mark.parametrize("name", ["RESOLUTE_BUDGET_MB", "RESOLUTE_WORKERS"])
@pytest.mark.parametrize("text", ["-1", "1.5", "4 GB", "lots", "0x10", "1_000", "²", "①"])
def test_what_is_not_a_whole_number_is_refused_by_name_and_value(name: str, text: str) -> None:
    with pytest.raises(UserError, match=rf"{name}='{re.escape(text)}' is not a whole number.*; for example {name}=\d"):
        CacheConfig.from_environment({name: text})


@given(st.text(max_size=6))
def test_any_text_is_a_budget_or_a_user_error(text: str) -> None:
    try:
        assert CacheConfig.from_environment({"RESOLUTE_BUDGET_MB": text}).budget_bytes >= 0
    except UserError as error:
        assert "RESOLUTE_BUDGET_MB" in str(error)


@pytest.mark.parametrize(("name", "field"), list(FLAGS.items()))
@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("ON", True), ("0", False), ("False", False), (" off ", False)]
)
def test_a_flag_is_read_as_people_write_it(name: str, field: str, text: str, value: bool) -> None:
    assert getattr(CacheConfig.from_environment({name: text}), field) is value


@pytest.mark.parametrize("name", list(FLAGS))
@pytest.mark.parametrize("text", ["2", "yes please", "-", "truee"])
def test_a_flag_that_is_neither_on_nor_off_is_refused_with_the_remedy(name: str, text: str) -> None:
    with pytest.raises(UserError, match=f"{name}=.*use 1 or 0"):
        CacheConfig.from_environment({name: text})


@pytest.mark.parametrize(("device", "budget"), [(8192, 2048), (12288, 3072), (16384, 4096), (143771, 4096)])
def test_without_a_setting_the_budget_is_a_quarter_of_the_gpu_and_4_gib_at_most(device: int, budget: int) -> None:
    assert CacheConfig.from_environment({}, device * MIB).budget_bytes == budget * MIB


def test_a_budget_that_was_set_holds_on_any_gpu() -> None:
    assert CacheConfig.from_environment({"RESOLUTE_BUDGET_MB": "9000"}, 1024 * MIB).budget_bytes == 9000 * MIB


def test_the_environment_overrides_the_callers_store_folder(tmp_path: Path) -> None:
    def folder(text: str) -> Path | None:
        return CacheConfig.from_environment({"RESOLUTE_STORE": text}, store_folder=tmp_path).store_folder

    assert [folder(text) for text in ("", "1", "on")] == [tmp_path] * 3
    assert [folder(text) for text in ("0", "off", "False")] == [None] * 3
    assert folder(str(tmp_path / "other")) == tmp_path / "other"
    with pytest.raises(UserError, match="RESOLUTE_STORE='some/where' is neither an absolute path"):
        folder("some/where")


@pytest.mark.parametrize(("text", "expected"), [("", None), ("0", 0), ("4", 4)])
def test_the_number_of_workers_is_unset_unless_the_environment_sets_it(text: str, expected: int | None) -> None:
    assert CacheConfig.from_environment({"RESOLUTE_WORKERS": text}).workers == expected


def test_classes_and_packs_that_a_person_trusts_are_read_from_two_lists() -> None:
    pack = "wan-wrapper@1.4.2:0123456789abcdef"
    given = {
        "RESOLUTE_TRUSTED_CLASSES": "C:\\packs\\wan.model.Block, other.Block",
        "RESOLUTE_TRUSTED_PACKS": f" {pack},",
    }
    assert CacheConfig.from_environment(given).trusted == {"C:\\packs\\wan.model.Block", "other.Block", pack}


@pytest.mark.parametrize("text", ["wan", "wan@1.4.2", "wan@1.4.2:xyz", "@1:0123456789abcdef", "wan@1:0123456789abcde"])
def test_a_pack_without_its_digest_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(UserError, match=f"RESOLUTE_TRUSTED_PACKS.*'{text}'.*copy what the log says"):
        CacheConfig.from_environment({"RESOLUTE_TRUSTED_PACKS": f"good@1:0123456789abcdef, {text}"})


def test_another_attention_than_the_default_is_other_source_code() -> None:
    default = CacheConfig.from_environment({}, source="abc")
    assert (default.attention, default.source) == ("measured", "abc")
    assert CacheConfig.from_environment({"RESOLUTE_ATTENTION": "Measured"}, source="abc") == default
    flash = CacheConfig.from_environment({"RESOLUTE_ATTENTION": "flash"}, source="abc")
    assert flash.attention == "flash"
    assert flash.source not in ("", "abc")
    with pytest.raises(UserError, match="RESOLUTE_ATTENTION='fast' is none of measured, flash"):
        CacheConfig.from_environment({"RESOLUTE_ATTENTION": "fast"})
