"""Generate text with two language models and with their midpoints, naive and aligned.

    python -m experiments.generate --setup decoder-text --pretrained
    python -m experiments.generate --setup decoder-shakespeare --prompt "ROMEO:" --length 400

All four networks continue the same prompt with the same random numbers. The first line of each shows how well it
predicts the test split.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from mcomb import combine, score
from mcomb.errors import UserError
from mcomb.lab import cli
from mcomb.lab.cache.matchings import B_TO_A
from mcomb.lab.cache.store import Store
from mcomb.lab.cli import Flag
from mcomb.lab.data.text import decode, encode
from mcomb.lab.flags import Config
from mcomb.lab.generation import generate
from mcomb.lab.runs.command import parse_and_join, print_plan
from mcomb.lab.runs.plan import Job
from mcomb.lab.setups import SETUPS
from mcomb.runtime.progress import show, show_json


@dataclass(frozen=True)
class GenerateConfig(Config):
    """Flags of `generate`."""

    pairs: ClassVar[int] = 1  # type: ignore[misc]
    prompt: Annotated[str | None, Flag("text to continue (default: the start of the test split)")] = None
    length: Annotated[int, Flag("characters to generate", at_least=1)] = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if SETUPS[self.setup].dataset.unit != "token":
            raise UserError(f"--setup {self.setup} generates no text: use a language model, such as decoder-text.")
        if self.prompt == "":
            raise UserError("--prompt is empty: pass at least one character.")


def main(argv: list[str] | None = None) -> None:
    """Print the text of each network and its test loss."""
    config = parse_and_join(GenerateConfig, __doc__, argv)
    store = Store(config)
    if config.plan:
        return print_plan([Job("generate", store, list(store.networks.trainings("AB").values()), (), (B_TO_A,))])
    networks = store.networks.get("AB")
    a, b = (networks[letter].params for letter in "AB")
    aligned = store.permute(networks["B"], store.matchings.get(networks).matching)
    several = {"A": a, "B": b, "naive midpoint": combine(a, b, 0.5), "aligned midpoint": combine(a, aligned, 0.5)}
    test, (context,) = store.data.test.subset(config.test_examples), store.setup.dataset.shape
    prompt = test.inputs[0] if config.prompt is None else encode(config.prompt)
    written = {}
    show(f"The prompt: {decode(prompt)}")
    for name, params in several.items():
        measured = score(store.apply, params, *test)
        text = decode(generate(store.apply, params, prompt.astype(np.int32), config.length, context, config.seed))
        perplexity = math.exp(measured.loss)
        show(f"\n{name}: test loss {measured.loss:.3f}, perplexity {perplexity:.1f}, accuracy {measured.accuracy:.1%}")
        show(text)
        written[name] = {"loss": measured.loss, "perplexity": perplexity, "accuracy": measured.accuracy, "text": text}
    show_json({"prompt": decode(prompt), "networks": written})


if __name__ == "__main__":
    cli.run(main)
