import getpass
import tempfile
from pathlib import Path

import jax
from hypothesis import settings

jax.config.update("jax_enable_x64", True)
# Compiled programs are shared between the tests' processes and kept for the next run.
jax.config.update("jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / f"bilax-tests-{getpass.getuser()}"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

settings.register_profile("bilax", deadline=None, max_examples=20, derandomize=True, database=None)
settings.load_profile("bilax")
