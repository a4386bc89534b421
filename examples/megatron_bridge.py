#!/usr/bin/env python3
"""Pretraining by Megatron-Bridge with our attention: a layer spec, a hook and a forward step.

    torchrun --nproc-per-node 8 examples/megatron_bridge.py

Not run here: Megatron-Bridge 0.6 needs Python 3.12 and GPUs, and this project's tests have neither.
It was written from Bridge's source. The same calls on plain Megatron-Core are in own_loop.py, which
is tested.
"""

from functools import partial, wraps

from megatron_magi.adapter.batch import Batch, dispatch_batch
from megatron_magi.adapter.layer_spec import with_magi_attention
from megatron_magi.adapter.loss import per_token_loss
from megatron_magi.adapter.packed import make_packed_seq_params, pipeline_seq_length
from megatron_magi.adapter.plugin import attach

# The adapter comes first, because it prepares the import of megatron.core.
# isort: split
from megatron.bridge.recipes.llama import llama32_1b_pretrain_config
from megatron.bridge.training.pretrain import pretrain
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config

ROWS = ("tokens", "labels", "loss_mask", "position_ids")


def with_our_attention(layer_spec):
    """The recipe's own layers with our core attention; Bridge calls it with what it builds."""

    @wraps(layer_spec)  # Bridge looks at the arguments
    def magi_layer_spec(*args, **kwargs):
        return with_magi_attention(layer_spec(*args, **kwargs))

    return magi_layer_spec


def attach_chunks(chunks):
    """Before Bridge wraps the model: rotary positions by the plan, and every layer checked."""
    attach(chunks)
    return chunks


def forward_step(state, data_iterator, model, return_schedule_plan=False):
    """In place of Bridge's, which shares out rows as TransformerEngine's attention wants them."""
    config = get_model_config(model)
    cp_group = parallel_state.get_context_parallel_group()
    batch = next(data_iterator)
    rows = {name: batch[name].cuda(non_blocking=True) for name in ROWS}
    count, length = rows["tokens"].shape
    # One document a sequence. For packed documents put their boundaries in here.
    bounds = range(0, (count + 1) * length, length)
    packed = make_packed_seq_params(list(bounds), config, cp_group)
    stages = [get_attr_wrapped_model(model, name) for name in ("pre_process", "post_process")]
    full = Batch(**{name: x.reshape(1, -1) for name, x in rows.items()}) if any(stages) else None
    local = dispatch_batch(full, packed, cp_group)
    return model(**local.model_inputs()), partial(per_token_loss, local.loss_mask)


def main():
    cfg = llama32_1b_pretrain_config()
    cfg.model.transformer_layer_spec = with_our_attention(cfg.model.transformer_layer_spec)
    cfg.model.register_pre_wrap_hook(attach_chunks)
    cfg.model.context_parallel_size = 8
    cfg.model.attention_dropout = 0.0
    cfg.model.calculate_per_token_loss = True
    cfg.ddp.average_in_collective = False  # the sum is divided once, by all ranks' tokens
    cfg.train.micro_batch_size = 1
    # Bridge tells pipeline stages the length it has, so it has to be one that the plan keeps.
    padded = pipeline_seq_length(cfg.model.seq_length, cfg.model)
    if padded != cfg.model.seq_length:
        raise SystemExit(f"seq_length must divide evenly, got {cfg.model.seq_length}; set {padded}")
    pretrain(cfg, forward_step)


if __name__ == "__main__":
    main()
