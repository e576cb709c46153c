import dataclasses
from pathlib import Path

import pytest

from experiments.linear import LinearConfig
from experiments.width import WidthConfig
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import Config, SweepConfig

CONFIG = Config(setup="mlp-digits", width=1, epochs=4)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Config(), "uniform"),
        (
            SweepConfig(train_examples=50, epochs=60, points=3, samples=2),
            "uniform,epochs=60,train-examples=50,points=3,samples=2",
        ),
        (SweepConfig(batch_size=100, learning_rate=0.1), "uniform"),  # equal to the recipe
        (SweepConfig(learning_rate=0.05, weight_decay=0.0), "uniform,learning-rate=0.05,weight-decay=0"),
        (SweepConfig(seed=1, seed_b=0, matcher="ste", repair=True), "uniform,matcher=ste,seed=1,seed-b=0,repair"),
        (SweepConfig(out=Path("x"), data_dir=Path("y"), vmap_size=3, steps_per_call=2, checkpoint_every=1), "uniform"),
        (LinearConfig(range=(-1.0, 2.0), dtype="bfloat16"), "uniform,dtype=bfloat16,range=-1..2"),
        (WidthConfig(widths=(2, 1)), "uniform,widths=2..1"),
    ],
)
def test_folder_name_has_flags_that_change_results(config, name):
    config = dataclasses.replace(config, setup="mlp-digits", width=2)
    assert Store(config).folder("uniform") == config.out / "mlp-digits" / "width-2" / name


def test_matching_name_has_dtype_if_matcher_computes():
    plain, other = (Store(dataclasses.replace(CONFIG, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert other.folders.matching("A", "B", "weights") == plain.folders.matching("A", "B", "weights")
    assert plain.folders.matching("A", "B", "ste").name == "B-to-A,matcher=ste.npz"
    assert other.folders.matching("A", "B", "ste").name == "B-to-A,matcher=ste,dtype=bfloat16.npz"


def test_matching_name_fits_file_system_limit():
    store, long = Store(CONFIG), ",".join(f"option-{i}=0.001" for i in range(12))
    paths = [
        store.folders.matching(f"seed-0,{long}", f"seed-{i},{long}", "ste", restarts=restarts).name
        for i in (1, 2)
        for restarts in (1, 2)
    ]
    assert len({*paths}) == 4
    assert max(map(len, paths)) < 200
