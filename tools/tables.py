"""The measured tables of README and docs, by the names in the pages' marks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tools import record_index, table_attention, table_jobs, table_llama, table_steps
from tools.readme_records import Record
from tools.record_table import Row, Table, pivot


def planner_rows(record: Record) -> list[Row]:
    """Plans of documents that are cut at a quarter, at 8,192 tokens of a rank."""
    rows = [row for row in record["rows"] if row["what"] == "quality" and row["cut"]]
    return [row for row in rows if row["tokens_per_rank"] == 8192]


def scale_rows(record: Record) -> list[Row]:
    """One, eight and 64 nodes."""
    rows = [row for row in record["rows"] if row["cp_size"] in (8, 64, 512)]
    return pivot(rows, "distribution cp_size", "plan")


def both_ways(forward: str, backward: str, impls: str) -> str:
    """Cells of forward / backward in TFLOP/s; a star stands for the implementation."""
    cell = f"{{{forward}[tflops]:.0f}} / {{{backward}[tflops]:.0f}}"
    return " | ".join(cell.replace("*", impl) for impl in impls.split())


def whole_steps(records: str) -> Table:
    """Next to every way of stock Megatron, of all days."""
    return Table(
        records,
        "model | sequence | layout | runs of magi | magi, ms | stock by method, ms "
        "| over the fastest stock method | first step, s: magi / stock "
        "| torch's allocator, MiB: magi / stock",
        "{model} | {length:,} | {layout} | {runs} | {magi} | {ways} | {over:.2f}x | {first} "
        "| {peak}",
        table_steps.whole_rows,
        every=True,
    )


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "kernel": Table(
        "kernel",
        "mask | forward 4k | forward 16k | forward 64k | backward 4k | backward 16k | backward 64k",
        "`{mask}` | {fwd_4096[over]} | {fwd_16384[over]} | {fwd_65536[over]} "
        "| {bwd_4096[over]} | {bwd_16384[over]} | {bwd_65536[over]}",
        table_attention.kernel_rows,
        every=True,
    ),
    "head sizes": Table(
        "head_sizes",
        "head_dim | mask | 4k | 16k",
        "{name} | `{mask}` | {both_4096} | {both_16384}",
        table_attention.head_size_rows,
    ),
    "deterministic": Table(
        "deterministic",
        "mask | magi, 4k | fa3 | fa4 | magi, 16k | fa3 | fa4",
        "`{mask}` | "
        + " | ".join(
            f"{{{length}_{impl}_deterministic}}"
            for length in (4096, 16384)
            for impl in ("ours", "fa3", "fa4")
        ),
        table_attention.deterministic_rows,
    ),
    "planner": Table(
        "planner",
        "documents | cp | LPT, chunk 2048 | LPT, chunk 512 | search, chunk 512 "
        "| search, chosen chunk | plan, ms",
        "{distribution} | {cp_size} "
        "| {lpt_2048[received_own]:.2f} / {lpt_2048[imbalance_max]:.3f} "
        "| {lpt_fine[received_own]:.2f} / {lpt_fine[imbalance_max]:.3f} "
        "| {swap_fine[received_own]:.2f} / {swap_fine[imbalance_max]:.3f} "
        "| {swap_auto[received_own]:.2f} / {swap_auto[imbalance_max]:.3f} "
        "| {swap_auto[plan_ms_p50]:.1f}",
        planner_rows,
    ),
    "simulated scale": Table(
        "simulate_scale",
        "documents | GPUs | lpt_2048 | flat | nodes",
        "{distribution} | {cp_size} "
        "| {lpt_2048[tflops]:.0f}, {lpt_2048[efficiency]:.2f}, {lpt_2048[crossing_own]:.2f} "
        "| {flat[tflops]:.0f}, {flat[efficiency]:.2f}, {flat[crossing_own]:.2f} "
        "| {nodes[tflops]:.0f}, {nodes[efficiency]:.2f}, {nodes[crossing_own]:.2f}",
        scale_rows,
    ),
    "dist": Table(
        "dist",
        "mask | magi | kernels alone | contiguous all-gather | zigzag all-gather "
        "| ring | Ulysses | one GPU | rows received",
        "`{mask}` | "
        + both_ways(
            "*_fwd", "*_bwd", "ours kernels all_gather all_gather_zigzag ring ulysses one_gpu"
        )
        + " | {received:.0%}",
        table_attention.distributed_rows,
    ),
    "pretrain agreement": Table(
        "pretrain_agree",
        "bf16, 2,048 tokens | loss of step 1 | 2 | 5 | 10 | 20 | gradient norm of step 2",
        "{case} | {loss[0]:.5f} | {loss[1]:.5f} | {loss[4]:.5f} | {loss[9]:.5f} | {loss[19]:.5f} "
        "| {grad_norm[1]:.3f}",
        table_steps.agreement_rows,
    ),
    "pretrain flags": Table(
        "pretrain_flags",
        "job | loss of step 1 | 20 | differs from stock at step 1 | 20",
        "`{name}` | {loss[0]:.5f} | {loss[19]:.5f} | {apart[0]:.0e} | {apart[19]:.0e}",
        table_steps.flag_rows,
    ),
    "published jobs": table_jobs.sets_table,
    "reasons of refusals": Table(
        "jobs",
        "what keeps a job out: in jobs / alone | Megatron-LM | recipes | performance recipes",
        "{reason} | {megatron[0]} / {megatron[1]} "
        "| {Megatron-Bridge's recipes[0]} / {Megatron-Bridge's recipes[1]} "
        "| {its performance recipes[0]} / {its performance recipes[1]}",
        table_jobs.reason_rows,
        table_jobs.job_sources,
    ),
    "index": Table(
        "",
        "record | date | machine | commit | cited in",
        "[`{name}`]({name}) | {date} | {machine} | {commit} | {cited_in}",
        record_index.index_rows,
    ),
    "curves": Table(
        "llama_curves",
        "run | mean training loss | held-out loss | step, ms | TFLOP/s on a GPU",
        "{title} | {loss:.5f} | {held_out:.5f} | {ms:.0f} | {rate:.0f}",
        table_llama.curve_rows,
        table_llama.curve_figures,
    ),
    "gradients": Table(
        "llama_gradients",
        "run | drawn: median | worst | share | after 300 steps: median | worst | share",
        "{title} | {drawn} | {after 300 steps}",
        table_llama.gradient_rows,
    ),
    "held out": Table(
        "llama_held_out",
        "program | held-out loss",
        "{program} | {loss:.6f}",
        table_llama.held_out_rows,
    ),
    "te attention": Table(
        "te_attention_fa3_*_4gpus",
        "mask | 32k tokens a GPU | 16k | 8k",
        "`{mask}` | {fa3_32768_4} | {fa3_16384_4} | {fa3_8192_4}",
        table_attention.te_rows("fa3_32768_4", "fa3_16384_4", "fa3_8192_4"),
    ),
    "te attention of two": Table(
        "te_attention_fa3_*_2gpus te_attention_cudnn_*_2gpus",
        "mask | FlashAttention-3: 32k tokens a GPU | 16k | cuDNN: 16k | 8k",
        "`{mask}` | {fa3_32768_2} | {fa3_16384_2} | {cudnn_16384_2} | {cudnn_8192_2}",
        table_attention.te_rows("fa3_32768_2", "fa3_16384_2", "cudnn_16384_2", "cudnn_8192_2"),
    ),
    "te steps": Table(
        "te_pretrain",
        "sequence | magi, ms | stock by method, ms | over the fastest stock",
        "{length:,} | {magi} | {ways} | {over:.2f}x",
        table_steps.packed_rows,
    ),
    "te whole steps": whole_steps("te_steps_torchrun_*_4gpus"),
    "te fastest": Table(
        "te_steps_torchrun_*_4gpus",
        "model | sequence | layout | magi, ms | fastest stock, ms | gain",
        "{model} | {length:,} | {layout} | {magi} | {best} | {over:.2f}x",
        table_steps.long_rows,
        every=True,
    ),
    "te whole steps of two": whole_steps("te_steps_*_2gpus"),
    "te step profile": Table(
        "te_steps_*gpus",
        "run | step | attention | gemm | elementwise | exchange | idle | exchange, hidden too",
        "`{run}` | {step_ms:,.0f} | {parts_ms[attention]:,.0f} | {parts_ms[gemm]:,.0f} "
        "| {parts_ms[elementwise]:,.0f} | {parts_ms[exchange]:,.0f} | {parts_ms[idle]:,.0f} "
        "| {busy_ms[exchange]:,.0f}",
        table_steps.profile_rows,
        every=True,
    ),
}
