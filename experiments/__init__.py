"""One program for each experiment: `python -m experiments.NAME` in a clone, `mcomb NAME` after installation."""

import difflib
import pkgutil
import sys

# `python -m experiments.NAME` imports this package before it looks for NAME. At that time, sys.argv[0] is "-m".
if sys.argv[:1] == ["-m"]:
    _words = (word.removeprefix("-m") for word in sys.orig_argv[1:])
    _asked = next((word for word in _words if word.startswith(f"{__name__}.")), "").removeprefix(f"{__name__}.")
    _names = [module.name for module in pkgutil.iter_modules(__path__)]
    if _asked and _asked not in _names:
        _near = difflib.get_close_matches(_asked, _names, 1)
        _remedy = f"did you mean python -m {__name__}.{_near[0]}?" if _near else f"list them with python -m {__name__}."
        print(f"error: Unknown experiment {_asked:.50}: {_remedy}", file=sys.stderr)
        sys.exit(2)
