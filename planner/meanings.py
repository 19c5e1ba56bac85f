"""What each choice of a layout means, in the words that `--help` and training scripts show."""

from collections.abc import Mapping

MEANINGS: Mapping[str, str] = {
    "data_parallel": "copies of the model that read other sequences",
    "tensor_parallel": "ranks that share each layer's matrices",
    "pipeline_parallel": "ranks that share the layers",
    "context_parallel": "ranks that share each sequence",
    "context_parallel_type": "how attention sees the whole of a shared sequence",
    "expert_parallel": "ranks that share the experts",
    "expert_tensor_parallel": "ranks that share each expert's matrices",
    "zero_stage": "what data-parallel ranks share out: 1 optimizer, 2 gradients, 3 weights too",
    "zero_group": "ranks that one copy of those states is cut over",
    "keep_gathered": "stage 3 gathers weights once per step, not for each forward and backward",
    "micro_batch_size": "sequences of one forward",
    "num_micro_batches": "forwards of one step on each pipeline",
    "stages_per_rank": "pieces of the model on each pipeline rank",
    "schedule": "order of the pipeline's forwards and backwards",
    "layers_per_stage": "whole layers, in model order",
    "recompute": "what backward computes again instead of keeping",
    "recompute_layers": "how many layers of each stage, under full (0: all)",
    "sequence_parallel": "norms and residuals are cut along the sequence too",
    "offload": "what lives in host memory",
}
