"""These run on a GPU, by ``make test-gpu``; without one there is nothing here to collect."""

import jax

collect_ignore_glob = [] if jax.default_backend() == "gpu" else ["test_*.py"]
