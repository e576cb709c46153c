"""The README's library example is run as it stands."""

import re
from pathlib import Path

import jax

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_aligns_and_combines_a_network_of_ones_own(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    scope: dict = {}
    exec(code, scope)
    loss, accuracy = map(float, capsys.readouterr().out.split())
    assert len(scope["metrics"].loss) == 100
    assert loss == scope["metrics"].loss.max()
    assert 0 <= accuracy <= 1
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), scope["b"], scope["aligned"])
    assert moved["Dense_0"]["kernel"]  # the residual stream
    assert moved["Dense_1"]["kernel"]  # the inside of a block


def test_the_two_commands_are_there_once_for_everyone():
    assert README.count("pip install -e . && python -m experiments.uniform --setup mlp-digits\n") == 1
    assert README.count('pip install -e ".[test]" && pytest\n') == 1
