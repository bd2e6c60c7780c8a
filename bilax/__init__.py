"""Gradient-based bilevel optimization whose followers may be non-convex.

The public names are listed in `__init__.pyi`; each is imported when it is first used, so that the command
line starts quickly.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
