"""Everything that keeps a parsed job from running with `--attention-backend magi`."""

from __future__ import annotations

import re
from typing import Any

from megatron_magi.launcher import constraints


def reasons(args: Any) -> dict[str, str]:
    """Each thing that keeps the job out, by a stable name, with its line.

    Without effect by design, and so not among them: `--cp-comm-type` (our plan is the
    communication), `--attention-softmax-in-fp32` (it always is), `--apply-query-key-layer-scaling`
    (it scales scores and softmax by inverse factors), `--no-masked-softmax-fusion`,
    `--use-flash-attn`, `--flash-decode` (inference), both flags about masks in the data loader (the
    plan holds the mask), and `--ddp-average-in-collective`, which the launcher switches off and
    says so.

    Args:
        args: As Megatron's parser returns it, before `validate_args`, where the launcher checks it.
            The job is another machine's, so rules about this one do not count.
    """
    return {key_of(line): line for line in constraints.refusals(args, here=False)}


def key_of(line: str) -> str:
    """The flag in brackets, or else the first one after our switch."""
    in_brackets = re.search(r"\((--[a-z0-9-]+)", line)
    if in_brackets:
        return in_brackets.group(1)
    flags = re.findall(r"--[a-z][a-z0-9-]*", line.replace("--attention-backend magi", ""))
    return flags[0] if flags else line
