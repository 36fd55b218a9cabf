"""Requests from anyone who reaches ComfyUI's port: each is served or refused with a sentence, and nothing else happens.

The drawn examples are the same in every run (`derandomize`), so that a change is the only reason for a new result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

LONG = "x" * 5_000  # more than any answer may repeat
MOST_TOLD = 2_000  # characters of a sentence

drawn = settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))

names = st.sampled_from(["model", "load", "latent", "text", "vae", "sample", "1", "absent", LONG, "\ud800", "a\nb"])
numbers = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([10**300, 1e308, 0, 1, 64, 512]))
plain = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.text(max_size=8),
    st.sampled_from([LONG, "512x512", "9" * 400 + "x64", "../a.png", "a.png [output]", "SDXL", "1, 2", "x"]),
)
links = st.tuples(names, st.one_of(st.integers(-1, 3), st.floats())).map(list)
anything = st.recursive(
    plain, lambda inside: st.one_of(st.lists(inside, max_size=3), st.dictionaries(names, inside, max_size=3))
)
INPUTS = [
    "model", "positive", "negative", "latent_image", "samples", "vae", "width", "height", "batch_size", "cfg", "image",
    "pixels", "scale_by", "switch", "on_true", "on_false", "value", "preset", "multiple", "resize_type",
    "dim", "amount", "sizes", "control_net", "conditioning", "tile_size", "aspect_ratio",
    "megapixels", "samples1", "samples2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """ComfyUI's folders with one picture each, and a picture outside of them."""
    root = tmp_path_factory.mktemp("comfyui")
    made = SimpleNamespace(root=root, input=root / "input", output=root / "output", temp=root / "temp")
    for folder in (made.input, made.output, made.temp):
        folder.mkdir()
        Image.new("RGB", (24, 16)).save(folder / "a.png")
    Image.new("RGB", (640, 480)).save(root / "secret.png")
    return made


@pytest.fixture(scope="module")
def pack_with_folders(pack: Any, folders: SimpleNamespace) -> Iterator[Callable[[str], Any]]:
    """`pack`, beside as much of core's folder_paths as the pack uses: names are joined to a folder without a check."""

    def annotated(name: str) -> str:
        for kind in ("input", "output", "temp"):
            if name.endswith(f"[{kind}]"):
                return f"{getattr(folders, kind)}/{name[: -len(kind) - 3]}"
        return name if name.startswith("/") else f"{folders.input}/{name}"

    stub = SimpleNamespace(
        get_annotated_filepath=annotated,
        get_input_directory=lambda: str(folders.input),
        get_output_directory=lambda: str(folders.output),
        get_temp_directory=lambda: str(folders.temp),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "folder_paths", stub)  # type: ignore[arg-type]
        yield pack


@pytest.fixture(scope="module")
def parse_request(pack_with_folders: Any) -> Callable[[Any], Any]:
    return pack_with_folders("nodes.adapters.warm_up.request").parse_request  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def limits(pack: Any) -> Any:
    return pack("nodes.adapters.warm_up.request_limits")


def check_sentence(text: str) -> None:
    assert len(text) <= MOST_TOLD
    assert "x" * 61 not in text
    assert text.isprintable()


@st.composite
def workflows(draw: Any, classes: list[str]) -> dict[str, Any]:
    """Nodes of known and unknown classes, whose inputs are links and values of any kind."""
    inputs = st.dictionaries(st.sampled_from(INPUTS), st.one_of(links, anything), max_size=5)
    node = st.fixed_dictionaries(
        {"class_type": st.sampled_from(classes), "inputs": inputs},
        optional={"_meta": st.one_of(anything, st.just({"title": f"a\n{LONG}"}))},
    )
    return draw(st.dictionaries(names, st.one_of(node, anything) if draw(st.booleans()) else node, max_size=6))


class TestWarmUpRequests:
    def serve(self, parse: Callable[[Any], Any], user_error: type[Exception], body: Any) -> None:
        try:
            parsed = parse(body)
        except user_error as error:
            check_sentence(str(error))
            return
        assert json.loads(json.dumps(parsed.prompt))
        for text in (*parsed.unknown, *parsed.items):
            check_sentence(text)

    def test_any_workflow_is_served_or_refused(self, pack: Any, parse_request: Any, user_error: Any) -> None:
        rules = pack("nodes.adapters.scan.rules").RULES
        classes = [*rules, *["KSampler", "VAEDecode"] * 8, "ResoluteCompileModel", "Other", f"B{LONG}"]

        @drawn
        @given(workflows(classes))
        def check(prompt: dict[str, Any]) -> None:
            self.serve(parse_request, user_error, {"prompt": prompt})

        check()

    def test_any_plan_is_served_or_refused(self, parse_request: Any, user_error: Any) -> None:
        fields = ("sizes", "batch_sizes", "prompt_chunks", "cfg", "backend", "vae", LONG)

        @drawn
        @given(st.dictionaries(st.sampled_from(fields), anything), plain, plain)
        def check(given: dict[str, Any], checkpoint: Any, sizes: Any) -> None:
            self.serve(parse_request, user_error, {"plan": {"checkpoint": checkpoint, "sizes": sizes, **given}})

        check()

    @pytest.mark.parametrize(
        ("field", "value", "told"),
        [
            ("cfg", float("nan"), "from 0 to 100"),
            ("cfg", ["load", 0], "from 0 to 100"),
            ("cfg", -1, "from 0 to 100"),
            ("backend", ["load", 0], "must be a name"),
            ("sizes", "64x64," * 5_000, "may have 10000 characters"),
            ("checkpoint", "a" * 10_001, "may have 10000 characters"),
            ("sizes", "9" * 5_000 + "x64", "is not a size"),
        ],
    )
    def test_a_field_of_a_plan_has_its_limits(
        self, parse_request: Any, user_error: Any, field: str, value: Any, told: str
    ) -> None:
        plan = {"checkpoint": "a.safetensors", "sizes": "64x64", field: value}
        with pytest.raises(user_error, match=told):
            parse_request({"plan": plan})

    def test_long_lists_are_counted_before_they_are_multiplied(self, parse_request: Any, user_error: Any) -> None:
        lists = {"sizes": "64x64," * 1_600, "batch_sizes": "1," * 5_000, "prompt_chunks": "1," * 5_000}
        assert len(parse_request({"plan": {"checkpoint": "a", **lists}}).items) == 1
        sizes = ", ".join(f"{64 + 8 * number}x64" for number in range(1_000))
        batches = ", ".join(map(str, range(1, 65)))
        with pytest.raises(user_error, match="2048000 shapes are too many"):
            chunks = ", ".join(map(str, range(1, 33)))
            plan = {"checkpoint": "a", "sizes": sizes, "batch_sizes": batches, "prompt_chunks": chunks}
            parse_request({"plan": plan})

    def test_a_workflow_has_a_limit_of_nodes(self, parse_request: Any, limits: Any, user_error: Any) -> None:
        node = {"class_type": "Other", "inputs": {}}
        with pytest.raises(user_error, match=f"may have {limits.MAX_NODES}"):
            parse_request({"prompt": {str(number): node for number in range(limits.MAX_NODES + 1)}})

    def test_the_graph_is_followed_once_and_not_for_every_sampler(
        self, pack: Any, parse_request: Any, user_error: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A chain of ControlNets and as many samplers at its end: what each of them needs is known by then."""
        count = 200
        prompt: dict[str, Any] = {
            "latent": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64}},
            "sampled": {"class_type": "OtherSampler", "inputs": {"model": ["m", 0], "latent": ["latent", 0]}},
        }
        for number in range(count):
            before = ["sampled" if number == 0 else f"c{number - 1}", 0]
            inputs = {"conditioning": before, "control_net": ["n", 0]}
            prompt[f"c{number}"] = {"class_type": "ControlNetApply", "inputs": inputs}
            text = [f"c{count - 1}", 0]
            inputs = {"model": ["m", 0], "positive": text, "negative": text, "latent_image": ["latent", 0], "cfg": 7}
            prompt[f"s{number}"] = {"class_type": "KSampler", "inputs": inputs}
            prompt[f"o{number}"] = {"class_type": "Save", "inputs": {"anything": [f"s{number}", 0]}}
        prompt["m"] = {"class_type": "ResoluteCompileModel", "inputs": {}}
        read: list[Any] = []
        node = pack("nodes.adapters.scan.node")
        real = node.as_link
        monkeypatch.setattr(node, "as_link", lambda value: read.append(1) or real(value))
        assert parse_request({"prompt": prompt}).items == ["64x64: model"]
        assert len(read) < 20 * len(prompt)


class TestBodies:
    def test_any_bytes_are_json_within_limits_or_refused(self, limits: Any, user_error: Any) -> None:
        @drawn
        @given(st.one_of(st.binary(max_size=200), anything.map(lambda value: json.dumps(value).encode())))
        def check(content: bytes) -> None:
            try:
                assert type(limits.parse_body(content)) is dict
            except user_error as error:
                check_sentence(str(error))

        check()

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (b"", "not valid JSON"),
            (b"[1]", "must be a JSON object"),
            (b"\xff\xfe\xfa", "not valid JSON"),
            (b'{"a": NaN}', "contains NaN"),
            (b'{"a": [-Infinity]}', "contains -Infinity"),
            (b'{"a": 1e999}', "too large a number"),
            (b'{"a": 18446744073709551617}', "too large a number"),
            (b'{"a": ' + b"1" * 100_000 + b"}", "too large a number"),
            (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
            (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "more than 64 levels"),
            (b'{"a": [' + b"1," * 10_000 + b"1]}", "10001 entries, and may have 10000"),
            (b'{"a": [' + b"[]," * 300_000 + b"[]]}", "more than 200000 values"),
            (b'{"' + b"x" * 1_001 + b'": 1}', "1001 characters, and may have 1000"),
            (b'{"client_id": "' + b"x" * 1_001 + b'"}', "client_id.*1001 characters"),
        ],
        ids=range(14),
    )
    def test_what_breaks_a_limit_is_refused_with_a_sentence(
        self, limits: Any, user_error: Any, content: bytes, told: str
    ) -> None:
        with pytest.raises(user_error, match=told) as caught:
            limits.parse_body(content)
        check_sentence(str(caught.value))

    def test_what_workflows_have_is_within_the_limits(self, limits: Any) -> None:
        seed, picture = 2**64 - 1, "A" * (4 << 20)
        body = {"client_id": "a" * 32, "prompt": {"1": {"class_type": "A", "inputs": {"seed": seed, "data": picture}}}}
        assert limits.parse_body(json.dumps(body).encode()) == body


class TestFileNames:
    def test_no_name_reads_a_file_outside_of_comfyuis_folders(
        self, pack_with_folders: Any, folders: SimpleNamespace
    ) -> None:
        image_size = pack_with_folders("nodes.adapters.scan.image_files").image_size
        part = st.sampled_from(["..", ".", "a.png", "secret.png", "input", str(folders.root), "", "\0", "x" * 300])
        parts = st.lists(part, max_size=5).map("/".join)

        @drawn
        @given(st.tuples(parts, st.sampled_from(["", " [output]", " [input]", " [nothing]"])).map("".join))
        def check(name: str) -> None:
            assert image_size(name) in (None, (24, 16))

        check()
        assert image_size("a.png") == image_size("a.png [output]") == (24, 16)
        assert image_size("../secret.png") is image_size(str(folders.root / "secret.png")) is None
