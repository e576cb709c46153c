"""Runs and checkpoints in an object store: real clients, including orbax, and a bucket on the loopback address."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import pytest
from bucket import Bucket
from numerics import assert_equal

from experiments import uniform
from mcomb import read_checkpoint, write_checkpoint
from mcomb.errors import UserError
from mcomb.io.checkpoints import saved_steps
from mcomb.io.paths import as_path, atomic, make_writable, read_json, write_json
from mcomb.lab.runs.reuse import read_state
from mcomb.lab.runs.rows import Rows

pytestmark = pytest.mark.skipif(find_spec("gcsfs") is None, reason="gs:// needs gcsfs: pip install -e '.[gcs]'")

ROOT = Path(__file__).parents[2]
RUNS = "gs://bucket/runs"
FLAGS = "--setup mlp-digits --width 1 --epochs 3 --checkpoint-every 1 --points 3 --samples 1"
FLAGS += " --train-examples 60 --test-examples 60"
HOME = "runs/mlp-digits/width-1"
OWN = ("seconds", "durations", "command", "environment", "digest")  # what each run has of its own


@pytest.fixture(scope="module")
def server():
    with Bucket() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def bucket(server):
    server.objects.clear()
    as_path("gs://bucket")._backend.fs("gs://bucket").invalidate_cache()
    return server


def test_store_writes_objects_atomically(bucket):
    path = as_path(f"{RUNS}/x.json")
    assert read_json(path) is None
    write_json(path, {"a": [0.5, "é"]})
    assert read_json(path) == {"a": [0.5, "é"]}
    assert bucket.objects.keys() == {"runs/x.json"}

    def fail_half_way():
        with atomic(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert read_json(path) == {"a": [0.5, "é"]}


def test_store_names_place_without_write_access(bucket):
    assert make_writable(as_path(RUNS)) == as_path(RUNS)
    assert not bucket.objects
    with pytest.raises(UserError, match=r"^Cannot write to gs://other/runs \(no such bucket\): "):
        make_writable(as_path("gs://other/runs"))


def row(name, loss=0.5):
    return {"name": name, "loss": loss}


def test_store_keeps_rows_and_joins_them_on_resume(bucket, capsys):
    folder = as_path(f"{RUNS}/uniform")
    rows = Rows(folder, {"seed": 0})
    rows.add([row("a"), row("b")])
    rows.add([row("c", 0.25)])
    names = [f"runs/uniform/samples/{number:06}.jsonl" for number in range(3)]
    assert sorted(bucket.objects) == names
    bucket.put(names[1], bucket.objects[names[1]].replace(b"0.5", b"0.6", 1))
    again = Rows(folder, {"seed": 0})
    assert again.rows == {"b": row("b"), "c": row("c", 0.25)}
    said = capsys.readouterr().err
    assert said == f"gs://bucket/{names[1]} has damaged rows (1): measuring them again\n"
    assert sorted(bucket.objects) == names[:1]
    again.add([row("a")])
    assert Rows(folder, {"seed": 0}).rows == {name: again[name] for name in "bca"}
    assert not Rows(folder, {"seed": 1}).rows
    assert not Rows(folder, {"seed": 0}).rows  # for good


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "x.msgpack", "x"])
def test_store_checkpoint_round_trip(bucket, name):
    tree = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}
    write_checkpoint(f"gs://bucket/{name}", tree)
    assert_equal(read_checkpoint(f"gs://bucket/{name}", tree), tree)
    with pytest.raises(UserError, match="gs://bucket/none"):
        read_checkpoint(f"gs://bucket/none{Path(name).suffix}")


def test_store_ignores_checkpoint_without_commit_mark(bucket):
    for name in ("1/commit_success.txt", "1/params/_METADATA", "2/params/_METADATA", "damaged-3/commit_success.txt"):
        bucket.put(f"networks/{name}", b"{}")
    assert saved_steps(as_path("gs://bucket/networks")) == [1]


def start(out):
    """Run an experiment in its own process."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": os.environ["MCOMB_TESTS_DEVICES"]}
    words = [sys.executable, "-m", "experiments.uniform", *FLAGS.split(), "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=ROOT, env=environment, **pipes)


def numbers(text):
    return {name: value for name, value in json.loads(text).items() if name not in OWN}


@pytest.mark.slow
def test_store_killed_experiment_equals_one_on_disk(bucket, tmp_path):
    for moment in ("/2/params/manifest.ocdbt", "/3/commit_success.txt", "/samples/000002.jsonl", "/uniform.pdf"):
        with start(RUNS) as program:
            bucket.before_writing = lambda name, moment=moment, program=program: (
                name.endswith(moment) and program.kill()
            )
            said = program.communicate(timeout=300)[0]
            assert program.returncode == -signal.SIGKILL, (moment, said)
        assert not [name for name in bucket.objects if name.endswith("results.json")]
    bucket.before_writing = lambda name: None
    config = uniform.EXPERIMENT.config(
        setup="mlp-digits", width=1, epochs=3, checkpoint_every=1, points=3, samples=1, train_examples=60,
        test_examples=60, out=as_path(RUNS),
    )  # fmt: skip
    as_path("gs://bucket")._backend.fs("gs://bucket").invalidate_cache()
    assert read_state(uniform.EXPERIMENT, config).said == "begun: 12 of 12 rows"
    with start(RUNS) as program:
        said = program.communicate(timeout=300)[0]
        assert program.returncode == 0, said
    assert "Traceback" not in said
    assert said.count("gs://bucket has no locks") == 1
    assert read_state(uniform.EXPERIMENT, config).kind == "done"

    with start(tmp_path) as program:
        said = program.communicate(timeout=300)[0]
        assert program.returncode == 0, said
    (there,) = tmp_path.glob("mlp-digits/width-1/uniform*")
    folder = f"{HOME}/{there.name}"
    assert numbers(bucket.objects[f"{folder}/results.json"]) == numbers((there / "results.json").read_text())
    for kind in ("png", "pdf"):
        assert bucket.objects[f"{folder}/uniform.{kind}"] == (there / f"uniform.{kind}").read_bytes()
    rows = b"".join(content for name, content in bucket.objects.items() if "/samples/" in name).decode()
    assert set(rows.splitlines()) == set((there / "samples.jsonl").read_text().splitlines())
    for step in (2, 3):  # both checkpoints of both networks are what was written
        for seed in (0, 1):
            read_checkpoint(f"gs://bucket/{HOME}/networks/seed-{seed},epochs=3/{step}")
    assert not [name for name in bucket.objects if "damaged-" in name]
