import json

import pytest

from experiments import generate
from mcomb.lab import cli

FLAGS = ["--setup", "decoder-text", "--width", "1", "--epochs", "0", "--test-examples", "4", "--length", "20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("generate"))


@pytest.fixture
def written(folder, capsys):
    """Run the program, and return its JSON document."""

    def of(*flags):
        generate.main([*FLAGS, "--out", folder, "--json", *flags])
        return json.loads(capsys.readouterr().out)

    return of


def test_generate_continues_prompt_with_four_networks(written):
    found = written("--prompt", "def f(x):\n")
    assert found["prompt"] == "def f(x):\n"
    assert list(found["networks"]) == ["A", "B", "naive midpoint", "aligned midpoint"]
    texts = [network["text"] for network in found["networks"].values()]
    assert [len(text) for text in texts] == [20] * 4
    assert len({*texts}) > 1
    assert all(0 < network["loss"] < 10 for network in found["networks"].values())
    assert written("--prompt", "def f(x):\n") == found
    assert written("--prompt", "def f(x):\n", "--seed-b", "5")["networks"]["A"] == found["networks"]["A"]


def test_generate_starts_with_test_split_by_default(written, folder):
    found = written()
    store = generate.Store(cli.parse(generate.GenerateConfig, "", [*FLAGS, "--out", folder]))
    assert found["prompt"] == generate.decode(store.data.test.inputs[0])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--setup", "mlp-digits"], "--setup mlp-digits generates no text: use a language model"),
        ([*FLAGS, "--prompt", ""], "--prompt is empty"),
        ([*FLAGS, "--pairs", "2"], "unrecognized arguments: --pairs 2"),
    ],
)
def test_generate_rejects_what_it_cannot_use(flags, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: generate.main(flags))
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
