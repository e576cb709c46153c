"""Write networks A, B and C to pretrained/ in half precision, each with a model card.

    python -m experiments.pretrained --setup mlp-cifar10

The program trains the networks unless they are cached. All experiments then use these files with `--pretrained`.
"""

import json
import platform

import jax
import jax.numpy as jnp

from mcomb import read_checkpoint, score, write_checkpoint
from mcomb.io.fingerprints import fingerprint
from mcomb.io.paths import write_text
from mcomb.lab import cli
from mcomb.lab.cache.store import Store
from mcomb.lab.flags import RECIPE_FLAGS, Config, command, default_flags, recipe_dict
from mcomb.lab.run_folders import pretrained_path
from mcomb.lab.runs.command import parse_and_join, print_plan
from mcomb.lab.runs.plan import Job
from mcomb.runtime.processes import from_first
from mcomb.runtime.progress import show, show_json

CARD = """# {title}, width {width}, seed {seed}

Test accuracy {accuracy:.2%} and test loss {loss:.4f} on all {examples} test examples. The file stores half precision,
and the scores are those of the file, read as single precision. Fingerprint `{fingerprint}`.
{source}
This command trains the network and writes the file:

```sh
{command}
```

The recipe:

```json
{recipe}
```
"""

PYTHON = "The examples are those of Python {version}; another version has other examples.\n"


def main(argv: list[str] | None = None) -> None:
    """Train, write, read back and score the three networks."""
    config = parse_and_join(Config, __doc__, argv)
    store = Store(config)
    if config.plan:
        return print_plan([Job("pretrained", store, [store.config.training_of(letter) for letter in "ABC"])])
    test = store.data.test  # load the data before writing any file
    recipe = recipe_dict(config)
    chosen = {name: getattr(config, name) for name in ("setup", "width", "seed", *RECIPE_FLAGS)}
    source = "" if store.setup.dataset.is_fixed else PYTHON.format(version=platform.python_version())
    written = {}
    for letter, network in store.networks.get("ABC").items():
        seed = config.seed_of(letter)
        path = pretrained_path(config.setup, config.width, seed)
        from_first(path.parent.mkdir, parents=True, exist_ok=True)
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), network.params)
        about = {"setup": config.setup, "width": str(config.width), "seed": str(seed)}
        from_first(write_checkpoint, path, half, metadata=about)
        params = read_checkpoint(path, store.setup.shapes(config.width))
        found = score(store.apply, params, *test)
        card = CARD.format(
            title=store.setup.title,
            width=config.width,
            seed=seed,
            accuracy=found.accuracy,
            loss=found.loss,
            examples=f"{len(test.labels):,}",
            fingerprint=fingerprint(params),
            source=source,
            command=command("pretrained", Config(**default_flags(Config, config.setup) | chosen)),
            recipe=json.dumps(recipe, indent=1),
        )
        from_first(write_text, path.with_suffix(".md"), card)
        show(f"{path}: test accuracy {found.accuracy:.2%}, test loss {found.loss:.4f}")
        written[letter] = {
            "path": str(path),
            "accuracy": found.accuracy,
            "loss": found.loss,
            "examples": len(test.labels),
        }
    show_json({"networks": written})


if __name__ == "__main__":
    cli.run(main)
