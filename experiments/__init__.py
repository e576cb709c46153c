"""One short program for each experiment: `python -m experiments.NAME` in a clone, `mcomb NAME` once installed."""

import difflib
import pkgutil
import sys

# While Python looks for a module that is to run, it has imported this package, and the first argument is -m.
if sys.argv[:1] == ["-m"]:
    _words = (word.removeprefix("-m") for word in sys.orig_argv[1:])
    _asked = next((word for word in _words if word.startswith(f"{__name__}.")), "").removeprefix(f"{__name__}.")
    _names = [module.name for module in pkgutil.iter_modules(__path__)]
    if _asked and _asked not in _names:
        _near = difflib.get_close_matches(_asked, _names, 1)
        _remedy = f"did you mean python -m {__name__}.{_near[0]}?" if _near else f"python -m {__name__} lists them"
        print(f"error: there is no experiment {_asked:.50}: {_remedy}", file=sys.stderr)
        sys.exit(2)
