"""Will your Megatron job start with --attention-backend magi? Nothing is started.

Megatron's own parser reads the command line of your pretrain script; the launcher's rules judge it,
and then Megatron's own checks. Words before the script, such as torchrun's, are passed over.
Flags that Megatron does not know are named in one line, and the rest is judged without them.
Exit code 0: the job is accepted. 1: refused, with the lines that the launcher or Megatron would
print. 2: it cannot be read here, or there is no such script.

examples:
  megatron-magi check -- pretrain_gpt.py --context-parallel-size 2 ... --attention-backend magi
  megatron-magi check --gpus 16 -- PATH/pretrain_gpt.py ...        16 GPUs in all
  megatron-magi check --elsewhere -- PATH/pretrain_gpt.py ...      of a machine with other GPUs
  megatron-magi check -- pretrain_gpt.py --recipe llama3_1b_cp8    the flags of a recipe
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_magi import recipe
from megatron_magi.cli.parser import UsageError, add_output_options
from megatron_magi.run import PACKAGED, find_script

if TYPE_CHECKING:  # the options and their help need no Megatron
    from megatron_magi.launcher.job_plans import JobPlans
    from megatron_magi.launcher.preflight import Job, JobRejected, JobSummary

UNKNOWN = "not known before it starts: data, memory, and the transport between ranks"
MEGATRONS_MEANS = (
    "memory and time of the whole model: start it with --train-iters 5 --mock-data --log-throughput"
)
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus", type=int, metavar="N",
        help="GPUs of the job (default: the fewest that its parallel sizes allow)",
    )  # fmt: skip
    parser.add_argument(
        "--elsewhere", action="store_true",
        help="the job runs on another machine: leave out the rules about this one",
    )  # fmt: skip
    add_output_options(parser)
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="-- SCRIPT FLAGS",
                        help="the job as you start it")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Read, judge, print; 0 or 1."""
    script, flags = _script_and_flags(options.job)
    _find_modules_like_the_launcher(script)
    source = script.read_text(errors="replace")
    from megatron_magi.launcher import preflight

    try:
        preflight.prepare_megatron()
        read = preflight.read_job(flags, source)
        accepted = preflight.preflight(read, options.gpus, here=not options.elsewhere)
    except preflight.JobRejected as refused:
        return _refuse(refused, options)
    if options.quiet:
        print("accepted")
        return 0
    try:
        attention = _attention(read, accepted.gpus)
    except (ValueError, NotImplementedError) as error:  # the planner's: the job would end with it
        return _refuse(preflight.JobRejected([str(error)]), options)
    if options.json:
        print(json.dumps({"accepted": True, **asdict(accepted), "attention": attention}))
    else:
        print("\n".join([_line(accepted), *_attention_lines(attention), MEGATRONS_MEANS]))
        for note in _notes(read.args, accepted.megatron):
            print(f"note: {note}", file=sys.stderr)
    return 0


def _notes(args: Any, megatron: str) -> Iterator[str]:
    """Settings with which Megatron ends late, unless the script brings what is missing."""
    if _lacks_eval_interval(args):
        yield (
            f"Megatron {megatron} divides by --eval-interval when it sizes its data sets, got "
            f"none; pass it, with --eval-iters 0 too"
        )
    if _lacks_validation(args):
        yield (
            f"Megatron ends at its first validation without documents for it, got --split "
            f"{args.split}; give the second number a share, or pass --eval-iters 0"
        )


def _lacks_validation(args: Any) -> bool:
    """Megatron takes the absent data set for one."""
    validates = args.eval_iters or getattr(args, "full_validation", False)
    if not validates or args.mock_data or args.dataloader_type == "external":
        return False
    shares = re.findall(r"[.0-9]+", args.split or "")
    return bool(shares) and (len(shares) == 1 or not shares[1].strip("0."))


def _lacks_eval_interval(args: Any) -> bool:
    """Its default was 1000 in Megatron 0.18 and is none since; the script may set it."""
    other = args.skip_train or getattr(args, "full_validation", False)
    return not other and getattr(args, "eval_interval", None) is None


def _script_and_flags(words: list[str]) -> tuple[Path, list[str]]:
    """The pretrain script, and what follows it.

    The script is the first word that ends in .py, or the name of the packaged one.
    """
    for number, word in enumerate(words):
        if word.endswith(".py") or word == PACKAGED:
            try:
                return _existing(find_script(word)), recipe.expand(words[number + 1 :])
            except recipe.RecipeFileError as error:
                raise UsageError(str(error)) from error
    got = " ".join(word for word in words[:3] if word != "--")
    raise UsageError(
        f"a pretrain script and its flags are required after --, got {got or 'none'}; such as "
        f"megatron-magi check -- pretrain_gpt.py ... --attention-backend magi"
    )


def _existing(script: Path) -> Path:
    if not script.is_file():
        raise UsageError(
            f"the script must exist, got {str(script)!r} in {Path.cwd()}, and there is no such "
            f"file; give its path, or pretrain_gpt for the packaged one"
        )
    return script


def _find_modules_like_the_launcher(script: Path) -> None:
    """The script's folder first, where a checkout has Megatron, then the current folder."""
    if "" not in sys.path:  # as python -m has it; the command's own script does not
        sys.path.insert(0, "")
    sys.path.insert(0, str(script.resolve().parent))


def _refuse(refused: JobRejected, options: argparse.Namespace) -> int:
    """Print the refusals; the exit code."""
    if options.json:
        print(json.dumps({"accepted": False, "refusals": refused.lines}))
        return 1
    print("\n".join(refused.lines))
    if refused.about_machine and not options.quiet:
        print(
            "note: some of these lines are about this machine; --elsewhere leaves them out",
            file=sys.stderr,
        )
    return 1


def _line(accepted: JobSummary) -> str:
    a = accepted
    kernel = "kernel not known, as the job runs elsewhere"
    if a.kernel is not None:
        kernel = f"kernel {a.kernel} on this machine"
    return (
        f"accepted: {a.gpus} GPUs as tp {a.tp}, pp {a.pp}, cp {a.cp}, dp {a.dp}; {a.layers} "
        f"layers; heads {a.heads} on a rank; {kernel}; read by Megatron {a.megatron}; {UNKNOWN}"
    )


def _attention(job: Job, gpus: int) -> dict[str, Any]:
    """Facts of the attention in microbatches like the job's, or the reason why there are none."""
    from megatron_magi.launcher.job_plans import UnknownMask, plan_job
    from megatron_magi.launcher.preflight import silence, validated

    try:
        with silence():
            return _facts(plan_job(validated(job.args, gpus), job.options))
    except UnknownMask as error:
        return {"unknown": str(error)}


def _facts(job: JobPlans) -> dict[str, Any]:
    from megatron_magi.viz.plan_facts import exchange_bytes, ring_rows

    plans = job.plans
    received = [float(plan.rows_received.mean()) for plan in plans]
    ring = sum(ring_rows(plan) for plan in plans)
    layout = plans[0].layout
    return {
        "documents": job.documents,
        "tokens": job.tokens,
        "tokens_per_rank": layout.num_local_tokens,
        "chunk_size": layout.chunk_size,
        "num_plans": len(plans),
        "imbalance": sum(plan.imbalance for plan in plans) / len(plans),
        "worst_imbalance": max(plan.imbalance for plan in plans),
        "key_rows_received": sum(received) / len(received),
        "key_rows_of_ring": sum(received) / ring if ring else 0.0,
        "stages": max(plan.num_stages for plan in plans),
        "buffer_bytes": max(int(exchange_bytes(plan).max()) for plan in plans),
        "flops": job.flops,
        "causal_share": job.causal_share,
    }


def _attention_lines(facts: dict[str, Any]) -> list[str]:
    if "unknown" in facts:
        return [f"attention not planned: {facts['unknown']}"]
    f = facts
    return [
        f"attention of {f['num_plans']} plan{'s' * (f['num_plans'] > 1)} of {f['tokens']:,} tokens "
        f"({f['documents']}):",
        f"  balance   fullest rank over the mean {f['imbalance']:.3f}, at worst "
        f"{f['worst_imbalance']:.3f}; {f['tokens_per_rank']:,} tokens a rank in chunks of "
        f"{f['chunk_size']:,}",
        f"  key rows  {f['key_rows_received']:,.0f} received by a rank in a layer, "
        f"{f['key_rows_of_ring']:.1%} of a ring's, in up to {f['stages']} "
        f"stage{'s' * (f['stages'] > 1)}",
        f"  buffers   up to {f['buffer_bytes'] / GIB:.3f} GiB a rank for keys, values and their "
        f"gradients in flight",
        f"  FLOPs     {f['flops']:.3g} a step, forward and backward ({f['causal_share']:.1%} of "
        f"causal attention over whole samples)",
    ]
