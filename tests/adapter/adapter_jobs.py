"""Functions that layout_worker runs on every rank of a world; JSON in, JSON out."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import tiny_llama
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from megatron_magi.adapter import cpu, layer_spec, plugin
from megatron_magi.adapter.mla import MlaYarnRotaryEmbedding
from megatron_magi.adapter.model_chunks import model_chunks
from megatron_magi.adapter.rope import MagiRotaryEmbedding
from megatron_magi.config import MagiConfig
from megatron_magi.core.kernel import reference  # noqa: F401  before worlds are forked
from megatron_magi.core.runtime.token_dispatch import undispatch

with contextlib.suppress(ImportError):  # not every version has it
    from megatron.core.models import mimo  # noqa: F401


def train(**layout: Any) -> dict[str, list[float]]:
    """Train the tiny model in this layout."""
    return tiny_llama.train(tiny_llama.Layout(**layout))


def attach(spec: str = "magi", changes: dict[str, Any] | None = None, **rest: Any) -> str:
    """The start-up line of a model built from our or the stock spec, with changed settings."""
    world = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    config = tiny_llama.model_config(tiny_llama.Layout("attach", cp=world))
    config = dataclasses.replace(config, **(changes or {}))
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec.llama_layer_spec(config, attention=spec),  # type: ignore[arg-type]
        vocab_size=tiny_llama.VOCAB,
        max_sequence_length=64,
        **{"position_embedding_type": "rope", **rest},
    )
    line = plugin.attach(model)
    plugin.assert_active(model)
    assert isinstance(model.rotary_pos_emb, MagiRotaryEmbedding)
    again = model.rotary_pos_emb
    assert plugin.attach([model]) == line
    assert model.rotary_pos_emb is again
    return line


def module_kinds(**layout: Any) -> list[str]:
    """Names of the classes of all modules in the model of this layout."""
    wanted = tiny_llama.Layout("kinds", **layout)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=wanted.tp)
    model_parallel_cuda_manual_seed(1)
    chunks = tiny_llama.build_chunks(wanted, tiny_llama.model_config(wanted))
    return sorted({type(module).__name__ for chunk in chunks for module in chunk.modules()})


def attach_latent(kernel: str = "auto", changes: dict[str, Any] | None = None) -> str:
    """The start-up line of a model with multi-latent attention, attached twice."""
    world = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    config = tiny_llama.model_config(tiny_llama.Layout("attach", cp=world, latent="yarn"))
    for name, value in (changes or {}).items():
        setattr(config, name, value)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec.llama_layer_spec(config),
        vocab_size=tiny_llama.VOCAB,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    line = plugin.attach(model, MagiConfig(kernel_backend=kernel))  # type: ignore[arg-type]
    rotary = model.decoder.layers[0].self_attention.rotary_pos_emb
    assert isinstance(rotary, MlaYarnRotaryEmbedding)
    assert plugin.attach(model, MagiConfig(kernel_backend=kernel)) == line  # type: ignore[arg-type]
    assert model.decoder.layers[0].self_attention.rotary_pos_emb is rotary
    return line


def checkpoint_names(tp: int, attention: str) -> dict[str, list[int]]:
    """Global shape of every tensor that a distributed checkpoint of the model would hold."""
    layout = tiny_llama.Layout("checkpoint", tp=tp, sp=tp > 1, attention=attention)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    (model,) = model_chunks(tiny_llama.build_chunks(layout, tiny_llama.model_config(layout)))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensors = model.sharded_state_dict(metadata={"dp_cp_group": group})
    shapes = ((t.key, getattr(t, "global_shape", None)) for t in tensors.values())
    return {key: list(shape) for key, shape in shapes if shape is not None}


def sink_shards(attention: str) -> list[dict[str, Any]]:
    """How a distributed checkpoint holds every layer's learnable sink on this rank."""
    tp = torch.distributed.get_world_size()
    layout = tiny_llama.Layout("sinks", tp=tp, attention=attention, softmax_type="learnable")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    (model,) = model_chunks(tiny_llama.build_chunks(layout, tiny_llama.model_config(layout)))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensors = model.sharded_state_dict(metadata={"dp_cp_group": group})
    found = [t for t in tensors.values() if t.key.endswith("softmax_offset")]
    facts = ("key", "local_shape", "global_shape", "global_offset", "replica_id", "dtype")
    return [{name: _plain(getattr(t, name)) for name in facts} for t in found]


def _plain(fact: Any) -> Any:
    return list(fact) if isinstance(fact, tuple) else str(fact)


def cpu_runtime() -> None:
    """Literal CUDA calls mean the CPU, and seeding "CUDA" leaves the CPU's generator alone."""
    mode = cpu._active_mode
    assert cpu.install_cpu_runtime()
    assert cpu._active_mode is mode
    x = torch.zeros(2, device="cuda", pin_memory=True)
    assert x.device.type == "cpu"
    assert x.cuda() is x
    assert x.to("cuda").device.type == "cpu"
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.type(torch.float64).dtype == torch.float64
    assert torch.cuda.current_stream().record_event().query() is None
    torch.manual_seed(5)
    before = torch.get_rng_state()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(3)
    with get_cuda_rng_tracker().fork():
        pass
    assert torch.equal(before, torch.get_rng_state())


def run_page(code: str, then: str) -> float:
    """The mean loss that a page's Python leaves as `loss`, with the names that the page assumes.

    Args:
        code: the page's block, without lines that only a whole program can run.
        then: lines that call what the block defines.
    """
    world = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    config = tiny_llama.model_config(tiny_llama.Layout("page", cp=world))
    batch, bounds = tiny_llama.microbatch(tiny_llama.Layout("page", cp=world), 0, 0)
    names: dict[str, Any] = {
        "GPTModel": GPTModel,
        "config": config,
        "cp_group": parallel_state.get_context_parallel_group(),
        "cu_seqlens": bounds,
        "length": 96,
        "max_sequence_length": 96,
        "parallel_state": parallel_state,
        "sample": SimpleNamespace(cu_seqlens=bounds, **vars(batch)),
        "spec": layer_spec.llama_layer_spec(config, attention="stock"),
        "vocab_size": tiny_llama.VOCAB,
        **vars(batch),
    }
    exec(compile(f"{code}\n{then}", "page", "exec"), names)
    mean = names["loss"].float().sum()
    torch.distributed.all_reduce(mean)
    return float(mean)


def replay(**layout: Any) -> dict[str, Any]:
    """Losses of a stream whose experts were chosen by a rollout, and the choices as recorded."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from megatron_magi.adapter.routing_replay import dispatch_routing, gather_routing

    wanted = tiny_llama.Layout("replay", experts=4, **layout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=wanted.tp, context_parallel_size=wanted.cp
    )
    model_parallel_cuda_manual_seed(1)
    config = tiny_llama.model_config(wanted)
    config.moe_enable_routing_replay = True
    (model,) = model_chunks(tiny_llama.build_chunks(wanted, config))
    local = tiny_llama.local_batch(wanted, config, tiny_llama.microbatch(wanted, 0, 0), model)
    packed, group = local.packed_seq_params, parallel_state.get_context_parallel_group()
    random = torch.Generator().manual_seed(3)
    scores = torch.rand(config.num_layers, wanted.seq_length, 4, generator=random)
    chosen = list(scores.topk(config.moe_router_topk, dim=-1).indices)
    sp = {"sequence_parallel": wanted.sp}
    RouterReplay.set_replay_data(dispatch_routing(chosen, packed, group, **sp))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    losses = model(**local.model_inputs())
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    model(**local.model_inputs())
    recorded = gather_routing(RouterReplay.get_recorded_data(), packed, group, **sp)
    shown = undispatch(losses.reshape(-1).detach(), packed.token_plan, group)
    owners = packed.token_plan.layout.chunk_ranks
    return {
        "losses": shown.tolist(),
        "recorded": [x.sort(dim=-1).values.tolist() for x in recorded],
        "is_contiguous": bool((owners[1:] >= owners[:-1]).all()),
    }
