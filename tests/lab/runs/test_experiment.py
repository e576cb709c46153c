"""Common behaviour of experiments, tested with one that needs no network."""

import dataclasses
import json

import jax
import jaxlib
import pytest

from mcomb.lab.cache.store import Store
from mcomb.lab.flags import Config
from mcomb.lab.runs import command, experiment, reuse
from mcomb.lab.runs import run as run_module
from mcomb.lab.runs.command import setups_help
from mcomb.lab.runs.experiment import Experiment, Paper, is_of_paper, papers_networks
from mcomb.lab.runs.results import Results, to_json
from mcomb.lab.runs.reuse import identity_hash, read_state
from mcomb.lab.runs.run import add_verdict, read_results, run, said_verdict
from mcomb.lab.runs.verdicts import Verdict, verdict_colour
from mcomb.lab.setups import SETUPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(Results):
    answer: int
    of: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Several(Answer):
    @property
    def measured_widths(self):
        return self.of


@pytest.fixture
def calls():
    return []


@pytest.fixture
def example(calls):
    def measure(this):
        calls.append("measure")
        return Answer(answer=40 + len(this.parts), of=sorted(this.parts))

    def draw(results, folder):
        calls.append("draw")
        for kind in ("png", "pdf"):
            (folder / f"{results.experiment}.{kind}").write_text(str(results.answer))

    return Experiment(
        name="example",
        title="an example",
        claim="The answer is 40.",
        alt="A number.",
        networks="",
        results=Answer,
        measure=measure,
        draw=draw,
        judge=lambda results: Verdict(results.answer == 40, f"It is {results.answer}."),
        paper={"mlp-digits": Paper(loss=0.5, accuracy=0.25)},
    )


@pytest.fixture
def config(tmp_path):
    return Config(setup="mlp-digits", width=2, seed=3, out=tmp_path / "runs")


OTHERS = "The paper measures ResNet-20 on CIFAR-10 at width 32 and Tiny-10 on CIFAR-10 at width 32."


@pytest.mark.parametrize(
    ("answer", "setup", "width", "said", "colour"),
    [
        (40, "resnet20-cifar10", 32, "Agrees with the paper: It is 40.", "green"),
        (41, "resnet20-cifar10", 32, "Does not agree with the paper: It is 41.", "red"),
        (41, "resnet20-cifar10", 16, f"Does not show the paper's effect: It is 41. {OTHERS}", "yellow"),
        (41, "mlp-digits", 32, f"Does not show the paper's effect: It is 41. {OTHERS}", "yellow"),
        (40, "mlp-digits", 32, f"Shows the paper's effect: It is 40. {OTHERS}", "green"),
    ],
)
def test_verdict_agrees_only_for_networks_of_paper(example, tmp_path, answer, setup, width, said, colour):
    results = Answer(experiment="example", answer=answer, config={"setup": setup, "width": width})
    found = add_verdict(example, results, tmp_path)
    assert said_verdict(found) == said
    assert verdict_colour(found.agrees, found.is_papers) == colour


def test_finding_quotes_barriers_of_paper(example):
    example = dataclasses.replace(example, paper={"tiny10-cifar10": Paper(loss=0.3321, accuracy=0.07)})
    assert papers_networks(example) == (
        "The paper measures ResNet-20 on CIFAR-10 at width 32 and Tiny-10 on CIFAR-10 at width 32 (barriers of 0.332 "
        "in loss and 7.0% in accuracy)."
    )
    assert "at widths 1 to 32" in papers_networks(dataclasses.replace(example, in_paper={"tiny10-cifar10": (1, 8, 32)}))


def test_is_papers_requires_all_widths(example):
    example = dataclasses.replace(example, in_paper={"tiny10-cifar10": (1, 2, 4)})
    config = {"setup": "tiny10-cifar10", "width": 32}
    assert is_of_paper(example, Several(config=config, answer=0, of=[1, 4]))
    assert not is_of_paper(example, Several(config=config, answer=0, of=[1, 4, 8]))
    assert not is_of_paper(example, Answer(config=config, answer=0))


def test_run_measures_draws_writes_and_judges(example, config, calls, capsys):
    results = run(example, config)
    folder = Store(config).folder("example")
    assert calls == ["measure", "draw"]
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {
        *("results.json", "samples.jsonl", "example.png", "example.pdf")
    }
    stored = json.loads((folder / "results.json").read_text())
    assert len(stored.pop("digest")) == 16
    assert to_json(results) == stored | {
        "claim": "The answer is 40.",
        "alt": "A number.",
        "agrees": True,
        "finding": f"It is 40. {OTHERS}",
        "is_open": False,
        "is_papers": False,
    }
    assert stored["title"] == "MLP on digits: an example"
    flags = f"--setup mlp-digits --width 2 --out {config.out} --seed 3"
    assert stored["command"] == f"python -m experiments.example {flags}"
    assert stored["paper"] == {"loss": 0.5, "accuracy": 0.25, "width": 32}
    assert stored["config"]["recipe"]["epochs"] == SETUPS["mlp-digits"].recipe.epochs
    said = capsys.readouterr()
    assert said.err == f"results go to {folder}\n"
    verdict = f"Shows the paper's effect: It is 40. {OTHERS}"
    assert said.out.splitlines() == ["MLP on digits: an example", verdict, f"figure: {folder / 'example.png'}"]


def test_run_builds_one_store(example, config, monkeypatch):
    built = []
    for module in (command, run_module, reuse):
        monkeypatch.setattr(module, "Store", lambda config: built.append(config) or Store(config))
    flags = ["--setup", "mlp-digits", "--width", "2", "--seed", "3", "--out", str(config.out)]
    command.main(example, "", flags)
    assert built == [config]


def test_run_again_measures_and_draws_nothing(example, config, calls):
    first, second = (run(example, config) for _ in range(2))
    assert calls == ["measure", "draw"]
    assert first == second == read_results(example, config)


@pytest.mark.parametrize("kind", ["png", "pdf"])
@pytest.mark.parametrize("again", [run, read_results])
def test_run_redraws_missing_figure(example, config, calls, kind, again):
    run(example, config)
    path = Store(config).folder("example") / f"example.{kind}"
    path.unlink()
    again(example, config)
    assert calls == ["measure", "draw", "draw"]
    assert path.read_text() == "40"


@pytest.mark.parametrize("name", ["example.png", "example.pdf", ".figures.json"])
@pytest.mark.parametrize("again", [run, read_results])
def test_run_redraws_changed_figure(example, config, calls, name, again):
    run(example, config)
    path = Store(config).folder("example") / name
    whole = path.read_bytes()
    for content in (b"", whole[:-2], bytes([whole[0] ^ 1]) + whole[1:], b"another figure"):
        path.write_bytes(content)
        calls.clear()
        again(example, config)
        again(example, config)
        assert calls == ["draw"]
        assert path.read_bytes() == whole


def test_verdict_is_recomputed_for_old_results(example, config, calls):
    run(example, config)
    stricter = dataclasses.replace(example, judge=lambda results: Verdict(False, "No."), claim="It is 41.")
    assert {name: getattr(run(stricter, config), name) for name in ("agrees", "finding", "claim")} == {
        "agrees": False,
        "finding": f"No. {OTHERS}",
        "claim": "It is 41.",
    }
    assert calls == ["measure", "draw"]


def test_read_results_creates_nothing(example, config, calls):
    assert read_results(example, config) is None
    with_networks = dataclasses.replace(example, networks="AB")
    assert read_results(with_networks, config) is None
    assert not config.out.exists()
    assert not calls


def test_read_results_ignores_unfinished_run(example, config, calls):
    def stopped(this):
        this.rows.add([{"name": "one"}, {"name": "two"}])
        raise KeyboardInterrupt

    example = dataclasses.replace(example, combinations=lambda config: 5)
    assert read_state(example, config).kind == "not run"
    with pytest.raises(KeyboardInterrupt):
        run(dataclasses.replace(example, measure=stopped), config)
    assert read_results(example, config) is None
    assert read_state(example, config)[:2] == ("begun", "begun: 2 of 10 rows")
    assert read_state(example, dataclasses.replace(config, seed=4)).kind == "not run"
    assert run(example, config).answer == 40
    state = read_state(example, config)
    assert (state.kind, state.agrees, state.finding) == ("done", True, "It is 40.")
    assert state.said.startswith("shows, 20")


def test_run_without_figure_leaves_no_results(example, config, calls):
    """Results exist only together with their figure."""

    def fail(results, folder):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(dataclasses.replace(example, draw=fail), config)
    assert not list(config.out.rglob("results.json"))


def test_run_runs_parts_first_and_once(example, config, calls):
    part = dataclasses.replace(example, name="part")
    whole = dataclasses.replace(
        example, parts=lambda config: {f"seed {n}": (part, dataclasses.replace(config, seed=n)) for n in (1, 2)}
    )
    assert read_results(whole, config) is None
    results = run(whole, config)
    assert results.of == ["seed 1", "seed 2"]
    assert results.answer == 42
    assert calls == ["measure", "draw"] * 3
    assert results.parts == {f"seed {n}": identity_hash(run(part, dataclasses.replace(config, seed=n))) for n in (1, 2)}
    assert read_results(whole, config) == results == run(whole, config)
    assert calls == ["measure", "draw"] * 3


def test_verdict_is_none_for_unsuitable_networks(example, config, monkeypatch):
    monkeypatch.setattr(experiment, "why_no_verdict", lambda results: "No verdict: something is wrong.")
    results = run(example, config)
    assert results.agrees is None
    assert results.finding == "No verdict: something is wrong."


def test_identity_hash_depends_on_all_inputs(example, config):
    results = run(example, config)
    names = ("experiment", "config", "version", "networks", "matchings", "parts", "data", "devices")
    hashes = {identity_hash(results)} | {
        identity_hash(dataclasses.replace(results, **{name: "another"})) for name in names
    }
    assert len(hashes) == 1 + len(names)
    assert identity_hash(dataclasses.replace(results, seconds=1e9, answer=0)) == identity_hash(results)


def test_help_lists_recipe_of_every_setup():
    lines = setups_help().splitlines()
    assert lines[0] == "setups:"
    assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "] == list(SETUPS)
    assert any("59 % test accuracy" in line for line in lines)
    assert "250 epochs, batch 100, learning rate 0.1, weight decay 0.0001" in lines[1]


def test_parse_and_join_compares_flags_code_and_versions(tmp_path, monkeypatch):
    def agreed(flags):
        values = {}
        monkeypatch.setattr(command, "join", lambda *own: None)
        monkeypatch.setattr(command, "require_agreement", values.__setitem__)
        command.parse_and_join(Config, "", flags.split())
        return values

    first = agreed("--coordinator a:1 --processes 2 --process 0 --data-dir here --json")
    assert first == agreed("--coordinator b:1 --processes 2 --process 1 --data-dir there")
    assert first.keys() == {"flags", "code", "versions"}
    assert first["versions"] == f"jax {jax.__version__}, jaxlib {jaxlib.__version__}"
    assert agreed("--distributed --width 3")["flags"] != first["flags"]
    monkeypatch.setattr(command, "EXPERIMENTS", tmp_path)
    assert agreed("--distributed")["code"] != first["code"]
