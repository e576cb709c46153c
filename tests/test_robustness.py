"""Experiments that are killed, lack resources or find damaged files give the same results or none.

The default tests use a few cases. `pytest -m long` uses every fault point and every file.
"""

import errno
import gc
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from warm import Warm

from experiments import uniform
from mcomb.errors import UserError
from mcomb.io.paths import read_json
from mcomb.lab import cli
from mcomb.lab.runs.run import run

FLAGS = "--setup mlp-digits --width 1 --epochs 3 --checkpoint-every 1 --points 3 --samples 1"
FLAGS += " --train-examples 60 --test-examples 60"
UNIFORM = f"uniform {FLAGS}"
HOME = Path("mlp-digits", "width-1")
OWN = ("seconds", "durations", "command", "environment", "digest")  # differ between equal runs
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    # Orbax leaves coroutines of a failed read behind, which Python warns about.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(autouse=True)
def collect_at_once():
    """Collect garbage of failed reads inside the test that ignores its warnings."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def warm():
    with Warm() as process:
        yield process


@pytest.fixture(scope="module")
def finished(warm, tmp_path_factory):
    """The folder of an undisturbed run, and the fault points that it passed."""
    out = tmp_path_factory.mktemp("robust") / "whole"
    code, said = warm.run(UNIFORM, out, at=0)
    assert code == 0, said
    return out, Path(f"{out}.events").read_text().splitlines()


def found_in(out):
    """Return the numbers and the figure of a run."""
    (folder,) = (out / HOME).glob("uniform*")
    results = json.loads((folder / "results.json").read_text())
    figure = [(folder / f"uniform.{kind}").read_bytes() for kind in ("png", "pdf")]
    return {name: value for name, value in results.items() if name not in OWN}, figure


def outcome(out):
    """Return the numbers, the figure and the rows of a run."""
    (rows,) = (out / HOME).glob("uniform*/samples.jsonl")
    return *found_in(out), sorted(rows.read_text().splitlines())


def assert_nothing_wrong(out, expected):
    """Assert that existing results are complete and equal those of an undisturbed run."""
    for path in out.rglob("results.json"):
        found = read_json(path)
        assert found is not None
        assert {name: value for name, value in found.items() if name not in OWN} == expected[0]


def assert_ended_by(number, code, said):
    assert "Traceback" not in said, said
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert code == 128 + number, said
        assert said.splitlines()[-1] == "Interrupted; run the same command to resume."


def assert_goes_on(warm, out, expected):
    code, said = warm.run(UNIFORM, out)
    assert code == 0, said
    assert "Traceback" not in said, said
    assert outcome(out) == expected
    assert not list(out.rglob("damaged-*")), said  # kills never damage a checkpoint


STAGES = [
    (signal.SIGKILL, "os.rename 2.orbax-checkpoint-tmp/params"),
    (signal.SIGTERM, "os.mkdir 2.orbax-checkpoint-tmp/params"),
    (signal.SIGINT, "open matchings/. .npz"),
    (signal.SIGKILL, "open /samples.jsonl"),
    (signal.SIGKILL, "os.rename .png"),
    (signal.SIGTERM, "os.rename results.json"),
]


@pytest.mark.parametrize("stages", [STAGES[::5], pytest.param(STAGES, marks=pytest.mark.slow)], ids=["two", "every"])
def test_run_killed_repeatedly_ends_with_same_results(stages, warm, finished, tmp_path):
    out = tmp_path / "killed"
    for number, stage in stages:
        assert_ended_by(number, *warm.run(UNIFORM, out, at=stage, number=number))
        assert not list(out.rglob("results.json"))
    code, said = warm.run(UNIFORM, out, at="open .pdf", fail=errno.ENOSPC)
    assert_lacks(code, said, "No space left on device")
    assert_goes_on(warm, out, outcome(finished[0]))


def chunks(size, count):
    """Return the numbers below `size` in `count` chunks, one for each worker."""
    return [pytest.param(slice(i, size, count), id=f"part{i + 1}") for i in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("part", chunks(None, 4))
def test_run_killed_at_fault_point_ends_with_same_results(number, part, warm, finished, tmp_path):
    whole, events = finished
    expected = outcome(whole)
    points = range(1, len(events) + 1)[part][:: 1 if number == signal.SIGKILL else 4]
    done = 0
    for point in points:
        out = tmp_path / str(point)
        code, said = warm.run(UNIFORM, out, at=point, number=number)
        if code == 0:  # the order of events varies, so that late ones may not occur
            assert outcome(out) == expected
            continue
        assert_ended_by(number, code, said)
        assert_nothing_wrong(out, expected)
        assert_goes_on(warm, out, expected)
        shutil.rmtree(out)
        done += 1
    print(f"{done} ends by signal {number} survived")
    assert done > 0.8 * len(points)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_run_killed_at_random_ends_with_same_results(seed, warm, finished, tmp_path):
    expected, rng = outcome(finished[0]), random.Random(seed)
    done = 0
    for trial in range(4):
        out, code, longest = tmp_path / str(trial), None, 4.0
        while code != 0:
            number, after = rng.choice(SIGNALS), rng.uniform(0.1, longest)
            longest += 0.5  # a busy machine would make no progress within a few seconds
            code, said = warm.run(UNIFORM, out, after=after, number=number)
            assert "Traceback" not in said, said
            # Before main starts and after it ends, Python handles signals itself.
            assert code in (0, *(-number for number in SIGNALS), 143, 130), said
            assert_nothing_wrong(out, expected)
            done += code != 0
        assert_goes_on(warm, out, expected)
    print(f"{done} ends at random moments survived")


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
def test_report_killed_while_writing_is_old_or_new(number, warm, finished, tmp_path):
    out = tmp_path / "runs"
    shutil.copytree(finished[0], out)
    command = f"report {FLAGS}"
    assert warm.run(command, out, at=0)[0] == 0
    count = len(Path(f"{out}.events").read_text().splitlines())
    (page,) = (out / HOME).glob("report*.html")
    before = page.read_bytes()
    for point in range(1, count + 1):
        code, said = warm.run(command, out, at=point, number=number)
        if code != 0:
            assert_ended_by(number, code, said)
        assert page.read_bytes() == before
    assert warm.run(command, out)[0] == 0
    assert page.read_bytes() == before
    print(f"{count} ends by signal {number} while a report was written survived")


def assert_lacks(code, said, what):
    """Assert that a program ended with one line that names the missing resource."""
    assert code in (1, 2), (code, said)
    assert "Traceback" not in said, said
    assert [line for line in said.splitlines() if line.startswith("error: ")] == [said.splitlines()[-1]]
    assert what in said.splitlines()[-1], said


FAILURES = [errno.ENOSPC, errno.EACCES, errno.EIO, errno.ENOENT]


@pytest.mark.long
@pytest.mark.parametrize("fail", FAILURES, ids=errno.errorcode.get)
def test_run_failing_at_fault_point_destroys_nothing(fail, warm, finished, tmp_path):
    whole, events = finished
    expected, done = outcome(whole), 0
    for point in range(1 + 2 * FAILURES.index(fail), len(events) + 1, 8):  # all failures together: every second point
        out = tmp_path / str(point)
        code, said = warm.run(UNIFORM, out, at=point, fail=fail)
        if code == 0:
            assert outcome(out) == expected
            continue
        assert_lacks(code, said, "")
        assert_nothing_wrong(out, expected)
        assert_goes_on(warm, out, expected)
        shutil.rmtree(out)
        done += 1
    print(f"{done} times {errno.errorcode[fail]}")
    assert done


@pytest.mark.long
def test_run_on_full_disk_reports_and_resumes(warm, finished, tmp_path):
    expected, disk, done = outcome(finished[0]), tmp_path / "disk", 0
    disk.mkdir()
    for size in (*range(20, 400, 20), 5000):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("a small disk cannot be mounted here")
        try:
            code, said = warm.run(UNIFORM, disk / "runs")
            if code:
                assert_lacks(code, said, "")
                done += 1
                assert_nothing_wrong(disk, expected)
                subprocess.run(["mount", "-o", "remount,size=5000k", str(disk)], check=True)
            assert_goes_on(warm, disk / "runs", expected)
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    print(f"{done} full disks")
    assert done


@pytest.mark.long
def test_run_without_file_descriptors_reports_in_one_line(warm, finished, tmp_path):
    expected, done = outcome(finished[0]), 0
    for files in range(24, 64, 2):
        out = tmp_path / str(files)
        code, said = warm.run(UNIFORM, out, files=files)
        if code:
            assert_lacks(code, said, "")
            done += 1
        assert_goes_on(warm, out, expected)
    print(f"{done} times too few file descriptors")
    assert done


@pytest.mark.long
def test_run_is_independent_of_clock(warm, finished, tmp_path):
    code, said = warm.run(UNIFORM, tmp_path / "runs", clock=True)
    assert code == 0, said
    assert outcome(tmp_path / "runs") == outcome(finished[0])


def assert_equal_together(count, warm, finished, tmp_path):
    """Start several processes at once; they must train each network once and agree."""
    out = tmp_path / "runs"
    ended = warm.together([UNIFORM] * count, out)
    assert [code for code, _ in ended] == [0] * count, ended
    for seed in (0, 1):
        assert sum(f"training seed-{seed},epochs=3: started" in said for _, said in ended) == 1
    assert len({said[said.index("MLP on digits") :] for _, said in ended}) == 1
    assert outcome(out) == outcome(finished[0])


@pytest.mark.slow
def test_run_in_three_processes_trains_once(warm, finished, tmp_path):
    assert_equal_together(3, warm, finished, tmp_path)


@pytest.mark.long
def test_run_in_ten_processes_trains_once(warm, finished, tmp_path):
    assert_equal_together(10, warm, finished, tmp_path)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder of a run in this process."""
    out = tmp_path_factory.mktemp("kept") / "runs"
    run(uniform.EXPERIMENT, config(out))
    return out


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The folder of a run with other networks."""
    out = tmp_path_factory.mktemp("other") / "runs"
    run(uniform.EXPERIMENT, config(out, seed=1))
    return out


def config(out, seed=0):
    return cli.parse(uniform.EXPERIMENT.config, "", [*FLAGS.split(), "--out", str(out), "--seed", str(seed)])


def files_in(out):
    return sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file() and path.name[-5:] != ".lock")


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :]


DAMAGES = {
    "empty": lambda content, rng: b"",
    "cut": lambda content, rng: content[: rng.randrange(len(content))],
    "flipped": lambda content, rng: flipped(content, rng.randrange(len(content))),
    "garbage": lambda content, rng: rng.randbytes(len(content)),
    "twice": lambda content, rng: content + content,
    "deleted": lambda content, rng: None,
}


def damage(kind, path, rng):
    content = DAMAGES[kind](path.read_bytes(), rng)
    path.unlink()
    if content is not None:
        path.write_bytes(content)


def assert_survives(name, out, expected):
    """Assert equal results, or a checkpoint rejected by name and equal results after the remedy."""
    try:
        run(uniform.EXPERIMENT, config(out))
    except UserError as error:
        refused = str(error)
    else:
        assert found_in(out) == expected, name
        return
    assert HOME / "networks" in [*name.parents], (name, refused)
    folder = out / HOME.joinpath("networks", name.parts[3])
    assert str(folder) in refused
    assert refused.endswith("move it away.") or "move it away or use" in refused
    folder.rename(folder.with_name("away"))
    run(uniform.EXPERIMENT, config(out))
    assert found_in(out) == expected, name


def names_to_damage(out):
    """Return all files outside checkpoints, and the largest files of the newest checkpoint."""
    names = files_in(out)
    largest = sorted((name for name in names if "3" in name.parts), key=lambda name: -(out / name).stat().st_size)
    return [name for name in names if "networks" not in name.parts] + largest[:2]


KINDS = ("flipped", "cut", "deleted")


def test_run_with_damaged_files_has_same_results(kept, tmp_path):
    """Return every third file, each with another kind of damage."""
    assert_survives_all(zip(names_to_damage(kept)[::3], itertools.cycle(KINDS), strict=False), kept, tmp_path / "runs")


@pytest.mark.slow
def test_run_with_any_damage_has_same_results(kept, tmp_path):
    assert_survives_all(itertools.product(names_to_damage(kept), KINDS), kept, tmp_path / "runs")


def assert_survives_all(damages, kept, out):
    expected, rng = found_in(kept), random.Random(0)
    for name, kind in damages:
        shutil.copytree(kept, out)
        damage(kind, out / name, rng)
        assert_survives(name, out, expected)
        shutil.rmtree(out)


@pytest.mark.long
@pytest.mark.parametrize("kind", DAMAGES)
def test_run_with_each_file_damaged_is_same_or_rejected(kind, kept, tmp_path):
    expected, rng, done = found_in(kept), random.Random(1), 0
    for name in files_in(kept):
        for _ in range(8 if kind == "flipped" else 3 if kind == "cut" else 1):
            out = tmp_path / "runs"
            shutil.copytree(kept, out)
            damage(kind, out / name, rng)
            assert_survives(name, out, expected)
            shutil.rmtree(out)
            done += 1
    print(f"{done} files {kind}")


@pytest.mark.long
def test_run_with_swapped_files_is_same_or_rejected(kept, other, tmp_path):
    expected, rng, done = found_in(kept), random.Random(2), 0
    others = files_in(other)
    for name in files_in(kept):
        alike = [found for found in others if found.name == name.name and len(found.parts) == len(name.parts)]
        alike = alike or [found for found in others if found.parts[-3:-1] == name.parts[-3:-1]]
        alike = alike or [found for found in others if found.suffix == name.suffix]
        out = tmp_path / "runs"
        shutil.copytree(kept, out)
        shutil.copy(other / rng.choice(alike), out / name)
        assert_survives(name, out, expected)
        shutil.rmtree(out)
        done += 1
    for part in ("params", "optimizer", "config", ""):
        for to in ("seed-0,epochs=3", "seed-1,epochs=3"):
            out = tmp_path / "runs"
            shutil.copytree(kept, out)
            place = out / HOME / "networks" / to / "3" / part
            shutil.rmtree(place)
            shutil.copytree(other / HOME / "networks" / "seed-3,epochs=3" / "3" / part, place)
            assert_survives(place.relative_to(out), out, expected)
            shutil.rmtree(out)
            done += 1
    print(f"{done} files replaced")
