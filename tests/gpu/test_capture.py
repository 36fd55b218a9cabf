"""Captures on both of ComfyUI's allocators, and what happens when one fails. Each case is a process of its own:
the allocator is chosen at start, and the failure to rule out is the end of the process."""

from __future__ import annotations

import textwrap

import pytest

from ..programs import run_python

ALLOCATORS = {"cudaMallocAsync": "backend:cudaMallocAsync", "native": "backend:native"}

PRELUDE = """
    import torch
    from compile_cache.backends.cuda_graphs.capture import capture
    from compile_cache.errors import CaptureError
    torch.set_grad_enabled(False)
    weight = torch.randn(256, 256, device="cuda")

    def forward(tensors):
        x = tensors[0]
        for _ in range(4):
            x = torch.relu(x @ weight) * 0.1
        return x

    def check(rows):
        x = torch.randn(rows, 256, device="cuda")
        graph = capture(forward, [x], forward([x]))
        for _ in range(3):
            y = torch.randn(rows, 256, device="cuda")
            assert torch.equal(graph.replay([y]), forward([y])), rows
        assert graph.bytes > 0
        return graph
"""


def run(allocator: str, body: str) -> str:
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(body) + "\nprint('survived')\n"
    printed = run_python(code, PYTORCH_CUDA_ALLOC_CONF=ALLOCATORS[allocator])
    assert printed.rstrip().endswith("survived")
    return printed


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_replays_are_bit_identical_and_graphs_of_many_sizes_live_side_by_side(allocator: str) -> None:
    run(
        allocator,
        """
        graphs = [check(rows) for rows in (64, 1, 777, 4096)]
        x = torch.randn(777, 256, device="cuda")
        assert torch.equal(graphs[2].replay([x]), forward([x]))
        for graph in graphs:
            graph.close()
        check(64)
        """,
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_capture_launches_nothing(allocator: str) -> None:
    run(
        allocator,
        """
        count = torch.zeros(1, device="cuda")

        def counted(tensors):
            count.add_(1)
            return forward(tensors)

        x = torch.randn(777, 256, device="cuda")
        graph = capture(counted, [x], counted([x]))
        assert count.item() == 2, count  # the run before, and the rehearsal
        for launches in (1, 2):
            assert torch.equal(graph.replay([x]), forward([x]))
            assert count.item() == 2 + launches
        """,
    )


MEMORY = """
    from compile_cache.backends.cuda_graphs.memory import release_graph_memory
    from compile_cache.backends.cuda_graphs.pools import pool_bytes

    def used():
        release_graph_memory()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    check(64).close()
    before = used()
"""


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_closed_captures_leave_nothing_on_the_device(allocator: str) -> None:
    run(
        allocator,
        textwrap.dedent(MEMORY)
        + textwrap.dedent("""
        graphs = [check(rows) for rows in (400_000, 64)]
        assert pool_bytes() > 300 << 20, pool_bytes()
        for graph in graphs:
            graph.close()
        assert pool_bytes() == 0
        del graph, graphs
        assert used() - before < 64 << 20, (used() - before) >> 20
        """),
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_after_a_broken_capture_the_memory_of_captures_is_given_back(allocator: str) -> None:
    run(
        allocator,
        textwrap.dedent(MEMORY)
        + textwrap.dedent("""
        graphs = [check(400_000)]
        calls = []

        def broken(tensors):
            calls.append(1)
            if len(calls) > 2:
                torch.cuda.synchronize()
            return forward(tensors)

        x = torch.ones(64, 256, device="cuda")
        try:
            capture(broken, [x], broken([x]))
        except CaptureError as error:
            print(error)
        graphs.append(check(200_000))
        for graph in graphs:
            graph.close()
        assert pool_bytes() == 0
        del graph, graphs
        assert used() - before < 64 << 20, (used() - before) >> 20
        """),
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_what_graphs_work_in_counts_as_free_for_the_next_one(allocator: str) -> None:
    run(
        allocator,
        textwrap.dedent(MEMORY)
        + textwrap.dedent("""
        from compile_cache.cache.captures import free_bytes

        free = free_bytes("cuda:0")
        graph = check(400_000)
        assert pool_bytes() > 300 << 20, pool_bytes()
        torch.cuda.empty_cache()
        assert free - free_bytes("cuda:0") < graph.bytes + (64 << 20), (free - free_bytes("cuda:0")) >> 20
        """),
    )


def test_what_a_living_capture_works_in_can_be_released() -> None:
    run(
        "cudaMallocAsync",
        textwrap.dedent(MEMORY)
        + textwrap.dedent("""
        graph = check(400_000)
        assert pool_bytes() > 300 << 20, pool_bytes()
        assert used() - before < graph.bytes + (64 << 20), ((used() - before) >> 20, graph.bytes >> 20)
        assert pool_bytes() < 64 << 20, pool_bytes()
        y = torch.randn(400_000, 256, device="cuda")
        assert torch.equal(graph.replay([y]), forward([y]))
        """),
    )


# What goes wrong, and from which run of the forward on: the 2nd is the rehearsal, the 3rd the capture itself. After a
# rehearsal that waits, the 3rd looks for values that are made on the host.
FAILURES = {
    "item": ("x.sum().item()", 2),
    "copy": ("x.cpu()", 2),
    "python": ("1 / 0", 3),
    "memory": ("torch.empty(2**50, device='cuda')", 3),
    "wait": ("torch.cuda.synchronize()", 3),  # breaks the capture, as DynamicVRAM does when it unloads pages
}


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_capture_is_an_error_and_the_process_goes_on(allocator: str, failure: str) -> None:
    code, when = FAILURES[failure]
    run(
        allocator,
        f"""
        def attempt():
            calls = []

            def broken(tensors):
                calls.append(1)
                x = forward(tensors) + 1
                kept = [x * i for i in range(3)]
                if len(calls) >= {when}:
                    {code}
                return x + kept[1]

            x = torch.ones(64, 256, device="cuda")
            try:
                capture(broken, [x], broken([x]))
            except CaptureError as error:
                print(error)
            else:
                raise AssertionError("it did not fail")
            assert len(calls) == 3

        graph = check(8)
        torch.manual_seed(1)
        expected = [torch.randn(64, 256, device="cuda") for _ in range(2)]
        torch.manual_seed(1)
        assert torch.equal(torch.randn(64, 256, device="cuda"), expected[0])
        attempt()
        attempt()
        assert torch.equal(torch.randn(64, 256, device="cuda"), expected[1])  # the sequence goes on
        y = torch.randn(8, 256, device="cuda")
        assert torch.equal(graph.replay([y]), forward([y]))  # a graph from before
        check(64)
        import gc; gc.collect(); torch.cuda.empty_cache(); torch.cuda.synchronize()
        """,
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_values_made_on_the_host_are_copied_before_the_capture(allocator: str) -> None:
    run(
        allocator,
        """
        from types import SimpleNamespace
        from compile_cache.backends.base import CaptureFacts
        from compile_cache.backends.cuda_graphs.capture import Recorder

        calls = []

        def positioned(tensors):
            calls.append(1)
            x = tensors[0]
            rows = torch.arange(x.shape[0])
            x = x + torch.sin(rows / 7).to(x)[:, None]
            x = x * torch.tensor([1.0, x.shape[0]], device=x.device).sum()
            x = x[rows.flip(0)]
            return forward([x]) + torch.arange(3, dtype=torch.float64)[2].to(x.device)

        recorder = Recorder()
        graphs = {}
        for rows, runs in ((64, 4), (777, 2), (64, 1)):
            x = torch.randn(rows, 256, device="cuda")
            signature = SimpleNamespace(tensors=(("x", None),), values=())
            call = SimpleNamespace(
                key=SimpleNamespace(signature=signature), invoke=positioned, tensors=[x], module=None
            )
            result = positioned([x])
            calls.clear()
            graphs[rows, runs] = recorder.capture(call, result, CaptureFacts())
            assert len(calls) == runs, (rows, len(calls))
            for _ in range(3):
                torch.cuda.empty_cache()
                y = torch.randn(rows, 256, device="cuda")
                for (count, _), graph in graphs.items():
                    z = torch.randn(count, 256, device="cuda")
                    assert torch.equal(graph.replay([z]), positioned([z])), count
        for graph in graphs.values():
            graph.close()
        check(64)

        random = SimpleNamespace(
            key=SimpleNamespace(signature=SimpleNamespace(tensors=(("y", None),), values=())),
            invoke=lambda tensors: tensors[0] + torch.rand(256).to("cuda"), tensors=[x], module=None,
        )
        try:
            recorder.capture(random, x, CaptureFacts())
        except CaptureError as error:
            print(error)
        else:
            raise AssertionError("random numbers of the host were captured")
        check(8)
        """,
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_capture_that_the_user_cancels_ends_and_keeps_nothing(allocator: str) -> None:
    run(
        allocator,
        """
        import weakref

        class Cancelled(BaseException): pass  # as ComfyUI's own

        alive, calls = [], []

        def cancelled(tensors):
            calls.append(1)
            x = forward(tensors) + 1
            alive.append(weakref.ref(x))
            if len(calls) == 3:
                raise Cancelled
            return x

        check(8)
        x = torch.randn(64, 256, device="cuda")
        try:
            capture(cancelled, [x], cancelled([x]))
        except Cancelled:
            pass
        else:
            raise AssertionError("it was not cancelled")
        assert not torch.cuda.is_current_stream_capturing()
        assert alive[2]() is None
        torch.cuda.synchronize()
        check(64)
        """,
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_what_a_method_caches_is_not_read_after_the_cache_let_it_go(allocator: str) -> None:
    run(
        allocator,
        """
        import functools
        from compile_cache.backends.base import CaptureFacts

        class Cached(torch.nn.Module):
            @functools.lru_cache(maxsize=2)
            def positions(self, rows):
                return torch.linspace(0, 1, rows * 256, device="cuda").view(rows, 256)

            def forward(self, x):
                return (x + self.positions(len(x))) @ weight

        module, others = Cached(), [Cached() for _ in range(4)]
        for rows in (64, 777):
            x = torch.randn(rows, 256, device="cuda")
            expected = module(x)
            graph = capture(lambda given: module(given[0]), [x], expected, CaptureFacts(), True, module)
            taken = [other(x) for other in others]  # they push the positions out of the cache
            taken = [torch.full((rows, 256), 9.0, device="cuda") for _ in range(8)]
            y = torch.randn(rows, 256, device="cuda")
            assert torch.equal(graph.replay([y]), module(y))
            assert torch.equal(graph.replay([y]), module(y))
            graph.close()
        """,
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_tensor_that_a_forward_keeps_on_its_module_holds_no_memory_of_the_graph(allocator: str) -> None:
    run(
        allocator,
        """
        from compile_cache.backends.base import CaptureFacts

        class Kept(torch.nn.Module):
            def forward(self, x):
                self.embedding = x * 2
                return self.inner(self.log(x * 3))

            def log(self, x):
                self.numbers = {"tripled": x}
                return x

            def inner(self, x):
                return x @ weight

        module = Kept()
        for rows in (64, 777):
            x = torch.randn(rows, 256, device="cuda")
            expected = module(x)
            before = dict(vars(module))
            graph = capture(lambda given: module(given[0]), [x], expected, CaptureFacts(), False, module)
            assert all(vars(module)[name] is value for name, value in before.items())
            module.embedding = module.numbers = None
            for _ in range(3):
                y = torch.randn(rows, 256, device="cuda")
                assert torch.equal(graph.replay([y]), module(y))
            graph.close()
        """,
    )


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_triton_kernel_of_another_package_is_captured(allocator: str) -> None:
    """Else the package would catch the launcher's error and compute what was not rehearsed, as ComfyUI with
    SageAttention.
    """
    run(
        allocator,
        """
        from tests.gpu.triton_kernel import doubled

        def forward(tensors):
            x = tensors[0] + 1
            try:
                return doubled(x)
            except Exception:
                heads = x.reshape(1, 4, -1, 64).bfloat16()
                return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)

        x = torch.randn(4, 1024, device="cuda")
        graph = capture(forward, [x], forward([x]))
        x.normal_()
        assert torch.equal(graph.replay([x]), forward([x]))
        assert torch.equal(graph.replay([x]), (x + 1) * 2)
        """,
    )
