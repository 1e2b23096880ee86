"""The markers: what they ask for, and what happens where it isn't there."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapcheck.fixtures.hardware import Gpu, GpuNeeds, unmet

T4 = Gpu("Tesla T4", 15_800_000_000, (7, 5))
H100 = Gpu("NVIDIA H100", 85_000_000_000, (9, 0))

GPU_TEST = """
import pytest

@pytest.mark.gpu
def test_gpu():
    assert True
"""


@pytest.mark.parametrize(
    ("needs", "gpus", "reason"),
    [
        (GpuNeeds(), (), "needs a CUDA GPU: torch sees none"),
        (GpuNeeds(count=2), (), "needs 2 CUDA GPUs: torch sees none"),
        (GpuNeeds(), (T4,), None),
        (GpuNeeds(min_memory_gb=15.8), (T4,), None),
        (
            GpuNeeds(min_memory_gb=40),
            (T4,),
            "needs a CUDA GPU with 40 GB of memory: torch sees Tesla T4 (15.8 GB, capability 7.5)",
        ),
        (GpuNeeds(min_capability=(7, 5)), (T4,), None),
        (
            GpuNeeds(min_capability=(8, 0), min_memory_gb=10),
            (T4,),
            "needs a CUDA GPU with 10 GB of memory and compute capability 8.0: "
            "torch sees Tesla T4 (15.8 GB, capability 7.5)",
        ),
        (GpuNeeds(min_capability=(8, 0)), (T4, H100), None),
        (
            GpuNeeds(min_capability=(8, 0), count=2),
            (T4, H100),
            "needs 2 CUDA GPUs with compute capability 8.0 each: torch sees Tesla T4 (15.8 GB, "
            "capability 7.5), NVIDIA H100 (85.0 GB, capability 9.0)",
        ),
    ],
)
def test_what_is_missing_is_said(needs: GpuNeeds, gpus: tuple[Gpu, ...], reason: str) -> None:
    assert unmet(needs, gpus) == reason


_GPUS = st.lists(
    st.builds(
        Gpu,
        name=st.just("gpu"),
        memory_bytes=st.integers(1, 200) | st.integers(10**9, 10**11),
        capability=st.tuples(st.integers(5, 12), st.integers(0, 9)),
    ),
    max_size=4,
).map(tuple)
_NEEDS = st.builds(
    GpuNeeds,
    min_memory_gb=st.none() | st.floats(0.1, 100),
    min_capability=st.none() | st.tuples(st.integers(5, 12), st.integers(0, 9)),
    count=st.integers(1, 4),
)


@given(_NEEDS, _GPUS, _GPUS)
def test_another_gpu_never_takes_away_what_was_there(
    needs: GpuNeeds, some: tuple[Gpu, ...], more: tuple[Gpu, ...]
) -> None:
    if unmet(needs, some) is None:
        assert unmet(needs, some + more) is None
        assert unmet(needs, more + some) is None


@given(_NEEDS, _GPUS)
def test_gpus_meet_exactly_the_needs_that_enough_of_them_meet(
    needs: GpuNeeds, gpus: tuple[Gpu, ...]
) -> None:
    one = GpuNeeds(needs.min_memory_gb, needs.min_capability)
    alone = sum(unmet(one, (gpu,)) is None for gpu in gpus)
    assert (unmet(needs, gpus) is None) == (alone >= needs.count)


def test_missing_hardware_skips_with_the_reason_at_the_tests_own_place(
    pytester: pytest.Pytester, with_gpus: Callable[..., None]
) -> None:
    with_gpus()
    path = pytester.makepyfile(GPU_TEST)
    result = pytester.runpytest("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([f"SKIPPED * {path.name}:3: needs a CUDA GPU: torch sees none"])


def test_a_test_runs_where_its_hardware_is(
    pytester: pytest.Pytester, with_gpus: Callable[..., None]
) -> None:
    with_gpus(H100)
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.gpu(min_memory_gb=80)

        def test_one(device): assert device == "cuda"
        @pytest.mark.gpu(count=2)
        def test_both_markers_hold(): assert False
        """
    )
    pytester.runpytest("--require-gpu", "-k", "test_one").assert_outcomes(passed=1, deselected=1)
    pytester.runpytest().assert_outcomes(passed=1, skipped=1)


@pytest.mark.parametrize("workers", [[], ["-n", "1"]])
def test_require_gpu_makes_the_skip_a_failure_without_a_traceback(
    pytester: pytest.Pytester, with_gpus: Callable[..., None], workers: list[str]
) -> None:
    with_gpus()
    pytester.makepyfile(GPU_TEST)
    # xdist's workers see the true hardware; the device keeps them from it.
    result = pytester.runpytest(
        "--require-gpu", "--tapcheck-device=cpu", "--junitxml=out.xml", *workers
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["needs a CUDA GPU: the device is set to cpu (--require-gpu: *"])
    result.stdout.no_fnmatch_line("*plugin.py*")
    case = ET.parse(pytester.path / "out.xml").find(".//testcase")
    assert case is not None
    assert [child.tag for child in case] == ["failure"]


def test_require_gpu_leaves_other_skips_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.skip
        def test_marked(): pass
        def test_own(): pytest.skip("mine")
        """
    )
    pytester.runpytest("--require-gpu").assert_outcomes(skipped=2)


def test_gpu_tests_do_not_run_on_a_cpu_that_was_asked_for(
    pytester: pytest.Pytester, with_gpus: Callable[..., None]
) -> None:
    with_gpus(H100)
    pytester.makepyfile(GPU_TEST)
    result = pytester.runpytest("--tapcheck-device=cpu", "-rs")
    result.stdout.fnmatch_lines(["SKIPPED*needs a CUDA GPU: the device is set to cpu"])


def test_the_device_is_cuda_only_where_there_is_one(
    pytester: pytest.Pytester, with_gpus: Callable[..., None]
) -> None:
    pytester.makepyfile("def test_it(device): print('on', device)")
    with_gpus(H100)
    pytester.runpytest("-s").stdout.fnmatch_lines(["*on cuda*"])
    with_gpus()
    pytester.runpytest("-s").stdout.fnmatch_lines(["*on cpu*"])
    result = pytester.runpytest("--tapcheck-device=cuda")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the device is set to cuda, but torch sees no CUDA GPU*"])


def test_network_tests_run_unless_they_are_left_out(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.network
        def test_network(): pass
        """
    )
    pytester.runpytest().assert_outcomes(passed=1)
    pytester.runpytest("-m", "not network").assert_outcomes(deselected=1)


def test_a_suite_with_its_own_markers_and_network_option_runs_as_without_tapcheck(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        """
        import pytest

        def pytest_addoption(parser):
            parser.addoption("--network", action="store_true")
            parser.addini("network", "hosts that tests may reach")

        def pytest_runtest_setup(item):
            if item.get_closest_marker("network") and not item.config.getoption("--network"):
                pytest.skip("the suite's own reason")
        """
    )
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.slow(reason="db")
        def test_slow(): pass
        @pytest.mark.engine("postgres")
        def test_engine(): pass
        @pytest.mark.network("example.org")
        def test_network(): pass
        """
    )
    result = pytester.runpytest("-rs")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*the suite's own reason"])
    pytester.runpytest("--network").assert_outcomes(passed=3)


def test_engine_tests_skip_where_vllm_is_not_installed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "vllm" else find_spec(name, *rest),
    )
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.engine
        def test_engine(): pass
        """
    )
    result = pytester.runpytest("-rs")
    result.stdout.fnmatch_lines(["SKIPPED*vLLM isn't installed; pip install 'tapcheck*"])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("gpu(40)", "marker gpu: takes no positional arguments"),
        ("gpu(memory=40)", "marker gpu: unknown argument 'memory'; there are min_memory_gb"),
        ("gpu(min_memory_gb='40')", "marker gpu: min_memory_gb is a number"),
        ("gpu(min_memory_gb=True)", "marker gpu: min_memory_gb is a number"),
        ("gpu(min_memory_gb=-1)", "marker gpu: min_memory_gb is a number"),
        ("gpu(min_capability=8.0)", "marker gpu: min_capability is a pair such as (8, 0), not 8.0"),
        ("gpu(min_capability=(8,))", "marker gpu: min_capability is a pair"),
        ("gpu(count=0)", "marker gpu: count is a number of GPUs from 1, not 0"),
        ("gpu(count=True)", "marker gpu: count is a number of GPUs"),
    ],
)
def test_a_gpu_marker_that_makes_no_sense_is_a_usage_error_that_names_the_test(
    pytester: pytest.Pytester, marker: str, message: str
) -> None:
    path = pytester.makepyfile(
        f"""
        import pytest
        @pytest.mark.{marker}
        def test_it(): pass
        """
    )
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {path.name}::test_it: {message}*"])


def test_under_xdist_a_gpu_marker_that_makes_no_sense_is_an_error_of_its_test(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.gpu(memory=40)
        def test_wrong(): pass
        def test_right(): pass
        """
    )
    result = pytester.runpytest("-n", "2")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["marker gpu: unknown argument 'memory'*"])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


def test_markers_are_registered(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.engine
        @pytest.mark.gpu
        @pytest.mark.network
        @pytest.mark.slow
        def test_it(): pass
        """
    )
    pytester.runpytest("--strict-markers", "--tapcheck-device=cpu").assert_outcomes(skipped=1)
