"""`megatron_magi.run` without the rule against checkpoint workers on a machine without CUDA, for
tests that give the worker a stand-in for a GPU."""

from megatron_magi import run
from megatron_magi.launcher import machine_constraints as rules

rules.MACHINE_RULES = tuple(r for r in rules.MACHINE_RULES if r is not rules._checkpoint_worker)
run.main()
