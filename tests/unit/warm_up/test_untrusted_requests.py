"""Requests from anyone who reaches ComfyUI's port: each is served or refused with a sentence, and nothing else happens.

The drawn examples are the same in every run (`derandomize`), so that a change is the only reason for a new result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


# As much of ComfyUI's node classes as a request is read with.
CLASSES = {
    name: SimpleNamespace(RETURN_TYPES=outputs, OUTPUT_NODE=is_output)
    for name, outputs, is_output in (
        ("CheckpointLoaderSimple", ("MODEL", "CLIP", "VAE"), False),
        ("ResoluteCompileModel", ("MODEL",), False),
        ("ResoluteCompileVAEDecode", ("VAE",), False),
        ("ResoluteResolution", ("INT", "INT"), False),
        ("EmptyLatentImage", ("LATENT",), False),
        ("KSampler", ("LATENT",), False),
        ("VAEDecode", ("IMAGE",), False),
        ("SaveImage", (), True),
        ("SaveAndPass", ("IMAGE",), True),
        ("Switch", ("*",), False),
    )
}


@pytest.fixture(scope="module")
def parse_request(pack: Any) -> Callable[[Any], Any]:
    parse = pack("nodes.adapters.warm_up.request").parse_request
    return lambda body: parse(body, CLASSES)


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
        for text in parsed.unknown:
            check_sentence(text)

    def test_any_workflow_is_served_or_refused(self, parse_request: Any, user_error: Any) -> None:
        classes = [*CLASSES, *["KSampler", "SaveImage", "ResoluteCompileModel"] * 4, "Other", f"B{LONG}"]
        more = st.dictionaries(st.sampled_from(["sizes", "batch_sizes"]), plain, max_size=2)

        @drawn
        @given(workflows(classes), more)
        def check(prompt: dict[str, Any], more: dict[str, Any]) -> None:
            self.serve(parse_request, user_error, {"prompt": prompt, **more})

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
        assert parse_request({"plan": {"checkpoint": "a", **lists}}).prompt
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

    def test_many_sizes_of_a_long_workflow_are_refused(self, parse_request: Any, user_error: Any) -> None:
        prompt = {str(number): {"class_type": "Other", "inputs": {}} for number in range(200)}
        sizes = ", ".join(f"{64 + 8 * number}x64" for number in range(101))
        with pytest.raises(user_error, match="101 sizes are too many for a workflow"):
            parse_request({"prompt": prompt, "sizes": sizes})

    def test_a_long_chain_is_followed_without_recursion_and_once(
        self, pack: Any, parse_request: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A chain of nodes that save and pass on, and as many samplers at its end."""
        count = 600
        prompt: dict[str, Any] = {"m": {"class_type": "ResoluteCompileModel", "inputs": {}}}
        for number in range(count):
            before = ["m", 0] if number == 0 else [f"c{number - 1}", 0]
            prompt[f"c{number}"] = {"class_type": "Lora", "inputs": {"model": before}}
            prompt[f"s{number}"] = {"class_type": "KSampler", "inputs": {"model": [f"c{count - 1}", 0]}}
            prompt[f"o{number}"] = {"class_type": "SaveImage", "inputs": {"anything": [f"s{number}", 0]}}
        read: list[Any] = []
        workflow = pack("nodes.adapters.warm_up.workflow")
        real = workflow.as_link
        monkeypatch.setattr(workflow, "as_link", lambda value: read.append(1) or real(value))
        served = parse_request({"prompt": prompt})
        assert sum(each["class_type"] == "ResoluteWarmUpEnd" for each in served.prompt.values()) == 1
        assert len(read) < 4 * len(prompt)


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
