"""Run all tests with strict numerics on two virtual CPU devices, so that they exercise the sharded code.

MCOMB_TESTS_DEVICES sets another number of devices.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import array_types  # noqa: F401 (before mcomb)
import jax
import numpy as np
import pytest
from inputs import model_inputs

from mcomb.lab.data.digits import DIGITS
from mcomb.lab.data.download import DATA_VARIABLE
from mcomb.lab.figures import STYLE
from mcomb.lab.setups import SETUPS
from mcomb.runtime.progress import set_mode

collect_ignore = []
if not sys.platform.startswith("linux"):
    collect_ignore += ["test_benchmarks.py"]  # they read /proc
if sys.platform == "win32":  # without signals to other processes, fork and pseudo-terminals
    collect_ignore += ["test_robustness.py", "runtime/test_interrupts.py", "runtime/test_processes.py"]
    collect_ignore += ["runtime/test_progress.py", "io/test_stores.py", "experiments/test_report_browser.py"]

DEVICES = os.environ.setdefault("MCOMB_TESTS_DEVICES", "2")
# These programs are tiny and run once, so optimised compilation would take most of the time. Flags that are already
# set come last and win, such as --xla_cpu_max_isa=AVX2 for the arithmetic of an older CPU.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICK += " --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # XLA aborts on unknown flags
    QUICK += " --xla_cpu_use_fusion_emitters=false"
if "MCOMB_TESTS_COMPILED" not in os.environ:  # the first process sets it, and pytest's workers inherit it
    os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"
    # All tests, and the commands that they start, share compiled programs.
    os.environ["MCOMB_TESTS_COMPILED"] = tempfile.mkdtemp(prefix="mcomb-tests-")
    atexit.register(shutil.rmtree, os.environ["MCOMB_TESTS_COMPILED"], ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["MCOMB_TESTS_COMPILED"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
jax.config.update("jax_compilation_cache_dir", os.environ["MCOMB_TESTS_COMPILED"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
gc.set_threshold(200_000, 20, 100)  # a trace has many small objects, which the default thresholds scan too often
jax.config.update("jax_traceback_in_locations_limit", 0)  # compiled operations need no source locations
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", int(DEVICES))
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "standard")


def pytest_collection_modifyitems(items):
    """Run the longest file first, so that no worker waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_robustness.py")


def pytest_collection_finish():
    """Exclude imported modules from garbage collection."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def small_figures():
    """Draw figures at low resolution without embedded fonts, in half the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STYLE, "savefig.dpi", 80)
        patch.setitem(STYLE, "pdf.fonttype", 3)
        yield


@pytest.fixture(autouse=True)
def as_loud_as_ever():
    """Undo --quiet and --json after each test."""
    yield
    set_mode()


@pytest.fixture
def any_rank():
    """Let arrays of different ranks broadcast, as in the code of others."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def one_device(monkeypatch):
    """Hide all devices except the first; skip the test if there is only one."""
    devices = jax.devices()
    if len(devices) == 1:
        pytest.skip("The machine has one device only: set MCOMB_TESTS_DEVICES=2.")
    monkeypatch.setattr(jax, "devices", lambda: devices[:1])


@pytest.fixture(scope="session")
def digits():
    return DIGITS.load(None)


@pytest.fixture(scope="session")
def cifar_archive():
    place = os.environ.get(DATA_VARIABLE)
    if not place:
        pytest.skip(f"CIFAR-10 is missing: set {DATA_VARIABLE}.")
    return Path(place)


def each_model():
    """Return one setup of each model; mark all but the MLP, because they compile slowly."""
    names = {setup.model: name for name, setup in reversed([*SETUPS.items()])}.values()
    return [pytest.param(name, marks=() if "mlp" in name else pytest.mark.slow) for name in names]


@pytest.fixture(params=each_model())
def network(request):
    """Return an untrained network of each model at width 1: setup, module, parameters and a few inputs."""
    setup = SETUPS[request.param]
    model = setup.module(1)
    inputs = model_inputs(setup.dataset, 6)
    # All leaves are random, because freshly initialised norms look the same under every permutation.
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape, scale=np.prod(leaf.shape[:-1]) ** -0.5).astype(np.float32), shapes
    )
    return setup, model, params, inputs
