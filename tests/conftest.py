import contextlib
import ctypes
import gc
import getpass
import importlib.metadata
import itertools
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# Set before jax is imported, and inherited by the processes that tests start. The tests compile far more than they
# compute: programs are optimised less, shared between processes and kept for the next run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
CACHE = Path(tempfile.gettempdir()) / f"bilax-tests-{getpass.getuser()}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # XLA's newer way to emit code takes twice as long to compile, and cutting small programs into parts to compile side
    # by side costs a quarter more; other releases may not know the flags, and end at them.
    flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", flags)

import jax  # noqa: E402
import jaxtyping  # noqa: E402

jax.config.update("jax_enable_x64", True)


def jaxtyped_where_annotated(*, typechecker, jaxtyped=jaxtyping.jaxtyped):
    """The import hook has every function checked, also those that have no annotations: closures are wrapped anew
    whenever the function around them runs, which took an eighth of the tests' time and checked nothing."""
    check = jaxtyped(typechecker=typechecker)
    return lambda made: check(made) if getattr(made, "__annotations__", True) or isinstance(made, type) else made


jaxtyping.jaxtyped = jaxtyped_where_annotated

settings.register_profile("bilax", deadline=None, max_examples=20, derandomize=True, database=None)
settings.load_profile("bilax")


THOROUGH = (
    "test_killed_runs_end_bit_identical[two]",
    "test_diagnosis_agrees_with_dense_hessians[network]",
    "test_other_problems[rastrigin]",
    "test_tolls_on_the_simplex[squares]",
    "test_large_followers_and_terms",
    "test_table_2_in_small",
    "test_table_3_in_small",
    "test_figure_3_right_in_small",
    "test_compare_cleaning_takes_up_where_it_was",
    "test_bench_stochastic_measures_bilax_alone_and_keeps_what_it_has",
    "test_a_leader_that_cannot_be_tuned_is_told",
    "test_a_run_that_goes_on_draws_no_task_again",
    "[resnet-18, statistics of the batch]",
    "--backbone resnet12 --way 3 --method protonet]",
    *(f"_files_of_both_formats[{name}-tiered" for name in ("bda", "fomaml", "maml-pp", "reptile", "rhg", "t-rhg")),
)
"""parts of the names of tests that take long and have a cheaper one beside them: for BILAX_THOROUGH=1 alone"""


def pytest_collection_modifyitems(items):
    if not os.environ.get("BILAX_THOROUGH"):
        for item in items:
            if any(part in item.nodeid for part in THOROUGH):
                item.add_marker(pytest.mark.skip(reason="takes long: BILAX_THOROUGH=1 make test has it"))


def pytest_collection_finish():
    """What is imported stays, and tracing makes much that stays for a while: the garbage collector need not go through
    it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


MAPS, TESTS = Path("/proc/self/maps"), itertools.count()


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """Frees what was compiled before it is too much: a program takes many of Linux's 65,530 memory maps, and a worker
    should stay below 2 GB. To read the maps takes as long as many a test: after every fourth is often enough."""
    yield
    if next(TESTS) % 4 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 8_000:
        jax.clear_caches()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # runs in chunks have glibc keep what they free
