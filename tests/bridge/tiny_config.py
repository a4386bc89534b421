"""The small Llama of examples/megatron_bridge.py, on mock data or on packed documents."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.training.config import ConfigContainer
from megatron_bridge import LENGTH, small_config  # in examples/

NUM_SAMPLES = 8


def tiny_config(packed: bool) -> ConfigContainer:
    """Four steps of two microbatches in fp32."""
    config = small_config(on_gpu=False)
    if packed:
        config.dataset = packed_documents()
    return config


def packed_documents() -> GPTSFTDatasetConfig:
    """Documents of uneven lengths that Bridge reads as packed samples of at most LENGTH tokens."""
    folder = Path(tempfile.mkdtemp())
    generator = np.random.default_rng(5)
    samples = []
    for _ in range(NUM_SAMPLES):
        starts = [0, *sorted(generator.choice(np.arange(4, LENGTH - 8), 4, replace=False).tolist())]
        tokens = generator.integers(0, 126, LENGTH).tolist()
        mask = (generator.random(LENGTH) < 0.7).astype(int).tolist()
        samples.append({"input_ids": tokens, "seq_start_id": starts, "loss_mask": mask})
    (folder / "metadata.json").write_text("[]")
    np.save(folder / "packed.npy", np.array(samples, dtype=object), allow_pickle=True)
    return GPTSFTDatasetConfig(
        seq_length=LENGTH,
        dataset_root=folder,
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(
            packed_sequence_size=LENGTH,
            packed_train_data_path=folder / "packed.npy",
            packed_metadata_path=folder / "metadata.json",
        ),
        dataset_kwargs={"pad_to_max_length": True},
        do_validation=False,
        do_test=False,
        num_workers=0,
    )
