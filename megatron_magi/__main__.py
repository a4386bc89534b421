"""``python -m megatron_magi``: the command line ``megatron-magi``."""

from megatron_magi.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
