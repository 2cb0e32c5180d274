"""``python -m matrixfsdp_jax``: see `cli`."""

import sys

from matrixfsdp_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
