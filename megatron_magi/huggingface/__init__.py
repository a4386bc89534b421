"""HuggingFace Transformers on this engine: one call, then ``attn_implementation="magi"``.

    from megatron_magi.huggingface import dispatch_batch, register

    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="magi")
    loss = model(input_ids=input_ids, position_ids=position_ids, labels=labels).loss

Packed rows (position ids that restart, or ``cu_seq_lens_q``), windows per layer, sinks, softcap,
grouped heads and padding at the ends of rows become one list of slices, which is made once a batch;
no dense mask is built. With a context-parallel group, `dispatch_batch` gives a rank its rows, and
the same model attends over the group. What cannot be honoured is refused with an error.
"""

from megatron_magi.huggingface.batch_documents import Documents, find_documents
from megatron_magi.huggingface.cp_batch import DispatchedBatch, Packing, dispatch_batch
from megatron_magi.huggingface.register import NAME, register

__all__ = [
    "NAME",
    "DispatchedBatch",
    "Documents",
    "Packing",
    "dispatch_batch",
    "find_documents",
    "register",
]
