"""The hard time limit of gpu and engine tests."""

from __future__ import annotations

import pytest

SHOW = """
import pytest

@pytest.fixture(autouse=True)
def show(request):
    print("limit of", request.node.name, request.node.get_closest_marker("timeout"))

@pytest.mark.engine
def test_engine(): pass

@pytest.mark.engine
@pytest.mark.timeout(5)
def test_own(): pass

def test_plain(): pass
"""


def test_engine_tests_get_the_limit_unless_they_carry_their_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SHOW)
    result = pytester.runpytest("-s", "--tapcheck-timeout=7")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [
            "*limit of test_engine *args=(7.0,), kwargs={'method': 'thread'}*",
            "*limit of test_own *args=(5,), kwargs={}*",
            "*limit of test_plain None*",
        ]
    )


def test_the_limit_of_gpu_tests_is_600_seconds_by_default(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        def test_gpu(): pass
        """
    )
    pytester.makeconftest(
        """
        def pytest_collection_finish(session):
            print("limit is", session.items[0].get_closest_marker("timeout"))
        """
    )
    result = pytester.runpytest("-s", "--tapcheck-device=cpu")
    result.stdout.fnmatch_lines(["*limit is*args=(600.0,), kwargs={'method': 'thread'}*"])


@pytest.mark.parametrize("place", ["the test", "a fixture"])
def test_the_limit_dumps_all_stacks_and_ends_the_run(pytester: pytest.Pytester, place: str) -> None:
    in_fixture = place == "a fixture"
    pytester.makepyfile(
        f"""
        import threading
        import pytest

        def hang_for_ever():
            threading.Event().wait()

        @pytest.fixture
        def maybe_hangs():
            if {in_fixture}: hang_for_ever()

        @pytest.mark.engine
        def test_hangs(maybe_hangs):
            hang_for_ever()

        def test_after(): pass
        """
    )
    result = pytester.runpytest_subprocess("--tapcheck-timeout=0.5", timeout=60)
    assert result.ret == 1
    output = result.stdout.str() + result.stderr.str()
    assert "Stack of MainThread" in output
    assert "in hang_for_ever" in output
    assert " passed" not in output


def test_without_pytest_timeout_the_header_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.engine
        def test_engine(): pass
        """
    )
    result = pytester.runpytest("-p", "no:timeout")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["tapcheck *no time limits (pytest-timeout is off)"])
